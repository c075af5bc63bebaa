"""Four trainers in processes of their own, and a store, on links of a rate and a round trip."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.loco.jobs import TRAINERS, Job, RoundRecord
from benchmarks.network import carrier
from benchmarks.network.run import STORE_PORT, process, s3_server
from benchmarks.network.shape import INTERFACE, Node, build_commands, built, require_root

Child = subprocess.Popen[str]
STORE = Node("store", TRAINERS + 1)
ENDPOINT = f"http://{STORE.address}:{STORE_PORT}"
MTU = 1500


@dataclass(frozen=True)
class Link:
    """Of each trainer: bit/s, up and down, and seconds. A ``round_trip`` of None is that of a
    switch in the kernel: there is no process that carries packets, which could not carry so
    many."""

    rate: float
    round_trip: float | None


#: What trainers meet on, and fill residuals, where packets are carried.
OPEN = Link(2e9, 0.0)


class TrainerProcesses:
    """The trainers' standard inputs and outputs, and that of what carries their packets."""

    def __init__(self, children: list[Child], log: Path, carried: Child | None) -> None:
        self._children, self._log, self._carried = children, log, carried

    def set(self, link: Link) -> None:
        """Changes the links between two rounds."""
        if self._carried is not None and link.round_trip is not None:
            self._write(self._carried, f"{link.rate} {link.round_trip}")

    def begin(self, job: Job) -> None:
        """Fills the residuals on open links."""
        self.set(OPEN)
        self._ask(json.dumps(asdict(job)))

    def round(self) -> list[RoundRecord]:
        """The next one, of each trainer."""
        return [RoundRecord(**record) for record in self._ask("round")]

    def end(self) -> None:
        self.set(OPEN)
        self._ask("end")

    def _ask(self, line: str) -> list[Any]:
        """Of all trainers; SystemExit if one ended."""
        for child in self._children:
            self._write(child, line)
        return [self._answer(child) for child in self._children]

    def _write(self, child: Child, line: str) -> None:
        assert child.stdin is not None
        child.stdin.write(line + "\n")
        child.stdin.flush()

    def _answer(self, child: Child) -> Any:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise SystemExit(
                f"a trainer ended with status {child.wait()}:\n{self._log.read_text()[-3000:]}"
            )
        return json.loads(line)


def why_no_network() -> str | None:
    """What is missing for namespaces and shaped links, None if nothing is."""
    try:
        require_root()
    except SystemExit as error:
        return str(error)
    return None


@contextmanager
def start_trainers(link: Link | None) -> Iterator[TrainerProcesses]:
    """Four trainers of one thread each, and a store on an unshaped link, each in a namespace of its
    own; without a ``link`` on the loopback interface, without the store."""
    folder = Path(tempfile.mkdtemp(prefix="pulse-loco-"))
    log = folder / "trainers.log"
    nodes = [
        Node(f"trainer{rank}", rank + 1, link.rate if link else None) for rank in range(TRAINERS)
    ]
    rendezvous, carried = f"file://{folder / 'rendezvous'}", None
    try:
        with ExitStack() as stack:
            output = stack.enter_context(log.open("w"))

            def start(command: list[str]) -> Child:
                settings = {
                    "GLOO_SOCKET_IFNAME": INTERFACE if link else "lo",
                    "OMP_NUM_THREADS": "1",
                }
                pipe = subprocess.PIPE
                child = subprocess.Popen(
                    command,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=output,
                    text=True,
                    env=os.environ | settings,
                )
                stack.callback(_end, child)
                return child

            if link is not None:
                everyone = [*nodes, STORE]
                if link.round_trip is None:
                    stack.enter_context(built(build_commands(everyone)))
                else:
                    stack.enter_context(
                        built(carrier.build_commands(everyone, mtu=MTU, congestion="cubic"))
                    )
                    carried = start(carrier.command(everyone, link.round_trip, mtu=MTU))
                stack.enter_context(
                    process(STORE.inside(s3_server(STORE.address)), folder / "store.log")
                )
            children = []
            for rank, node in enumerate(nodes):
                command = [sys.executable, "-m", "benchmarks.loco.trainer", str(rank), rendezvous]
                children.append(start(node.inside([*command, INTERFACE]) if link else command))
            yield TrainerProcesses(children, log, carried)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end(child: Child) -> None:
    """At the end of its input a trainer ends by itself; one that waits for a lost trainer is not
    waited for."""
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
    child.kill()
    child.wait()
