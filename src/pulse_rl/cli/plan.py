"""The command plan: the cost of a sync, before anything is run."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._util.settings import format_bytes, format_duration, parse_seconds
from ..errors import InputError
from ..study import Scenario, from_study, make_plan
from ..study.plan import METHODS, QUANTIZED, Plan, quantized_inputs
from ..study.units import format_bandwidth, parse_bandwidth, parse_count, parse_share
from .arguments import Shared
from .output import Console, read_study

_LABELS = {
    "full": "full sync",
    "zstd": "zstd (PULSE paper)",
    "auto": "auto, no history",
    "history": "auto, history",
}


_PREDICTIONS = (
    "utilization",
    "worker_utilization",
    "sync_seconds",
    "bandwidth_for_target",
    "sync_bytes",
    "phases",
)


def add_parser(commands: Any, _: Shared) -> None:
    """Add the command to ``commands``, argparse's sub-parsers."""
    command = commands.add_parser(
        "plan", help="predict the bytes, time and GPU utilization of a sync"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--params", metavar="N", help="number of parameters: 7B, 0.5B, 22.6M")
    text = "share of the weights that a step changes: 0.0086 or 0.86%%"
    command.add_argument("--density", metavar="D", help=text)
    text = "take --params and --density from the JSON of `pulse study`"
    command.add_argument("--study", metavar="FILE", help=text)
    command.add_argument(
        "--quantized",
        nargs="?",
        const="",
        metavar="FORMAT",
        help="plan for quantized states: those of a --study that has them (--quantize); or of "
        "--params weights in "
        f"FORMAT, {', '.join(QUANTIZED)}, where a step changes --density of the same weights in "
        "BF16",
    )
    text = "compute per step: 50 or 50s"
    command.add_argument("--step-seconds", required=True, metavar="T", help=text)
    text = "bandwidth of a worker's link: 0.2Gbit, 10MB/s"
    command.add_argument("--bandwidth", required=True, metavar="B", help=text)
    text = "bandwidth of the trainer's link (default: the same)"
    command.add_argument("--upload-bandwidth", metavar="B", help=text)
    text = "number of workers, each on its own link (default: 1)"
    command.add_argument("--workers", default="1", metavar="W", help=text)
    command.add_argument("--shared-link", action="store_true", help="all workers share one link")
    text = "CPU cores of the trainer and of each worker (default: 8)"
    command.add_argument("--cores", default="8", metavar="C", help=text)
    text = "round-trip time to the store (default: 0)"
    command.add_argument("--round-trip-seconds", default="0", metavar="SECONDS", help=text)
    text = "that of the trainer (default: the same)"
    command.add_argument("--upload-round-trip-seconds", metavar="SECONDS", help=text)
    text = "share of packets that links lose (default: 0)"
    command.add_argument("--loss", default="0", metavar="P", help=text)
    text = "target GPU utilization (default: 0.9)"
    command.add_argument("--target", default="0.9", metavar="U", help=text)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    study = read_study(Path(args.study)) if args.study else None
    if args.quantized is not None and bool(args.study) == bool(args.quantized):
        raise InputError(
            "quantized states are those of a study, or of a format",
            hint="Give --study FILE --quantized; or without a study --quantized, and one of "
            f"{', '.join(QUANTIZED)}.",
        )
    if args.study and args.quantized is not None:
        study = study.get("quantized") if isinstance(study, dict) else None
        if study is None:
            raise InputError(
                "there is no study of quantized states",
                hint="Give --study, of pulse study --quantize.",
            )
    measured = from_study(study) if args.study else None
    if measured is None and (args.params is None or args.density is None):
        raise InputError(
            "the number of changed parameters is unknown",
            hint="Give --params and --density, or --study.",
        )
    if measured is None and args.quantized is not None:
        measured = quantized_inputs(
            parse_count(args.params), parse_share(args.density), args.quantized
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
    console.result(facts_of(plan) | {"target": target}, _lines(plan, target))
    return 0


def facts_of(plan: Plan) -> dict[str, Any]:
    """The plan as JSON: each prediction an object keyed by method; seconds, bytes, bit/s."""
    return {
        **{
            key: {name: getattr(plan.methods[name], key) for name in METHODS}
            for key in _PREDICTIONS
        },
        "full_wins": asdict(plan.full_wins),
        "inputs": asdict(plan.scenario),
    }


def _lines(plan: Plan, target: float) -> list[str]:
    inputs, wins = plan.scenario, plan.full_wins
    lines = [
        f"{inputs.params:,} parameters, density {inputs.density:.3%}, {inputs.step_seconds:g} s "
        "per step, "
        f"{format_bandwidth(inputs.bandwidth)} to each worker",
        f"  {'':18} {'bytes/sync':>10} {'utilization':>12} {'of a worker':>14} {'time/sync':>10}  "
        f"bandwidth for {target:.0%}",
    ]
    for name in METHODS:
        m = plan.methods[name]
        needed = format_bandwidth(m.bandwidth_for_target)
        lines.append(
            f"  {_LABELS[name]:18} {format_bytes(m.sync_bytes):>10} {m.utilization:>12.1%} "
            f"{m.worker_utilization:>14.1%} {format_duration(m.sync_seconds):>10}  {needed}"
        )
    phases = ", ".join(
        f"{name} {format_duration(s)}" for name, s in plan.methods["auto"].phases.items()
    )
    lines.append(f"  auto: {phases}")
    if "history" not in inputs.bytes_per_changed:
        lines.append(
            "  with history: as with FP32 masters; with pure BF16 weights it saves 42 to 45%"
        )
    over = f"above density {wins.density:.1%}" if wins.density is not None else "never"
    beyond = f"above {format_bandwidth(wins.bandwidth)}" if wins.bandwidth is not None else "never"
    lines.append(f"  a full sync is faster: on this link, {over}; at this density, {beyond}")
    return lines
