"""What is trained: FP32 masters, a forward pass on their BF16 cast, and a policy gradient of
verifiable rewards."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import Parameter

from benchmarks import trace
from benchmarks.loco.jobs import TRAINERS
from examples.grpo import policy, task
from examples.grpo.grpo import group_advantages, grpo_loss, supervised_loss, warm_up
from pulse_rl.loco import PulseLoCo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRETRAINED, PRETRAINED_SPLIT = "pretrained weights", "pretrained weights, split prompts"
ARITHMETIC, APART = "arithmetic", "arithmetic apart"
WARM_START = Path(trace.CACHE).parent / "loco" / "warm.pt"
PROBLEMS, GROUP = 8, 8
HELD_OUT = 1024
HELD_OUT_PROMPTS = 512
_HELD_OUT_SHARE = 8
_WARM_UP_STEPS, _WARM_UP_REWARD = 400, 0.35


class Task(Protocol):
    """``masters`` are what the optimizer trains, FP32 by name."""

    masters: dict[str, Parameter]

    def gradient(self, step: int) -> float:
        """Fills the masters' gradients by new rollouts of this trainer; their mean reward."""

    def cast(self) -> None:
        """Gives the forward pass the masters' BF16 cast."""

    def evaluate(self) -> tuple[float, float]:
        """(reward, loss) on this trainer's share of the held-out problems."""


class Pretrained:
    """Real pretrained weights on cloze prompts (`benchmarks.trace`), the same start for all seeds
    and trainers."""

    def __init__(self, seed: int, rank: int) -> None:
        self._policy = trace.Policy()
        trace.load_start(self._policy, trace.CACHE / "start.pt", 0)
        self._flat = self._policy.flat.clone()
        self._prompts = self._make_prompts(1000 * seed + rank)
        self._generator = torch.Generator().manual_seed(1000 * seed + rank)
        self.masters: dict[str, Parameter] = {}
        self._gradients, start = [], 0
        for name, shape in self._policy.shapes.items():
            stop = start + int(torch.Size(shape).numel())
            self.masters[name] = Parameter(self._flat[start:stop].view(shape))
            self._gradients.append(self._policy.grad[start:stop].view(shape))
            start = stop
        self.cast()

    def _make_prompts(self, seed: int) -> trace.Prompts:
        return trace.Prompts(self._policy.vocabulary, seed)

    def gradient(self, step: int) -> float:
        reward = self._policy.policy_gradient(self._prompts, self._generator)
        for master, gradient in zip(self.masters.values(), self._gradients, strict=True):
            master.grad = gradient
        return reward

    def cast(self) -> None:
        self._policy.flat.copy_(self._flat.bfloat16())

    def evaluate(self) -> tuple[float, float]:
        raise NotImplementedError("the cloze prompts have no held-out set")


class SplitPrompts(trace.Prompts):
    """Cloze prompts of one part of a split by their text: one in `_HELD_OUT_SHARE` is held out."""

    def __init__(self, vocabulary: list[str], seed: int, *, held_out: bool) -> None:
        super().__init__(vocabulary, seed)
        self._held_out = held_out

    def one(self) -> tuple[str, str]:
        while True:
            text, answer = super().one()
            if (zlib.crc32(text.encode()) % _HELD_OUT_SHARE == 0) == self._held_out:
                return text, answer


class PretrainedSplit(Pretrained):
    """The same without the held-out prompts, of which those count that the starting weights were
    not fitted on."""

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__(seed, rank)
        self._rank = rank

    def _make_prompts(self, seed: int) -> trace.Prompts:
        return SplitPrompts(self._policy.vocabulary, seed, held_out=False)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """The expected reward of a sampled token, and the cross-entropy of the right ones."""
        policy = self._policy
        texts, answers = zip(
            *held_out_prompts(policy.vocabulary)[self._rank :: TRAINERS], strict=True
        )
        answer = torch.tensor(policy.tokenizer.convert_tokens_to_ids(list(answers)))
        log_p = policy.log_probabilities(list(texts))
        right = log_p.gather(1, answer[:, None]).squeeze(1)
        near = (log_p.exp() * (policy.initial == policy.initial[answer][:, None])).sum(dim=1)
        return float((0.7 * right.exp() + 0.3 * near).mean()), float(-right.mean())


def held_out_prompts(vocabulary: list[str]) -> list[tuple[str, str]]:
    """`HELD_OUT_PROMPTS` prompts and answers; all of them are of words, as the fit has seen most of
    the others."""
    fit = trace.Prompts(vocabulary, trace.FIT_SEED)
    fitted = {fit.one()[0] for _ in range(trace.FIT_STEPS * trace.PROMPTS)}
    prompts = SplitPrompts(vocabulary, 0, held_out=True)
    found: dict[str, str] = {}
    while len(found) < HELD_OUT_PROMPTS:
        text, answer = prompts.one()
        if text not in fitted:
            found[text] = answer
    return list(found.items())


class Arithmetic:
    """The policy and the task of examples/grpo, from one warm-started checkpoint, without the
    held-out problems."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank
        self._model = policy.build_model(0)
        saved = torch.load(WARM_START, weights_only=True)
        self.masters = {
            name: Parameter(saved[name].clone()) for name, _ in self._model.named_parameters()
        }
        self._held_out = held_out()
        self._without = set(self._held_out)
        self.cast()

    def gradient(self, step: int) -> float:
        rng, generator = policy.seeded(self._seed, "trainer", self._rank, step)
        problems = [p for p in draw(rng, PROBLEMS, self._without) for _ in range(GROUP)]
        prompts = task.prompt_tokens(problems)
        answers, log_probs = policy.sample(self._model, prompts, generator)
        rewards = task.rewards(problems, answers)
        advantages = group_advantages(rewards, GROUP)
        loss = grpo_loss(self._model, torch.cat([prompts, answers], dim=1), log_probs, advantages)
        torch.autograd.backward(loss)
        for weight, master in zip(self._model.parameters(), self.masters.values(), strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        return float(rewards.mean())

    @torch.no_grad()
    def cast(self) -> None:
        for weight, master in zip(self._model.parameters(), self.masters.values(), strict=True):
            weight.copy_(master)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """The reward is the expected one, the probability of the right answer at temperature 1: no
        sampling noise. The loss is the cross-entropy of the right answers' tokens."""
        problems = self._held_out[self._rank :: TRAINERS]
        return expected_reward(self._model, problems), float(supervised_loss(self._model, problems))


class ArithmeticApart(Arithmetic):
    """Each trainer is trained on its own quarter of the first summands; what is held out has all of
    them."""

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__(seed, rank)
        self._without |= of_others(rank)


def of_others(rank: int) -> set[task.Problem]:
    """The problems whose first summand is of another trainer's quarter."""
    return {
        (a, b) for a in range(100) for b in range(100) if a * TRAINERS // 100 != rank % TRAINERS
    }


# Each from the seed and the trainer's rank.
TASKS: dict[str, Callable[[int, int], Task]] = {
    PRETRAINED: Pretrained,
    PRETRAINED_SPLIT: PretrainedSplit,
    ARITHMETIC: Arithmetic,
    APART: ArithmeticApart,
}


def evaluate_global(loop: object, task: Task) -> tuple[float, float]:
    """(reward, loss) of theta, which the masters may be away from between rounds."""
    with loop.global_weights() if isinstance(loop, PulseLoCo) else nullcontext():
        task.cast()
        found = task.evaluate()
    task.cast()
    return found


def held_out() -> list[task.Problem]:
    """`HELD_OUT` problems that nothing is trained on."""
    every = [(a, b) for a in range(100) for b in range(100)]
    return random.Random("held out").sample(every, HELD_OUT)


def draw(rng: random.Random, count: int, without: set[task.Problem]) -> list[task.Problem]:
    found: list[task.Problem] = []
    while len(found) < count:
        found += [p for p in task.draw_problems(rng, count - len(found)) if p not in without]
    return found


@torch.no_grad()
def expected_reward(model: PreTrainedModel, problems: list[task.Problem]) -> float:
    """The mean probability of the right answer, to its full stop."""
    answers = task.answer_tokens(problems)
    tokens = torch.cat([task.prompt_tokens(problems), answers], dim=1)
    log_probs = policy.log_probabilities(model, tokens)[:, task.PROMPT_TOKENS - 1 :]
    return float(log_probs.masked_fill(answers == task.PAD, 0).sum(dim=1).exp().mean())


def ensure(task_name: str) -> None:
    """Makes the starting checkpoint that all trainers of a task share, unless it is there."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if task_name in (PRETRAINED, PRETRAINED_SPLIT):
        if not (trace.CACHE / "start.pt").exists():
            trace.load_start(trace.Policy(), trace.CACHE / "start.pt", 0)
    elif not WARM_START.exists():
        _warm_up()


def _warm_up() -> None:
    """Supervised steps until about a third of the answers are right, so that rewards vary within a
    group."""
    model = policy.build_model(0)
    weights = policy.MasterWeights(model)
    without = held_out()

    def report(step: int, loss: float, reward: float) -> None:
        print(f"warm-up step {step}: expected reward {reward:.3f}", flush=True)

    warm_up(
        weights,
        "warm-up",
        steps=_WARM_UP_STEPS,
        accuracy=_WARM_UP_REWARD,
        draw=lambda rng, count: draw(rng, count, set(without)),
        measure=lambda: expected_reward(model, without),
        report=report,
    )
    names = [name for name, _ in model.named_parameters()]
    trace.save(dict(zip(names, weights.masters, strict=True)), WARM_START)
