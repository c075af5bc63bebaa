"""The two policies: a solver that adds two numbers, and a verifier that says whether a sum is right.

Both are the small Qwen2 of `examples.grpo`. The verifier reads problem and answer and writes one token, ``1`` or ``0``;
its reward is 1 where that is true. What it sees depends on the solver, so that both have to keep up with each other.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..grpo import policy, task
from ..grpo.grpo import group_advantages, supervised_loss
from .settings import RunFolder, Settings

FALSE, TRUE = (task.ALPHABET.index(digit) for digit in "01")
WARM_UP_BATCH, WARM_UP_LR = 128, 2e-3
_MOST_STEPS = {"solver": 400, "verifier": 60}


@torch.inference_mode()
def judge(
    model: PreTrainedModel, tokens: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples a verdict on each sum.

    ``tokens`` int64 [sequences, problem + answer] -> verdicts int64 [sequences, 1], their log-probabilities float32.
    """
    output = policy.forward(model, policy.for_arithmetic(model), input_ids=tokens, use_cache=False)
    log_p = output.logits[:, -1].float().log_softmax(-1)
    verdicts = torch.multinomial(log_p.exp(), 1, generator=generator)
    return verdicts, log_p.gather(-1, verdicts)


def verdict_rewards(verdicts: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """1.0 where the verdict on an answer says whether it is ``right`` (1.0 or 0.0), float32 [sequences]."""
    return (verdicts[:, 0] == torch.where(right > 0, TRUE, FALSE)).float()


def advantages(name: str, rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Rewards normalised: the solver's within the answers to one problem, the verifier's within the batch."""
    return group_advantages(rewards, group if name == "solver" else len(rewards))


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
    return {
        name: _warm_up(name, settings, folder) for name in ("solver", "verifier") if not folder.start(name).exists()
    }


def _warm_up(name: str, settings: Settings, folder: RunFolder) -> int:
    model = policy.build_model(settings.seed + (name == "verifier"))
    weights = policy.MasterWeights(model)
    for step in range(_MOST_STEPS[name]):
        rng, generator = policy.seeded(settings.seed, name, step)
        problems = task.draw_problems(rng, WARM_UP_BATCH)
        if name == "solver":
            loss = supervised_loss(model, problems)
        else:
            tokens, right = _sums(problems, generator)
            output = policy.forward(model, policy.for_arithmetic(model), input_ids=tokens, use_cache=False)
            loss = cross_entropy(output.logits[:, -1].float(), torch.where(right, TRUE, FALSE))
        torch.autograd.backward(loss)
        weights.step(WARM_UP_LR * min(1.0, (step + 1) / 30))
        if name == "solver" and step % 10 == 9 and _accuracy(model, step) >= settings.sft_accuracy:
            break
    torch.save(weights.state()["masters"], folder.start(name))
    return step + 1


def _sums(problems: list[task.Problem], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Problems with answers, every second one right: tokens and whether they are."""
    right = torch.rand(len(problems), generator=generator) < 0.5
    offset = torch.randint(1, 20, (len(problems),), generator=generator)
    given = [(a + (0 if ok else int(o)), b) for (a, b), ok, o in zip(problems, right, offset, strict=True)]
    return torch.cat([task.prompt_tokens(problems), task.answer_tokens(given)], dim=1), right


def _accuracy(model: PreTrainedModel, step: int) -> float:
    rng, generator = policy.seeded("accuracy", step)
    problems = task.draw_problems(rng, 256)
    answers, _ = policy.sample(model, task.prompt_tokens(problems), generator)
    return float(task.rewards(problems, answers).mean())
