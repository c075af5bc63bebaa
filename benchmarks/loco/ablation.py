"""What each setting of PULSELoCo does to what is learnt: the arithmetic task, trainers as threads of one process, each
group of settings beside DiLoCo with the same ones.

    python -m benchmarks.loco.ablation [--only GROUP ...] [--seeds 0 1] [--rounds 32] [--json FILE]

A run of 32 rounds of 4 trainers takes two to three minutes of a core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.loco import tasks
from benchmarks.loco.baselines import sparse_loco
from benchmarks.loco.convergence import LAST, LR, ROUNDS
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, SYNC_EVERY, TRAINERS
from benchmarks.loco.threads import Masters, train
from pulse_rl.loco import DiLoCo, Exchange, PulseLoCo
from pulse_rl.loco.loop import OuterLoop


@dataclass(frozen=True)
class Variant:
    """``rounds`` are those of `SYNC_EVERY` steps; with another ``sync_every`` the inner steps stay as many."""

    method: Callable[..., OuterLoop] = PulseLoCo
    task: str = tasks.ARITHMETIC
    trainers: int = TRAINERS
    lr: float = LR
    sync_every: int = SYNC_EVERY
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        changed = [f"{name} {value}" for name, value in self.settings.items()]
        if self.trainers != TRAINERS:
            changed.insert(0, f"R {self.trainers}")
        if self.sync_every != SYNC_EVERY:
            changed.insert(0, f"H {self.sync_every}")
        if self.lr != LR:
            changed.insert(0, f"lr {self.lr:g}")
        if self.task != tasks.ARITHMETIC:
            changed.insert(0, self.task)
        return ", ".join([self.method.__name__, *changed])


def both(**changed: Any) -> list[Variant]:
    """DiLoCo and PULSELoCo with the same change."""
    return [Variant(DiLoCo, **changed), Variant(**changed)]


def pulse(**settings: Any) -> Variant:
    return Variant(settings=settings)


GROUPS: dict[str, list[Variant]] = {
    "lookahead": [Variant(DiLoCo), *(pulse(lookahead=c) for c in (0.0, 1.33, 3.0, 7.0, 14.0))],
    "gate": [pulse(gate_scale=k) for k in (0.25, 0.5, 2.0)],
    "sums": [
        pulse(gate_sums=True),
        pulse(gate_sums=True, wire_dtype=torch.bfloat16),
        Variant(DiLoCo, trainers=8),
        *(Variant(trainers=8, settings={"gate_sums": gated}) for gated in (False, True)),
    ],
    "momentum": [v for mu in (0.0, 0.5, 0.95) for v in both(settings={"outer_momentum": mu})],
    "H": [v for h in (4, 16, 32) for v in both(sync_every=h)],
    "lr": [v for lr in (1e-5, 1e-4) for v in both(lr=lr)],
    "low lr": [Variant(lr=1e-5, settings={"lookahead": c}) for c in (0.0, 3.0, 14.0)],
    "data": [
        Variant(DiLoCo, task=tasks.APART),
        *(Variant(task=tasks.APART, settings=settings) for settings in ({}, {"gate_sums": True})),
    ],
    "SparseLoCo": [
        Variant(sparse_loco, settings={"fraction": share, "outer_lr": lr})
        for share, lr in ((0.03, 1.0), (0.1, 1.0), (0.1, 3.0))
    ],
}


@dataclass(frozen=True)
class Outcome:
    """Of the last rounds: mean reward and loss. ``density``, ``payload`` and ``link`` (bytes): means over trainers and
    rounds, times the rounds for the bytes. ``rewards``: of each round, mean over trainers; ``ahead``: of the last ones,
    by the weights that the inner steps start from; ``consensus``: after the last one, by the mean of these."""

    title: str
    seed: int
    reward: float
    loss: float
    ahead: float
    consensus: float
    density: float
    payload: float
    link: float
    rewards: list[float]

    def __str__(self) -> str:
        return (
            f"{self.title:52} {self.seed:4} {self.reward:>8.4f} {self.loss:>8.4f} {self.ahead:>8.4f} "
            f"{self.consensus:>9.4f} {self.density:>8.2%} {self.payload / 1e6:>8.2f} {self.link / 1e6:>8.2f}"
        )


def measure(variant: Variant, seed: int, rounds: int) -> Outcome:
    """``rounds`` of `SYNC_EVERY` steps; the last `LAST` of those count."""
    count = rounds * SYNC_EVERY // variant.sync_every
    outer = {} if variant.method is sparse_loco else {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}

    def make_loop(rank: int, masters: Masters, optimizer: torch.optim.Optimizer) -> OuterLoop:
        settings = {"sync_every": variant.sync_every, **outer, **variant.settings}
        of_exchange = {name: settings.pop(name) for name in ("gate_sums", "wire_dtype") if name in settings}
        loop = variant.method(masters, optimizer, group=Exchange(**of_exchange), **settings)
        loop.threads = 1
        return loop

    done = train(variant.task, variant.trainers, make_loop, lr=variant.lr, rounds=count, seed=seed, evaluate=True)
    last = -max(1, LAST * SYNC_EVERY // variant.sync_every)
    of_rounds = [r for trained in done for r in trained.rounds]
    held_out = list(zip(*(trained.held_out for trained in done[:TRAINERS]), strict=True))
    of_last = [found for of_round in held_out[last:] for found in of_round]
    return Outcome(
        title=variant.title,
        seed=seed,
        reward=fmean(reward for reward, _ in of_last),
        loss=fmean(loss for _, loss in of_last),
        ahead=fmean(reward for trained in done[:TRAINERS] for reward, _ in trained.ahead[last:]),
        consensus=fmean((trained.consensus or trained.held_out[-1])[0] for trained in done[:TRAINERS]),
        density=fmean(r.density for r in of_rounds),
        payload=fmean(r.payload_bytes for r in of_rounds) * count,
        link=fmean(r.sent_bytes for r in of_rounds) * count,
        rewards=[fmean(reward for reward, _ in of_round) for of_round in held_out],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loco.ablation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    arguments = parser.parse_args()
    tasks.ensure(tasks.ARITHMETIC)
    found = []
    print(f"{'method':52} seed   reward     loss    ahead consensus  density  payload  link, MB a trainer", flush=True)
    for group in arguments.only:
        for variant in GROUPS[group]:
            for seed in arguments.seeds:
                found.append(measure(variant, seed, arguments.rounds))
                print(found[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
