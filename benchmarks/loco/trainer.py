"""The process of one trainer: each line of its standard input is a `Job`, "round" for the next
round of it, or "end", and it answers each with a line, a round with a `RoundRecord`.

python -m benchmarks.loco.trainer RANK RENDEZVOUS [INTERFACE]
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.loco import recorded
from benchmarks.loco.baselines import Ddp
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, TRAINERS, Job, RoundRecord
from benchmarks.loco.methods import METHODS, make_loop
from benchmarks.loco.recorded import Tensors
from benchmarks.network.run import make_bucket, open_run
from pulse_rl.loco import PulseLoCo, StoreExchange
from pulse_rl.loco.loop import OuterLoop


@contextlib.contextmanager
def replayed(
    job: Job, start: Tensors, steps: list[Tensors], interface: str | None = None
) -> Iterator[Callable[[], RoundRecord]]:
    """Takes the next round of the job, in which the inner steps take ``steps`` off the weights;
    those of the second half come again and again."""
    weights = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=1.0)
    loop = _loop(job, weights, optimizer)
    number = 0

    def take() -> RoundRecord:
        nonlocal number
        half = len(steps) // 2
        taken = steps[
            number if number < len(steps) else half + (number - half) % (len(steps) - half)
        ]
        number += 1
        for name, weight in weights.items():
            weight.grad = taken[name].clone()
        before = (loop.sent_bytes, loop.payload_bytes) if isinstance(loop, Ddp) else (0, 0)
        dist.barrier()
        counted = _interface_bytes(interface)
        began = time.perf_counter()
        optimizer.step()
        seconds = time.perf_counter() - began
        # What others still had to get through this interface has left it when all are here.
        dist.barrier()
        after = _interface_bytes(interface)
        if isinstance(loop, Ddp):
            facts: dict[str, Any] = {
                "entries": loop.parameters.count,
                "phases": {"exchange": seconds},
                "root": None,
            }
            facts |= {
                "sent_bytes": loop.sent_bytes - before[0],
                "payload_bytes": loop.payload_bytes - before[1],
            }
        else:
            done = loop.last_round
            assert done is not None
            facts = {
                k: getattr(done, k) for k in ("entries", "payload_bytes", "sent_bytes", "root")
            }
            facts["phases"] = done.seconds
        return RoundRecord(
            parameters=loop.parameters.count,
            interface_bytes=None if counted is None or after is None else after - counted,
            seconds=seconds,
            **facts,
        )

    with loop:
        for _ in range(job.fill):
            take()
        yield take


def _loop(
    job: Job, weights: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> Ddp | OuterLoop:
    if job.store is None:
        return make_loop(job.method, weights, optimizer, sync_every=1)
    make_bucket(job.store)
    over = StoreExchange(
        open_run(job.store, job.name),
        trainer=f"trainer-{dist.get_rank()}",
        min_trainers=dist.get_world_size(),
        grace_seconds=0.0,
    )
    loop = PulseLoCo(
        weights,
        optimizer,
        sync_every=1,
        outer_lr=OUTER_LR,
        outer_momentum=OUTER_MOMENTUM,
        exchange=over,
        **METHODS[job.method].settings,
    )
    loop.threads = 1
    return loop


def _interface_bytes(interface: str | None) -> int | None:
    return (
        None
        if interface is None
        else int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
    )


def main() -> None:
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    interface = sys.argv[3] if len(sys.argv) > 3 else None
    torch.set_num_threads(1)
    answers = sys.stdout
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=TRAINERS)

    def answer(facts: object) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    # Whatever a library prints is no answer.
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            job = Job(**json.loads(line))
            start, steps = recorded.read(job.lr, rank)
            with replayed(job, start, steps, interface) as take:
                answer("ready")
                while sys.stdin.readline() == "round\n":
                    answer(asdict(take()))
            answer("ended")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
