"""GRPO on a Ray cluster of any size: a trainer and rollout workers as actors, and workers that come
and go meanwhile.

    python -m examples.ray_fleet                                  # this machine
    ray job submit --working-dir . -- python -m examples.ray_fleet --store s3://bucket/run --workers
    64

Ray places the actors, restarts those that die, and starts nodes for those that do not fit. Rollouts
go from a worker to the trainer as Ray objects. The weights go through a stream: whoever begins,
late or again, takes what it lacks from there, and nobody keeps a list of who has which weights. On
the way one worker is killed, one is added, and one leaves. At the end every worker and the trainer
must hold the same bits.

The policy, the task (adding two numbers) and the loss are those of examples/grpo.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from typing import Any

import ray
import torch

import pulse_rl
from examples.grpo import grpo, policy, task
from pulse_rl.frameworks.torch import apply_

PROMPTS, GROUP = 16, 8
LR = 1e-5
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Rollouts:
    """Answers to some prompts, ``GROUP`` to each, and the version of the weights that gave them."""

    worker: str
    version: int
    tokens: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor


@dataclass(frozen=True)
class Step:
    """What one step of the trainer has done."""

    version: int
    lag: int
    reward: float
    density: float
    patch_bytes: int
    dense_bytes: int
    worker: str


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Trainer:
    """Trains on the rollouts that it is called with, and publishes the weights after each step.

    Restarted by Ray, it takes its weights from the stream, as a worker does. The FP32 masters are
    as good as the BF16 weights then, and Adam's moments are gone; a trainer that must lose nothing
    writes a checkpoint besides.
    """

    def __init__(self, store: str, warm_up: int) -> None:
        self.model = policy.build_model(seed=0)
        self.publisher = pulse_rl.Publisher(store, stream="policy", threads=1)
        with pulse_rl.Subscriber(store, stream="policy") as before:
            update = before.sync()
            if update is not None:
                apply_(self.model, update)
        self.weights = policy.MasterWeights(self.model)
        if (
            update is None
        ):  # supervised steps: without any right answers there is no reward to learn from
            grpo.warm_up(self.weights, "warm-up", steps=warm_up, accuracy=2.0)
        self.newest = self.publisher.publish(self.model.state_dict())

    def train(self, rollouts: Rollouts) -> Step:
        """One step of GRPO, and one version."""
        advantages = grpo.group_advantages(rollouts.rewards, GROUP)
        torch.autograd.backward(
            grpo.grpo_loss(self.model, rollouts.tokens, rollouts.log_probs, advantages)
        )
        self.weights.step(LR)
        lag = self.newest.version - rollouts.version
        reward = float(rollouts.rewards.mean())
        done = self.newest = self.publisher.publish(
            self.model.state_dict(), metadata={"reward": reward}
        )
        return Step(
            done.version,
            lag,
            reward,
            done.density,
            done.patch_bytes,
            done.dense_bytes,
            rollouts.worker,
        )

    def held(self) -> tuple[int, str]:
        """The newest version, and the root of this model's own weights."""
        return self.newest.version, pulse_rl.state_root(self.model.state_dict())


@ray.remote(max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
class RolloutWorker:
    """Follows the stream and generates. It keeps nothing that a restart would have to save."""

    def __init__(self, name: str, store: str) -> None:
        self.name = name
        self.subscriber = pulse_rl.Subscriber(store, stream="policy", threads=1)
        self.model = policy.build_model(seed=1)

    def rollouts(self, number: int) -> Rollouts:
        """A batch of answers, from the newest weights."""
        version = self._follow()
        rng, generator = policy.seeded("rollouts", self.name, number)
        problems = [problem for problem in task.draw_problems(rng, PROMPTS) for _ in range(GROUP)]
        prompts = task.prompt_tokens(problems)
        answers, log_probs = policy.sample(self.model, prompts, generator)
        tokens = torch.cat([prompts, answers], dim=1)
        return Rollouts(self.name, version, tokens, log_probs, task.rewards(problems, answers))

    def held(self) -> tuple[int, str]:
        """The newest version, and the root of the live model's own weights, once it is there."""
        return self._follow(), pulse_rl.state_root(self.model.state_dict())

    def _follow(self) -> int:
        update = self.subscriber.sync()  # fetched and verified on the host
        if update is not None:
            apply_(self.model, update)  # writes the changed elements only
        version = self.subscriber.version
        assert version is not None  # workers are made after the first version
        return version


class Fleet:
    """The trainer, the workers, and one batch in the making by each of them."""

    def __init__(self, store: str, warm_up: int, cpus: float) -> None:
        self.store = store
        self._cpus = cpus
        self.trainer = Trainer.options(num_cpus=cpus).remote(store, warm_up)
        self.workers: dict[str, Any] = {}
        self._batches: dict[Any, str] = {}
        self._count = 0
        self._made = 0
        ray.get(self.trainer.held.remote())

    def join(self) -> str:
        """One more worker. It takes part as soon as Ray has a place for it."""
        name = f"worker-{self._count}"
        self._count += 1
        self.workers[name] = RolloutWorker.options(num_cpus=self._cpus).remote(name, self.store)
        self._begin_batch(name)
        return name

    def leave(self, name: str) -> None:
        """A worker goes for good; its batch is given up."""
        ray.kill(self.workers.pop(name))
        self._batches = {batch: worker for batch, worker in self._batches.items() if worker != name}

    def kill(self, name: str) -> None:
        """A worker's process dies. Ray starts it again, and repeats its call."""
        ray.kill(self.workers[name], no_restart=False)

    def step(self) -> Step:
        """One step of the trainer on the batch that is ready first."""
        (batch,), _ = ray.wait(list(self._batches))
        done: Step = ray.get(self.trainer.train.remote(batch))
        self._begin_batch(self._batches.pop(batch))
        return done

    def _begin_batch(self, name: str) -> None:
        self._batches[self.workers[name].rollouts.remote(self._made)] = name
        self._made += 1

    def held(self) -> dict[str, tuple[int, str] | None]:
        """What everybody holds at the end, by name: version and root, None where Ray has found no
        place in time."""
        asked = {
            actor.held.remote(): name
            for name, actor in {"trainer": self.trainer, **self.workers}.items()
        }
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE_SECONDS)
        return {
            name: ray.get(answer) if answer in ready else None for answer, name in asked.items()
        }


def run(
    store: str,
    *,
    workers: int,
    steps: int,
    warm_up: int,
    cpus: float,
    kill_at: int,
    add_at: int,
    remove_at: int,
) -> bool:
    """The whole job; whether all ended with the same bits."""
    print(f"warm-up: {warm_up} supervised steps")
    fleet = Fleet(store, warm_up, cpus)
    for _ in range(workers):
        fleet.join()
    for step in range(1, steps + 1):
        done = fleet.step()
        print(
            f"step {step:3}  version {done.version:3}  {done.worker:9}  {done.lag} behind  "
            f"reward {done.reward:.2f}  "
            f"{done.density:6.2%} changed  {done.patch_bytes:7,} of {done.dense_bytes:,} bytes",
            flush=True,
        )
        if step == kill_at:
            name = next(iter(fleet.workers))
            fleet.kill(name)
            print(f"{name} was killed", flush=True)
        if step == add_at:
            print(f"{fleet.join()} was added", flush=True)
        if step == remove_at:
            name = next(iter(fleet.workers))
            fleet.leave(name)
            print(f"{name} has left", flush=True)
    held = fleet.held()
    for name, answer in held.items():
        print(
            f"{name:9}  "
            + (
                "version {:3}  root {}".format(*answer)
                if answer
                else "has no place: see `ray status`"
            )
        )
    same = len(set(held.values())) == 1
    print("the same bits everywhere" if same else "NOT the same bits everywhere")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--store",
        help="an address that all nodes reach; default: a temporary folder of this machine",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=100, help="supervised steps (default 100)")
    parser.add_argument(
        "--cpus",
        type=float,
        default=0.5,
        help="CPUs that Ray sets aside for an actor (default 0.5)",
    )
    parser.add_argument(
        "--kill-at", type=int, default=20, help="the step after which a worker is killed (0: never)"
    )
    parser.add_argument(
        "--add-at", type=int, default=40, help="the step after which a worker is added (0: never)"
    )
    parser.add_argument(
        "--remove-at", type=int, default=50, help="the step after which a worker leaves (0: never)"
    )
    options = vars(parser.parse_args())
    ray.init()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return 0 if run(options.pop("store") or folder, **options) else 1
    finally:
        ray.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
