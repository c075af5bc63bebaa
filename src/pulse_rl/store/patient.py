"""A store that may be late, but not without end (docs/protocol.md, section 2)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import StoreUnavailable
from .base import Data, ObjectInfo, Store

_REQUEST_SECONDS = 1.0
_LEAST_RATE = 16 << 10

T = TypeVar("T")


class PatientStore:
    """``store``, whose reading calls may be late for a while: a second for each call and each 16 KiB is its due, what
    takes longer is lateness. A listing is one call, however many pages it has."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._left: float | None = None
        self._lock = threading.Lock()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Within it, reading calls raise StoreUnavailable once they were late by so many ``seconds`` in all."""
        self._left = seconds
        try:
            yield
        finally:
            self._left = None

    def put(self, name: str, data: Data) -> None:
        self.store.put(name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self.store.put_new(name, data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._timed(name, lambda: self.store.get(name, start, stop))

    def head(self, name: str) -> ObjectInfo:
        return self._timed(name, lambda: self.store.head(name))

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        found, due = iter(self.store.list(folder, start_after)), _REQUEST_SECONDS
        while True:
            began = time.monotonic()
            info = next(found, None)
            due -= time.monotonic() - began
            if due < 0:
                self._draw(folder, -due)
                due = 0.0
            if info is None:
                return
            yield info

    def delete(self, name: str) -> None:
        self.store.delete(name)

    def _timed(self, name: str, read: Callable[[], T]) -> T:
        self._draw(name, 0.0)
        began = time.monotonic()
        found = read()
        due = _REQUEST_SECONDS + (len(found) / _LEAST_RATE if isinstance(found, bytes) else 0.0)
        self._draw(name, max(0.0, time.monotonic() - began - due), raises=False)
        return found

    def _draw(self, name: str, seconds: float, *, raises: bool = True) -> None:
        with self._lock:
            if self._left is None:
                return
            self._left -= seconds
            if raises and self._left < 0:
                raise StoreUnavailable(f"{name}: the store answers too slowly", hint="The next call tries it again.")
