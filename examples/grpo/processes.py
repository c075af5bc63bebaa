"""Small things that a process needs which may be killed at any moment and whose peers may be too."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

POLL_SECONDS = 0.02
STOP_SECONDS = 20.0

MISMATCH = 3
"""Exit status of a trainer whose workers ended with other weights."""
GAVE_UP = 4
"""Exit status of a process whose peers did not do their part, so that starting it again is no help."""

T = TypeVar("T")


class PeerVanished(RuntimeError):
    """Another process of the run did not do its part in time."""


class Alarm:
    """Stops a process whose peers are gone.

    ``parent`` is the process id of the orchestrator, None for a role started by hand. Orphans must not train on beside
    the processes that a second orchestrator starts.
    """

    def __init__(self, patience: float, parent: int | None) -> None:
        self.patience = patience
        self._parent = parent
        self.reset()

    def reset(self) -> None:
        self._since = time.monotonic()

    def check_parent(self) -> None:
        """Raises SystemExit in an orphan."""
        if self._parent is not None and os.getppid() != self._parent:
            raise SystemExit("the orchestrator is gone")

    def check(self, waiting_for: str) -> None:
        """Raises PeerVanished once ``patience`` seconds passed since the last `reset`."""
        self.check_parent()
        if time.monotonic() - self._since > self.patience:
            raise PeerVanished(f"waited {self.patience:.0f} s for {waiting_for}; see the other processes' logs")


def wait_for(poll: Callable[[], T | None], alarm: Alarm, what: str) -> T:
    """What ``poll`` returns once it is not None."""
    alarm.check_parent()
    alarm.reset()
    while (found := poll()) is None:
        alarm.check(what)
        time.sleep(POLL_SECONDS)
    return found


@contextmanager
def sole_holder(path: Path, timeout: float = 20.0) -> Iterator[None]:
    """Holds a lock that the system frees when the process dies, however it dies.

    A predecessor gets some seconds to notice that its orchestrator is gone. Raises PeerVanished after that.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PeerVanished(f"another process holds {path}: is this role running already?") from None
                time.sleep(0.1)
        yield


def write_file_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """Lets ``write`` fill a file that then replaces ``path`` at once, also across a power cut."""
    aside = path.with_suffix(".unfinished")
    with aside.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class SavedSettings:
    """Base of dataclasses that are kept in a run's folder, where every process of the run finds them."""

    def save(self: DataclassInstance, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(asdict(self), indent=1) + "\n"
        write_file_atomically(path, lambda file: file.write(data.encode()))

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))


class Journal:
    """Appends JSON objects to a file, one a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        self._file = path.open("a", buffering=1)
        if torn:
            self._file.write("\n")

    def write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")


class JournalReader:
    """Reads the lines that were added since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        events = []
        for line in complete.splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # torn by a SIGKILL in the middle of a write; the step is reported again
        return events


def stop(processes: Iterable[subprocess.Popen[bytes]], seconds: float = STOP_SECONDS) -> None:
    """Ends processes: asks all of them, and kills those that are still there after so many ``seconds``."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
