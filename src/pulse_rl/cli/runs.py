"""Commands that take versions out of a stream: checkout; and with a program for each, evaluate and
bisect."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .._util.serial import Closing
from .._util.settings import counted, format_bytes, format_number, short_int
from ..errors import InputError
from ..events import Event, Synced
from ..follow.checkpoint import FILE_NAME
from ..follow.folder import InUse, check_folder
from ..metrics import JsonLines, read_events, tee_listeners
from ..ops import checkout as checkouts
from ..store.base import UNREADABLE
from ..sync.planner import BROKEN_LINK
from .common import (
    COMMON,
    LAYOUT,
    STREAM,
    TRUST,
    WRITING,
    Console,
    add_command,
    add_metadata,
    count,
    facts_of,
    number,
    open_lasting,
    path,
    reading,
)
from .inventory import opened_stream, versions_of

_SKIP, _LAST_BAD = 125, 127
_PLACE = "{}"


def add_parsers(commands: Any) -> None:
    parents = (COMMON, STREAM, TRUST, LAYOUT, WRITING)
    command = add_command(commands, "checkout", checkout, *parents)
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--version", type=number, metavar="N", help="the version's number")
    text = "the newest version with this root, or its first 8 digits or more"
    which.add_argument("--root", metavar="ROOT", help=text)
    add_metadata(which, "the newest version that says this, such as step=400")
    text = "a folder that engines load"
    command.add_argument("--out", type=path, required=True, metavar="DIR", help=text)

    command = add_command(commands, "evaluate", evaluate, *parents)
    text = "versions N, 2N, 3N …, the first and the newest"
    command.add_argument("--every", type=count, required=True, metavar="N", help=text)
    _add_program(command, "events-evaluate.jsonl")

    command = add_command(commands, "bisect", bisect, *parents)
    text = "a version that is good"
    command.add_argument("--good", type=number, required=True, metavar="N", help=text)
    text = "a later one that is bad"
    command.add_argument("--bad", type=number, required=True, metavar="N", help=text)
    _add_program(command, "events-bisect.jsonl")


def _add_program(command: argparse.ArgumentParser, log: str) -> None:
    command.add_argument(
        "program",
        nargs="+",
        metavar="COMMAND",
        help=f"after --: the program and its arguments; {_PLACE} is the version's folder, which "
        f"comes last without {_PLACE}. PULSE_VERSION is the version's number. The last line of its "
        "output that is a number or a JSON object of numbers is kept",
    )
    text = "a line for each version, from which a command that was stopped goes on (default: "
    command.add_argument("--log", type=path, default=log, metavar="FILE", help=f"{text}{log})")
    text = "the folder of the version, which stays (default: a temporary one)"
    command.add_argument("--out", type=path, metavar="DIR", help=text)


def checkout(args: argparse.Namespace, console: Console) -> None:
    """Write a version as a checkpoint.

    pulse checkout s3://bucket/run --stream policy --version 40 --out policy-40
    """
    out, started = Path(args.out), time.perf_counter()
    check_folder(out, [FILE_NAME], force=args.force)
    fetched: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, Synced):
            fetched.append(event.fetched_bytes)

    with (
        InUse(out) as use,
        checkouts.checkout(
            open_lasting(args.store),
            args.stream,
            version=args.version,
            root=args.root,
            metadata=None if args.metadata is None else dict(args.metadata),
            **reading(args, tee_listeners(console, listen)),
        ) as found,
    ):
        use.take()
        found.save(out, sharded=args.sharded, force=args.force)
        console.note_files(found.files())
        facts = facts_of(found, "version", "root", "metadata")
    nbytes, seconds = sum(fetched), round(time.perf_counter() - started, 6)
    console.result(
        facts | {"payload_bytes": nbytes, "seconds": seconds},
        f"version {facts['version']}: {format_bytes(nbytes)} fetched, root {facts['root']} "
        "verified",
    )


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A line of the log: the ``program`` ended with ``status`` on a version, which took
    ``seconds``; ``metrics`` are the numbers that it printed."""

    stream: str
    version: int
    root: str
    program: list[str]
    status: int
    metrics: dict[str, float]
    seconds: float


class Runs(Closing):
    """The versions of a stream, and the program of the command on any of them, once: what the log
    has is not asked again. A context manager."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self._args = args
        self._console = console
        if args.out is not None:
            check_folder(Path(args.out), [FILE_NAME], force=args.force)
        self.stream = opened_stream(open_lasting(args.store), args.stream, args)
        self.versions = versions_of(self.stream)
        known = read_events(args.log) if Path(args.log).exists() else ()
        self._known = {(e["version"], e["root"]): e for e in known if self._is_ours(e)}
        self._checkout: checkouts.Checkout | None = None
        self._temporary = TemporaryDirectory(prefix="pulse-")
        self._folder = Path(args.out or Path(self._temporary.name, "policy")).absolute()
        self._use = InUse(self._folder)

    def on(self, version: int, accepted: Collection[int]) -> Evaluated:
        """What came of the program on a version. Status 125 where the version cannot be had. Raises
        InputError where the program cannot be run, or ends with a status that is not
        ``accepted``."""
        args = self._args
        # 1. The version, unless the log has what came of it.
        try:
            root = self.stream.manifest(version).root
            if known := self._known.get((version, root)):
                return Evaluated(*(known[name] for name in Evaluated.__slots__))
            self._use.take()
            if self._checkout is None:
                self._checkout = checkouts.checkout(
                    args.store,
                    args.stream,
                    version=version,
                    cache=self._temporary.name,  # evaluations go back and forth
                    **reading(args, self._console),
                )
            self._checkout.to(version).save(self._folder, sharded=args.sharded, force=args.force)
        except (*BROKEN_LINK, *UNREADABLE) as error:
            self._console.note(f"version {version} is passed over: {error}")
            return Evaluated(args.stream, version, "", args.program, _SKIP, {}, 0.0)
        # 2. The program.
        started = time.perf_counter()
        status, metrics = self._run(version)
        seconds = round(time.perf_counter() - started, 3)
        if status not in accepted:
            how = f"status {status}" if status >= 0 else f"signal {-status}"
            hint = (
                "0 is good, 125 skips a version, 1 to 127 is bad for bisect; the same command "
                "goes on from its log."
            )
            raise InputError(f"{args.program[0]} ended with {how} on version {version}", hint=hint)
        # 3. The log, of what is no event of the library's own: only commands make it.
        done = Evaluated(args.stream, version, root, args.program, status, metrics, seconds)
        with JsonLines(args.log) as log:
            log(done)  # type: ignore[arg-type]
        return done

    def close(self) -> None:
        if self._checkout:
            self._checkout.close()
        self._use.close()
        self._temporary.cleanup()

    def _is_ours(self, event: dict[str, Any]) -> bool:
        named = all(name in event for name in Evaluated.__slots__)
        ours = (self._args.stream, self._args.program)
        return named and (event["stream"], event["program"]) == ours

    def _run(self, version: int) -> tuple[int, dict[str, float]]:
        """The status of the program, and the numbers that it printed."""
        words = [word.replace(_PLACE, str(self._folder)) for word in self._args.program]
        words += [str(self._folder)] if words == self._args.program else []
        metrics: dict[str, float] = {}
        try:
            with subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
                env=os.environ | {"PULSE_VERSION": str(version)},
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    print(line, end="", file=sys.stderr, flush=True)
                    metrics = _numbers(line) or metrics
        except OSError as error:
            hint = "Give the program after --, with the arguments that it needs."
            raise InputError(f"cannot run {words[0]}: {error.strerror}", hint=hint) from None
        return process.returncode, metrics


def _numbers(line: str) -> dict[str, float]:
    """The numbers of a line that is a number or a JSON object; empty for any other."""
    try:
        said = json.loads(line, parse_int=short_int)
    except (ValueError, RecursionError):
        return {}
    found = said.items() if isinstance(said, dict) else [("value", said)]
    return {
        name: value
        for name, value in found
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def evaluate(args: argparse.Namespace, console: Console) -> None:
    """Run a program on versions of a stream, and keep what it prints.

    pulse evaluate s3://bucket/run --stream policy --every 50 -- python evaluate.py --model {}
    """
    with Runs(args, console) as runs:
        ends = {runs.versions[0], runs.versions[-1]}
        for version in runs.versions:
            if version % args.every and version not in ends:
                continue
            done = runs.on(version, (0, _SKIP))
            if done.status == 0 and not done.metrics:
                hint = "Its last line must be a number, or a JSON object of numbers."
                raise InputError(
                    f"{args.program[0]} printed no number on version {version}", hint=hint
                )
            shown = _shown(done.metrics) if done.status == 0 else "skipped"
            facts = facts_of(done, "version", "root", "status", "metrics", "seconds")
            console.result(facts, f"version {version}: {shown}")
    console.note(f"`pulse report {args.log} -o evaluation.html` shows the curve")


def bisect(args: argparse.Namespace, console: Console) -> int:
    """Find the first version for which a program fails.

    pulse bisect s3://bucket/run --stream policy --good 100 --bad 400 -- ./is-good.sh {}
    """
    with Runs(args, console) as runs:
        for end in (args.good, args.bad):
            if end not in runs.versions:
                has = f"it has {runs.versions[0]} to {runs.versions[-1]}"
                raise InputError(
                    f"stream {args.stream!r} has no version {end}: {has}",
                    hint="`pulse log` shows them.",
                )
        if args.good >= args.bad:
            raise InputError(
                "the good version is not before the bad one", hint="Give an earlier --good."
            )
        # 1. The first bad one is among these, of which the last is known to be bad.
        suspects = [version for version in runs.versions if args.good < version <= args.bad]
        skipped = set[int]()
        asked = 0
        while rest := [version for version in suspects[:-1] if version not in skipped]:
            middle = suspects[(len(suspects) - 1) // 2]
            version = min(rest, key=lambda each: abs(each - middle))
            done = runs.on(version, range(_LAST_BAD + 1))
            asked += 1
            verdict = "good" if done.status == 0 else "skipped" if done.status == _SKIP else "bad"
            if verdict == "good":
                suspects = [each for each in suspects if each > version]
            elif verdict == "bad":
                suspects = [each for each in suspects if each <= version]
            else:
                skipped.add(version)
            shown = f" ({_shown(done.metrics)})" if done.metrics else ""
            console.result(
                {"verdict": verdict, "left": len(suspects)}
                | facts_of(done, "version", "status", "metrics", "seconds"),
                f"version {version}: {verdict}{shown}, {len(suspects)} left",
            )
        # 2. It is one of several, where those between could not be asked.
        facts: dict[str, Any] = {"first_bad": None, "suspects": suspects, "asked": asked}
        if len(suspects) > 1:
            names = ", ".join(map(str, suspects))
            line = f"the first bad version is one of {names}: the others were skipped"
            console.result(facts, line)
            return 1
        (first,) = suspects
        metadata = runs.stream.manifest(first).metadata
        said = " ".join(f"{key}={value}" for key, value in metadata.items())
        facts |= {"first_bad": first, "metadata": metadata}
        of = f" ({said})" if said else ""
        tries = counted(asked, "time")
        console.result(facts, f"version {first} is the first bad one{of}, asked {tries}")
        return 0


def _shown(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={format_number(value)}" for name, value in metrics.items())
