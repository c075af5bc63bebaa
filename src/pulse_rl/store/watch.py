"""Waits for new objects in folders, for any number of readers at the cost of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

_LOOK_SECONDS = 0.1
_SETTLED_SECONDS = 2.1
_THREADS = 4

_Key = tuple[int, int] | None


class _Waiter:
    def __init__(self, folders: set[str], gone: Callable[[], bool]) -> None:
        self.folders = folders
        self.gone = gone
        self.changed: set[str] = set()
        self.event = asyncio.Event()

    def wake(self, changed: set[str]) -> None:
        self.changed |= changed & self.folders
        if self.changed or self.gone():
            self.event.set()


class Watch:
    """Looks at the folders below ``root`` that somebody waits for, ten times a second, and at none otherwise.

    A folder is told changed by its time, and once more two seconds after a change: what came within the resolution of a
    file system's clock did not show. Used from one event loop, with threads of its own: whoever else uses the loop's
    threads does not queue behind lists.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._waiters: set[_Waiter] = set()
        self._keys: dict[str, _Key] = {}
        self._again: dict[str, float] = {}
        self._looking: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, "pulse-wait")

    async def wait(
        self, folders: set[str], news: Callable[[set[str]], list[str]], seconds: float, gone: Callable[[], bool]
    ) -> list[str]:
        """What ``news`` finds in the ``folders`` that change, as soon as it finds anything; nothing after so many
        ``seconds``, or once whoever waits is ``gone``. ``news`` is called in a thread."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(folders, gone)
        self._waiters.add(waiter)
        try:
            stop = time.monotonic() + seconds
            changed = folders
            while True:
                found = await loop.run_in_executor(self._threads, news, changed)
                left = stop - time.monotonic()
                if found or left <= 0:
                    return found
                if self._looking is None:
                    self._looking = asyncio.create_task(self._look())
                with suppress(TimeoutError):
                    await asyncio.wait_for(waiter.event.wait(), left)
                waiter.event.clear()
                changed, waiter.changed = waiter.changed, set()
                if not changed or gone():
                    return []
        finally:
            self._waiters.discard(waiter)

    def close(self) -> None:
        """Nobody waits any longer."""
        if self._looking is not None:
            self._looking.cancel()
        for waiter in self._waiters:
            waiter.event.set()

    def shutdown(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(cancel_futures=True)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiters:
                folders = {folder for waiter in self._waiters for folder in waiter.folders}
                keys = await loop.run_in_executor(self._threads, self._keys_of, folders)
                now = time.monotonic()
                changed = {f for f in folders if keys[f] != self._keys.get(f, ()) or now >= self._again.get(f, now + 1)}
                for folder in changed:
                    if keys[folder] == self._keys.get(folder, ()):
                        del self._again[folder]
                    else:
                        self._again[folder] = now + _SETTLED_SECONDS
                self._keys = keys
                self._again = {folder: at for folder, at in self._again.items() if folder in folders}
                for waiter in self._waiters:
                    waiter.wake(changed)
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._looking = None
            self._keys, self._again = {}, {}

    def _keys_of(self, folders: set[str]) -> dict[str, _Key]:
        keys: dict[str, _Key] = dict.fromkeys(folders)
        for folder in folders:
            with suppress(OSError):
                info = (self._root / folder).stat()
                keys[folder] = info.st_mtime_ns, info.st_ino
        return keys
