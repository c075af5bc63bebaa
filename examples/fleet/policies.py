"""The two policies: a solver that adds two numbers, and a verifier that says whether the solver's sum is right.

Both are the small Qwen2 of `examples.grpo`. The verifier works the sum out for itself, without having seen the answer,
and its verdict is whether it comes to the same; its reward is 1 where the verdict is true. What it is rewarded for
depends on the solver's answers, so that both have to keep up with each other.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..grpo import policy, task
from ..grpo.grpo import supervised_loss
from .settings import POLICIES, RunFolder, Settings

WARM_UP_BATCH, WARM_UP_LR, WARM_UP_STEPS = 128, 2e-3, 400


def verdict_rewards(sums: torch.Tensor, answers: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """1.0 where the verdict on an answer is true, float32 [sequences].

    ``sums`` and ``answers`` int64 [sequences, answer]: the verifier's, and the solver's, ``right`` (1.0) or not.
    """
    return ((sums == answers).all(dim=1) == (right > 0)).float()


def advantages(rewards: torch.Tensor, counted: torch.Tensor, group: int) -> torch.Tensor:
    """Rewards normalised among the ``counted`` sequences (1.0) of a group, the ``group`` neighbours of one problem; 0
    for the others. float32 [sequences], all three.

    Of the verifier those count that judge a right answer: what disagrees with a wrong one is seldom right itself.
    """
    given, weight = rewards.view(-1, group), counted.view(-1, group)
    among = weight.sum(dim=1, keepdim=True).clamp(min=1.0)
    centred = (given - (given * weight).sum(dim=1, keepdim=True) / among) * weight
    deviation = (centred.square().sum(dim=1, keepdim=True) / among).sqrt()
    return (centred / (deviation + 1e-4)).reshape(-1)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """The clipped policy-gradient loss over the last ``old.shape[1]`` tokens of each sequence."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, -old.shape[1] :].float()
    targets = tokens[:, -old.shape[1] :]
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    ratio, weight = torch.exp(log_probs - old), advantage[:, None]
    gain = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
    mask = targets != task.PAD
    return -(gain * mask).sum() / mask.sum()


def warm_up(settings: Settings, folder: RunFolder) -> dict[str, int]:
    """Makes the weights that both policies start from; returns the supervised steps that they took."""
    torch.set_num_threads(1)  # models as small as these are faster without others
    return {name: _warm_up(name, settings, folder) for name in POLICIES if not folder.start(name).exists()}


def _warm_up(name: str, settings: Settings, folder: RunFolder) -> int:
    model = policy.build_model(settings.seed + POLICIES.index(name))
    weights = policy.MasterWeights(model)
    for step in range(WARM_UP_STEPS):
        rng, _ = policy.seeded(settings.seed, name, step)
        torch.autograd.backward(supervised_loss(model, task.draw_problems(rng, WARM_UP_BATCH)))
        weights.step(WARM_UP_LR * min(1.0, (step + 1) / 30))
        if step % 10 == 9 and _accuracy(model, step) >= settings.sft_accuracy:
            break
    torch.save(weights.state()["masters"], folder.start(name))
    return step + 1


def _accuracy(model: PreTrainedModel, step: int) -> float:
    rng, generator = policy.seeded("accuracy", step)
    problems = task.draw_problems(rng, 256)
    answers, _ = policy.sample(model, task.prompt_tokens(problems), generator)
    return float(task.rewards(problems, answers).mean())
