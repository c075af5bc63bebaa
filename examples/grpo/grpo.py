"""The two objectives: cross-entropy for the warm-up, group-relative policy optimisation afterwards."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from . import task
from .policy import log_probabilities


def supervised_loss(model: PreTrainedModel, problems: list[task.Problem]) -> torch.Tensor:
    """Mean cross-entropy of the right answers' tokens, the full stop included."""
    answers = task.answer_tokens(problems)
    tokens = torch.cat([task.prompt_tokens(problems), answers], dim=1)
    log_probs = log_probabilities(model, tokens)[:, task.PROMPT_TOKENS - 1 :]
    mask = answers != task.PAD
    return -(log_probs * mask).sum() / mask.sum()


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Rewards normalised within each group of answers to one prompt.

    ``rewards`` [prompts * group], the answers to one prompt side by side; returns the same shape. A group whose
    answers are all right or all wrong teaches nothing and gets zeros.
    """
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, unbiased=False, keepdim=True) + 1e-4)).reshape(-1)


def grpo_loss(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    clip: float = 0.2,
) -> torch.Tensor:
    """The clipped policy-gradient loss, averaged over answer tokens.

    ``tokens`` [sequences, PROMPT_TOKENS + ANSWER_TOKENS]; ``old_log_probs`` [sequences, ANSWER_TOKENS], what the
    worker sampled with; ``advantages`` [sequences]. A worker may be some versions behind: the ratio between the
    two policies corrects for that, and the clip bounds the correction.
    """
    mask = tokens[:, task.PROMPT_TOKENS :] != task.PAD
    log_probs = log_probabilities(model, tokens)[:, task.PROMPT_TOKENS - 1 :]
    ratio = torch.exp(log_probs - old_log_probs)
    advantage = advantages[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(gain * mask).sum() / mask.sum()
