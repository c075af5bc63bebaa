"""Everything that needs a GPU, in at most twelve minutes; results are written after each row.

    python -m benchmarks.gpu --out FILE           # on a machine with a GPU
    python -m benchmarks.gpu --try --out FILE     # small; without a GPU the
                                                  # CPU stands in for it
    python -m benchmarks.gpu --table FILE         # what the docs show of a FILE

A row is a process of its own. If it fails, or takes longer than its limit, the file says so and the
next row runs. The first row measures what the machine can do at best. Rows need torch and pulse-rl,
the last but one transformers and the model's folder, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import machine

# --try needs 50 s of processor time; other programs may run.
_MINUTES, _TRY_MINUTES, _TRY_SECONDS = 12.0, 6.0, 60
#: No row before it may use the time of this one.
_KEPT = "grpo"


class Row(NamedTuple):
    """``part``: the function of `measures`. ``seconds``: its limit."""

    name: str
    part: str
    seconds: int
    words: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()


ROWS = (
    Row("limits", "limits", 60),
    Row("roots", "roots", 60),
    Row("apply", "apply", 120),
    Row("threads", "threads", 120),
    Row("submit", "submit", 75),
    Row("submit, copied on the device", "submit", 75, ("--copy-on-device",)),
    Row("tensors", "tensors", 60),
    Row("quantize", "quantize", 60),
    Row("quantize, host", "quantize_host", 60),
    Row("scatter", "scatter", 40),
    Row("grpo", "grpo", 180),
    Row(
        "compute-sanitizer",
        "roots",
        100,
        ("--try",),
        ("compute-sanitizer", "--error-exitcode", "1"),
    ),
)


def run(row: Row, seconds: float, words: list[str]) -> dict[str, Any]:
    """The row's entry in the file."""
    entry: dict[str, Any] = {"row": row.name, "limit_s": round(seconds)}
    if row.prefix and shutil.which(row.prefix[0]) is None:
        return entry | {"status": "not run", "reason": f"no {row.prefix[0]}"}
    if seconds < 1:
        return entry | {"status": "not run", "reason": "no time was left"}
    command = [*row.prefix, sys.executable, "-m", "benchmarks.gpu", "--part", row.part]
    began = time.monotonic()
    # A group of its own: what hangs is killed with all that it has started.
    process = subprocess.Popen(
        [*command, *row.words, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
        status = "ok" if process.returncode == 0 else "failed"
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        printed, errors = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        status = "timed out"
    entry |= {"status": status, "seconds": round(time.monotonic() - began, 1)}
    if status == "ok":
        # compute-sanitizer adds lines of its own.
        found = [line for line in printed.splitlines() if line.startswith("{")]
        entry |= json.loads(found[-1]) if found else {"status": "failed", "reason": "no result"}
    else:
        entry["reason"] = (errors.strip() or printed.strip())[-600:]
        entry["exit"] = process.returncode
    return entry


def write(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(results, indent=1) + "\n")
        unfinished.replace(path)


def about(words: list[str]) -> dict[str, Any]:
    import torch

    import pulse_rl

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    triton = importlib.util.find_spec("triton") is not None
    return {
        "command": " ".join(["python -m benchmarks.gpu", *words]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "gpu": gpu or "none: the CPU stands in for it, and no figure says anything about a GPU",
        "torch": torch.__version__,
        "triton": triton,
        "pulse_rl": pulse_rl.__version__,
    }


def table(results: dict[str, Any]) -> str:
    """Markdown: a line for each figure, with the row that it is from."""
    head = results["about"]
    lines = [
        f"`{head['command']}` · {head['date']} · {head['gpu']} · torch {head['torch']} · "
        f"{head['machine']['cores']} cores of {head['machine']['cpu']}",
        "",
        "| row | figure | value |",
        "|---|---|---|",
    ]
    for row in results["rows"]:
        name = f"{row['row']} ({row.get('seconds', 0):.0f} s)"
        if row["status"] != "ok":
            reason = " ".join(row.get("reason", "").split())[-200:].replace("|", "/")
            lines.append(f"| {name} | {row['status']} | {reason} |")
            continue
        for key, value in row["figures"].items():
            shown = f"{value:,.4g}" if isinstance(value, float) else f"{value}"
            lines.append(f"| {name} | {key} | {shown} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, written after each row")
    parser.add_argument("--try", dest="small", action="store_true", help="small")
    text = f"default: {_MINUTES:.0f}; {_TRY_MINUTES:.0f} with --try"
    parser.add_argument("--minutes", type=float, help=text)
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=[row.name for row in ROWS])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="SmolLM2's checkpoint, for GRPO")  # fmt: skip  # noqa: E501
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a file")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--copy-on-device", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return 0
    if arguments.part:
        from benchmarks.gpu import measures

        print(json.dumps(measures.measured(arguments)), flush=True)
        return 0
    words = ["--try"] if arguments.small else []
    shown = words + ([f"--out {arguments.out.name}"] if arguments.out else [])
    if arguments.model:
        words += ["--model", str(arguments.model)]
    minutes = arguments.minutes or (_TRY_MINUTES if arguments.small else _MINUTES)
    until = time.monotonic() + 60 * minutes
    rows = [row for row in ROWS if not arguments.only or row.name in arguments.only]
    results: dict[str, Any] = {"about": about(shown), "rows": []}
    print(json.dumps(results["about"]), flush=True)
    kept = sum(row.seconds for row in rows if row.name == _KEPT and not arguments.small)
    for row in rows:
        if row.name == _KEPT:
            kept = 0
        limit = row.seconds
        if arguments.small and row.name != _KEPT:  # it unpacks the model first
            limit = min(limit, _TRY_SECONDS)
        entry = run(row, min(limit, until - time.monotonic() - kept), words)
        results["rows"].append(entry)
        write(arguments.out, results)
        print(json.dumps(entry), flush=True)
    return int(any(row["status"] in ("failed", "timed out") for row in results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
