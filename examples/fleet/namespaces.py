"""Regions as network namespaces, with token buckets on their links, as the network benchmark has them.

The demo goes on in namespaces of its own (`unshare`), so that nothing of the machine's network is touched and nothing
is left when it ends; it needs root, or a system that lets users make namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.network.shape import Node, link_command, network

from .settings import REGIONS

_INSIDE = "PULSE_FLEET_NAMESPACES"
_ENTER = ("sh", "-c", 'mount -t tmpfs tmpfs /run && ip link set dev lo up && exec "$@"', "sh")
_TRIAL = "ip netns add a && ip netns exec a true && tc qdisc add dev lo root tbf rate 1mbit burst 16000b limit 16000b"

ORIGIN = Node("origin", 1)
NODES = {region: Node(region, number, rate) for number, (region, rate) in enumerate(REGIONS.items(), 2)}


def enter(module: str, arguments: Sequence[str]) -> str:
    """Starts the program ``module`` over in namespaces of its own, in place of this process. Returns why that cannot be
    done, "" where it has been done already."""
    if os.environ.get(_INSIDE):
        return ""
    missing = [tool for tool in ("unshare", "ip", "tc", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found"
    for options in ([], ["--map-root-user"]):
        command = ["unshare", "--net", "--mount", *options, *_ENTER]
        if subprocess.run([*command, "sh", "-c", _TRIAL], capture_output=True, check=False).returncode == 0:
            sys.stdout.flush()
            os.environ[_INSIDE] = "1"
            os.execvp("unshare", [*command, sys.executable, "-m", module, *arguments])
    return "this system does not let you make them"


@contextmanager
def regions() -> Iterator[None]:
    """The origin and all regions while the context lasts."""
    with network([ORIGIN, *NODES.values()]):
        yield


def inside(region: str | None, command: Sequence[str]) -> list[str]:
    """``command`` as one that runs in a region, None: at the origin."""
    return (NODES[region] if region else ORIGIN).inside(command)


def set_link(region: str, *, up: bool) -> None:
    """Cuts a region off, or lets it come back."""
    subprocess.run(link_command(NODES[region], up=up), check=True)
