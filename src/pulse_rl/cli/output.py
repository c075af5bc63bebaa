"""What commands print, write and read: one JSON object or readable lines on stdout, progress and
errors on stderr; no output file replaces what Pulse did not write, no input is a device."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._util.files import open_regular, write_atomically
from ..errors import InputError, PulseError
from ..events import BaselineRestored, Event, FallbackUsed, Hint, Progress, ProgressBars
from ..follow.folder import check_file


def open_streams() -> None:
    """Lets standard output and error take any text. A stream that the caller closed, as some
    daemons do, leads nowhere; characters that an ASCII output lacks are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the process's life
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Console:
    """One command's output. A progress bar shows only on a terminal, and only for work that takes a
    while."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._bars = ProgressBars(disable=None)
        self._noted: set[str] = set()

    def result(self, facts: dict[str, Any], lines: list[str]) -> None:
        """The outcome: ``facts`` with --json, else ``lines``."""
        self._bars.close()
        print(json.dumps(facts) if self._as_json else "\n".join(map(_printable, lines)), flush=True)

    def error(self, error: PulseError) -> None:
        self._bars.close()
        if self._as_json:
            print(
                json.dumps({"error": error.kind, "message": str(error), "hint": error.hint}),
                flush=True,
            )
        message = _printable(" ".join(str(error).split()))
        print(f"pulse: {message} ({error.hint})", file=sys.stderr, flush=True)

    def __call__(self, event: Event) -> None:
        """Listens to the library's events."""
        if isinstance(event, Progress):
            self._bars(event)
        elif isinstance(event, FallbackUsed):
            self.note(f"{event.link} cannot be used: {event.reason}")
        elif isinstance(event, BaselineRestored) and event.how == "anchored":
            self.note(
                f"version {event.version} could not be restored, starting over with an anchor: "
                f"{event.reason}"
            )
        elif (
            isinstance(event, Hint) and event.kind != "no_stream"
        ):  # which is an error where it counts
            self.note(f"{event.reason} ({event.hint})")

    def note(self, text: str) -> None:
        """Prints a line on stderr, unless it was printed since `forget_notes`: what is tried again
        fails again."""
        if text in self._noted:
            return
        self._noted.add(text)
        self._bars.close()
        print(f"pulse: {_printable(' '.join(text.split()))}", file=sys.stderr, flush=True)

    def forget_notes(self) -> None:
        """What was noted before is news again."""
        self._noted.clear()


def _printable(text: str) -> str:
    """``text`` without the control characters that a tensor's name may hold, which a terminal would
    obey."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text
    )


PAGE_MARK = b'<meta name="generator" content="pulse-rl'
"""In the head of every page of `pulse_rl.report`."""


def check_output(out: Path, mark: bytes, *, force: bool) -> None:
    """Every file that a command writes is checked by this first. It may be replaced if it has the
    ``mark`` of what the command makes: a patch, a page, or a checkpoint. Anything else needs
    ``force``. Raises InputError.
    """
    try:
        check_file(out, force=force, mark=mark)
    except (FileNotFoundError, NotADirectoryError):  # writing has an error for the second
        return
    except OSError as error:
        raise InputError(
            f"cannot write {shortened(out)}: {error.strerror}", hint="Check the path."
        ) from None


def write_output(
    out: Path, chunks: Iterable[bytes | memoryview], mark: bytes, *, force: bool
) -> None:
    """Puts a file at ``out`` whole or not at all. Raises InputError as `check_output`, StoreFull
    and StoreError."""
    check_output(out, mark, force=force)
    write_atomically(out, chunks)


def read_study(path: Path) -> Any:
    """The JSON of a study. Raises InputError."""
    try:
        with open_regular(path) as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        hint = "Give the output of `pulse study --json`."
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot read {shortened(path)}: {reason}", hint=hint) from None


def shortened(path: Path | str) -> str:
    """For a message: a path that is too long for a file is too long for a line, too."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:200]}…"
