"""The process of one trainer: jobs as JSON lines on its standard input, one JSON line of `RoundRecord`s for each.

python -m benchmarks.loco.trainer RANK RENDEZVOUS [INTERFACE]
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.loco.baselines import Ddp
from benchmarks.loco.jobs import SYNC_EVERY, TRAINERS, Job, RoundRecord
from benchmarks.loco.methods import make_loop
from benchmarks.loco.tasks import TASKS
from benchmarks.loco.threads import clip_before_steps


def run(job: Job, rank: int, interface: str | None) -> list[RoundRecord]:
    """Does the job together with the other trainers."""
    task = TASKS[job.task](job.seed, rank)
    optimizer = torch.optim.AdamW(task.masters.values(), lr=job.lr, betas=(0.9, 0.999), weight_decay=0.0, foreach=True)
    inner_steps, started = 0, 0.0

    def before_the_outer_round(*_: object) -> None:
        nonlocal inner_steps, started
        inner_steps += 1
        if inner_steps % SYNC_EVERY == 0:
            dist.barrier()
            started = time.perf_counter()

    # Hooks run in the order they were registered in: the clock starts before the outer round, which the loop hooks
    # when it is entered; and gradients are clipped after DDP has averaged them.
    optimizer.register_step_post_hook(before_the_outer_round)
    records: list[RoundRecord] = []
    loop = make_loop(job.method, task.masters, optimizer, sync_every=SYNC_EVERY)
    with loop:
        clip_before_steps(optimizer, task.masters)
        task.cast()
        dense = torch.zeros(loop.parameters.count) if job.dense else None
        dist.barrier()
        counted = _interface_bytes(interface)
        sent = payload = 0
        for number in range(1, job.rounds + 1):
            rewards = 0.0
            for step in range((number - 1) * SYNC_EVERY, number * SYNC_EVERY):
                rewards += task.gradient(step) / SYNC_EVERY
                for group in optimizer.param_groups:
                    group["lr"] = job.lr * min(1.0, (step + 1) / job.warm_up)
                optimizer.step()
                ended = time.perf_counter()
                task.cast()
            # What others still had to get through this interface has left it when all are here.
            dist.barrier()
            before, counted = counted, _interface_bytes(interface)
            done = None if isinstance(loop, Ddp) else loop.last_round
            if isinstance(loop, Ddp):
                facts: dict[str, Any] = {"entries": loop.parameters.count, "seconds": {}, "root": None}
                facts |= {"sent_bytes": loop.sent_bytes - sent, "payload_bytes": loop.payload_bytes - payload}
                sent, payload = loop.sent_bytes, loop.payload_bytes
            else:
                assert done is not None
                facts = {k: getattr(done, k) for k in ("entries", "payload_bytes", "sent_bytes", "seconds", "root")}
            records.append(
                RoundRecord(
                    number=number,
                    parameters=loop.parameters.count,
                    interface_bytes=None if counted is None or before is None else counted - before,
                    outer_seconds=ended - started,
                    dense_seconds=None if dense is None else _all_reduce(dense),
                    reward=rewards,
                    **facts,
                )
            )
            counted = _interface_bytes(interface)
    return records


def _all_reduce(values: torch.Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(values)
    seconds = time.perf_counter() - started
    dist.barrier()
    return seconds


def _interface_bytes(interface: str | None) -> int | None:
    return None if interface is None else int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def main() -> None:
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    interface = sys.argv[3] if len(sys.argv) > 3 else None
    torch.set_num_threads(1)
    answers = sys.stdout
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=TRAINERS)
    # Whatever a library prints is no answer.
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            records = run(Job(**json.loads(line)), rank, interface)
            print(json.dumps([asdict(record) for record in records]), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
