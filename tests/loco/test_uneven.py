"""Trainers that do not take as many inner steps as the others: an error in time that says who is
where."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from pulse_rl.errors import InputError, TrainerLost
from pulse_rl.loco import PulseLoCo
from tests.support.loco_reference import Job, pulse_loco, root_of
from tests.support.trainers import Group, Trainer, each, together

pytestmark = pytest.mark.slow
SIZE = 3


def steps(loop: PulseLoCo, job: Job, who: int, count: int) -> None:
    for _ in range(count):
        job.step(who)


def fewer_batches(trainer: Trainer) -> None:
    """The loop of trainer 1 ends one batch before a round; that of trainer 0 at a round, when the
    others go on."""
    for early, batches, where in (
        (1, 3, "1 of 2 inner steps of round 2"),
        (0, 4, "0 of 2 inner steps of round 3"),
    ):
        job = Job(trainer.rank)
        with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=20) as loop:
            steps(loop, job, trainer.rank, batches)
            if trainer.rank == early:
                continue
            started = time.monotonic()
            with pytest.raises(TrainerLost, match=f"trainer {early} left after {where}") as caught:
                steps(loop, job, trainer.rank, 6 - batches)
            assert "this one has taken 2" in str(caught.value)
            assert "fewer batches" in caught.value.hint
            assert time.monotonic() - started < 10


def an_error_in_the_loop(trainer: Trainer) -> None:
    job = Job(trainer.rank)
    if trainer.rank == 1:
        loop = pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=20)
        with suppress(OSError), loop:
            steps(loop, job, 1, 3)
            raise OSError("no such batch")
        return
    with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=20) as loop:
        steps(loop, job, trainer.rank, 3)
        with pytest.raises(
            TrainerLost, match="trainer 1 left with OSError: no such batch"
        ) as caught:
            steps(loop, job, trainer.rank, 1)
        assert "fewer batches" not in caught.value.hint


def other_parameters(trainer: Trainer) -> None:
    """An error of one trainer alone, in a round, reaches the others at once and with its words."""
    job = Job(trainer.rank)
    with pulse_loco(job.model, job.optimizer, sync_every=1, timeout_seconds=20) as loop:
        steps(loop, job, trainer.rank, 1)
        if trainer.rank == 1:
            job.model[0].bias = torch.nn.Parameter(torch.zeros(40))
            with pytest.raises(InputError, match=r"parameters have changed: '0\.bias'"):
                job.step(1)
        else:
            with pytest.raises(TrainerLost, match=r"trainer 1 left with InputError: .*'0\.bias'"):
                job.step(trainer.rank)


def stalled(trainer: Trainer) -> None:
    """Trainer 1 waits for the others in a barrier of the training loop."""
    job = Job(trainer.rank)
    with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=2) as loop:
        steps(loop, job, trainer.rank, 3)
        if trainer.rank != 1:
            with pytest.raises(
                TrainerLost, match=r"trainer 1 had taken 1 of 2 inner steps of round 2.*GradScaler"
            ):
                job.step(trainer.rank)
        trainer.barrier("stalled", (0, 1, 2))


def skipped_steps(trainer: Trainer) -> None:
    """Gradients overflow on trainer 1 alone: its scaler skips a step, and its round takes a batch
    more."""
    job = Job(trainer.rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def batch(overflow: bool = False) -> None:
        data = torch.Generator().manual_seed(1000 * trainer.rank + job.steps)
        job.steps += 1
        job.optimizer.zero_grad()
        scaler.scale(job.model(torch.randn(4, 24, generator=data)).square().mean()).backward()
        if overflow:
            job.model[0].bias.grad[3] = float("inf")
        scaler.step(job.optimizer)
        scaler.update()

    with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=20) as loop:
        batch()
        if trainer.rank == 1:
            batch(overflow=True)
            assert (loop.round, loop.inner_step) == (0, 1)
        batch()
        assert (loop.round, loop.inner_step) == (1, 0)
        trainer.put("root", root_of(loop))
        assert trainer.get("root", 0) == root_of(loop)
        batch()
        if trainer.rank == 1:  # as many batches as the others
            return
        with pytest.raises(
            TrainerLost, match=r"trainer 1 left after 1 of 2 inner steps of round 2.*has taken 2"
        ) as e:
            batch()
        assert "GradScaler" in e.value.hint


def every(trainer: Trainer) -> list[str]:
    """Every case in a world of its own. Returns those that failed, and how."""
    cases: list[Callable[[Trainer], None]] = [
        fewer_batches,
        an_error_in_the_loop,
        other_parameters,
        stalled,
        skipped_steps,
    ]
    return each(trainer, cases, SIZE)


def test_the_others_are_told_who_is_where() -> None:
    assert together(every, SIZE, seconds=60) == [[], [], []]


def exits(trainer: Trainer) -> Any:
    """A process that ends without leaving the loop."""
    trainer.connect("start")
    job = Job(trainer.rank)
    loop = pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=20)
    loop.__enter__()
    steps(loop, job, trainer.rank, 3)
    if trainer.rank == 1:
        os._exit(0)
    with pytest.raises(
        TrainerLost, match=r"trainer 1 had taken 1 of 2 inner steps of round 2.*fewer batches"
    ):
        job.step(trainer.rank)


def test_a_process_that_ended_is_named() -> None:
    Group(exits, SIZE, lost=(1,)).results()
