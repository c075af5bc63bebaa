"""The commands study, how sparse the updates between saved states are, and report: a run, a study,
or both as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._util.settings import format_bytes
from ..events import progress_to
from ..report import read_run, render
from ..state.cast import COMPUTE_DTYPES, cast_specs
from ..study import CheckpointFolder, StoredStream, study
from ..study.result import STEP_SECONDS
from ..study.run import DEFAULT_KS, StateSequence
from ..study.units import format_bandwidth
from .arguments import Shared, add_quantize, compute_dtype, seconds
from .output import PAGE_MARK, Console, check_output, read_study, write_output

_SHOWN_TENSORS = 8


def add_parser(commands: Any, _: Shared) -> None:
    """Add the command to ``commands``, argparse's sub-parsers."""
    command = commands.add_parser(
        "study", help="measure the sparsity of updates between saved states"
    )
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
        default=list(DEFAULT_KS),
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
    command.add_argument("-o", "--output", metavar="REPORT", help="also write an HTML report")
    text = "replace REPORT even if it is something else"
    command.add_argument("--force", action="store_true", help=text)
    command.add_argument("--json", action="store_true", help="print JSON")
    text = "number of threads (default: one per core)"
    command.add_argument("--threads", type=int, metavar="N", help=text)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    source: StateSequence
    if args.output:
        check_output(Path(args.output), PAGE_MARK, force=args.force)
    if args.stream:
        source = StoredStream(args.source, args.stream, threads=args.threads)
    else:
        source = CheckpointFolder(args.source)
    given = {
        "dtype": args.dtype,
        "ks": args.k,
        "step_seconds": args.step_seconds,
        "threads": args.threads,
    }
    specs = cast_specs(source.specs, COMPUTE_DTYPES[args.dtype])
    nbytes = len(source.state_names) * sum(spec.nbytes for spec in specs)
    found = study(source, progress=progress_to(console, "study", nbytes), **given)
    lines = lines_of(found)
    if args.quantize is not None:
        found["quantized"] = study(source, quantize=args.quantize, **given)
        lines += beside(found, found["quantized"])
    if args.output:
        write_output(
            Path(args.output),
            [render(study=found, title=source.name).encode()],
            PAGE_MARK,
            force=args.force,
        )
    console.result(found, lines)
    return 0


def lines_of(found: dict[str, Any]) -> list[str]:
    """A study as readable lines; the last three are the summary."""
    states = found["states"]
    lines = [
        f"{found['source']}: {len(states)} states ({states[0]} … {states[-1]}) of "
        f"{found['parameters']:,} parameters "
        f"in {found['dtype']}",
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
    return [*lines, "", *_three_numbers(found)]


def beside(found: dict[str, Any], quantized: dict[str, Any]) -> list[str]:
    """What a quantized state changes and costs, beside the same states as they are."""
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


def _three_numbers(found: dict[str, Any]) -> list[str]:
    numbers, k = found["summary"], found["rows"][0]["k"]
    nbytes = numbers["bytes_per_sync"]
    over = "from one state to the next" if k == 1 else f"over {k} states"
    bandwidth, full = (
        format_bandwidth(numbers["bandwidth_for_target"]),
        format_bandwidth(numbers["bandwidth_full"]),
    )
    return [
        f"sparsity          {numbers['sparsity']:.3%} {over}",
        f"bytes per sync    {format_bytes(nbytes)} instead of {format_bytes(found['dense_bytes'])}",
        f"bandwidth         {bandwidth} instead of {full} for {numbers['target']:.0%} utilization "
        f"at {numbers['step_seconds']:g} s per step",
    ]


STUDY_NAME = "study.json"


def add_report_parser(commands: Any, _: Shared) -> None:
    """Add the command to ``commands``, argparse's sub-parsers."""
    command = commands.add_parser("report", help="write a run or a study as one HTML page")
    command.add_argument("--json", action="store_true", help="print JSON")
    text = "a folder with events*.jsonl, study.json or both, or one such file"
    command.add_argument("source", metavar="RUN", help=text)
    text = "the HTML file to write"
    command.add_argument("-o", "--output", required=True, metavar="HTML", help=text)
    text = "replace HTML even if it is something else"
    command.add_argument("--force", action="store_true", help=text)
    command.add_argument("--stream", metavar="S", help="the stream to show, if the run has several")
    command.set_defaults(run=report)


def report(args: argparse.Namespace, console: Console) -> int:
    source, out = Path(args.source), Path(args.output)
    check_output(out, PAGE_MARK, force=args.force)
    study = _study_of(source)
    run = None
    if source.is_file():
        run = None if study is not None else read_run(source, stream=args.stream)
    elif study is None or args.stream is not None or any(source.glob("events*.jsonl")):
        run = read_run(source, stream=args.stream)
    page = render(run=run, study=study, title=f"Pulse report: {source.resolve().name}").encode()
    write_output(out, [page], PAGE_MARK, force=args.force)
    drawn = {"run": run is not None, "study": study is not None}
    what = " and ".join(name for name, there in drawn.items() if there)
    console.result(
        {"output": str(out), "bytes": len(page), **drawn},
        [f"{out}: {what} report, {format_bytes(len(page))}"],
    )
    return 0


def _study_of(source: Path) -> Any:
    """The study in the folder or file ``source``, None where there is none."""
    file = source / STUDY_NAME if source.is_dir() else source
    if file.suffix != ".json" or not file.exists():
        return None
    return read_study(file)
