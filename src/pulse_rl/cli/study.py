"""The commands study, how sparse the updates between saved states are; plan, the cost of a sync
before anything is run; and report: a run, a study, or both as one HTML page."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._util.files import open_regular
from .._util.settings import counted, format_bytes, format_duration, parse_seconds
from ..errors import InputError
from ..state.cast import COMPUTE_DTYPES
from ..study import plan as plans
from ..study import run as studies
from ..study.plan import QUANTIZED, MethodPlan, Scenario, format_bandwidth
from ..study.report import read_run, render
from ..study.tally import STEP_SECONDS
from .common import (
    AS_JSON,
    COMMON,
    WRITING,
    Console,
    add_command,
    add_file_to_write,
    add_quantize,
    check_output,
    compute_dtype,
    facts_of,
    seconds,
    shortened,
    write_output,
)

#: In the head of every page of `pulse_rl.study.report`.
PAGE_MARK = b'<meta name="generator" content="pulse-rl'
STUDY_NAME = "study.json"
_SHOWN_TENSORS = 8
_LABELS = {
    "full": "full sync",
    "zstd": "zstd (PULSE paper)",
    "auto": "auto, no history",
    "history": "auto, history",
}


def add_parsers(commands: Any) -> None:
    command = add_command(commands, "plan", plan, AS_JSON)
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

    command = add_command(commands, "study", study, COMMON, WRITING)
    text = "a folder of checkpoints; with --stream, a store"
    command.add_argument("source", metavar="SOURCE", help=text)
    command.add_argument("--stream", metavar="S", help="study the versions of this stream")
    command.add_argument(
        "--dtype",
        type=compute_dtype,
        choices=list(COMPUTE_DTYPES),
        default="BF16",
        help="compute dtype; wider weights are cast to it (default: BF16)",
    )
    add_quantize(
        command,
        "study codes and scales beside weights in --dtype, quantized from what is stored: "
        "{formats}, or the config.json of a quantized model",
    )
    command.add_argument(
        "--k",
        type=int,
        nargs="+",
        default=list(studies.DEFAULT_KS),
        metavar="K",
        help="compare each state with the one K states later (default: 1 2 4 … 32)",
    )
    command.add_argument(
        "--step-seconds",
        type=seconds,
        default=STEP_SECONDS,
        metavar="T",
        help="compute between syncs: 50 or 50s (default: 50)",
    )
    add_file_to_write(command, "REPORT", "also write an HTML report", required=False)

    command = add_command(commands, "report", report, AS_JSON, WRITING)
    text = "a folder with events*.jsonl, study.json or both, or one such file"
    command.add_argument("source", metavar="RUN", help=text)
    add_file_to_write(command, "HTML", "the HTML file to write")
    command.add_argument("--stream", metavar="S", help="the stream to show, if the run has several")


def plan(args: argparse.Namespace, console: Console) -> None:
    """Predict the bytes, time and GPU utilization of a sync.

    pulse plan --params 7B --density 0.86% --step-seconds 50s --bandwidth 0.2Gbit
    """
    # 1. What a study has measured, or is known of a format.
    inputs: dict[str, Any] = {}
    if args.quantized is not None and bool(args.study) == bool(args.quantized):
        raise InputError(
            "quantized states are those of a study, or of a format",
            hint="Give --study FILE --quantized; or without a study --quantized, and one of "
            f"{', '.join(QUANTIZED)}.",
        )
    if args.study:
        measured = _read_study(Path(args.study))
        if args.quantized is not None:
            measured = measured.get("quantized") if isinstance(measured, dict) else None
            if measured is None:
                raise InputError(
                    "there is no study of quantized states",
                    hint="Give --study, of pulse study --quantize.",
                )
        inputs = plans.from_study(measured)
    elif args.params is None or args.density is None:
        raise InputError(
            "the number of changed parameters is unknown",
            hint="Give --params and --density, or --study.",
        )
    # 2. What is given: numbers with units.
    for name, parse in (
        ("params", plans.parse_count),
        ("density", plans.parse_share),
        ("step_seconds", parse_seconds),
        ("bandwidth", plans.parse_bandwidth),
        ("upload_bandwidth", plans.parse_bandwidth),
        ("cores", plans.parse_count),
        ("round_trip_seconds", parse_seconds),
        ("upload_round_trip_seconds", parse_seconds),
        ("loss", plans.parse_share),
    ):
        if (text := getattr(args, name)) is not None:
            inputs[name] = parse(text)
    if args.quantized:
        inputs |= plans.quantized_inputs(inputs["params"], inputs["density"], args.quantized)
    workers, target = plans.parse_count(args.workers), plans.parse_share(args.target)
    scenario = Scenario(**inputs, sharers=workers if args.shared_link else 1)
    # 3. Each prediction by method; seconds, bytes, bit/s.
    methods = plans.make_plan(scenario, target=target)
    density, bandwidth = plans.full_wins(scenario)
    facts: dict[str, Any] = {}
    for name in (*MethodPlan.__slots__, "sync_seconds"):
        facts[name] = {method: getattr(found, name) for method, found in methods.items()}
    facts["full_wins"] = {"density": density, "bandwidth": bandwidth}
    facts |= {"inputs": asdict(scenario), "target": target}
    lines = [
        f"{counted(scenario.params, 'parameter')}, density {scenario.density:.3%}, "
        f"{scenario.step_seconds:g} s per step, {format_bandwidth(scenario.bandwidth)} to each "
        "worker",
        f"  {'':18} {'bytes/sync':>10} {'utilization':>12} {'of a worker':>14} {'time/sync':>10}  "
        f"bandwidth for {target:.0%}",
    ]
    for method, m in methods.items():
        needed = format_bandwidth(m.bandwidth_for_target)
        lines.append(
            f"  {_LABELS[method]:18} {format_bytes(m.sync_bytes):>10} {m.utilization:>12.1%} "
            f"{m.worker_utilization:>14.1%} {format_duration(m.sync_seconds):>10}  {needed}"
        )
    phases = methods["auto"].phases.items()
    lines.append("  auto: " + ", ".join(f"{name} {format_duration(s)}" for name, s in phases))
    if "history" not in scenario.bytes_per_changed:
        lines.append(
            "  with history: as with FP32 masters; with pure BF16 weights it saves 42 to 45%"
        )
    over = f"above density {density:.1%}" if density is not None else "never"
    beyond = f"above {format_bandwidth(bandwidth)}" if bandwidth is not None else "never"
    lines.append(f"  a full sync is faster: on this link, {over}; at this density, {beyond}")
    console.result(facts, *lines)


def study(args: argparse.Namespace, console: Console) -> None:
    """Measure the sparsity of updates between saved states.

    pulse study checkpoints -o study.html
    """
    if args.output:
        check_output(Path(args.output), PAGE_MARK, force=args.force)
    given = facts_of(args, "stream", "dtype", "step_seconds", "threads") | {"ks": args.k}
    found = studies.study(args.source, on_event=console, **given)
    lines = lines_of(found)
    if args.quantize is not None:
        found["quantized"] = studies.study(args.source, quantize=args.quantize, **given)
        lines += compared_with(found, found["quantized"])
    if args.output:
        page = render(study=found, title=found["source"]).encode()
        write_output(Path(args.output), [page], PAGE_MARK, force=args.force)
    console.result(found, *lines)


def lines_of(found: dict[str, Any]) -> list[str]:
    """A study as readable lines; the last three are the summary."""
    states = found["states"]
    lines = [
        f"{found['source']}: {len(states)} states ({states[0]} … {states[-1]}) of "
        f"{counted(found['parameters'], 'parameter')} in {found['dtype']}",
        "",
        "sparsity: fraction of weights that are bitwise equal in two states k apart",
        f"{'k':>5} {'pairs':>6} {'mean':>9} {'min':>9} {'max':>9} {'untouched':>10}",
    ]
    for row in found["rows"]:
        lines.append(
            f"{row['k']:>5} {row['pairs']:>6} {row['sparsity']:>9.3%} {row['sparsity_min']:>9.3%} "
            f"{row['sparsity_max']:>9.3%} {row['untouched']:>10.3%}"
        )
    lines.append("untouched: fraction of weights that are also equal in every state in between")
    lines += _by_k("layer type", "layer", found["layers"], None)
    lines += _by_k("least sparse tensors", "name", found["tensors"], _SHOWN_TENSORS)
    lines += [
        "",
        "bytes per changed weight",
        f"{'k':>5} {'auto':>9} {'zstd':>9} {'a patch':>10}",
    ]
    for row in found["rows"]:
        if row["bytes"] is not None:
            lines.append(
                f"{row['k']:>5} {row['bytes_per_changed']:>9.3f} "
                f"{row['bytes_per_changed_zstd']:>9.3f} {format_bytes(row['bytes']):>10}"
            )
    numbers, k = found["summary"], found["rows"][0]["k"]
    nbytes = numbers["bytes_per_sync"]
    over = "from one state to the next" if k == 1 else f"over {k} states"
    bandwidth = format_bandwidth(numbers["bandwidth_for_target"])
    full = format_bandwidth(numbers["bandwidth_full"])
    return [
        *lines,
        "",
        f"sparsity          {numbers['sparsity']:.3%} {over}",
        f"bytes per sync    {format_bytes(nbytes)} instead of {format_bytes(found['dense_bytes'])}",
        f"bandwidth         {bandwidth} instead of {full} for {numbers['target']:.0%} utilization "
        f"at {numbers['step_seconds']:g} s per step",
    ]


def compared_with(found: dict[str, Any], quantized: dict[str, Any]) -> list[str]:
    """What a quantized state changes and costs, compared with the same states as they are."""
    kinds = list(dict.fromkeys(row["kind"] for row in quantized["kinds"]))
    changed = {(row["kind"], row["k"]): 1 - row["sparsity"] for row in quantized["kinds"]}
    lines = [
        "",
        "quantized: what changes of each kind of tensor, and a patch beside the one above",
        f"{'k':>5} {found['dtype']:>9} | {' '.join(f'{kind:>9}' for kind in kinds)} "
        f"{'a patch':>10} {'smaller':>8}",
    ]
    for before, row in zip(found["rows"], quantized["rows"], strict=True):
        shares = " ".join(f"{changed[kind, row['k']]:>9.3%}" for kind in kinds)
        line = f"{row['k']:>5} {1 - before['sparsity']:>9.3%} | {shares}"
        if row["bytes"] and before["bytes"]:
            line += f" {format_bytes(row['bytes']):>10} {before['bytes'] / row['bytes']:>7.1f}x"
        lines.append(line)
    return lines


def _by_k(title: str, key: str, rows: list[dict[str, Any]], limit: int | None) -> list[str]:
    """Mean sparsity by name and k, the least sparse first."""
    table: dict[str, list[float]] = {}
    for row in rows:
        if row["elements"]:
            table.setdefault(row[key], []).append(row["sparsity"])
    ks = sorted({row["k"] for row in rows})
    shown = sorted(table.items(), key=lambda item: item[1][0])[:limit]
    width = max(len(title), *(len(name) for name, _ in shown)) if shown else len(title)
    head = " ".join(f"{f'k={k}':>9}" for k in ks)
    return [
        "",
        f"{title:<{width}} {head}",
        *(f"{name:<{width}} {' '.join(f'{v:>9.3%}' for v in values)}" for name, values in shown),
        *([f"(and {len(table) - len(shown)} more: --json)"] if len(table) > len(shown) else []),
    ]


def report(args: argparse.Namespace, console: Console) -> None:
    """Write a run or a study as one HTML page.

    pulse report runs/policy -o run.html
    """
    source, out = Path(args.source), Path(args.output)
    check_output(out, PAGE_MARK, force=args.force)
    file = source / STUDY_NAME if source.is_dir() else source
    found = run = None
    if file.suffix == ".json" and file.exists():
        found = _read_study(file)
    if found is None or (
        source.is_dir() and (args.stream is not None or any(source.glob("events*.jsonl")))
    ):
        run = read_run(source, stream=args.stream)
    page = render(run=run, study=found, title=f"Pulse report: {source.resolve().name}").encode()
    write_output(out, [page], PAGE_MARK, force=args.force)
    drawn = {"run": run is not None, "study": found is not None}
    what = " and ".join(name for name, there in drawn.items() if there)
    facts = {"output": str(out), "bytes": len(page), **drawn}
    console.result(facts, f"{out}: {what} report, {format_bytes(len(page))}")


def _read_study(path: Path) -> Any:
    """The JSON of a study. Raises InputError."""
    try:
        with open_regular(path) as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        hint = "Give the output of `pulse study --json`."
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot read {shortened(path)}: {reason}", hint=hint) from None
