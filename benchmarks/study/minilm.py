"""Runs on 22.6 M pretrained weights: the policy, task and AdamW of `benchmarks.trace`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import trace
from benchmarks.study.recorder import Recorder
from benchmarks.study.settings import Settings
from pulse_rl import State

_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
_CLIP = 0.2


def run(
    settings: Settings, seed: int, progress: Callable[[int, float, float], None]
) -> dict[str, Any]:
    """Trains and measures; ``progress`` gets step, reward (or loss) and density after each
    update."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    policy = trace.Policy()
    trace.load_start(policy, trace.CACHE / "start.pt", seed)
    adam = trace.AdamW(
        policy,
        trace.Run(
            settings.name,
            settings.lr,
            masters=settings.masters,
            warmup=settings.warmup,
            betas=settings.betas,
        ),
    )
    prompts = trace.Prompts(policy.vocabulary, seed)
    rollouts = _rollouts(settings, policy, prompts, generator)
    fill = _supervised(policy, prompts) if settings.supervised else rollouts
    recorders = {
        name: Recorder(settings, state_of(policy, adam, name))
        for name in ("BF16", *settings.dtypes)
    }
    gradients, rewards = [], []
    for step in range(1, settings.steps + 1):
        rewards.append(fill())
        gradients.append(float(policy.grad.count_nonzero()) / policy.grad.numel())
        adam.step()
        for name, recorder in recorders.items():
            recorder.add(state_of(policy, adam, name))
        progress(step, rewards[-1], recorders["BF16"].density[-1])
    main, *_ = recorders.values()
    others = {name: recorders[name].result(gradients) for name in settings.dtypes}
    return {**main.result(gradients), "rewards": rewards, "dtypes": others}


def state_of(policy: trace.Policy, adam: trace.AdamW, dtype: str) -> State:
    """The weights after the cast; in BF16 they are what the forward pass uses."""
    flat = policy.flat if adam.master is None or dtype == "BF16" else adam.master
    parts = flat.to(_TORCH[dtype]).split([int(np.prod(s)) for s in policy.shapes.values()])
    return State.of({k: p.view(s) for (k, s), p in zip(policy.shapes.items(), parts, strict=True)})


def _supervised(policy: trace.Policy, prompts: trace.Prompts) -> Callable[[], float]:
    """Fills the gradient of the right answers' cross-entropy; returns the loss."""

    def fill() -> float:
        log_p, answer = policy.forward(prompts)
        loss = torch.nn.functional.nll_loss(log_p, answer)
        policy.backward(loss)
        return float(loss.detach())

    return fill


def _rollouts(
    settings: Settings, policy: trace.Policy, prompts: trace.Prompts, generator: torch.Generator
) -> Callable[[], float]:
    """Fills a policy gradient; returns the batch's mean reward.

    With several updates a batch the rollouts are of the policy before the first of them, and the
    clipped ratio corrects for that.
    """
    if settings.updates == 1:
        return lambda: policy.policy_gradient(prompts, generator)
    left = 0
    batch: tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor, float]

    def fill() -> float:
        nonlocal left, batch
        if left == 0:
            texts, answers = prompts.batch(trace.PROMPTS)
            answer = torch.tensor(policy.tokenizer.convert_tokens_to_ids(answers))
            with torch.no_grad():
                log_p = policy.log_probabilities(texts)
            sample, advantage, reward = policy.roll_out(log_p, answer, generator)
            batch, left = (
                (texts, sample, advantage, log_p.gather(1, sample), reward),
                settings.updates,
            )
        texts, sample, advantage, old, reward = batch
        ratio = (policy.log_probabilities(texts).gather(1, sample) - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantage)
        policy.backward(-gain.mean())
        left -= 1
        return reward

    return fill
