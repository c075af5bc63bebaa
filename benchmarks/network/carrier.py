"""A network with latency: a TUN device in each node's namespace, and one process that carries the
packets between them, since not every kernel has netem.

A packet leaves its node at the node's rate, travels for half of the round trip, and enters the
other node at that one's rate; each of these ends has a queue as long as the round trip, and what
would have to wait longer is lost, as are packets at random. TCP is the kernel's own.

    python -m benchmarks.network.carrier NODES ROUND_TRIP LOSS MTU

A line "RATE ROUND_TRIP" on the standard input changes both: bit/s of all nodes that have a rate,
and seconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count

from benchmarks.network import shape

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_BATCH = 64
_MIN_QUEUE_SECONDS = 0.05


def build_commands(
    nodes: Sequence[shape.Node], *, mtu: int, congestion: str
) -> list[shape.Command]:
    """What builds the nodes, without the process between them."""
    commands: list[shape.Command] = []
    for node in nodes:
        space = node.namespace
        link = ["ip", "-n", space, "link", "set", "dev"]
        commands += [
            ["ip", "netns", "add", space],
            [*link, "lo", "up"],
            ["ip", "-n", space, "tuntap", "add", "dev", shape.INTERFACE, "mode", "tun"],
            ["ip", "-n", space, "addr", "add", f"{node.address}/24", "dev", shape.INTERFACE],
            [*link, shape.INTERFACE, "mtu", str(mtu), "txqueuelen", "10000", "up"],
            [
                "ip",
                "-n",
                space,
                "route",
                "replace",
                shape.SUBNET,
                "dev",
                shape.INTERFACE,
                "congctl",
                congestion,
            ],
        ]
    return commands


def command(
    nodes: Sequence[shape.Node], round_trip: float, *, loss: float = 0.0, mtu: int
) -> shape.Command:
    """What carries packets between the nodes until it is killed."""
    return [
        *(
            sys.executable,
            "-m",
            "benchmarks.network.carrier",
            json.dumps([asdict(node) for node in nodes]),
        ),
        *(str(round_trip), str(loss), str(mtu)),
    ]


@dataclass
class _End:
    """A node's interface. ``seconds``: of a byte on its link; ``up`` and ``down``: when the last
    packet has left, and has come in."""

    file: int
    shaped: bool
    seconds: float
    up: float = 0.0
    down: float = 0.0


def carry(nodes: Sequence[shape.Node], round_trip: float, loss: float, mtu: int) -> None:
    os.nice(-10)
    ends = [
        _End(_tunnel(n.namespace), n.rate is not None, 8 / n.rate if n.rate else 0.0) for n in nodes
    ]
    by_file = {end.file: end for end in ends}
    by_address = {
        bytes(map(int, n.address.split("."))): end for n, end in zip(nodes, ends, strict=True)
    }
    chance, order = random.Random(0), count()
    # (When, order of arrival, where to, packet, whether it has come in): first at the far end of
    # the way, then in.
    under_way: list[tuple[float, int, _End, bytes, bool]] = []
    watched = [*by_file, sys.stdin.fileno()]
    longest = max(round_trip, _MIN_QUEUE_SECONDS)
    while True:
        now = time.monotonic()
        wait = under_way[0][0] - now if under_way else 1.0
        ready, _, _ = select.select(watched, [], [], max(0.0, wait))
        now = time.monotonic()
        for file in ready:
            if file not in by_file:
                words = os.read(file, 1000).split()
                if not words:
                    watched.remove(file)
                    continue
                rate, round_trip = map(float, words[-2:])
                longest = max(round_trip, _MIN_QUEUE_SECONDS)
                for end in ends:
                    end.seconds = 8 / rate if end.shaped else 0.0
                continue
            end = by_file[file]
            for _ in range(_BATCH):
                try:
                    packet = os.read(file, 2 * mtu)
                except BlockingIOError:
                    break
                target = by_address.get(packet[16:20])
                leaves = max(now, end.up) + len(packet) * end.seconds
                if target is None or leaves - now > longest or (loss and chance.random() < loss):
                    continue
                end.up = leaves
                heapq.heappush(
                    under_way, (leaves + round_trip / 2, next(order), target, packet, False)
                )
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            when, _, target, packet, is_in = heapq.heappop(under_way)
            if is_in or not target.seconds:
                os.write(target.file, packet)
                continue
            there = max(when, target.down) + len(packet) * target.seconds
            if there - when <= longest:
                target.down = there
                heapq.heappush(under_way, (there, next(order), target, packet, True))


def _tunnel(namespace: str) -> int:
    """The file of the TUN device in a namespace; it stays there when this process goes on to
    another one."""
    with open(f"/run/netns/{namespace}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        tunnel, _TUNSETIFF, struct.pack("16sH22x", shape.INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI)
    )
    return tunnel


if __name__ == "__main__":
    carry(
        [shape.Node(**node) for node in json.loads(sys.argv[1])],
        *map(float, sys.argv[2:4]),
        int(sys.argv[4]),
    )
