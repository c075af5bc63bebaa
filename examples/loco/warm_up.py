"""The supervised phase: until the policy is right often enough for rewards to vary within a group."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..grpo import policy, task
from ..grpo.grpo import supervised_loss
from ..grpo.processes import Journal
from ..grpo.trainer import ACCURACY_EVERY, ACCURACY_PROBLEMS, WARM_UP_BATCH, WARM_UP_LR
from .settings import Settings


def warm_up(model: PreTrainedModel, settings: Settings, journal: Journal) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(1, settings.sft_steps + 1):
        rng, _ = policy.seeded(settings.seed, "warm-up", step)
        for group in optimizer.param_groups:
            group["lr"] = WARM_UP_LR * min(1.0, step / 30)
        loss = supervised_loss(model, task.draw_problems(rng, WARM_UP_BATCH))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % ACCURACY_EVERY == 0:
            right = accuracy(model, settings, ACCURACY_PROBLEMS)
            journal.write("warm-up", step=step, loss=loss.item(), accuracy=right)
            if right >= settings.sft_accuracy:
                return


def accuracy(model: PreTrainedModel, settings: Settings, problems: int) -> float:
    """The share of right answers to problems that are the same in every call: the mean reward of the policy."""
    rng, generator = policy.seeded(settings.seed, "accuracy")
    drawn = task.draw_problems(rng, problems)
    answers, _ = policy.sample(model, task.prompt_tokens(drawn), generator)
    return float(task.rewards(drawn, answers).mean())
