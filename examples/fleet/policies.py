"""The two policies: a solver that adds two numbers, and a verifier that says whether the solver's
sum is right.

Both are the small Qwen2 of `examples.grpo`. The verifier works the sum out for itself, without
having seen the answer, and its verdict is whether it comes to the same; its reward is 1 where the
verdict is true. What it is rewarded for depends on the solver's answers, so that both have to keep
up with each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..grpo import grpo, policy, task
from ..grpo.rollouts import Rollouts
from ..grpo.run import RunFolder
from .settings import POLICIES, Settings

WARM_UP_STEPS = 400


@dataclass(frozen=True)
class Judged(Rollouts):
    """``right``: whether the solver's answer is right, float32 [sequences]."""

    right: torch.Tensor


def verdict_rewards(sums: torch.Tensor, answers: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """1.0 where the verdict on an answer is true, float32 [sequences].

    ``sums`` and ``answers`` int64 [sequences, answer]: the verifier's, and the solver's, ``right``
    (1.0) or not.
    """
    return ((sums == answers).all(dim=1) == (right > 0)).float()


def advantages(rewards: torch.Tensor, counted: torch.Tensor, group: int) -> torch.Tensor:
    """Rewards normalized among the ``counted`` sequences (1.0) of a group, the ``group`` neighbors
    of one problem; 0 for the others. float32 [sequences], all three.

    Of the verifier those count that judge a right answer: what disagrees with a wrong one is seldom
    right itself.
    """
    given, weight = rewards.view(-1, group), counted.view(-1, group)
    among = weight.sum(dim=1, keepdim=True).clamp(min=1.0)
    centered = (given - (given * weight).sum(dim=1, keepdim=True) / among) * weight
    deviation = (centered.square().sum(dim=1, keepdim=True) / among).sqrt()
    return (centered / (deviation + 1e-4)).reshape(-1)


def loss_of(
    model: torch.nn.Module, tokens: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor
) -> torch.Tensor:
    """The clipped policy-gradient loss over the last ``old.shape[1]`` tokens of each sequence."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, -old.shape[1] :].float()
    targets = tokens[:, -old.shape[1] :]
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    ratio, weight = torch.exp(log_probs - old), advantage[:, None]
    gain = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
    mask = targets != task.PAD
    return -(gain * mask).sum() / mask.sum()


def warm_up(settings: Settings, folder: RunFolder) -> None:
    """Makes the weights that both policies start from."""
    torch.set_num_threads(1)  # models as small as these are faster without others
    for number, name in enumerate(POLICIES):
        weights = policy.MasterWeights(policy.build_model(settings.seed + number))
        steps = grpo.warm_up(
            weights, settings.seed, name, steps=WARM_UP_STEPS, accuracy=settings.sft_accuracy
        )
        torch.save(weights.masters, folder.checkpoint(name))
        print(f"warm-up of the {name}: {steps} supervised steps", flush=True)
