"""``python -m benchmarks.loco``: see the package. Over an hour on two cores."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.loco import convergence, cost, plot, scaling, sites, speed, tasks, traffic
from benchmarks.loco.jobs import Job, JobResult
from benchmarks.loco.methods import DILOCO, METHODS
from benchmarks.loco.processes import start_trainers, why_no_network

PARTS = ("traffic", "convergence", "cost", "scaling", "sites")


def network_jobs(parts: list[str], quick: bool) -> list[Job]:
    """Traffic and cost come from the same runs; the cost alone needs only those with timed rounds."""
    jobs = traffic.jobs(quick)
    return jobs if "traffic" in parts else [job for job in jobs if job.dense]


def measure_network(parts: list[str], quick: bool) -> dict[str, Any]:
    """Runs the trainers in their namespaces and prints the tables of traffic and cost."""
    missing = why_no_network()
    rate = None if missing else cost.LINK
    if missing:
        print(
            f"{missing}\nHere: trainers on the loopback interface, bytes by the processes' own count, no link to time."
        )
    results: list[tuple[Job, JobResult]] = []
    with start_trainers(rate, namespaces=not missing) as trainers:
        for job in network_jobs(parts, quick):
            results.append((job, trainers.run(job)))
    facts: dict[str, Any] = {"rate": rate}
    if "traffic" in parts:
        rows = [traffic.row(job, result) for job, result in results]
        print("\n" + traffic.text(rows))
        facts["traffic"] = [asdict(row) for row in rows]
    if "cost" in parts:
        timed = [cost.row(job, result) for job, result in results if job.dense]
        speeds = speed.measure(2 if quick else speed.ROUNDS)
        print("\n" + cost.text(timed, rate) + "\n\n" + speed.text(speeds))
        facts |= {"cost": [asdict(row) for row in timed], "speed": asdict(speeds)}
    facts["rounds"] = [
        {"job": asdict(job), "trainers": [[asdict(r) for r in rounds] for rounds in result]} for job, result in results
    ]
    return facts


def measure_convergence(
    methods: Sequence[str], rounds: int, seeds: Sequence[int], picture: Path | None, kept: Path | None
) -> dict[str, Any]:
    """``kept`` has the curves so far while it runs: a run may take hours."""
    curves = []
    with start_trainers() as trainers:
        for curve in convergence.run(trainers, methods, rounds, seeds):
            curves.append(curve)
            if kept:
                kept.write_text(json.dumps({"convergence": [asdict(c) for c in curves]}) + "\n")
    print("\n" + convergence.text(curves))
    if picture:
        plot.draw(curves, picture)
    return {"convergence": [asdict(c) for c in curves]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loco", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, seeds and rates: to see that all of it works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the convergence as a PNG")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="METHOD",
        help=f"the convergence of these, always beside {DILOCO}: {', '.join(METHODS)}".replace("%", "%%"),
    )
    parser.add_argument("--rounds", type=int, help=f"the rounds of a convergence run (default {convergence.ROUNDS})")
    parser.add_argument("--seeds", nargs="+", type=int, help="of the convergence (default 0 1 2 3; 0 1 with --quick)")
    arguments = parser.parse_args()
    # SIGTERM unwinds like Ctrl-C, so that trainers and network are taken down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    facts: dict[str, Any] = {}
    try:
        if {"traffic", "cost"} & set(arguments.only):
            for name in (tasks.PRETRAINED, tasks.ARITHMETIC):
                tasks.ensure(name)
            facts |= measure_network(arguments.only, arguments.quick)
        if "convergence" in arguments.only:
            tasks.ensure(tasks.ARITHMETIC)
            methods = [m for m in METHODS if m in arguments.methods or m == DILOCO]
            rounds = arguments.rounds or (4 if arguments.quick else convergence.ROUNDS)
            seeds = arguments.seeds or convergence.SEEDS[: 2 if arguments.quick else None]
            facts |= measure_convergence(methods, rounds, seeds, arguments.plot, arguments.json)
        for part, name in ((scaling, "scaling"), (sites, "sites")):
            if name in arguments.only:
                for task in (tasks.PRETRAINED, tasks.ARITHMETIC):
                    tasks.ensure(task)
                rows = part.run(arguments.quick)
                print("\n" + part.text(rows))
                facts[name] = [asdict(row) for row in rows]
    except KeyboardInterrupt:
        print("interrupted; trainers and network are gone", file=sys.stderr)
        return 130
    print(f"\n{(time.monotonic() - started) / 60:.1f} minutes")
    if arguments.json:
        arguments.json.write_text(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
