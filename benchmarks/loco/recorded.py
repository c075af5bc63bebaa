"""The inner steps of real training, recorded once, so that rounds are timed apart from them: of
each trainer the start of the first round, and what its inner steps took off the weights in each."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.loco import tasks
from benchmarks.loco.jobs import STEADY_FROM, SYNC_EVERY, TRAINERS
from benchmarks.loco.methods import PULSE, make_loop
from benchmarks.loco.threads import Masters, take_step, train
from pulse_rl.loco.loop import OuterLoop

Tensors = dict[str, torch.Tensor]
ROUNDS = STEADY_FROM


def path_of(lr: float, rank: int) -> Path:
    return tasks.WARM_START.with_name(f"steps-{lr:g}-{rank}.pt")


def read(lr: float, rank: int) -> tuple[Tensors, list[Tensors]]:
    """(The weights before the first round, what the inner steps of each took off them)."""
    start, *rounds = torch.load(path_of(lr, rank), mmap=True, weights_only=True)
    return start, rounds


def ensure(lr: float) -> None:
    """Trains by PULSELoCo on pretrained weights, unless that was recorded."""
    tasks.ensure(tasks.PRETRAINED)
    if all(path_of(lr, rank).exists() for rank in range(TRAINERS)):
        return
    kept: list[list[Tensors]] = [[] for _ in range(TRAINERS)]

    def make(rank: int, masters: Masters, optimizer: torch.optim.Optimizer) -> OuterLoop:
        steps = 0

        @torch.no_grad()
        def before(*_: object) -> None:
            if steps % SYNC_EVERY == 0:
                start = {name: master.detach().clone() for name, master in masters.items()}
                kept[rank] += (
                    [{name: tensor.clone() for name, tensor in start.items()}]
                    if not kept[rank]
                    else []
                )
                kept[rank].append(start)

        @torch.no_grad()
        def after(*_: object) -> None:
            nonlocal steps
            steps += 1
            if steps % SYNC_EVERY == 0:
                for name, master in masters.items():
                    kept[rank][-1][name] -= master

        # Before the loop's own hook, which is registered when it is entered.
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        loop = make_loop(PULSE, masters, optimizer, sync_every=SYNC_EVERY)
        assert isinstance(loop, OuterLoop)
        return loop

    train(tasks.PRETRAINED, TRAINERS, make, lr=lr, steps=ROUNDS * SYNC_EVERY)
    for rank, found in enumerate(kept):
        torch.save(found, path_of(lr, rank))


def inner_step_seconds(task: str, steps: int = 8) -> float:
    """Processor seconds of an inner step of one trainer alone, on one core; the median."""
    tasks.ensure(task)
    torch.set_num_threads(1)
    job = tasks.TASKS[task](0, 0)
    optimizer = torch.optim.AdamW(job.masters.values(), lr=1e-6, weight_decay=0.0)
    taken = []
    for step in range(steps):
        began = time.process_time()
        take_step(job, optimizer, step, 1e-6)
        taken.append(time.process_time() - began)
    return median(taken)
