"""Runs on the example's task and loss in one process, with its Qwen2 in three sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.study.recorder import Recorder
from benchmarks.study.settings import Settings
from examples.grpo import policy, task
from examples.grpo.grpo import group_advantages, grpo_loss, supervised_loss
from pulse_rl import State

CACHE = Path(__file__).parent.parent / ".cache" / "study"
HIDDEN = {"qwen-0.4m": 128, "qwen-1.6m": 256, "qwen-6m": 512}
PROMPTS, GROUP = 32, 8
FIT_STEPS, FIT_LR, FIT_BATCH, FIT_ACCURACY = 400, 2e-3, 128, 0.35


def build_model(size: str, seed: int) -> PreTrainedModel:
    """The example's model at another width; the initial weights shrink with the root of it, as
    there."""
    torch.manual_seed(seed)
    hidden = HIDDEN[size]
    config = Qwen2Config(
        vocab_size=task.VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=32,
        initializer_range=0.06 * (256 / hidden) ** 0.5,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def run(
    settings: Settings, seed: int, progress: Callable[[int, float, float], None]
) -> dict[str, Any]:
    """Trains and measures; ``progress`` gets step, reward (or loss) and density after each
    update."""
    model = build_model(settings.model, seed)
    weights = policy.MasterWeights(model)
    load_start(settings.model, model, weights, seed)
    recorder = Recorder(settings, State.of(model.state_dict()))
    gradients, rewards = [], []
    fill = _supervised(model, seed) if settings.supervised else _rollouts(settings, model, seed)
    for step in range(1, settings.steps + 1):
        rewards.append(fill())
        found = [p.grad for p in model.parameters() if p.grad is not None]
        gradients.append(sum(int(g.count_nonzero()) for g in found) / sum(g.numel() for g in found))
        weights.step(settings.lr * min(1.0, step / settings.warmup))
        recorder.add(State.of(model.state_dict()))
        progress(step, rewards[-1], recorder.density[-1])
    return {**recorder.result(gradients), "rewards": rewards, "dtypes": {}}


def load_start(size: str, model: PreTrainedModel, weights: policy.MasterWeights, seed: int) -> None:
    """Gives the model the weights from which a third of the sampled answers is right, fitting them
    the first time."""
    path = CACHE / f"{size}.pt"
    if not path.exists():
        fit(model, weights, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights.state()["masters"], path)
    weights.forget_moments()
    weights.load(
        {"masters": torch.load(path, weights_only=True), "optimizer": weights.state()["optimizer"]}
    )


def fit(model: PreTrainedModel, weights: policy.MasterWeights, seed: int) -> None:
    for step in range(FIT_STEPS):
        rng, generator = policy.seeded(seed, "fit", step)
        torch.autograd.backward(supervised_loss(model, task.draw_problems(rng, FIT_BATCH)))
        weights.step(FIT_LR * min(1.0, (step + 1) / 30))
        if step % 10 == 9:
            problems = task.draw_problems(rng, 256)
            answers, _ = policy.sample(model, task.prompt_tokens(problems), generator)
            accuracy = float(task.rewards(problems, answers).mean())
            print(f"fit step {step + 1} accuracy {accuracy:.3f}", flush=True)
            if accuracy >= FIT_ACCURACY:
                return


def _supervised(model: PreTrainedModel, seed: int) -> Callable[[], float]:
    rng, _ = policy.seeded(seed, "supervised")

    def fill() -> float:
        loss = supervised_loss(model, task.draw_problems(rng, PROMPTS * GROUP))
        torch.autograd.backward(loss)
        return float(loss.detach())

    return fill


def _rollouts(settings: Settings, model: PreTrainedModel, seed: int) -> Callable[[], float]:
    """Fills a gradient of the example's loss; returns the batch's mean reward."""
    rng, generator = policy.seeded(seed, "rollouts")
    left = 0
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def fill() -> float:
        nonlocal left, batch
        if left == 0:
            problems = [p for p in task.draw_problems(rng, PROMPTS) for _ in range(GROUP)]
            prompts = task.prompt_tokens(problems)
            answers, log_probs = policy.sample(model, prompts, generator)
            batch = (
                torch.cat([prompts, answers], dim=1),
                log_probs.clone(),
                task.rewards(problems, answers),
            )
            left = settings.updates
        tokens, log_probs, rewards = batch
        torch.autograd.backward(
            grpo_loss(model, tokens.clone(), log_probs, group_advantages(rewards, GROUP))
        )
        left -= 1
        return float(rewards.mean())

    return fill
