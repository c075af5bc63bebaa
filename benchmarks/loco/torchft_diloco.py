"""torchft's DiLoCo beside the library's own: four trainers with the same task, data, seeds and settings.

    python -m benchmarks.loco.torchft_diloco [--rounds 16] [--seeds 0] [--noise] [--json FILE]

torchft is no dependency of this library. In an environment that has it and ``transformers``:

    pip install --no-deps torchft
    pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http

Each trainer is a replica group of one, with a `torchft.Manager` of its own, over gloo; trainer 0 has the lighthouse.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

import torch
import torch.distributed as dist

from benchmarks.loco import convergence, cost, tasks
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, SYNC_EVERY, TRAINERS, Job, JobResult
from benchmarks.loco.methods import DILOCO, PULSE, TORCHFT
from benchmarks.loco.processes import start_trainers, why_no_network
from pulse_rl.loco import Round
from pulse_rl.loco.parameters import Parameters

ROUNDS = 16
_SIOCGIFADDR = 0x8915


class TorchftDiLoCo:
    """`torchft.local_sgd.DiLoCo` behind what `benchmarks.loco.trainer` asks of a loop.

    ``payload_bytes`` of a round: what it gave to all-reduces. ``sent_bytes``: what rings of them send, by arithmetic.
    """

    def __init__(
        self, masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, *, timeout_seconds: float
    ) -> None:
        self.parameters = Parameters(masters, optimizer)
        self._masters, self._optimizer = masters, optimizer
        self._timeout = timedelta(seconds=timeout_seconds)
        self._stack = ExitStack()
        self._manager: Any = None
        self._store: dist.TCPStore | None = None
        self._payload = self._counted = self._number = 0

    def __enter__(self) -> Self:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        rank, trainers, address = dist.get_rank(), dist.get_world_size(), _own_address()
        lighthouse = [""]
        if rank == 0:
            server = LighthouseServer(bind="[::]:0", min_replicas=trainers)
            self._stack.callback(server.shutdown)
            lighthouse = [f"http://{address}:{server.address().rsplit(':', 1)[1]}"]
        dist.broadcast_object_list(lighthouse)
        store = self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=self._timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=trainers,
            use_async_quorum=False,
            timeout=self._timeout,
            quorum_timeout=self._timeout,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=store.port,
            lighthouse_addr=lighthouse[0],
            replica_id=f"trainer_{rank}",
            hostname=address,
            init_sync=False,  # all begin with the same weights
        )
        self._stack.callback(self._manager.shutdown)
        self._stack.callback(dist.barrier)  # nobody's manager goes while another one asks it
        self._count_all_reduces()
        fragment = torch.nn.ParameterList(self._masters.values())
        outer = torch.optim.SGD(fragment.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        self._stack.enter_context(DiLoCo(self._manager, [fragment], self._optimizer, outer, SYNC_EVERY))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _count_all_reduces(self) -> None:
        all_reduce = self._manager.allreduce

        def counted(tensor: torch.Tensor, **settings: Any) -> Any:
            self._payload += tensor.nbytes
            return all_reduce(tensor, **settings)

        self._manager.allreduce = counted

    @property
    def last_round(self) -> Round:
        """Of the round that has just ended; to be asked for once a round."""
        self._number += 1
        if self._manager.current_step() != self._number:
            raise RuntimeError(f"torchft took back round {self._number}: {self._manager.errored()}")
        payload, self._counted = self._payload - self._counted, self._payload
        trainers, count = dist.get_world_size(), self.parameters.count
        theta = hashlib.sha256(b"".join(m.detach().numpy().tobytes() for m in self._masters.values()))
        return Round(
            number=self._number,
            trainers=trainers,
            parameters=count,
            entries=count,
            summed=count,
            scattered=False,
            payload_bytes=payload,
            sent_bytes=2 * (trainers - 1) * payload // trainers,
            between_bytes=0,
            root=theta.hexdigest(),
            seconds={},
        )


def _own_address() -> str:
    """The IPv4 address of the interface that gloo uses."""
    name = os.environ["GLOO_SOCKET_IFNAME"].encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name))[20:24])


@dataclass(frozen=True)
class Row:
    """``payload`` and ``interface`` (None without one of its own): bytes of a trainer in a round, means. ``outer`` and
    ``dense``: seconds of the slowest trainer in the round and in a dense all-reduce right after it, medians over rounds
    but the first."""

    method: str
    seed: int
    reward: float
    loss: float
    payload: float
    interface: float | None
    outer: float
    dense: float


def row(job: Job, result: JobResult) -> Row:
    """Raises SystemExit if trainers ended a round with different weights."""
    rounds = list(zip(*result, strict=True))
    apart = [records[0].number for records in rounds if len({r.root for r in records}) > 1]
    if apart:
        raise SystemExit(f"{job.title}: trainers held different weights after rounds {apart}")
    curve = convergence.curve(job, result)
    interface = [r.interface_bytes for records in rounds for r in records if r.interface_bytes is not None]
    return Row(
        method=job.method,
        seed=job.seed,
        reward=curve.reward,
        loss=curve.loss,
        payload=fmean(curve.payloads),
        interface=fmean(interface) if interface else None,
        outer=median(max(r.outer_seconds for r in records) for records in rounds[1:]),
        dense=median(max(r.dense_seconds or 0.0 for r in records) for records in rounds[1:]),
    )


def text(task: str, rows: Sequence[Row], rounds: int, rate: float | None) -> str:
    """The table as lines."""
    link = f"links of {rate / 1e9:g} Gbit/s" if rate else "the loopback interface, which is no link"
    lines = [
        f"{task}, {rounds} rounds of {SYNC_EVERY} inner steps, {TRAINERS} trainers on {link}.",
        f"Reward and loss: held out, mean of the last {min(convergence.LAST, rounds)} rounds. MB a round and trainer:",
        "payload, and what its network interface counts. outer: the round beyond its inner steps, the slowest trainer,",
        "median; dense: one all-reduce of as many FP32 values right after it.",
        "",
        f"{'method':18} {'seed':>4} {'reward':>8} {'loss':>8} {'payload':>8} {'interface':>9} {'outer, ms':>9} "
        f"{'dense, ms':>9}",
    ]
    for r in rows:
        interface = "-" if r.interface is None else f"{r.interface / 1e6:.3f}"
        lines.append(
            f"{r.method:18} {r.seed:>4} {r.reward:>8.4f} {r.loss:>8.4f} {r.payload / 1e6:>8.3f} {interface:>9} "
            f"{1e3 * r.outer:>9.0f} {1e3 * r.dense:>9.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    description = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loco.torchft_diloco", description=description)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least 2")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--noise",
        action="store_true",
        help="gradients of noise in place of training: bytes, and whether weights agree, in a minute; reward and loss "
        "are theta's distance from its start, and the part of it along a random direction",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    arguments = parser.parse_args()
    if importlib.util.find_spec("torchft") is None:
        raise SystemExit("torchft is not installed: benchmarks/loco/torchft_diloco.py says how")
    tasks.ensure(tasks.ARITHMETIC)
    missing = why_no_network()
    rate = None if missing else cost.LINK
    rows = []
    with start_trainers(rate, namespaces=not missing) as trainers:
        for seed in arguments.seeds:
            for method in (DILOCO, TORCHFT, PULSE):
                job = replace(convergence.job(method, seed, arguments.rounds), dense=True)
                job = replace(job, task=tasks.NOISE) if arguments.noise else job
                rows.append(row(job, trainers.run(job)))
    print(text(job.task, rows, arguments.rounds, rate))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(r) for r in rows]) + "\n")


if __name__ == "__main__":
    main()
