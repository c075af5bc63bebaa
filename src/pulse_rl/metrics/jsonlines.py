"""Events as JSON lines: an append-only file, and a reader that tolerates a partial last line."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .._util.files import open_regular
from ..errors import InputError
from ..events import Event, Progress

MAX_LINE_BYTES = 1 << 20


class JsonLines:
    """Appends each event but `Progress` to the file ``path`` as one line, in a single write.

    A line is the event's fields with ``event``, its name in snake case ("published", "synced" …), and ``time``, seconds
    since 1970 by this machine's clock. Each process needs its own file: ``events-worker-0.jsonl`` in the run's folder
    appears as the worker "worker-0" in its report. A partial last line left by a killed process is ended first.

    A context manager that closes the file. Raises InputError if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("a+b", buffering=0)
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        except OSError as error:
            raise InputError(f"cannot write events to {file}: {error}", hint="Check the path.") from None
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            return
        line = {"event": _snake_case(type(event).__name__), "time": round(time.time(), 6), **asdict(event)}
        with self._lock:
            self._file.write(json.dumps(line).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; later events raise ValueError."""
        self._file.close()


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of the file ``path`` in order. Lines that are incomplete, too long or not an event are skipped.

    Raises InputError if the file cannot be read.
    """
    try:
        with open_regular(Path(path)) as file:
            while line := file.readline(MAX_LINE_BYTES):
                event = _parsed(line)
                if event is not None:
                    yield event
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="Check the path.") from None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if known and isinstance(event.get("time"), int | float) else None


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
