"""Two regions and the long way between them: a trainer and an S3-compatible store in one, a worker
in the other.

The way is made by `carrier`. The trainer publishes a version a step; the worker waits for it and
moves to it at once. ``newest``: seconds from the call of publish until the worker has the version.
``idle``: what the worker's own sync takes of that, so what a step waits that needs it. Two copies
of the recorded run, each at another of its steps, make 45 M weights.

rsync carries the safetensors file from a daemon beside the trainer, with its own search for equal
parts (``--no-whole-file``), as often as it takes to see a new version. Full syncs are fetched in
ranges over eight connections.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.network import carrier, shape
from benchmarks.network.run import (
    LOOK_SECONDS,
    STOP_SECONDS,
    STORE_PORT,
    THREADS,
    Spec,
    check,
    process,
    read_log,
    s3_server,
    wait_or_kill,
    wait_until_ready,
)
from pulse_rl.study.plan import Scenario, make_plan

RATES, ROUND_TRIP, LOSS = (50e6, 200e6), 0.08, 0.001
METHODS = ("auto", "zstd", "full", "rsync")
COPIES, STEP_SECONDS = 2, 4.0
# Of a method: seconds of a run. Two full syncs must fit.
SECONDS = {"auto": 50.0, "zstd": 50.0, "full": 75.0, "rsync": 250.0}
_MTU = 1500


def run(
    method: str, rate: float, *, trace: Path, folder: Path, congestion: str, scale: float = 1.0
) -> dict[str, Any]:
    """One row: ``method`` over a way of ``rate``, for `SECONDS`, times ``scale``."""
    regions = store, worker = shape.Node("store", 1, rate), shape.Node("worker", 2, rate)
    folder.mkdir(parents=True)
    where = f"http://{store.address}:{STORE_PORT}"
    spec = Spec(method, STEP_SECONDS, where, str(trace), str(folder), copies=COPIES)
    path, python = str(spec.save()), [sys.executable, "-m"]
    with ExitStack() as stack:
        stack.enter_context(
            shape.built(carrier.build_commands(regions, mtu=_MTU, congestion=congestion))
        )
        link = carrier.command(regions, ROUND_TRIP, loss=LOSS, mtu=_MTU)
        children = [stack.enter_context(process(link, folder / "link.log"))]
        server = s3_server(store.address)
        if method == "rsync":
            (folder / "daemon").write_text(
                f"use chroot = no\nuid = 0\n[run]\npath = {folder}/shown\nread only = yes\n"
            )
            (folder / "shown").mkdir()
            server = [
                "rsync",
                "--daemon",
                "--no-detach",
                f"--config={folder}/daemon",
                f"--address={store.address}",
            ]
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
    names, values = [
        s.split() for s in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if s[:4] == "Tcp:"
    ]
    return int(values[names.index("RetransSegs")])


def summary(spec: Spec, rate: float) -> dict[str, Any]:
    """Measured and planned: medians over the versions that the worker moved to."""
    published = {
        e["version"]: e for e in read_log(spec.log("trainer")) if e["event"] == "published"
    }
    lines, trainer = read_log(spec.log("worker")), read_log(spec.log("trainer"))[0]
    ready, synced = lines[0], [e for e in lines if e["event"] == "synced"]
    if not synced:
        raise SystemExit(f"{spec.method}: the worker moved to no version; run for longer")
    newest = [
        e["time"] - published[e["version"]]["time"] + published[e["version"]]["seconds"]
        for e in synced
    ]
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
    head = (
        f"{'':8}{'Mbit/s':>7}{'bytes':>13}{'newest s':>10}{'planned':>9}{'idle s':>8}{'planned':>9}"
    )
    print(f"{head}  versions, resent, bits")
    for method in arguments.methods:
        for rate in arguments.rates:
            scale = 0.3 if arguments.quick else 1.0
            where = folder / f"{method}-{rate:.0f}"
            row = run(
                method,
                rate,
                trace=traces,
                folder=where,
                congestion=arguments.congestion,
                scale=scale,
            )
            row |= planned(row, next((r["density"] for r in rows if r["density"]), row["density"]))
            rows.append(row)
            plans = [
                row.get(name, math.nan)
                for name in ("planned_newest_seconds", "planned_idle_seconds")
            ]
            bits = "ok" if row["identical"] else "DIFFER"
            print(
                f"{method:8}{rate / 1e6:7.0f}{row['bytes']:13,.0f}{row['newest_seconds']:10.2f}"
                f"{plans[0]:9.2f}"
                f"{row['idle_seconds']:8.2f}{plans[1]:9.2f}  {row['versions']}, "
                f"{row['resent_segments']}, {bits}",
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
    plan = make_plan(scenario)[row["method"]]
    idle = sum(plan.phases[name] for name in ("download", "verify", "apply"))
    return {
        "planned_bytes": plan.sync_bytes,
        "planned_newest_seconds": plan.sync_seconds + (LOOK_SECONDS + row["round_trip"]) / 2,
        "planned_idle_seconds": idle,
    }
