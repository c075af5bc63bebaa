"""A store in the memory of one process, for tests and for trainers and workers that run as threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from ..errors import AlreadyExists, NotFound
from .base import Data, ObjectInfo, check_name, check_range, joined


class MemoryStore:
    """A `Store` in the memory of the process, empty when created. Thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def put(self, name: str, data: Data) -> None:
        entry = (joined(data), time.time())
        with self._lock:
            self._objects[check_name(name)] = entry

    def put_new(self, name: str, data: bytes) -> None:
        with self._lock:
            if check_name(name) in self._objects:
                raise AlreadyExists(f"{name} already exists")
            self._objects[name] = (bytes(data), time.time())

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data, _ = self._entry(name)
        start, stop = check_range(name, len(data), start, stop)
        return data[start:stop]

    def head(self, name: str) -> ObjectInfo:
        data, modified = self._entry(name)
        return ObjectInfo(name, len(data), modified)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        prefix = check_name(folder) + "/"
        with self._lock:
            found = [ObjectInfo(n, len(d), t) for n, (d, t) in self._objects.items() if n.startswith(prefix)]
        yield from sorted(o for o in found if start_after is None or o.name > start_after)

    def delete(self, name: str) -> None:
        with self._lock:
            self._objects.pop(check_name(name), None)

    def _entry(self, name: str) -> tuple[bytes, float]:
        with self._lock:
            if check_name(name) not in self._objects:
                raise NotFound(f"{name} is not in the store")
            return self._objects[name]
