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

from benchmarks.loco import learning, tables, tasks, traffic
from benchmarks.loco.jobs import Job, JobResult
from benchmarks.loco.processes import start_trainers, why_no_network

PARTS = ("traffic", "cost", *learning.GROUPS)
DEFAULT = ("traffic", "cost", "methods", "heldout", "H", "trainers", "scaling", "sites")


def measure_network(parts: Sequence[str], quick: bool) -> dict[str, Any]:
    """Runs the trainers in their namespaces and prints traffic and cost, which come from the same runs."""
    tasks.ensure(tasks.PRETRAINED)
    tasks.ensure(tasks.ARITHMETIC)
    missing = why_no_network()
    rate = None if missing else traffic.LINK
    if missing:
        print(f"{missing}\nHere: the loopback interface, bytes by the processes' own count, no link to time.")
    jobs = [job for job in traffic.jobs(quick) if "traffic" in parts or job.dense]
    results: list[tuple[Job, JobResult]] = []
    with start_trainers(rate, namespaces=not missing) as trainers:
        for job in jobs:
            results.append((job, trainers.run(job)))
    rows = [traffic.row(job, result) for job, result in results]
    if "traffic" in parts:
        print("\n" + traffic.traffic_text(rows))
    if "cost" in parts:
        print("\n" + traffic.cost_text([row for row in rows if row.outer], rate))
    rounds = [{"job": asdict(job), "trainers": [[asdict(r) for r in rs] for rs in result]} for job, result in results]
    return {"rate": rate, "traffic": [asdict(row) for row in rows], "rounds": rounds}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loco", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=DEFAULT, help="only these parts")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, seeds and rates: to see that all of it works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--rounds", type=int, help="of a run of a group; each has its own default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of groups (default 0 1 2)")
    arguments = parser.parse_args()
    # SIGTERM unwinds like Ctrl-C, so that trainers and network are taken down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    facts: dict[str, Any] = {}
    try:
        if {"traffic", "cost"} & set(arguments.only):
            facts |= measure_network(arguments.only, arguments.quick)
        groups = [part for part in learning.GROUPS if part in arguments.only]
        if groups:
            seeds, rounds = (arguments.seeds[:1], 2) if arguments.quick else (arguments.seeds, arguments.rounds)
            found = list(learning.run(groups, seeds, rounds, quick=arguments.quick))
            print("\n" + "\n\n".join(map(tables.text, tables.by_task(found))))
            facts["groups"] = [asdict(outcome) for outcome in found]
    except KeyboardInterrupt:
        print("interrupted; trainers and network are gone", file=sys.stderr)
        return 130
    print(f"\n{(time.monotonic() - started) / 60:.1f} minutes")
    if arguments.json:
        arguments.json.write_text(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
