"""The commands study, how sparse the updates between saved states are, and report: a run, a study,
or both as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._util.settings import format_bandwidth, format_bytes
from ..events import progress_to
from ..report import read_run, render
from ..state.cast import COMPUTE_DTYPES, cast_specs
from ..state.quantise_formats import FORMATS
from ..state.tensors import TensorSpec
from ..study import CheckpointFolder, StoredStream, study
from ..study.result import STEP_SECONDS
from ..study.run import DEFAULT_KS, StateSequence
from .arguments import compute_dtype, quantisation, seconds
from .output import PAGE_MARK, Console, check_output, read_study, write_output

_SHOWN_TENSORS = 8
_SHOWN_SHARE = 1e-3


def add_parser(commands: Any) -> None:
    """Adds the command to ``commands``, argparse's sub-parsers."""
    command = commands.add_parser(
        "study", help="measure the sparsity of updates between saved states"
    )
    command.add_argument(
        "source", metavar="SOURCE", help="a folder of checkpoints; with --stream, a store"
    )
    command.add_argument("--stream", metavar="S", help="study the versions of this stream")
    command.add_argument(
        "--dtype",
        type=compute_dtype,
        choices=list(COMPUTE_DTYPES),
        default="BF16",
        help="compute dtype; wider weights are cast to it (default: BF16)",
    )
    command.add_argument(
        "--quantise",
        type=quantisation,
        metavar="FORMAT",
        help="study codes and scales beside weights in --dtype, quantised from what is stored: "
        f"{', '.join(FORMATS)}, or the config.json of a quantised model",
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
        "--lr",
        type=float,
        metavar="LR",
        help="learning rate; adds the density that theory predicts",
    )
    command.add_argument(
        "--step-seconds",
        type=seconds,
        default=STEP_SECONDS,
        metavar="T",
        help="compute between syncs: 50 or 50s (default: 50)",
    )
    command.add_argument("-o", "--output", metavar="REPORT", help="also write an HTML report")
    command.add_argument(
        "--force", action="store_true", help="replace REPORT even if it is something else"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--threads", type=int, metavar="N", help="number of threads (default: one per core)"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    source: StateSequence
    if args.output:
        check_output(Path(args.output), PAGE_MARK, force=args.force)
    if args.stream:
        source = StoredStream(args.source, args.stream, threads=args.threads)
    else:
        source = CheckpointFolder(args.source)
    found = study(
        source,
        dtype=args.dtype,
        ks=args.k,
        lr=args.lr,
        step_seconds=args.step_seconds,
        threads=args.threads,
        progress=progress_to(
            console, "study", len(source.state_names) * _nbytes(source.specs, args.dtype)
        ),
    )
    lines = lines_of(found)
    if args.quantise is not None:
        given = {
            "ks": args.k,
            "lr": args.lr,
            "step_seconds": args.step_seconds,
            "threads": args.threads,
        }
        found["quantised"] = study(source, dtype=args.dtype, quantise=args.quantise, **given)
        lines += beside(found, found["quantised"])
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
        f"{'k':>5} {'auto':>9} {'zstd':>9} {'entropy':>9} {'a patch':>10}",
    ]
    for row in found["rows"]:
        if row["bytes"] is not None:
            lines.append(
                f"{row['k']:>5} {row['bytes_per_changed']:>9.3f} "
                f"{row['bytes_per_changed_zstd']:>9.3f} "
                f"{row['entropy_bound']:>9.3f} {format_bytes(row['bytes']):>10}"
            )
    return [*lines, *_history(found["history"]), *_exponents(found), "", *_three_numbers(found)]


def beside(found: dict[str, Any], quantised: dict[str, Any]) -> list[str]:
    """What a quantised state changes and costs, beside the same states as they are."""
    kinds = list(dict.fromkeys(row["kind"] for row in quantised["kinds"]))
    changed = {(row["kind"], row["k"]): 1 - row["sparsity"] for row in quantised["kinds"]}
    lines = [
        "",
        "quantised: what changes of each kind of tensor, and a patch beside the one above",
        f"{'k':>5} {found['dtype']:>9} | {' '.join(f'{kind:>9}' for kind in kinds)} "
        f"{'a patch':>10} {'smaller':>8}",
    ]
    for before, row in zip(found["rows"], quantised["rows"], strict=True):
        shares = " ".join(f"{changed[kind, row['k']]:>9.3%}" for kind in kinds)
        line = f"{row['k']:>5} {1 - before['sparsity']:>9.3%} | {shares}"
        if row["bytes"] and before["bytes"]:
            line += f" {format_bytes(row['bytes']):>10} {before['bytes'] / row['bytes']:>7.1f}x"
        lines.append(line)
    return lines


def _history(history: dict[str, Any] | None) -> list[str]:
    """Recurrence by age, the bound with and without history, and what the codecs reach."""
    if history is None or not history["changed"]:
        return []
    ages = [(_age(age["from"], age["to"]), age["share"]) for age in history["ages"]]
    lines = [
        "",
        "recurrence: of what changed from one state to the next, the share that had last "
        "changed so many states ago "
        f"(the last {history['steps']} steps)",
        " ".join(f"{name:>9}" for name, _ in (*ages, ("not yet", 0))),
        " ".join(f"{share:>9.3%}" for _, share in (*ages, ("", history["not_yet"]))),
        f"within 8 states: {history['within_8']:.3%}",
    ]
    if history["entropy_bound"] is None:
        return lines
    names = ("position", "sign", "size")
    lines += [
        "",
        f"what history knows of a step ({history['coded_steps']} of these): entropies in bits a "
        "change; their sum and "
        "whole patch files in bytes",
        f"{'':15} {' '.join(f'{name:>9}' for name in names)} {'entropy':>9} {'files':>9}",
    ]
    for label, suffix, codec in (
        ("without history", "", "auto"),
        ("with history", "_with_history", "history"),
    ):
        bits = " ".join(f"{history[f'{name}_bits{suffix}']:>9.3f}" for name in names)
        bound, reached = history[f"entropy_bound{suffix}"], history[f"bytes_per_changed_{codec}"]
        lines.append(f"{label:15} {bits} {bound:>9.3f} {reached:>9.3f} by {codec}")
    return lines


def _age(first: int, last: int | None) -> str:
    if last is None:
        return f"{first} +"
    return f"{first}" if first == last else f"{first}-{last}"


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


def _exponents(found: dict[str, Any]) -> list[str]:
    rows = found["exponents"]
    total = sum(row["elements"] for row in rows)
    shown = [row for row in rows if row["elements"] >= _SHOWN_SHARE * total]
    if not shown:
        return []
    theory = f" {'if |dw| = lr':>13} {'10 lr':>9}" if found["lr"] else ""
    k = found["rows"][0]["k"]
    lines = [
        "",
        f"density by size of the old weight, k = {k}; an update below `visible from` is lost in "
        "weights kept in "
        f"{found['dtype']}, but FP32 masters accumulate it",
        f"{'|w| from':>10} {'share':>9} {'density':>9} {'visible from':>13}{theory}",
    ]
    for row in shown:
        share, density = row["elements"] / total, row["density"]
        line = (
            f"{2.0 ** row['exponent']:>10.2g} {share:>9.3%} {density:>9.3%} "
            f"{row['threshold']:>13.2g}"
        )
        if found["lr"]:
            line += f" {row['predicted_lr']:>13.3%} {row['predicted_10lr']:>9.3%}"
        lines.append(line)
    return lines


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
        f"bandwidth         {bandwidth} instead of {full} for {numbers['target']:.0%} utilisation "
        f"at {numbers['step_seconds']:g} s per step",
    ]


def _nbytes(specs: tuple[TensorSpec, ...], dtype: str) -> int:
    return sum(s.nbytes for s in cast_specs(specs, COMPUTE_DTYPES[dtype]))


STUDY_NAME = "study.json"


def add_report_parser(commands: Any) -> None:
    """Adds the command to ``commands``, argparse's sub-parsers."""
    command = commands.add_parser("report", help="write a run or a study as one HTML page")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "source",
        metavar="RUN",
        help="a folder with events*.jsonl, study.json or both, or one such file",
    )
    command.add_argument(
        "-o", "--output", required=True, metavar="HTML", help="the HTML file to write"
    )
    command.add_argument(
        "--force", action="store_true", help="replace HTML even if it is something else"
    )
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
