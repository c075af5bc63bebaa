"""Additions that are written as a chat, and the reward of an answer.

The model's turn begins with ``23 + 45 = ``: asked in plain words it chats, and no answer is right.
Every prompt of a task has the same number of tokens, so a batch needs no padding.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Problem = tuple[int, ...]
#: Held-out problems that are answered at once.
_BATCH = 16
_PROMPT = "<|im_start|>user\nWhat is {sum}?<|im_end|>\n<|im_start|>assistant\n{sum} = "


@dataclass(frozen=True)
class Additions:
    """Sums of ``terms`` numbers in [``low``, ``high``], all of two digits.

    ``held_out`` problems are chosen by the numbers they consist of, in whatever order: training
    never sees 45 + 23 where 23 + 45 is held out. The choice does not depend on a run's seed.
    """

    tokenizer: PreTrainedTokenizerBase
    low: int = 10
    high: int = 49
    terms: int = 2
    held_out: int = 128

    @cached_property
    def test(self) -> list[Problem]:
        """The held-out problems, each in one order."""
        rng = random.Random("held out")
        if self.terms == 2:
            numbers = range(self.low, self.high + 1)
            pool = rng.sample(list(combinations_with_replacement(numbers, 2)), self.held_out)
        else:
            pool = []
            while len(pool) < self.held_out:
                drawn = self._draw(rng)
                if sorted(drawn) not in [sorted(one) for one in pool]:
                    pool.append(drawn)
        return [tuple(rng.sample(problem, len(problem))) for problem in pool]

    @cached_property
    def _kept_out(self) -> set[Problem]:
        return {tuple(sorted(problem)) for problem in self.test}

    def draw(self, rng: random.Random, count: int) -> list[Problem]:
        """Training problems."""
        problems: list[Problem] = []
        while len(problems) < count:
            drawn = self._draw(rng)
            if tuple(sorted(drawn)) not in self._kept_out:
                problems.append(drawn)
        return problems

    def _draw(self, rng: random.Random) -> Problem:
        return tuple(rng.randint(self.low, self.high) for _ in range(self.terms))

    @cached_property
    def answer_tokens(self) -> int:
        """Tokens of the longest right answer and of what ends it: one a digit."""
        return len(str(self.high * self.terms)) + 1

    def prompts(self, problems: list[Problem]) -> torch.Tensor:
        """Token ids, int64 [problems, prompt]."""
        texts = [_PROMPT.format(sum=" + ".join(map(str, problem))) for problem in problems]
        return torch.tensor(self.tokenizer(texts, add_special_tokens=False).input_ids)

    @cached_property
    def _digits(self) -> torch.Tensor:
        """Whether a token is made of digits, bool [vocabulary]."""
        texts = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return torch.tensor([text.isdecimal() for text in texts])

    def lengths(self, answers: torch.Tensor) -> torch.Tensor:
        """Tokens of each answer up to the first that is no digit, that one included.

        ``answers`` int64 [sequences, answer] -> int64 [sequences].
        """
        going_on = self._digits[answers].long().cumprod(dim=1).sum(dim=1)
        return (going_on + 1).clamp(max=answers.shape[1])

    def counted(self, answers: torch.Tensor) -> torch.Tensor:
        """Which tokens a loss counts: those up to an answer's end, bool [sequences, answer]."""
        return torch.arange(answers.shape[1]) < self.lengths(answers)[:, None]

    def rewards(self, problems: list[Problem], answers: torch.Tensor) -> torch.Tensor:
        """1.0 where the digits of an answer are the sum and something else ends them, else 0.0.

        ``answers`` int64 [problems, answer] -> float32 [problems].
        """
        right = []
        for problem, tokens in zip(problems, answers.tolist(), strict=True):
            text = self.tokenizer.decode(tokens)
            right.append(re.match(f"{sum(problem)}[^0-9]", text) is not None)
        return torch.tensor(right, dtype=torch.float32)

    def accuracy(self, answer: Callable[[torch.Tensor, int], torch.Tensor]) -> float:
        """The share of held-out problems that ``answer`` gets right: it maps prompts and a number
        of tokens to as many tokens for each prompt."""
        right = 0.0
        for at in range(0, len(self.test), _BATCH):
            problems = self.test[at : at + _BATCH]
            answers = answer(self.prompts(problems), self.answer_tokens)
            right += float(self.rewards(problems, answers).sum())
        return right / len(self.test)
