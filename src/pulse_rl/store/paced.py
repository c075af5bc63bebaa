"""A store that is read at no more than a given rate, by all who share it together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from .._util.threads import checkpoint
from .base import Data, ObjectInfo, Store

_LEAST_CHUNK = 64 << 10
_LOOK_SECONDS = 0.1


class Pace:
    """``bytes_per_second``, averaged over a second or the longest chunk that is read at once: ``chunk`` bytes, 64 KiB,
    or what one second admits where that is more."""

    def __init__(self, bytes_per_second: float) -> None:
        self.chunk = max(_LEAST_CHUNK, int(bytes_per_second))
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """The time at which these bytes may be read; those who ask later come later."""
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + nbytes / self._rate
            return begin


class PacedStore:
    """``store``, from which `get` reads no faster than ``pace``, which may be that of several stores together. Ranges
    of more than a chunk are read in chunks."""

    def __init__(self, store: Store, pace: Pace) -> None:
        self.store = store
        self._pace = pace

    def put(self, name: str, data: Data) -> None:
        self.store.put(name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self.store.put_new(name, data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        chunk = self._pace.chunk
        if stop is None or stop - start <= chunk:
            expected = 0 if stop is None else max(stop - start, 0)
            _await(self._pace.reserve(expected))
            data = self.store.get(name, start, stop)
            self._pace.reserve(len(data) - expected)
            return data
        return b"".join(self.get(name, at, min(at + chunk, stop)) for at in range(start, stop, chunk))

    def head(self, name: str) -> ObjectInfo:
        return self.store.head(name)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self.store.list(folder, start_after)

    def delete(self, name: str) -> None:
        self.store.delete(name)


def _await(begin: float) -> None:
    while (left := begin - time.monotonic()) > 0:
        checkpoint()
        time.sleep(min(left, _LOOK_SECONDS))
