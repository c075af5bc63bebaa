"""What leaves a site, and what is learnt: trainers in two sites with rounds of one level and of two, beside DiLoCo;
trainers as threads of one process.

    python -m benchmarks.loco --only sites
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from benchmarks.loco import convergence
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, PRETRAINED_RATES, STEADY_FROM, SYNC_EVERY
from benchmarks.loco.tasks import ARITHMETIC, PRETRAINED
from benchmarks.loco.threads import Masters, Trained, train
from pulse_rl.loco import DiLoCo, Exchange, PulseLoCo
from pulse_rl.loco.exchange import Sites
from pulse_rl.loco.loop import OuterLoop

ROUNDS = 16
MEMBERS = 4
"""Trainers of each of the two sites."""


def one_level(*arguments: Any, **settings: Any) -> PulseLoCo:
    """Knows the sites, and does as if there were none."""
    loop = PulseLoCo(*arguments, **settings)
    loop.reduction.sites = lambda group: Sites.of([""] * group.size)  # type: ignore[method-assign]
    return loop


METHODS: dict[str, Callable[..., OuterLoop]] = {"DiLoCo": DiLoCo, "one level": one_level, "two levels": PulseLoCo}


@dataclass(frozen=True)
class Row:
    """Of the last `convergence.LAST` rounds, or of the last one where nothing is ``evaluated``: means over trainers,
    sites and rounds. ``link``: bytes that leave a process. ``between``: bytes that leave a site."""

    task: str
    lr: float
    method: str
    rounds: int
    parameters: int
    density: float
    summed: float
    link: float
    between: float
    reward: float | None
    loss: float | None


def measure(task: str, lr: float, method: str, rounds: int, *, members: int = MEMBERS, evaluate: bool = False) -> Row:
    def make_loop(rank: int, masters: Masters, optimizer: torch.optim.Optimizer) -> OuterLoop:
        exchange = Exchange(site="ab"[rank // members])
        outer = {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}
        loop = METHODS[method](masters, optimizer, sync_every=SYNC_EVERY, group=exchange, **outer)
        loop.threads = 1
        return loop

    done = train(task, 2 * members, make_loop, lr=lr, rounds=rounds, evaluate=evaluate)
    return row(task, lr, method, done, members)


def row(task: str, lr: float, method: str, done: Sequence[Trained], members: int) -> Row:
    evaluated = bool(done[0].held_out)
    last = -convergence.LAST if evaluated else -1
    rounds = [r for trained in done for r in trained.rounds[last:]]
    held_out = [found for trained in done for found in trained.held_out[last:]]
    # A ring of ranks in the order of the sites crosses each site's border once.
    crossing = [r.dense_bytes if method == "DiLoCo" else members * r.between_bytes for r in rounds]
    return Row(
        task=task,
        lr=lr,
        method=method,
        rounds=rounds[-1].number,
        parameters=rounds[0].parameters,
        density=fmean(r.density for r in rounds),
        summed=fmean(r.summed / r.parameters for r in rounds),
        link=fmean(r.sent_bytes for r in rounds),
        between=fmean(crossing),
        reward=fmean(reward for reward, _ in held_out) if evaluated else None,
        loss=fmean(loss for _, loss in held_out) if evaluated else None,
    )


def run(quick: bool) -> list[Row]:
    rounds = 2 if quick else ROUNDS
    rows = [measure(ARITHMETIC, convergence.LR, method, rounds, evaluate=True) for method in METHODS]
    if not quick:
        rows += [measure(PRETRAINED, PRETRAINED_RATES[-1], m, STEADY_FROM) for m in METHODS if m != "DiLoCo"]
    return rows


def text(rows: Sequence[Row]) -> str:
    """The table as lines."""
    lines = [
        f"Two sites of {MEMBERS} trainers, threads of one process. link: bytes that leave a process in a round.",
        "between: bytes that leave a site, the ring of all ranks included. With a reward (held out) means of the last",
        f"{convergence.LAST} rounds, otherwise the last one.",
        "",
        f"{'task':18} {'lr':>6} {'method':11} {'rounds':>6} {'density':>8} {'summed':>8} {'link':>12} {'between':>12} "
        f"{'reward':>8} {'loss':>8}",
    ]
    for r in rows:
        learnt = " ".join(f"{'-' if x is None else f'{x:.4f}':>8}" for x in (r.reward, r.loss))
        lines.append(
            f"{r.task:18} {r.lr:>6g} {r.method:11} {r.rounds:>6} {r.density:>8.2%} {r.summed:>8.2%} {r.link:>12,.0f} "
            f"{r.between:>12,.0f} {learnt}"
        )
    return "\n".join(lines)
