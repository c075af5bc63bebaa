"""A fleet as a discrete-event simulation, where the arithmetic of `pulse plan --regions` is not enough.

    python -m benchmarks.fleet_simulation [--versions 20] [--json FILE]
    python -m benchmarks.fleet_simulation --check

It has what the arithmetic leaves out: looks at random times, queues at links, stores that answer so many requests a
second, relays and workers that take several versions at a time once they are behind, anchors that relays copy beside
the patches, workers that join meanwhile, a region that is cut off. It takes from `pulse_rl.plan` what a version costs
to make, to fetch and to apply, and how many bytes bring a receiver how far.

``--check``: beside the arithmetic, where nothing queues, and beside what `benchmarks.fleet` has measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.fleet_simulation.settings import against_server, eventful, table_setting
from benchmarks.fleet_simulation.simulation import Setting, simulate
from pulse_rl._util.units import format_bytes, format_duration
from pulse_rl.plan import Fleet, Scenario, make_fleet_plan

PARAMS = {"7B": 7e9, "70B": 70e9, "1T": 1e12}


def table(versions: int) -> list[dict[str, object]]:
    print(f"{table_setting.__doc__}\n    {eventful.__doc__}\n")
    heads = ("params", "workers", "way", "to all", "worst", "a version leaves", "after a cut", "by", "joiner")
    print("{:6} {:>8}  {:7} {:>9} {:>9} {:>16} {:>12} {:>9} {:>9}".format(*heads))
    rows: list[dict[str, object]] = []
    for name, params in PARAMS.items():
        for workers in (1000, 10_000, 100_000):
            for relays in (False, True):
                setting = table_setting(params, workers, versions, relays=relays)
                steady = simulate(setting)
                after = simulate(eventful(setting)) if relays and not steady.behind else None
                rows.append(
                    {"params": name, "workers": workers, "relays": relays, "steady": asdict(steady)}
                    | ({"eventful": asdict(after)} if after else {})
                )
                cells = (
                    "behind" if steady.behind else format_duration(steady.to_all),
                    "" if steady.behind else format_duration(steady.worst),
                    format_bytes(steady.origin_bytes),
                    format_duration(after.back) if after and after.back is not None else "",
                    format_bytes(after.back_bytes) if after and after.back_bytes is not None else "",
                    format_duration(after.joined) if after and after.joined is not None else "",
                )
                way = "relays" if relays else "direct"
                print(
                    f"{name:6} {workers:8,}  {way:7} {{:>9}} {{:>9}} {{:>16}} {{:>12}} {{:>9}} {{:>9}}".format(*cells),
                    flush=True,
                )
    return rows


MEASURED = {1: 0.5, 10: 1.0, 100: 2.1, 400: 9.5}
"""Seconds to the last of so many workers at one S3 server, in a process of Python (docs/clusters.md)."""


def check() -> None:
    """Beside the arithmetic, and beside real subscribers."""
    print(
        "seconds to all, where nothing queues: simulated, and by `pulse plan --regions`, which takes the longest look"
    )
    scenario = Scenario(int(7e9), 0.01, 60, 1e9, 10e9, cores=32, round_trip_seconds=0.1)
    for workers in (1000, 10_000):
        fleet = Fleet(workers, 10, 100e9, 10e9, 100e9)
        plan = make_fleet_plan(scenario, fleet)
        for relays, way in ((False, "direct"), (True, "relays")):
            found = simulate(Setting(scenario, fleet, relays=relays))
            print(f"  {workers:6,} {way:7} {found.to_all:8.2f} {plan.ways[way]['context'].seconds_to_all:8.2f}")
    print("seconds to the last worker at one server: simulated, measured")
    for workers, seconds in MEASURED.items():
        print(f"  {workers:6} {simulate(against_server(workers)).to_all:8.2f} {seconds:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="a fleet as a discrete-event simulation")
    parser.add_argument("--versions", type=int, default=20, help="of the runs in which nothing happens")
    parser.add_argument("--check", action="store_true", help="beside the arithmetic and what was measured")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if args.check:
        check()
        return
    rows = table(args.versions)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
