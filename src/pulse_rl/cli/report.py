"""The command report: a run, a study, or both as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._util.settings import format_bytes
from ..report import read_run, render
from .output import Console
from .paths import check_output, read_study, write_output

STUDY_NAME = "study.json"


def add_parser(commands: Any) -> None:
    """Adds the command to ``commands``, argparse's sub-parsers."""
    command = commands.add_parser("report", help="write a run or a study as one HTML page")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "source", metavar="RUN", help="a folder with events*.jsonl, study.json or both, or one such file"
    )
    command.add_argument("-o", "--output", required=True, metavar="HTML", help="the HTML file to write")
    command.add_argument("--force", action="store_true", help="replace HTML even if it is something else")
    command.add_argument("--stream", metavar="S", help="the stream to show, if the run has several")
    command.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    source, out = Path(args.source), Path(args.output)
    check_output(out, force=args.force)
    study = _study_of(source)
    drawn = None
    if source.is_file():
        drawn = None if study is not None else read_run(source, stream=args.stream)
    elif study is None or args.stream is not None or any(source.glob("events*.jsonl")):
        drawn = read_run(source, stream=args.stream)
    page = render(run=drawn, study=study, title=f"Pulse report: {source.resolve().name}").encode()
    write_output(out, [page], force=args.force)
    shown = {"run": drawn is not None, "study": study is not None}
    facts = {"output": str(out), "bytes": len(page), **shown, "summary": drawn["summary"] if drawn else None}
    what = " and ".join(name for name, there in shown.items() if there)
    console.result(facts, [f"{out}: {what} report, {format_bytes(len(page))}"])
    return 0


def _study_of(source: Path) -> Any:
    """The study in the folder or file ``source``, None where there is none."""
    file = source / STUDY_NAME if source.is_dir() else source
    if file.suffix != ".json" or not file.exists():
        return None
    return read_study(file)
