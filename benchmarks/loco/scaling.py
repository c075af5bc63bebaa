"""What leaves a process as trainers are added: trainers as threads of one process, which run the library's own rounds
and count as its processes do, and arithmetic beyond them.

    python -m benchmarks.loco --only scaling
"""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, STEADY_FROM, SYNC_EVERY
from benchmarks.loco.tasks import ARITHMETIC, PRETRAINED, TASKS
from benchmarks.loco.traffic import PRETRAINED_RATES, WARM_UP
from pulse_rl.loco import PulseLoCo, Round, outer
from pulse_rl.loco.exchange import Exchange
from pulse_rl.loco.transfer import Own

_WAIT_SECONDS = 3600.0
_MAX_NORM = 1.0
BEYOND = (16, 32, 64)

Bytes = npt.NDArray[np.uint8]


class ThreadedExchange(Exchange):
    """The collectives among threads. What would leave a process is counted as `Exchange` counts it."""

    def __init__(self, rank: int, size: int, places: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(timeout_seconds=_WAIT_SECONDS)
        self.rank, self.size = rank, size
        self._places, self._barrier = places, barrier

    def _swap(self, own: Any) -> list[Any]:
        self._barrier.wait()
        self._places[self.rank] = own
        self._barrier.wait()
        return list(self._places)

    def _all_gather_array(self, data: Bytes) -> list[Bytes]:
        self.sent_bytes += (self.size - 1) * len(data)
        return self._swap(data.copy())

    def _all_to_all_arrays(self, pieces: list[Bytes], lengths: list[int]) -> list[Bytes]:
        self.sent_bytes += sum(len(piece) for rank, piece in enumerate(pieces) if rank != self.rank)
        return [theirs[self.rank] for theirs in self._swap(pieces)]

    def broadcast(self, array: npt.NDArray[Any], source: int) -> None:
        array[:] = self._swap(array.copy())[source]


@dataclass(frozen=True)
class Row:
    """The last round of so many trainers: means over them. ``unions``: entries of the union of the first 1, 2, 4, …
    trainers' entries. ``gathered``: what would have left a process, had the round been gathered."""

    task: str
    lr: float
    wire: str
    trainers: int
    parameters: int
    entries: float
    summed: int
    payload: float
    scattered: bool
    link: float
    gathered: float
    unions: list[int]
    sums: int

    @property
    def dense_link(self) -> float:
        return 2 * (self.trainers - 1) / self.trainers * 4 * self.parameters


def measure(task: str, lr: float, trainers: int, wire: torch.dtype = torch.float32, rounds: int = STEADY_FROM) -> Row:
    """Trains ``rounds`` rounds; the last one counts."""
    torch.set_num_threads(1)
    places: list[Any] = [None] * trainers
    barrier = threading.Barrier(trainers)
    loops: list[PulseLoCo | None] = [None] * trainers
    owns: list[Own | None] = [None] * trainers
    rank_of = threading.local()
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        rank_of.value = rank
        job = TASKS[task](0, rank)
        optimizer = torch.optim.AdamW(job.masters.values(), lr=lr, weight_decay=0.0)
        loop = loops[rank] = PulseLoCo(
            job.masters,
            optimizer,
            sync_every=SYNC_EVERY,
            outer_lr=OUTER_LR,
            outer_momentum=OUTER_MOMENTUM,
            wire_dtype=wire,
            threads=1,
        )
        gate = loop._gate

        def kept() -> Own:
            owns[rank] = gate()
            return owns[rank]  # type: ignore[return-value]

        loop._gate = kept  # type: ignore[method-assign]
        with loop:
            job.cast()
            for step in range(rounds * SYNC_EVERY):
                job.gradient(step)
                torch.nn.utils.clip_grad_norm_(job.masters.values(), _MAX_NORM)
                for group in optimizer.param_groups:
                    group["lr"] = lr * min(1.0, (step + 1) / WARM_UP)
                optimizer.step()
                job.cast()

    def guarded(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    started = time.monotonic()

    def make(*_: object, **__: object) -> Exchange:
        return ThreadedExchange(rank_of.value, trainers, places, barrier)

    with mock.patch.object(outer, "Exchange", make):
        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    print(f"{task}, lr {lr:g}, {trainers} trainers: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return _row(task, lr, wire, [loop for loop in loops if loop], [own for own in owns if own])


def _row(task: str, lr: float, wire: torch.dtype, loops: list[PulseLoCo], owns: list[Own]) -> Row:
    done: list[Round] = [loop.last_round for loop in loops if loop.last_round]
    known, blocks = loops[0]._known, loops[0].parameters.blocks
    assert known is not None
    trainers = len(loops)
    unions = []
    for count in (1 << i for i in range(trainers.bit_length())):
        union = 0
        for block in blocks:
            held = np.zeros(block.stop - block.start, np.bool_)
            for own in owns[:count]:
                held[own.entries[block.number][0]] = True
            union += int(held.sum())
        unions.append(union)
    return Row(
        task=task,
        lr=lr,
        wire=str(wire).removeprefix("torch."),
        trainers=trainers,
        parameters=done[0].parameters,
        entries=fmean(r.entries for r in done),
        summed=done[0].summed,
        payload=fmean(r.payload_bytes for r in done),
        scattered=done[0].scattered,
        link=fmean(r.sent_bytes for r in done),
        gathered=(trainers - 1) * (40 + known.longest + 1 + 32),
        unions=unions,
        sums=known.sums,
    )


def beyond(row: Row, trainers: int) -> float:
    """Times less than a dense ring, by arithmetic: 8 bytes a parameter over a message and the sums. The union is taken
    to go on growing by its last doubling's factor, which has fallen with each doubling, and is at most everything."""
    growth = row.unions[-1] / row.unions[-2]
    union = min(row.unions[-1] * float(growth ** math.log2(trainers / row.trainers)), float(row.parameters))
    return 8 * row.parameters / (row.payload + row.sums * union / row.unions[-1])


def run(quick: bool) -> list[Row]:
    cases = [(PRETRAINED, lr, count) for lr in PRETRAINED_RATES for count in (4, 8)]
    if quick:
        cases = [(ARITHMETIC, 1e-5, 4), (ARITHMETIC, 1e-5, 8)]
    return [measure(task, lr, count, rounds=2 if quick else STEADY_FROM) for task, lr, count in cases]


def text(rows: list[Row]) -> str:
    """The tables as lines."""
    lines = [
        f"Bytes that leave a process in round {STEADY_FROM}, by its own count; trainers are threads of one process.",
        "overlap: all entries / parameters whose sum is not 0. Times less than a dense ring all-reduce.",
        "",
        f"{'task':18} {'lr':>6} {'R':>3} {'density':>8} {'overlap':>7} {'payload':>11} {'link':>12} {'':9} "
        f"{'times less':>10} {'gathered':>8}",
    ]
    for r in rows:
        lines.append(
            f"{r.task:18} {r.lr:>6g} {r.trainers:>3} {r.entries / r.parameters:>8.3%} "
            f"{r.trainers * r.entries / max(r.summed, 1):>7.2f} {r.payload:>11,.0f} {r.link:>12,.0f} "
            f"{'scattered' if r.scattered else 'gathered':9} {r.dense_link / r.link:>10.1f} "
            f"{r.dense_link / r.gathered:>8.1f}"
        )
        unions = ", ".join(f"{1 << i}: {u / r.parameters:.2%}" for i, u in enumerate(r.unions))
        lines.append(f"  union of the gates of so many trainers: {unions}")
    lines.append("")
    for r in (r for r in rows if r.scattered):
        found = ", ".join(f"{count}: {beyond(r, count):.1f}" for count in (r.trainers, *BEYOND) if count >= r.trainers)
        lines.append(f"{r.task}, lr {r.lr:g}, from {r.trainers} trainers, times less by arithmetic: {found}")
    return "\n".join(lines)
