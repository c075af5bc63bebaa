"""A fuse in a store: the process SIGKILLs itself at a chosen call, before, after or in the midst of
its effect."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from pulse_rl import LocalStore
from pulse_rl.store import Data, ObjectInfo

T = TypeVar("T")
TIMEOUT_SECONDS = 60


class Fuse:
    """Counts calls and kills the process at the ``at``-th (0: never), ``mode`` of its effect. With
    "midst" only calls that write are counted: others have none."""

    def __init__(self, at: int = 0, mode: str = "before") -> None:
        self.at, self.mode = at, mode
        self._count = 0
        self._lock = threading.Lock()

    def next(self) -> bool:
        """Counts a call; whether it is the one."""
        with self._lock:
            self._count += 1
            return self._count == self.at

    def around(self, act: Callable[[], T]) -> T:
        """Does something that has no midst."""
        due = self.mode != "midst" and self.next()
        if due and self.mode == "before":
            die()
        result = act()
        if due:
            die()
        return result


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # other threads run on until the signal arrives; this one must not
        time.sleep(1)


class FusedStore:
    """A local store each of whose calls, and each item of a listing, goes through a fuse."""

    def __init__(self, root: Path, fuse: Fuse, fetched: Path | None = None) -> None:
        self.root = root
        self._inner = LocalStore(root)
        self._fuse = fuse
        self._fetched = fetched

    def put(self, name: str, data: Data) -> None:
        due = self._fuse.next()
        if due and self._fuse.mode == "before":
            die()
        self._inner.put(name, broken_off(data) if due and self._fuse.mode == "midst" else data)
        if due:
            die()

    def put_new(self, name: str, data: bytes) -> None:
        due = self._fuse.next()
        if due and self._fuse.mode == "before":
            die()
        if due and self._fuse.mode == "midst":
            os.link = lambda *args, **kwargs: die()  # the unfinished file is there, its name is not
        self._inner.put_new(name, data)
        if due:
            die()

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if self._fetched and "/payloads/" in name:
            with self._fetched.open("a") as log:
                log.write(f"{name}\n")
        return self._fuse.around(lambda: self._inner.get(name, start, stop))

    def head(self, name: str) -> ObjectInfo:
        return self._fuse.around(lambda: self._inner.head(name))

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return iter(self._fuse.around(lambda: tuple(self._inner.list(folder, start_after))))

    def delete(self, name: str) -> None:
        self._fuse.around(lambda: self._inner.delete(name))


def broken_off(data: Data) -> Iterator[bytes]:
    """The first half of an object, and then nothing more, ever."""
    whole = data if isinstance(data, bytes) else b"".join(data)
    yield whole[: len(whole) // 2]
    die()


def forked(act: Callable[[], object]) -> int:
    """Runs ``act`` in a process of its own; 0, the exit status, or minus the signal that ended
    it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(TIMEOUT_SECONDS)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
