"""Network namespaces on one machine: a bridge, a veth pair to each node, token buckets (tbf) on
both ends of it.

The commands are made by pure functions; `network` runs them and deletes the namespaces again,
however it ends. Every namespace's name begins with ``pulse-net-``; `clean` deletes all of these.
Linux, root, iproute2.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "pulse-net-"
HUB = PREFIX + "hub"
INTERFACE = "eth0"
LOCK = Path("/run/pulse-net.lock")
SUBNET = "10.77.0.0/24"

# A bucket as deep as a patch would let it pass at full speed; at least some packets must fit.
_BURST_SECONDS, _MIN_BURST_BYTES = 0.001, 16_000
_QUEUE_SECONDS, _MIN_QUEUE_BYTES = 0.05, 100_000

Command = list[str]


@dataclass(frozen=True)
class Node:
    """A namespace with one interface. ``rate`` is that of its link in bit/s, both ways; None:
    unshaped."""

    name: str
    number: int
    rate: float | None = None

    @property
    def namespace(self) -> str:
        return PREFIX + self.name

    @property
    def address(self) -> str:
        return SUBNET.replace("0/24", str(self.number))

    def inside(self, command: Sequence[str]) -> Command:
        """``command`` as one that runs in the node's namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]


def build_commands(nodes: Sequence[Node]) -> list[Command]:
    """What builds the network, in order."""
    commands = [
        ["ip", "netns", "add", HUB],
        ["ip", "-n", HUB, "link", "add", "br0", "type", "bridge"],
        ["ip", "-n", HUB, "link", "set", "dev", "br0", "up"],
    ]
    for node in nodes:
        space, port = node.namespace, f"port{node.number}"
        pair = ["type", "veth", "peer", "name", port, "netns", HUB]
        commands += [
            ["ip", "netns", "add", space],
            ["ip", "link", "add", INTERFACE, "netns", space, *pair],
            ["ip", "-n", HUB, "link", "set", "dev", port, "master", "br0", "up"],
            ["ip", "-n", space, "addr", "add", f"{node.address}/24", "dev", INTERFACE],
            ["ip", "-n", space, "link", "set", "dev", INTERFACE, "up"],
            ["ip", "-n", space, "link", "set", "dev", "lo", "up"],
        ]
        if node.rate is not None:
            commands += [_bucket(HUB, port, node.rate), _bucket(space, INTERFACE, node.rate)]
    return commands


def link_command(node: Node, *, up: bool) -> Command:
    """What cuts a node off, at the bridge's end of its link, or lets it come back."""
    return ["ip", "-n", HUB, "link", "set", "dev", f"port{node.number}", "up" if up else "down"]


def delete_commands(namespaces: Sequence[str]) -> list[Command]:
    """What deletes our own of these namespaces, with all that is in them."""
    return [["ip", "netns", "delete", name] for name in namespaces if name.startswith(PREFIX)]


def _bucket(space: str, interface: str, rate: float) -> Command:
    burst = max(_MIN_BURST_BYTES, round(rate / 8 * _BURST_SECONDS))
    queue = max(_MIN_QUEUE_BYTES, round(rate / 8 * _QUEUE_SECONDS))
    bucket = ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "limit", f"{queue}b"]
    return ["tc", "-n", space, "qdisc", "add", "dev", interface, "root", *bucket]


def require_root() -> None:
    """Ends the program, in one line, where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise SystemExit(
            "the shaped network needs root: it makes network namespaces (try: sudo make "
            "bench-network)"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"the shaped network needs {' and '.join(missing)} (package iproute2)")


def network(nodes: Sequence[Node]) -> AbstractContextManager[None]:
    """The network while the context lasts, in place of what a killed run may have left.

    One at a time on a machine: SystemExit while there is another.
    """
    return built(build_commands(nodes))


@contextmanager
def built(commands: Sequence[Command]) -> Iterator[None]:
    """What ``commands`` build while the context lasts, as `network`; then what still runs in it is
    ended."""
    with _alone():
        _clean()
        try:
            for command in commands:
                _run(command)
            yield
        finally:
            _clean()


def clean() -> list[str]:
    """Deletes the namespaces that a killed run left, and ends what still runs in them; their names.

    SystemExit while a network is in use.
    """
    with _alone():
        return _clean()


@contextmanager
def _alone() -> Iterator[None]:
    """Holds a lock that the system frees when the process dies, however it dies."""
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                "another process is using the shaped network; wait until it has ended"
            ) from None
        yield


def _clean() -> list[str]:
    names = [
        line.split()[0]
        for line in _output(["ip", "netns", "list"]).splitlines()
        if line.startswith(PREFIX)
    ]
    for name in names:
        for process in _output(["ip", "netns", "pids", name]).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    for command in delete_commands(names):
        _run(command)
    return names


def _output(command: Command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _run(command: Command) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}: {done.stderr.strip()} (leftovers? python -m "
            "benchmarks.network --clean)"
        )
