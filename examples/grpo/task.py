"""The verifiable task: adding two two-digit numbers, and the character tokenizer that writes it
down.

A problem reads ``47+85=`` and its answer ``132.``. Operands keep their leading zero, so that every
prompt has the same length and a batch needs no padding on the left. A reward is 1 when the answer
is right to the last character and the model ended it with a full stop, else 0: there is nothing to
learn but arithmetic.
"""

from __future__ import annotations

import random

import torch

ALPHABET = "0123456789+=. "
VOCABULARY = len(ALPHABET)
STOP, PAD = ALPHABET.index("."), ALPHABET.index(" ")
PROMPT_TOKENS = len("47+85=")
ANSWER_TOKENS = len("132.")

Problem = tuple[int, int]


def draw_problems(rng: random.Random, count: int) -> list[Problem]:
    return [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]


def encode(text: str, length: int) -> list[int]:
    """Token ids of ``text``, padded on the right to ``length``."""
    return [ALPHABET.index(character) for character in text.ljust(length)]


def decode(tokens: list[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


def prompt_tokens(problems: list[Problem]) -> torch.Tensor:
    """Token ids [problems, PROMPT_TOKENS]."""
    return torch.tensor([encode(f"{a:02}+{b:02}=", PROMPT_TOKENS) for a, b in problems])


def answer_tokens(problems: list[Problem]) -> torch.Tensor:
    """Token ids [problems, ANSWER_TOKENS], padded behind the full stop."""
    return torch.tensor([encode(f"{a + b}.", ANSWER_TOKENS) for a, b in problems])


def rewards(problems: list[Problem], answers: torch.Tensor) -> torch.Tensor:
    """1.0 for each exactly right answer, else 0.0.

    ``answers`` [problems, ANSWER_TOKENS] hold ``PAD`` behind the full stop. Returns float32
    [problems].
    """
    return (answers == answer_tokens(problems)).all(dim=1).float()
