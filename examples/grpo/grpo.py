"""The two objectives, cross-entropy and group-relative policy optimization, and the warm-up that
uses the first."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import task
from .policy import MasterWeights, log_probabilities, sample, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM_UP_LR, WARM_UP_BATCH, ACCURACY_EVERY, ACCURACY_PROBLEMS = 2e-3, 128, 10, 512


def supervised_loss(model: PreTrainedModel, problems: list[task.Problem]) -> torch.Tensor:
    """Mean cross-entropy of the right answers' tokens, the full stop included."""
    answers = task.answer_tokens(problems)
    tokens = torch.cat([task.prompt_tokens(problems), answers], dim=1)
    log_probs = log_probabilities(model, tokens)[:, task.PROMPT_TOKENS - 1 :]
    mask = answers != task.PAD
    return -(log_probs * mask).sum() / mask.sum()


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Rewards normalized within each group of answers to one prompt.

    ``rewards`` [prompts * group], the answers to one prompt side by side; returns the same shape. A
    group whose answers are all right or all wrong teaches nothing and gets zeros.
    """
    grouped = rewards.view(-1, group)
    centered = grouped - grouped.mean(dim=1, keepdim=True)
    return (centered / (grouped.std(dim=1, unbiased=False, keepdim=True) + 1e-4)).reshape(-1)


def grpo_loss(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
) -> torch.Tensor:
    """The loss of answers of this task.

    ``tokens`` [sequences, PROMPT_TOKENS + ANSWER_TOKENS]; ``old_log_probs`` [sequences,
    ANSWER_TOKENS], what the worker sampled with; ``advantages`` [sequences].
    """
    mask = tokens[:, task.PROMPT_TOKENS :] != task.PAD
    log_probs = log_probabilities(model, tokens)[:, task.PROMPT_TOKENS - 1 :]
    return clipped_loss(log_probs, old_log_probs, advantages, mask)


def clipped_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float = 0.2,
) -> torch.Tensor:
    """The clipped policy-gradient loss, averaged over the answer tokens that ``mask`` keeps.

    All are [sequences, tokens] but ``advantages``, which are [sequences]. A worker may be some
    versions behind: the ratio between the two policies corrects for that, and the clip bounds the
    correction.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    advantage = advantages[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(gain * mask).sum() / mask.sum()


def warm_up(
    weights: MasterWeights,
    *key: object,
    steps: int,
    accuracy: float,
    draw: Callable[[random.Random, int], list[task.Problem]] = task.draw_problems,
    measure: Callable[[], float] | None = None,
    report: Callable[[int, float, float], None] = lambda step, loss, accuracy: None,
) -> int:
    """Supervised steps until the share of right answers is ``accuracy``, so that rewards vary
    within a group.

    At most ``steps``; returns how many. ``key`` seeds what is drawn. ``measure`` tells the accuracy
    (default: of sampled answers); ``report`` gets step, loss and accuracy now and then.
    """
    for step in range(1, steps + 1):
        rng, _ = seeded(*key, step - 1)
        loss = supervised_loss(weights.model, draw(rng, WARM_UP_BATCH))
        torch.autograd.backward(loss)
        weights.step(WARM_UP_LR * min(1.0, step / 30))
        if step % ACCURACY_EVERY == 0 or step == steps:
            right = (
                measure() if measure else sampled_accuracy(weights.model, ACCURACY_PROBLEMS, *key)
            )
            report(step, loss.item(), right)
            if right >= accuracy:
                break
    weights.forget_moments()
    return step


def sampled_accuracy(model: PreTrainedModel, problems: int, *key: object) -> float:
    """The share of right answers to problems that are the same in every call with this ``key``: the
    mean reward."""
    rng, generator = seeded(*key, "accuracy")
    drawn = task.draw_problems(rng, problems)
    answers, _ = sample(model, task.prompt_tokens(drawn), generator)
    return float(task.rewards(drawn, answers).mean())
