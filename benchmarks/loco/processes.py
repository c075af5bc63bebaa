"""Four trainers in processes of their own, started once, which then do one job after another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from benchmarks.loco.jobs import TRAINERS, Job, JobResult, RoundRecord
from benchmarks.network.shape import INTERFACE, Node, network, require_root

Child = subprocess.Popen[str]


class TrainerProcesses:
    """The trainers' standard inputs and outputs."""

    def __init__(self, children: list[Child], log: Path) -> None:
        self._children, self._log = children, log

    def run(self, job: Job) -> JobResult:
        """Has all trainers do the same job, and waits for all. Raises SystemExit if one ended."""
        started = time.monotonic()
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(json.dumps(asdict(job)) + "\n")
            child.stdin.flush()
        result = [self._answer(child) for child in self._children]
        print(f"{job.title}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        return result

    def _answer(self, child: Child) -> list[RoundRecord]:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"a trainer ended with status {child.wait()}:\n{self._log.read_text()[-3000:]}")
        return [RoundRecord(**record) for record in json.loads(line)]


def why_no_network() -> str | None:
    """What is missing for namespaces and shaped links, None if nothing is."""
    try:
        require_root()
    except SystemExit as error:
        return str(error)
    return None


@contextmanager
def start_trainers(rate: float | None = None, *, namespaces: bool = False) -> Iterator[TrainerProcesses]:
    """Four trainers of one thread each; with ``namespaces`` each is in one of its own, on a link of ``rate`` bit/s."""
    folder = Path(tempfile.mkdtemp(prefix="pulse-loco-"))
    log = folder / "trainers.log"
    nodes = [Node(f"trainer{rank}", rank + 1, rate) for rank in range(TRAINERS)]
    rendezvous = f"file://{folder / 'rendezvous'}"
    try:
        with ExitStack() as stack:
            output = stack.enter_context(log.open("w"))
            if namespaces:
                stack.enter_context(network(nodes))
            children = []
            for rank, node in enumerate(nodes):
                command = [sys.executable, "-m", "benchmarks.loco.trainer", str(rank), rendezvous]
                command = node.inside([*command, INTERFACE]) if namespaces else command
                settings = {"GLOO_SOCKET_IFNAME": INTERFACE if namespaces else "lo", "OMP_NUM_THREADS": "1"}
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    env=os.environ | settings,
                )
                stack.callback(_end, child)
                children.append(child)
            yield TrainerProcesses(children, log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end(child: Child) -> None:
    """At the end of its input a trainer ends by itself; one that waits for a lost trainer is not waited for."""
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
    child.kill()
    child.wait()
