"""Two regions and the long way between them: a trainer and an S3-compatible store in one, a worker in the other.

The way is a TUN device in each region's namespace and a process that carries the packets (`carry`), since not every
kernel has netem: each direction has a rate, half of the round trip as delay, a queue as long as the round trip, and
loses packets at random. TCP is the kernel's own. The trainer publishes a version a step; the worker waits for it and
moves to it at once. ``newest``: seconds from the call of publish until the worker has the version. ``idle``: what the
worker's own sync takes of that, so what a step waits that needs it. Two copies of the recorded run, each at another of
its steps, make 45 M weights.

rsync carries the safetensors file from a daemon beside the trainer, with its own search for equal parts
(``--no-whole-file``), as often as it takes to see a new version. Full syncs are fetched in ranges over eight
connections.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import math
import os
import random
import select
import statistics
import struct
import sys
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.network import shape
from benchmarks.network.run import (
    LOOK_SECONDS,
    STOP_SECONDS,
    STORE_PORT,
    THREADS,
    Spec,
    check,
    process,
    read_log,
    wait_or_kill,
    wait_until_ready,
)
from pulse_rl.plan import Scenario, make_plan

RATES, ROUND_TRIP, LOSS = (50e6, 200e6), 0.08, 0.001
METHODS = ("auto", "zstd", "full", "rsync")
COPIES, STEP_SECONDS = 2, 4.0
# Of a method: seconds of a run. Two full syncs must fit.
SECONDS = {"auto": 50.0, "zstd": 50.0, "full": 75.0, "rsync": 250.0}
REGIONS = [shape.Node("store", 1), shape.Node("worker", 2)]
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_MTU = 1500
# S3 keeps connections. moto's server closes each, after it has discarded what comes behind a request: the next one.
_SERVER = """
from unittest.mock import MagicMock
from werkzeug import serving
from moto.server import main

serving.selectors = MagicMock()
serving.selectors.DefaultSelector.return_value.select.return_value = []
Handler = serving.WSGIRequestHandler
send = Handler.send_header
Handler.protocol_version, Handler.disable_nagle_algorithm = "HTTP/1.1", True
Handler.send_header = lambda self, name, value: name.lower() == "connection" or send(self, name, value)
main()
"""


def build_commands(congestion: str) -> list[shape.Command]:
    """What builds the regions, without the process between them."""
    commands: list[shape.Command] = []
    for node in REGIONS:
        space = node.namespace
        link = ["ip", "-n", space, "link", "set", "dev"]
        commands += [
            ["ip", "netns", "add", space],
            [*link, "lo", "up"],
            ["ip", "-n", space, "tuntap", "add", "dev", shape.INTERFACE, "mode", "tun"],
            ["ip", "-n", space, "addr", "add", f"{node.address}/24", "dev", shape.INTERFACE],
            [*link, shape.INTERFACE, "mtu", str(_MTU), "txqueuelen", "10000", "up"],
            ["ip", "-n", space, "route", "replace", shape.SUBNET, "dev", shape.INTERFACE, "congctl", congestion],
        ]
    return commands


def carry(rate: float, round_trip: float, loss: float) -> None:
    """Carries packets between the regions until it is killed: ``rate`` in bit/s and ``loss`` of each direction."""
    os.nice(-10)
    ends = [_tunnel(node.namespace) for node in REGIONS]
    chance = random.Random(0)
    ways = {ends[0]: _Way(ends[1]), ends[1]: _Way(ends[0])}
    while True:
        now = time.monotonic()
        due = min((way.queue[0][0] for way in ways.values() if way.queue), default=now + 1)
        ready, _, _ = select.select(ends, [], [], max(0.0, due - now))
        now = time.monotonic()
        for end in ready:
            ways[end].take(end, now, rate, round_trip, loss, chance)
        for way in ways.values():
            way.deliver(time.monotonic())


class _Way:
    """One direction: packets and when they arrive; ``free``: when the last one has left."""

    def __init__(self, target: int) -> None:
        self.target, self.free = target, 0.0
        self.queue: deque[tuple[float, bytes]] = deque()

    def take(self, end: int, now: float, rate: float, round_trip: float, loss: float, chance: random.Random) -> None:
        for _ in range(64):
            try:
                packet = os.read(end, 2 * _MTU)
            except BlockingIOError:
                return
            leaves = max(now, self.free) + 8 * len(packet) / rate
            if leaves - now > round_trip or chance.random() < loss:
                continue
            self.free = leaves
            self.queue.append((leaves + round_trip / 2, packet))

    def deliver(self, now: float) -> None:
        while self.queue and self.queue[0][0] <= now:
            os.write(self.target, self.queue.popleft()[1])


def _tunnel(namespace: str) -> int:
    """The file of the TUN device in a namespace; it stays there when this process goes on to another one."""
    with open(f"/run/netns/{namespace}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22x", shape.INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return tunnel


def run(method: str, rate: float, *, trace: Path, folder: Path, congestion: str, scale: float = 1.0) -> dict[str, Any]:
    """One row: ``method`` over a way of ``rate``, for `SECONDS`, times ``scale``."""
    store, worker = REGIONS
    folder.mkdir(parents=True)
    where = f"http://{store.address}:{STORE_PORT}"
    spec = Spec(method, STEP_SECONDS, where, str(trace), str(folder), copies=COPIES)
    path, python = str(spec.save()), [sys.executable, "-m"]
    with ExitStack() as stack:
        stack.enter_context(shape.built(build_commands(congestion)))
        link = [*python, "benchmarks.network.regions", str(rate), str(ROUND_TRIP), str(LOSS)]
        children = [stack.enter_context(process(link, folder / "link.log"))]
        server = [sys.executable, "-c", _SERVER, "-H", store.address, "-p", str(STORE_PORT)]
        if method == "rsync":
            (folder / "daemon").write_text(f"use chroot = no\nuid = 0\n[run]\npath = {folder}/shown\nread only = yes\n")
            (folder / "shown").mkdir()
            server = ["rsync", "--daemon", "--no-detach", f"--config={folder}/daemon", f"--address={store.address}"]
            server.append(f"--port={STORE_PORT}")
        children.append(stack.enter_context(process(store.inside(server), folder / "store.log")))
        for role, node in (("trainer", store), ("worker", worker)):
            command = node.inside([*python, "benchmarks.network.replay", role, path, role])
            children.append(stack.enter_context(process(command, folder / f"{role}.log")))
            wait_until_ready(spec.log(role), children)
        before = _retransmitted(children[-1].pid), _retransmitted(children[-2].pid)
        spec.go.touch()
        until = time.monotonic() + SECONDS[method] * scale
        while time.monotonic() < until:
            check(children)
            time.sleep(0.2)
        resent = _retransmitted(children[-2].pid) - before[1]
        for child in children[:1:-1]:
            child.terminate()
            wait_or_kill(child, time.monotonic() + STOP_SECONDS)
    return summary(spec, rate) | {"congestion": congestion, "resent_segments": resent}


def _retransmitted(pid: int) -> int:
    """TCP segments that the namespace of a process has sent again."""
    names, values = [s.split() for s in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if s[:4] == "Tcp:"]
    return int(values[names.index("RetransSegs")])


def summary(spec: Spec, rate: float) -> dict[str, Any]:
    """Measured and planned: medians over the versions that the worker moved to."""
    published = {e["version"]: e for e in read_log(spec.log("trainer")) if e["event"] == "published"}
    lines, trainer = read_log(spec.log("worker")), read_log(spec.log("trainer"))[0]
    ready, synced = lines[0], [e for e in lines if e["event"] == "synced"]
    if not synced:
        raise SystemExit(f"{spec.method}: the worker moved to no version; run for longer")
    newest = [e["time"] - published[e["version"]]["time"] + published[e["version"]]["seconds"] for e in synced]
    densities = [e["density"] for e in published.values() if e["density"] is not None]
    identical = all(e["root"] in (None, published[e["version"]]["root"]) for e in synced)
    return {
        "method": spec.method,
        "rate": rate,
        "round_trip": ready["round_trip"],
        "upload_round_trip": trainer.get("round_trip"),
        "upload_rate": trainer.get("upload_rate"),
        "loss": LOSS,
        "params": ready["params"],
        "step_seconds": spec.step_seconds,
        "density": statistics.fmean(densities) if densities else None,
        "versions": len(synced),
        "bytes": statistics.median(e["rx"] for e in synced),
        "newest_seconds": statistics.median(newest),
        "newest_worst": max(newest),
        "idle_seconds": statistics.median(e["seconds"] for e in synced),
        "publish_seconds": statistics.median(e["seconds"] for e in published.values()),
        "fallbacks": sum(e["fallbacks"] for e in synced),
        "identical": identical,
    }


def run_all(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures and prints a row a method and rate."""
    from benchmarks import trace  # imports torch, which nothing else here needs

    traces, rows = trace.ensure(runs=[trace.CHAIN_RUN]), list[dict[str, Any]]()
    head = f"{'':8}{'Mbit/s':>7}{'bytes':>13}{'newest s':>10}{'planned':>9}{'idle s':>8}{'planned':>9}"
    print(f"{head}  versions, resent, bits")
    for method in arguments.methods:
        for rate in arguments.rates:
            scale = 0.3 if arguments.quick else 1.0
            where = folder / f"{method}-{rate:.0f}"
            row = run(method, rate, trace=traces, folder=where, congestion=arguments.congestion, scale=scale)
            row |= planned(row, next((r["density"] for r in rows if r["density"]), row["density"]))
            rows.append(row)
            plans = [row.get(name, math.nan) for name in ("planned_newest_seconds", "planned_idle_seconds")]
            bits = "ok" if row["identical"] else "DIFFER"
            print(
                f"{method:8}{rate / 1e6:7.0f}{row['bytes']:13,.0f}{row['newest_seconds']:10.2f}{plans[0]:9.2f}"
                f"{row['idle_seconds']:8.2f}{plans[1]:9.2f}  {row['versions']}, {row['resent_segments']}, {bits}",
                flush=True,
            )
    return rows


def planned(row: dict[str, Any], density: float | None) -> dict[str, float]:
    """What `pulse plan` says of a row; it knows no rsync."""
    if row["method"] == "rsync" or density is None:
        return {}
    scenario = Scenario(
        params=row["params"],
        density=density,
        step_seconds=row["step_seconds"],
        bandwidth=row["rate"],
        upload_bandwidth=row["upload_rate"],
        upload_round_trip_seconds=row["upload_round_trip"],
        loss=row["loss"],
        cores=THREADS,
        round_trip_seconds=row["round_trip"],
    )
    plan = make_plan(scenario).methods[row["method"]]
    idle = sum(plan.phases[name] for name in ("download", "verify", "apply"))
    return {
        "planned_bytes": plan.sync_bytes,
        "planned_newest_seconds": plan.sync_seconds + (LOOK_SECONDS + row["round_trip"]) / 2,
        "planned_idle_seconds": idle,
    }


if __name__ == "__main__":
    carry(*map(float, sys.argv[1:]))
