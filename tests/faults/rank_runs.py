"""Real ranks of a sharded trainer that are killed, interrupted, and that skip steps, and start
again.

An interrupt is caught, and its rank goes on with its next step, as a program may. Every committed
version is one step of all ranks, to the bit, and the chain is whole.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pulse_rl import LocalStore, Publisher, PulseError, Subscriber, verify_stream
from pulse_rl.frameworks.fsdp import ShardedPublisher
from tests.support.interrupts import Boom

_ROWS, _COLUMNS, _KINDS = 23, 64, 50
_TIMEOUT_SECONDS = 20.0
_MAX_SECONDS = 60.0
_FULL, _PARTED = 0, 7
_VERSIONS = 200


def sequence(seed: int) -> Counter[str]:
    """Two, three or four ranks in their turn, until there are so many versions."""
    size = 2 + seed % 3
    with tempfile.TemporaryDirectory(prefix="pulse-ranks-") as folder:
        starts = _run(Random(seed), Path(folder), size, _VERSIONS)
        wrong = _looked_at(Path(folder), size)
    assert not wrong, f"{size} ranks: {wrong}"
    return starts + Counter(versions=_VERSIONS)


def state_of(step: int, rank: int) -> npt.NDArray[np.int32]:
    """A rank's rows after a step: one element in 50 is new in each."""
    places = np.arange(_ROWS * _COLUMNS, dtype=np.int32) % _KINDS
    return (1000 * (step - (step - places) % _KINDS) + rank).reshape(_ROWS, _COLUMNS)


def _run(rng: Random, folder: Path, size: int, versions: int) -> Counter[str]:
    """Starts the ranks again and again until there are so many versions; how often they ended in
    which way."""
    ends = Counter[str]()
    while True:
        with Publisher(LocalStore(folder / "store"), stream="s") as publisher:
            head = publisher.head()
        if head is not None and head.version >= versions - 1:
            return ends
        first = 1 + int(head.metadata["step"]) if head else 0
        name = folder / f"meet-{sum(ends.values())}"
        seeds = [rng.getrandbits(32) for _ in range(size)]
        fate = rng.choice(("kill", "interrupt", "interrupt", "skip"))
        chosen = rng.randrange(size)
        children = []
        for rank in range(size):
            child = os.fork()
            if not child:
                code = 1
                try:
                    own = fate if rank == chosen else "none"
                    code = _rank(
                        Random(seeds[rank]), folder, name, rank, size, first, versions, own
                    )
                finally:
                    os._exit(code)
            children.append(child)
        codes = _awaited(children)
        unexpected = [code for code in codes if code not in (_FULL, _PARTED, -signal.SIGKILL)]
        assert not unexpected, f"ranks ended with {codes}: {(folder / 'said').read_text()[-3000:]}"
        ends[fate] += 1


def _awaited(children: list[int]) -> list[int]:
    """The codes with which processes end, all of them soon after the first."""
    codes: dict[int, int] = {}
    limit = time.monotonic() + 10 * _MAX_SECONDS
    while len(codes) < len(children) and time.monotonic() < limit:
        for child in set(children) - set(codes):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                limit = min(limit, time.monotonic() + _MAX_SECONDS)
        time.sleep(0.005)
    for child in set(children) - set(codes):
        os.kill(child, signal.SIGABRT)
        codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [codes[child] for child in children]


def _rank(
    rng: Random, folder: Path, name: Path, rank: int, size: int, step: int, versions: int, fate: str
) -> int:
    """What a rank does until it ends, in one way or another."""
    os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    dist.init_process_group("gloo", init_method=f"file://{name}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    publisher = ShardedPublisher(
        LocalStore(folder / "store"),
        stream="s",
        threads=1,
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    last = rng.randrange(1, 20)
    signal.signal(signal.SIGALRM, _killed if fate == "kill" else _interrupted)
    version = -1
    for count in range(2 * versions):
        if version >= versions - 1:
            return _FULL
        try:
            if count == last:
                if fate == "skip":
                    step += 1
                elif fate != "none":
                    signal.setitimer(
                        signal.ITIMER_REAL, rng.random() * rng.choice((0.0005, 0.005, 0.05)) + 1e-6
                    )
            local = torch.from_numpy(state_of(step, rank))
            state = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
            if rng.random() < 0.3:
                done = publisher.submit(state, metadata={"step": step})
                if rng.random() < 0.5:
                    version = done.result().version
            else:
                version = publisher.publish(state, metadata={"step": step}).version
        except Boom:
            pass
        except PulseError as error:
            print(f"rank {rank} at step {step}: {error!r}", file=sys.stderr)
            return _PARTED
        step += 1
    return _PARTED


def _interrupted(*_: object) -> None:
    raise Boom


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _looked_at(folder: Path, size: int) -> str:
    """What is wrong with the versions; "" if nothing is."""
    store = LocalStore(folder / "store")
    for report in verify_stream(store, "s", threads=1):
        if not report.ok:
            return f"version {report.version}: {report.problems}"
    worker = Subscriber(store, stream="s", threads=1)
    steps: list[int] = []
    with Publisher(store, stream="s") as publisher:
        head = publisher.head()
    assert head is not None
    for version in range(head.version + 1):
        update = worker.sync(version)
        assert update is not None
        update.acknowledge()
        step = int(update.metadata["step"])
        whole = np.concatenate([state_of(step, rank) for rank in range(size)])
        found = worker.state.read("w").reshape(whole.shape).view(np.int32)
        if not np.array_equal(found, whole):
            return f"version {version} is not step {step} of all ranks: {found[:, 0].tolist()}"
        steps.append(step)
    return "" if steps == sorted(set(steps)) else f"the steps of the versions are {steps}"
