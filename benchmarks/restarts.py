"""A training that dies twenty times, with exact weights and an optimizer state of every so many
steps, beside plain checkpoints of every so many steps and a training that does not die
(docs/restart.md).

    python -m benchmarks.restarts [--steps 4000] [--every 200] [--crashes 20] [--seeds 2] [--lr
    1e-5] [--log NAME]

A policy (46,000 weights, FP32, published in BF16) was pretrained to choose one of 96 actions as a
teacher does. The teacher has changed since: the action that is right now has reward 1. It learns by
REINFORCE and AdamW: 64 states a step, 8 actions sampled for each, with their mean reward as the
baseline. States and actions are functions of the step. Each way gets the same number of steps of
work and dies after the same ones; what it does again is not progress. Measured on 4,096 fixed
states: ``reward``, the mean probability of the right action; ``loss``, the mean of minus its
logarithm."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pulse_rl import Publisher, Subscriber, state_root
from pulse_rl.frameworks.restart import restore_training, save_training

from .results import save

INPUTS, WIDTH, ACTIONS = 32, 160, 96
PRETRAINED_STEPS, PRETRAINED_LR = 1500, 1e-3
SAMPLES, POINTS = 8, 40
COLUMNS = {"step": ",.0f", "reward": ".4f", "loss": ".4f"}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, ACTIONS),
    )


class Training:
    """``rows``: what was measured of the way that is run now, by the steps of work."""

    def __init__(self, seed: int, lr: float) -> None:
        self.seed = seed
        self.lr = lr
        self.rows: list[dict[str, float]] = []
        self.teacher = network(1000 + seed)
        self.start = network(seed)
        optimizer = torch.optim.AdamW(self.start.parameters(), lr=PRETRAINED_LR)
        for step in range(PRETRAINED_STEPS):
            states, right = self.states(-step - 1, 64)
            optimizer.zero_grad()
            functional.cross_entropy(self.start(states), right).backward()
            optimizer.step()
        with torch.no_grad():  # what was learnt is not quite what is asked from now on
            for parameter in self.teacher.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std())

    def new(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A process that has just started: it has the pretrained model."""
        model = network(0)
        model.load_state_dict(self.start.state_dict())
        return model, torch.optim.AdamW(model.parameters(), lr=self.lr)

    def states(self, number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(states, float32 of ``count`` by ``INPUTS``; the right actions, int64)."""
        states = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(number % 2**31))
        return states, self.teacher(states).argmax(1)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        states, right = self.states(number, 64)
        logs = model(states).log_softmax(1)
        dice = torch.Generator().manual_seed(number)
        chosen = torch.multinomial(logs.detach().exp(), SAMPLES, replacement=True, generator=dice)
        reward = (chosen == right[:, None]).float()
        advantage = reward - reward.mean(1, keepdim=True)
        optimizer.zero_grad()
        (-(advantage * logs.gather(1, chosen)).mean()).backward()
        optimizer.step()

    def measure(self, model: nn.Module, work: int, step: int) -> None:
        states, right = self.states(10**6, 4096)
        with torch.no_grad():
            logs = model(states).log_softmax(1).gather(1, right[:, None])
        facts = {"loss": -logs.mean().item(), "reward": logs.exp().mean().item()}
        self.rows.append({"work": work, "step": step, **facts})


def lives(steps: int, crashes: int, seed: int) -> Iterator[int]:
    """How many steps of work each process does."""
    ends = sorted(random.Random(seed).sample(range(1, steps), crashes))
    for begin, end in zip([0, *ends], [*ends, steps], strict=True):
        yield end - begin


def plain(training: Training, args: argparse.Namespace, folder: Path) -> int:
    """Bytes on the disk with the checkpoints that trainers write."""
    file, done = folder / "checkpoint.pt", 0
    for work in lives(args.steps, args.crashes, training.seed):
        model, optimizer = training.new()
        step = 0
        if file.exists():
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            step = saved["step"]
        for _ in range(work):
            step, done = step + 1, done + 1
            training.step(model, optimizer, step)
            if step % args.every == 0:
                torch.save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    },
                    file,
                )
            if done % (args.steps // POINTS) == 0:
                training.measure(model, done, step)
    return file.stat().st_size if file.exists() else 0


def exact(training: Training, args: argparse.Namespace, states: bool, folder: Path) -> int:
    """The same with a stream. Without ``states`` there is nothing but the stream: fresh moments,
    weights as in BF16."""
    store, file, done = f"{folder}/store", folder / "training.pt", 0
    for work in lives(args.steps, args.crashes, training.seed):
        model, optimizer = training.new()
        with Subscriber(store, stream="policy") as subscriber:
            found = restore_training(file, subscriber, model, optimizer=optimizer)
            step = found[0] if found else 0
            cast = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
            assert found is None or (state_root(cast) == subscriber.root and step == done)
        with Publisher(store, stream="policy") as publisher:
            for _ in range(work):
                step, done = step + 1, done + 1
                training.step(model, optimizer, step)
                publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": step})
                if states and step % args.every == 0:
                    save_training(file, model, step=step, optimizer=optimizer)
                if done % (args.steps // POINTS) == 0:
                    training.measure(model, done, step)
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--crashes", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--log", help="the name of a log in benchmarks/results to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    undisturbed = argparse.Namespace(**vars(args) | {"crashes": 0, "every": args.steps})
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        training = Training(seed, args.lr)
        ways = {
            "it never dies": partial(plain, training, undisturbed),
            f"a checkpoint every {args.every} steps": partial(plain, training, args),
            f"exact weights, optimizer every {args.every}": partial(exact, training, args, True),
            "exact weights, no optimizer": partial(exact, training, args, False),
        }
        for name, run in ways.items():
            training.rows = []
            training.measure(training.start, 0, 0)
            with tempfile.TemporaryDirectory(dir=memory) as folder:
                training.rows[-1]["bytes"] = nbytes = run(Path(folder))
            rows += [{"seed": seed, "way": name, **row} for row in training.rows]
            print(f"seed {seed}: {name}: {training.rows[-1]}, {nbytes / 1e6:.2f} MB", flush=True)
    if args.log:
        save(args.log, f"python -m benchmarks.restarts {' '.join(sys.argv[1:])}", rows)
    print("\n| | steps of progress | reward | loss | on disk |\n|---|---|---|---|---|")
    for name in dict.fromkeys(row["way"] for row in rows):
        last = [row for row in rows if row["way"] == name and row["work"] == args.steps]
        cells = [f"{mean(row[key] for row in last):{spec}}" for key, spec in COLUMNS.items()]
        print(
            f"| {name} | {' | '.join(cells)} | {mean(row['bytes'] for row in last) / 1e6:.2f} MB |"
        )


if __name__ == "__main__":
    main()
