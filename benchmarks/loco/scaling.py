"""What leaves a process as trainers are added: trainers as threads of one process, which run the library's own rounds
and count as its processes do, and arithmetic beyond them.

    python -m benchmarks.loco --only scaling
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, PRETRAINED_RATES, STEADY_FROM, SYNC_EVERY
from benchmarks.loco.tasks import ARITHMETIC, PRETRAINED
from benchmarks.loco.threads import Masters, train
from pulse_rl.loco import Exchange, PulseLoCo, Round
from pulse_rl.loco.wire import LocalMessage

BEYOND = (16, 32, 64)


@dataclass(frozen=True)
class Row:
    """The last round of so many trainers: means over them. ``union``: parameters that pass anybody's gate.
    ``gathered``: what would have left a process, had the round been gathered."""

    task: str
    lr: float
    wire: str
    trainers: int
    gated: bool
    rounds: int
    parameters: int
    entries: float
    summed: int
    payload: float
    scattered: bool
    link: float
    gathered: float
    union: int

    @property
    def dense_link(self) -> float:
        return 2 * (self.trainers - 1) / self.trainers * 4 * self.parameters


def measure(
    task: str,
    lr: float,
    trainers: int,
    *,
    gate_sums: bool,
    wire: torch.dtype = torch.float32,
    rounds: int = STEADY_FROM,
) -> Row:
    """Trains ``rounds`` rounds; the last one counts."""
    owns: list[LocalMessage | None] = [None] * trainers

    def make_loop(rank: int, masters: Masters, optimizer: torch.optim.Optimizer) -> PulseLoCo:
        loop = PulseLoCo(
            masters,
            optimizer,
            sync_every=SYNC_EVERY,
            outer_lr=OUTER_LR,
            outer_momentum=OUTER_MOMENTUM,
            group=Exchange(wire_dtype=wire, gate_sums=gate_sums),
        )
        loop.threads = 1
        gate = loop.reduction.gate
        local_message = gate.local_message

        def kept(*arguments: Any) -> LocalMessage:
            own = owns[rank] = local_message(*arguments)
            return own

        gate.local_message = kept  # type: ignore[method-assign]
        return loop

    loops = [done.loop for done in train(task, trainers, make_loop, lr=lr, rounds=rounds)]
    return _row(task, lr, wire, [loop for loop in loops if isinstance(loop, PulseLoCo)], [own for own in owns if own])


def _row(task: str, lr: float, wire: torch.dtype, loops: list[PulseLoCo], owns: list[LocalMessage]) -> Row:
    done: list[Round] = [loop.last_round for loop in loops if loop.last_round]
    blocks, union = loops[0].parameters.blocks, 0
    for block in blocks:
        held = np.zeros(block.stop - block.start, np.bool_)
        for own in owns:
            held[own.entries[block.number][0]] = True
        union += int(held.sum())
    return Row(
        task=task,
        lr=lr,
        wire=str(wire).removeprefix("torch."),
        trainers=len(loops),
        gated=loops[0].exchange.gate_sums is True,
        rounds=done[0].number,
        parameters=done[0].parameters,
        entries=fmean(r.entries for r in done),
        summed=done[0].summed,
        payload=fmean(r.payload_bytes for r in done),
        scattered=done[0].scattered,
        link=fmean(r.sent_bytes for r in done),
        gathered=(len(loops) - 1) * (40 + max(r.payload_bytes for r in done) + 1 + 32),
        union=union,
    )


def beyond(half: Row, row: Row, trainers: int) -> float:
    """Times less than a dense ring among so many, by arithmetic: (1 - 1/R) of a message and of all sums leave a
    process. Both are taken to go on growing as they did from ``half`` as many trainers to those of ``row``."""
    before, after = (r.link / (1 - 1 / r.trainers) for r in (half, row))
    factor: float = (after / before) ** math.log2(trainers / row.trainers)
    return 8 * row.parameters / (after * factor)


CASES = ((4, False), (4, True), (8, True))
"""Trainers, and whether sums pass a gate: by default they do from 8 trainers on."""


def run(quick: bool) -> list[Row]:
    runs = [(ARITHMETIC, 1e-5)] if quick else [(PRETRAINED, lr) for lr in PRETRAINED_RATES]
    rounds = 2 if quick else STEADY_FROM
    return [measure(task, lr, count, gate_sums=gated, rounds=rounds) for task, lr in runs for count, gated in CASES]


def text(rows: list[Row]) -> str:
    """The tables as lines."""
    lines = [
        f"Bytes that leave a process in round {rows[0].rounds}, by its own count; trainers are threads of one process.",
        "union: of all gates. summed: parameters whose sum is sent. Times less than a dense ring all-reduce.",
        "",
        f"{'task':18} {'lr':>6} {'R':>3} {'sums':5} {'density':>8} {'union':>8} {'summed':>8} {'payload':>11} "
        f"{'link':>12} {'':9} {'times less':>10} {'gathered':>8}",
    ]
    for r in rows:
        sums, way = "gated" if r.gated else "all", "scattered" if r.scattered else "gathered"
        shares = " ".join(f"{part / r.parameters:>8.3%}" for part in (r.entries, r.union, r.summed))
        lines.append(
            f"{r.task:18} {r.lr:>6g} {r.trainers:>3} {sums:5} {shares} {r.payload:>11,.0f} {r.link:>12,.0f} {way:9} "
            f"{r.dense_link / r.link:>10.1f} {r.dense_link / r.gathered:>8.1f}"
        )
    lines.append("")
    for half, row in pairwise(rows):
        if (half.task, half.lr, half.gated, 2 * half.trainers) == (row.task, row.lr, row.gated, row.trainers):
            found = ", ".join(f"{r}: {beyond(half, row, r):.1f}" for r in (row.trainers, *BEYOND) if r >= row.trainers)
            lines.append(
                f"{row.task}, lr {row.lr:g}, times less by arithmetic, from {row.trainers} trainers on: {found}"
            )
    return "\n".join(lines)
