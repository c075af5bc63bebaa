"""What is learnt on pretrained weights, by held-out cloze prompts: DiLoCo and PULSELoCo, trainers as threads.

    python -m benchmarks.loco.heldout [--rounds 8] [--lr 1e-6 3e-6 1e-5] [--methods DiLoCo ...] [--json FILE]

A round of 4 trainers takes 20 to 40 seconds of a core.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.loco import tasks
from benchmarks.loco.jobs import PRETRAINED_RATES, TRAINERS, WARM_UP, Job
from benchmarks.loco.methods import DILOCO, LOOPS, PULSE, make_loop
from benchmarks.loco.threads import Masters, train
from pulse_rl.loco.loop import OuterLoop

RATES = (*PRETRAINED_RATES, 1e-5)
ROUNDS = 8


@dataclass(frozen=True)
class Learnt:
    """``rewards`` and ``losses`` of the held-out prompts: before training, then after each round; ``ahead``: the last
    reward by the weights that the next inner steps start from, ``consensus`` by the mean of these. ``density`` and
    ``link`` (bytes that left a process): means over trainers and rounds, times the rounds for the bytes."""

    method: str
    lr: float
    seed: int
    rewards: list[float]
    losses: list[float]
    ahead: float
    consensus: float
    density: float
    link: float

    def __str__(self) -> str:
        half = len(self.rewards) // 2
        rewards = " ".join(f"{self.rewards[i]:>8.4f}" for i in (0, half, -1))
        return (
            f"{self.method:29} {self.lr:>6g} {self.seed:>4} {rewards} {self.ahead:>8.4f} "
            f"{self.consensus:>9.4f} {self.density:>8.2%} {self.link / 1e6:>8.1f}"
        )


def measure(method: str, lr: float, seed: int, rounds: int) -> Learnt:
    job = Job(tasks.PRETRAINED_SPLIT, method, lr, rounds, seed, WARM_UP)

    def loop(_: int, masters: Masters, optimizer: torch.optim.Optimizer) -> OuterLoop:
        made = make_loop(job, masters, optimizer)
        assert isinstance(made, OuterLoop)
        return made

    before = [tasks.TASKS[job.task](seed, rank).evaluate() for rank in range(TRAINERS)]
    done = train(job.task, TRAINERS, loop, lr=lr, rounds=rounds, seed=seed, evaluate=True)
    held_out = [before, *zip(*(trained.held_out for trained in done), strict=True)]
    of_rounds = [r for trained in done for r in trained.rounds]
    return Learnt(
        method=method,
        lr=lr,
        seed=seed,
        rewards=[fmean(reward for reward, _ in shares) for shares in held_out],
        losses=[fmean(loss for _, loss in shares) for shares in held_out],
        ahead=fmean(trained.ahead[-1][0] for trained in done),
        consensus=fmean((trained.consensus or trained.held_out[-1])[0] for trained in done),
        density=fmean(r.density for r in of_rounds),
        link=fmean(r.sent_bytes for r in of_rounds) * rounds,
    )


def main() -> None:
    description = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loco.heldout", description=description)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lr", nargs="+", type=float, default=RATES)
    parser.add_argument("--methods", nargs="+", choices=LOOPS, default=(DILOCO, PULSE), metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    arguments = parser.parse_args()
    tasks.ensure(tasks.PRETRAINED_SPLIT)
    found = []
    print(
        f"{tasks.HELD_OUT_PROMPTS} held-out prompts; reward before, halfway and after {arguments.rounds} rounds\n"
        f"{'method':29} {'lr':>6} seed   before  halfway    after    ahead consensus  density  link, MB a trainer",
        flush=True,
    )
    for lr in arguments.lr:
        for seed in arguments.seeds:
            for method in arguments.methods:
                found.append(measure(method, lr, seed, arguments.rounds))
                print(found[-1], flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps([asdict(learnt) for learnt in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
