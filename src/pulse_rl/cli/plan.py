"""The command plan: the cost of a sync, before anything is run."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._util.settings import (
    format_bandwidth,
    format_bytes,
    format_duration,
    parse_bandwidth,
    parse_count,
    parse_seconds,
    parse_share,
)
from ..errors import InputError
from ..plan import Fleet, Scenario, from_study, make_fleet_plan, make_plan
from ..plan.fleet import WAYS, FleetPlan, catch_up_bytes
from ..plan.model import METHODS, QUANTISED, Plan, quantised_inputs
from .output import Console, read_study

_LABELS = {
    "full": "full sync",
    "zstd": "zstd (PULSE paper)",
    "auto": "auto, no history",
    "history": "auto, history",
}


def add_parser(commands: Any) -> None:
    """Adds the command to ``commands``, argparse's sub-parsers."""
    command = commands.add_parser(
        "plan", help="predict the bytes, time and GPU utilisation of a sync"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--params", metavar="N", help="number of parameters: 7B, 0.5B, 22.6M")
    command.add_argument(
        "--density", metavar="D", help="share of the weights that a step changes: 0.0086 or 0.86%%"
    )
    command.add_argument(
        "--study", metavar="FILE", help="take --params and --density from the JSON of `pulse study`"
    )
    command.add_argument(
        "--quantised",
        nargs="?",
        const="",
        metavar="FORMAT",
        help="plan for quantised states: those of a --study that has them (--quantise); or of "
        "--params weights in "
        f"FORMAT, {', '.join(QUANTISED)}, where a step changes --density of the same weights in "
        "BF16",
    )
    command.add_argument(
        "--step-seconds", required=True, metavar="T", help="compute per step: 50 or 50s"
    )
    command.add_argument(
        "--bandwidth",
        required=True,
        metavar="B",
        help="bandwidth of a worker's link: 0.2Gbit, 10MB/s",
    )
    command.add_argument(
        "--upload-bandwidth",
        metavar="B",
        help="bandwidth of the trainer's link (default: the same)",
    )
    command.add_argument(
        "--workers",
        default="1",
        metavar="W",
        help="number of workers, each on its own link (default: 1)",
    )
    command.add_argument("--shared-link", action="store_true", help="all workers share one link")
    command.add_argument(
        "--cores",
        default="8",
        metavar="C",
        help="CPU cores of the trainer and of each worker (default: 8)",
    )
    command.add_argument(
        "--round-trip-seconds",
        default="0",
        metavar="SECONDS",
        help="round-trip time to the store (default: 0)",
    )
    command.add_argument(
        "--upload-round-trip-seconds",
        metavar="SECONDS",
        help="that of the trainer (default: the same)",
    )
    command.add_argument(
        "--loss", default="0", metavar="P", help="share of packets that links lose (default: 0)"
    )
    fleet = command.add_argument_group(
        "a fleet", "with --regions: how a version reaches all --workers"
    )
    fleet.add_argument(
        "--regions", metavar="R", help="regions, alike; with and without a relay in each"
    )
    fleet.add_argument(
        "--origin-bandwidth", metavar="B", help="what the origin sends in all (default: no limit)"
    )
    fleet.add_argument(
        "--region-bandwidth", metavar="B", help="a region's link to the origin (default: no limit)"
    )
    fleet.add_argument(
        "--near-bandwidth",
        metavar="B",
        help="what the store in a region sends in all (default: no limit)",
    )
    fleet.add_argument(
        "--poll-seconds", default="1", metavar="P", help="seconds between two looks (default: 1)"
    )
    fleet.add_argument(
        "--away", metavar="N", help="what a region fetches that comes back N versions later"
    )
    fleet.add_argument(
        "--dollars-per-gb",
        default="0.09",
        metavar="D",
        help="of what leaves the origin (default: 0.09)",
    )
    command.add_argument(
        "--target", default="0.9", metavar="U", help="target GPU utilisation (default: 0.9)"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    study = read_study(Path(args.study)) if args.study else None
    if args.quantised is not None and bool(args.study) == bool(args.quantised):
        raise InputError(
            "quantised states are those of a study, or of a format",
            hint="Give --study FILE --quantised; or without a study --quantised, and one of "
            f"{', '.join(QUANTISED)}.",
        )
    if args.study and args.quantised is not None:
        study = study.get("quantised") if isinstance(study, dict) else None
        if study is None:
            raise InputError(
                "there is no study of quantised states",
                hint="Give --study, of pulse study --quantise.",
            )
    measured = from_study(study) if args.study else None
    if measured is None and (args.params is None or args.density is None):
        raise InputError(
            "the number of changed parameters is unknown",
            hint="Give --params and --density, or --study.",
        )
    if measured is None and args.quantised is not None:
        measured = quantised_inputs(
            parse_count(args.params), parse_share(args.density), args.quantised
        )
        args.density = None
    workers, target = parse_count(args.workers), parse_share(args.target)
    upload_trip = args.upload_round_trip_seconds
    plan = make_plan(
        Scenario(
            params=measured.params
            if measured and args.params is None
            else parse_count(args.params),
            density=measured.density
            if measured and args.density is None
            else parse_share(args.density),
            step_seconds=parse_seconds(args.step_seconds),
            bandwidth=parse_bandwidth(args.bandwidth),
            upload_bandwidth=parse_bandwidth(args.upload_bandwidth)
            if args.upload_bandwidth is not None
            else None,
            sharers=workers if args.shared_link else 1,
            cores=parse_count(args.cores),
            round_trip_seconds=parse_seconds(args.round_trip_seconds),
            upload_round_trip_seconds=None if upload_trip is None else parse_seconds(upload_trip),
            loss=parse_share(args.loss),
            param_bytes=measured.param_bytes if measured else 2.0,
            bytes_per_changed=measured.bytes_per_changed if measured else {},
        ),
        target=target,
    )
    facts, lines = facts_of(plan) | {"target": target}, _lines(plan, target)
    if args.regions is not None:
        fleet = make_fleet_plan(plan.scenario, _fleet(args, workers))
        away = None if args.away is None else parse_count(args.away)
        facts["fleet"] = _fleet_facts(fleet, away)
        lines += _fleet_lines(fleet, away)
    console.result(facts, lines)
    return 0


def _fleet(args: argparse.Namespace, workers: int) -> Fleet:
    def bandwidth(text: str | None) -> float | None:
        return None if text is None else parse_bandwidth(text)

    return Fleet(
        workers=workers,
        regions=parse_count(args.regions),
        origin_bandwidth=bandwidth(args.origin_bandwidth),
        region_bandwidth=bandwidth(args.region_bandwidth),
        near_bandwidth=bandwidth(args.near_bandwidth),
        poll_seconds=parse_seconds(args.poll_seconds),
        dollars_a_gb=_number("--dollars-per-gb", args.dollars_per_gb),
    )


def _fleet_facts(plan: FleetPlan, away: int | None) -> dict[str, Any]:
    facts = {
        "ways": {
            way: {method: asdict(each) for method, each in plan.ways[way].items()} for way in WAYS
        },
        "relays_pay_from": plan.relays_pay_from,
        "inputs": asdict(plan.fleet),
    }
    return (
        facts if away is None else facts | {"catch_up_bytes": catch_up_bytes(plan.scenario, away)}
    )


def _fleet_lines(plan: FleetPlan, away: int | None) -> list[str]:
    fleet = plan.fleet
    lines = [
        f"{fleet.workers:,} workers in {fleet.regions:,} regions, {fleet.in_a_region:,} in each",
        f"  {'':18} {'':8} {'to all':>10} {'a fetch':>10} {'versions':>9} "
        f"{'leaves the origin a day':>24}  looks/min",
    ]
    for method in METHODS:
        for way in WAYS:
            each = plan.ways[way][method]
            day = f"{format_bytes(each.origin_bytes)}, ${each.dollars:,.2f}"
            lines.append(
                f"  {_LABELS[method]:18} {way:8} {format_duration(each.seconds_to_all):>10} "
                f"{format_bytes(each.fetch_bytes):>10} {each.versions:>9,} {day:>24}  "
                f"{each.idle_looks:,.0f}"
            )
    pays = plan.relays_pay_from
    lines.append(
        "  a relay is sooner "
        f"{f'from {pays:,} workers in a region on' if pays else 'for no number of workers'}"
    )
    if away is not None:
        ways = ", ".join(
            f"{format_bytes(n)} by {way}" for way, n in catch_up_bytes(plan.scenario, away).items()
        )
        lines.append(f"  after {away:,} versions: {ways}")
    return lines


def facts_of(plan: Plan) -> dict[str, Any]:
    """The plan as JSON: each prediction an object keyed by method; seconds, bytes, bit/s."""
    methods = plan.methods
    return {
        "utilisation": {name: methods[name].utilisation for name in METHODS},
        "worker_utilisation": {name: methods[name].worker_utilisation for name in METHODS},
        "sync_seconds": {name: methods[name].sync_seconds for name in METHODS},
        "bandwidth_for_target": {name: methods[name].bandwidth_for_target for name in METHODS},
        "sync_bytes": {name: methods[name].sync_bytes for name in METHODS},
        "phases": {name: methods[name].phases for name in METHODS},
        "full_wins": asdict(plan.full_wins),
        "inputs": asdict(plan.scenario),
    }


def _lines(plan: Plan, target: float) -> list[str]:
    inputs, wins = plan.scenario, plan.full_wins
    lines = [
        f"{inputs.params:,} parameters, density {inputs.density:.3%}, {inputs.step_seconds:g} s "
        "per step, "
        f"{format_bandwidth(inputs.bandwidth)} to each worker",
        f"  {'':18} {'bytes/sync':>10} {'utilisation':>12} {'of a worker':>14} {'time/sync':>10}  "
        f"bandwidth for {target:.0%}",
    ]
    for name in METHODS:
        m = plan.methods[name]
        needed = format_bandwidth(m.bandwidth_for_target)
        lines.append(
            f"  {_LABELS[name]:18} {format_bytes(m.sync_bytes):>10} {m.utilisation:>12.1%} "
            f"{m.worker_utilisation:>14.1%} {format_duration(m.sync_seconds):>10}  {needed}"
        )
    phases = ", ".join(
        f"{name} {format_duration(s)}" for name, s in plan.methods["auto"].phases.items()
    )
    lines.append(f"  auto: {phases}")
    if "history" not in inputs.bytes_per_changed:
        lines.append(
            "  with history: as with FP32 masters; measure pure BF16 weights by pulse study, and "
            "give --study"
        )
    over = f"above density {wins.density:.1%}" if wins.density is not None else "never"
    beyond = f"above {format_bandwidth(wins.bandwidth)}" if wins.bandwidth is not None else "never"
    lines.append(f"  a full sync is faster: on this link, {over}; at this density, {beyond}")
    return lines


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option} must be a number, not {text!r}") from None
