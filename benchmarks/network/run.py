"""A run: a store, a trainer and workers as processes in their namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.network.shape import Node, network
from benchmarks.network.spec import Spec

STORE_PORT = 5000
GIGABIT = 1e9
WORKER_RATES = (10e6, 50e6, 200e6, GIGABIT)
_START_SECONDS = 120.0

Lines = list[dict[str, Any]]


def nodes(shaped: bool) -> list[Node]:
    """The store is on an unshaped link, the trainer on 1 Gbit/s, each worker on one of `WORKER_RATES`."""
    rates = [None, GIGABIT, *WORKER_RATES] if shaped else [None] * (2 + len(WORKER_RATES))
    names = ["store", "trainer", *(f"worker{rate / 1e6:.0f}" for rate in WORKER_RATES)]
    return [Node(name, number + 1, rate) for number, (name, rate) in enumerate(zip(names, rates, strict=True))]


def run(
    program: str,
    method: str,
    *,
    shaped: bool,
    step_seconds: float,
    seconds: float,
    stop_seconds: float,
    trace: Path,
    folder: Path,
) -> Spec:
    """Builds the network and runs the module ``program`` in it for so many seconds from the moment that all are ready.

    All are told to stop then, and killed ``stop_seconds`` later. What they did is in their logs.
    """
    store, trainer, *workers = nodes(shaped)
    folder.mkdir(parents=True)
    names = tuple(worker.name for worker in workers)
    spec = Spec(method, step_seconds, f"http://{store.address}:{STORE_PORT}", names, str(trace), str(folder))
    path = str(spec.save())
    python = [sys.executable, "-m"]
    with ExitStack() as stack:
        stack.enter_context(network([store, trainer, *workers]))
        server = [*python, "moto.server", "-H", store.address, "-p", str(STORE_PORT)]
        stack.enter_context(process(store.inside(server), folder / "store.log"))
        children = []
        for role, node in [("trainer", trainer), *(("worker", worker) for worker in workers)]:
            command = node.inside([*python, program, role, path, node.name])
            children.append(stack.enter_context(process(command, folder / f"{node.name}.log")))
            if role == "trainer":
                wait_until_ready([spec.log(node.name)], children)
        wait_until_ready([spec.log(name) for name in names], children)
        spec.go.touch()
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            check(children)
            time.sleep(0.2)
        # Workers first: a version that none of them can have seen is of no interest.
        for child in children[::-1]:
            child.terminate()
        deadline = time.monotonic() + stop_seconds
        for child in children:
            wait(child, deadline)
    return spec


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child whose output goes to ``log``, which ends with the context."""
    scratch = log.with_suffix(".scratch")
    scratch.mkdir()
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(scratch)}
        )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def wait(child: subprocess.Popen[bytes], deadline: float) -> None:
    """Until the child has ended, or the deadline: one in the midst of a long download does not hear the signal."""
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def wait_until_ready(logs: list[Path], children: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not all(log.exists() and '"ready"' in log.read_text() for log in logs):
        check(children)
        if time.monotonic() > deadline:
            raise SystemExit(f"not ready after {_START_SECONDS:.0f} s: {', '.join(log.name for log in logs)}")
        time.sleep(0.1)


def check(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is not None:
            raise SystemExit(f"{child.args!r} ended with status {child.returncode}; see its log in the run's folder")


def read_log(path: Path) -> Lines:
    """The whole lines of a log; the last one may be torn."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
