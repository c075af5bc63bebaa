"""Trainers as threads of one process: any number of them, with the library's own rounds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.loco import baselines
from benchmarks.loco.baselines import Ddp
from benchmarks.loco.jobs import SYNC_EVERY, TRAINERS, WARM_UP
from pulse_rl.loco import PulseLoCo, Round, group_rounds
from pulse_rl.loco.group import TrainerGroup
from pulse_rl.loco.loop import OuterLoop

if TYPE_CHECKING:
    from benchmarks.loco.tasks import Task

_WAIT_SECONDS = 3600.0
_MAX_NORM = 1.0

Bytes = npt.NDArray[np.uint8]
Masters = dict[str, torch.nn.Parameter]
#: The loop of the trainer of a rank.
MakeLoop = Callable[[int, Masters, torch.optim.Optimizer], Ddp | OuterLoop]


class ThreadedGroup(TrainerGroup):
    """The collectives among threads. What would leave a process is counted as `TrainerGroup` counts
    it."""

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
        self.sent_bytes += sum(map(len, pieces)) - len(pieces[self.rank])
        return [theirs[self.rank] for theirs in self._swap(pieces)]

    def broadcast(self, array: npt.NDArray[Any], source: int) -> None:
        array[:] = self._swap(array.copy())[source]

    def all_reduce(self, array: npt.NDArray[np.float32]) -> None:
        array[:] = sum(self._swap(array.copy()))
        self.sent_bytes += 2 * (self.size - 1) * array.nbytes // self.size


@dataclass
class Trained:
    """What one trainer did: its loop and its rounds (none of DDP), in each round the bytes of its
    messages and of all that left it, and after each, where asked for, (reward, loss) of its share
    of the held-out problems, by theta and by where its next inner steps start; after the last one
    by the mean of those starts."""

    loop: Ddp | OuterLoop
    rounds: list[Round] = field(default_factory=list)
    payloads: list[int] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    held_out: list[tuple[float, float]] = field(default_factory=list)
    ahead: list[tuple[float, float]] = field(default_factory=list)
    consensus: tuple[float, float] | None = None

    def end_round(self) -> None:
        if isinstance(self.loop, Ddp):
            self.payloads.append(self.loop.payload_bytes - sum(self.payloads))
            self.links.append(self.loop.sent_bytes - sum(self.links))
        else:
            done = self.loop.last_round
            assert done is not None
            self.rounds.append(done)
            self.payloads.append(done.payload_bytes)
            self.links.append(done.sent_bytes)


def train(
    task: str,
    trainers: int,
    make_loop: MakeLoop,
    *,
    lr: float,
    steps: int,
    seed: int = 0,
    evaluate: bool = False,
) -> list[Trained]:
    """So many inner steps of so many trainers, by rank; of DDP each `SYNC_EVERY` steps count as a
    round. ``evaluate``: the first `TRAINERS` share what is held out."""
    from benchmarks.loco.tasks import (
        TASKS,
        evaluate_global,
    )  # transformers, which a test of threads does without

    found: list[Trained | None] = [None] * trainers

    def run(rank: int) -> None:
        job = TASKS[task](seed, rank)
        optimizer = torch.optim.AdamW(job.masters.values(), lr=lr, weight_decay=0.0)
        loop = make_loop(rank, job.masters, optimizer)
        done = found[rank] = Trained(loop)
        sync_every = SYNC_EVERY if isinstance(loop, Ddp) else loop.sync_every
        with loop:
            clip_before_steps(optimizer, job.masters)
            job.cast()
            for step in range(steps // sync_every * sync_every):
                take_step(job, optimizer, step, lr)
                if (step + 1) % sync_every:
                    continue
                done.end_round()
                if evaluate and rank < TRAINERS:
                    done.held_out.append(evaluate_global(loop, job))
                    done.ahead.append(
                        job.evaluate() if isinstance(loop, PulseLoCo) else done.held_out[-1]
                    )
            if evaluate and isinstance(loop, PulseLoCo):
                done.consensus = _evaluate_consensus(job, loop.averaged_state())

    started = time.monotonic()
    as_threads(run, trainers)
    print(
        f"{task}, lr {lr:g}, {trainers} trainers: {time.monotonic() - started:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return [done for done in found if done is not None]


@torch.no_grad()
def _evaluate_consensus(job: Task, weights: dict[str, torch.Tensor]) -> tuple[float, float]:
    for name, master in job.masters.items():
        master.copy_(weights[name])
    job.cast()
    return job.evaluate()


def clip_before_steps(optimizer: torch.optim.Optimizer, masters: Masters) -> None:
    """Within the ``with`` of a loop, so that DDP has averaged the gradients before."""

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(masters.values(), _MAX_NORM)

    optimizer.register_step_pre_hook(clip)


def take_step(job: Task, optimizer: torch.optim.Optimizer, step: int, lr: float) -> None:
    job.gradient(step)
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, (step + 1) / WARM_UP)
    optimizer.step()
    job.cast()


def as_threads(run: Callable[[int], None], trainers: int) -> None:
    """``run`` for every rank, each in a thread that meets the others; the first error of any of
    them ends all."""
    barrier = threading.Barrier(trainers)
    with _exchanges(trainers, barrier) as rank_of:

        def meeting(rank: int) -> None:
            rank_of.value = rank
            run(rank)

        in_threads(meeting, trainers, barrier.abort)


def in_threads(
    run: Callable[[int], None], trainers: int, abort: Callable[[], None] = lambda: None
) -> None:
    """``run`` for every rank in a thread; after the first error of any of them ``abort`` ends what
    others wait for."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        torch.set_num_threads(1)  # it holds for the thread that calls it
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)
            abort()

    threads = [
        threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(trainers)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive() and not errors:
                thread.join(1.0)
    except BaseException:
        abort()
        raise
    if errors:
        raise errors[0]


@contextmanager
def _exchanges(trainers: int, barrier: threading.Barrier) -> Iterator[threading.local]:
    """Within, loops meet through memory; what is yielded has the ``value`` of a thread's rank."""
    places: list[Any] = [None] * trainers
    rank_of = threading.local()

    def make(*_: object, **__: object) -> TrainerGroup:
        return ThreadedGroup(rank_of.value, trainers, places, barrier)

    with (
        mock.patch.object(group_rounds, "TrainerGroup", make),
        mock.patch.object(baselines, "TrainerGroup", make),
    ):
        yield rank_of
