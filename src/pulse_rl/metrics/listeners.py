"""Listeners for long runs: a log of JSON lines, and a watch over density: training has changed, and the network to the
workers may soon be too slow."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from .._util.files import open_regular
from ..errors import InputError
from ..events import DensityDrift, Event, Listener, Progress, Published

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


WINDOW = 100
"""Versions over which the running median is taken."""
QUIET = 50
"""Versions that are not judged: density peaks at steps 10 to 40, the end of warm-up, at 2 to 3 times what follows."""
FACTOR = 3.0
"""The band: from a third of the median to three times the median."""
IN_A_ROW = 3
"""Versions outside the band before it counts; a single step without a reward to learn from is not a drift."""


class DriftWatch:
    """Passes events on to ``listener``, and adds a `DensityDrift` when density has left its band.

    The rule, per stream: three versions in a row with a density below a third of the running median, or above three
    times the median. The median is that of the last 100 densities inside the band. The first 50 versions are not
    judged, and versions without a patch never are. After a drift the watch starts over, so that each drift is reported
    once.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._bands: dict[str, _Band] = {}

    def __call__(self, event: Event) -> None:
        self._listener(event)
        if isinstance(event, Published) and event.changed is not None:
            band = self._bands.setdefault(event.stream, _Band())
            if left := band.leaves(event.density):
                self._listener(DensityDrift(event.stream, event.version, event.density, *left))


class _Band:
    """The band of usual densities of one stream."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._outside = 0

    def leaves(self, density: float) -> tuple[float, float] | None:
        """The band, from low to high, if ``density`` is the one that makes it a drift."""
        if len(self._window) < QUIET:
            self._window.append(density)
            return None
        middle = median(self._window)
        low, high = middle / FACTOR, middle * FACTOR
        if low <= density <= high:
            self._window.append(density)
            self._outside = 0
            return None
        self._outside += 1
        if self._outside < IN_A_ROW:
            return None
        self._window.clear()
        self._outside = 0
        return low, high
