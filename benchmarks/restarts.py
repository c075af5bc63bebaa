"""A training that dies twenty times, with exact weights and an optimizer state of every so many steps, beside plain
checkpoints of every so many steps and a training that does not die (docs/restart.md).

    python -m benchmarks.restarts [--steps 2000] [--every 100] [--crashes 20] [--seeds 2]

A student (46,000 weights, FP32, published in BF16) learns another teacher than it was pretrained on, by AdamW at 1e-5.
The batch is a function of the step. Each way gets the same number of steps of work and dies after the same ones; what
it does again is not progress. The loss is that of 4,096 fixed examples.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from pulse_rl import Publisher, Subscriber, state_root
from pulse_rl.integrations.restart import restore_training, save_training

INPUTS, WIDTH, OUTPUTS = 32, 160, 96
PRETRAINED_STEPS, PRETRAINED_LR, LR = 1500, 1e-3, 1e-5


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)
    )


class Training:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.teacher = network(1000 + seed)
        self.start = network(seed)
        optimizer = torch.optim.AdamW(self.start.parameters(), lr=PRETRAINED_LR)
        for step in range(PRETRAINED_STEPS):
            self.step(self.start, optimizer, -step - 1)
        with torch.no_grad():  # what was learnt is not quite what is asked from now on
            for parameter in self.teacher.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15 * parameter.std())

    def new(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A process that has just started: it has the pretrained model."""
        model = network(0)
        model.load_state_dict(self.start.state_dict())
        return model, torch.optim.AdamW(model.parameters(), lr=LR)

    def loss(self, model: nn.Module, number: int, count: int = 64) -> torch.Tensor:
        inputs = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(number % 2**31))
        return (model(inputs) - self.teacher(inputs).detach()).square().mean()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        self.loss(model, number).backward()
        optimizer.step()

    def final(self, model: nn.Module) -> float:
        return self.loss(model, 10**6, 4096).item()


def lives(steps: int, crashes: int, seed: int) -> Iterator[int]:
    """How many steps of work each process does."""
    ends = sorted(random.Random(seed).sample(range(1, steps), crashes))
    for begin, end in zip([0, *ends], [*ends, steps], strict=True):
        yield end - begin


def plain(training: Training, args: argparse.Namespace, folder: Path) -> tuple[int, float, int]:
    """(the last step, its loss, bytes on the disk) with the checkpoints that trainers write."""
    file, step = folder / "checkpoint.pt", 0
    for work in lives(args.steps, args.crashes, training.seed):
        model, optimizer = training.new()
        step = 0
        if file.exists():
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            step = saved["step"]
        for _ in range(work):
            step += 1
            training.step(model, optimizer, step)
            if step % args.every == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
    return step, training.final(model), file.stat().st_size


def exact(training: Training, args: argparse.Namespace, states: bool, folder: Path) -> tuple[int, float, int]:
    """The same with a stream. Without ``states`` there is nothing but the stream: fresh moments, weights as in BF16."""
    store, file, step = f"{folder}/store", folder / "training.pt", 0
    for work in lives(args.steps, args.crashes, training.seed):
        model, optimizer = training.new()
        with Subscriber(store, stream="policy") as subscriber:
            found = restore_training(file, subscriber, model, optimizer=optimizer)
            step = found[0] if found else 0
            cast = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
            assert found is None or state_root(cast) == subscriber.root
        with Publisher(store, stream="policy") as publisher:
            for _ in range(work):
                step += 1
                training.step(model, optimizer, step)
                publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": step})
                if states and step % args.every == 0:
                    save_training(file, model, step=step, optimizer=optimizer)
    return step, training.final(model), sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--crashes", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[int, float, int]]] = {}
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    undisturbed = argparse.Namespace(**vars(args) | {"crashes": 0, "every": args.steps})
    for seed in range(args.seeds):
        training = Training(seed)
        ways = {
            "never dies": partial(plain, training, undisturbed),
            f"a checkpoint every {args.every} steps": partial(plain, training, args),
            f"exact weights, optimizer every {args.every}": partial(exact, training, args, True),
            "exact weights, no optimizer": partial(exact, training, args, False),
        }
        found.setdefault("before", []).append((0, training.final(training.start), 0))
        for name, run in ways.items():
            with tempfile.TemporaryDirectory(dir=memory) as folder:
                found.setdefault(name, []).append(run(Path(folder)))
            print(f"seed {seed}: {name}: step {found[name][-1][0]}, loss {found[name][-1][1]:.6f}", flush=True)
    print(f"\n{args.steps} steps of work, {args.crashes} crashes, {args.seeds} seeds\n")
    print("| | steps of progress | loss, mean (each seed) | on disk |\n|---|---|---|---|")
    for name, runs in found.items():
        steps, losses, nbytes = zip(*runs, strict=True)
        shown = ", ".join(f"{loss:.5f}" for loss in losses)
        print(f"| {name} | {mean(steps):,.0f} | {mean(losses):.5f} ({shown}) | {mean(nbytes) / 1e6:.2f} MB |")


if __name__ == "__main__":
    main()
