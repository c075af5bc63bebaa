"""A store in the memory of one process: for tests, and for trainers and workers that run as
threads."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

import numpy as np

from .._util.settings import counted
from ..errors import AlreadyExists, NotFound
from ..store.base import Data, ObjectInfo, check_folder, check_name, check_range, joined

# From here on numpy asks the system for large pages, which makes new memory cheaper.
_LARGE = 4 << 20


class MemoryStore:
    """A `Store` in the memory of the process, empty when created. Thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes | memoryview, float]] = {}
        self._names: list[str] = []  # in order, so that a list costs what it yields
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<MemoryStore of {counted(len(self._names), 'object')}>"

    def put(self, name: str, data: Data) -> None:
        entry = (_joined(data), time.time())
        with self._lock:
            self._set(check_name(name), entry)

    def put_new(self, name: str, data: bytes) -> None:
        with self._lock:
            if check_name(name) in self._objects:
                raise AlreadyExists(f"{name} already exists")
            self._set(name, (bytes(data), time.time()))

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data, _ = self._entry(name)
        start, stop = check_range(name, len(data), start, stop)
        return bytes(data[start:stop])

    def head(self, name: str) -> ObjectInfo:
        data, modified = self._entry(name)
        return ObjectInfo(name, len(data), modified)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        prefix = check_folder(folder) and f"{folder}/"
        with self._lock:
            first = bisect_right(self._names, max(prefix, start_after or ""))
            # "0" is the character after "/".
            last = bisect_left(self._names, f"{folder}0", first) if folder else len(self._names)
            found = [(name, self._objects[name]) for name in self._names[first:last]]
        for name, (data, modified) in found:
            yield ObjectInfo(name, len(data), modified)

    def delete(self, name: str) -> None:
        with self._lock:
            if self._objects.pop(check_name(name), None):
                del self._names[bisect_left(self._names, name)]

    def _set(self, name: str, entry: tuple[bytes | memoryview, float]) -> None:
        if name not in self._objects:
            insort(self._names, name)
        self._objects[name] = entry

    def _entry(self, name: str) -> tuple[bytes | memoryview, float]:
        with self._lock:
            if check_name(name) not in self._objects:
                raise NotFound(f"{name} is not in the store")
            return self._objects[name]


def _joined(data: Data) -> bytes | memoryview:
    if isinstance(data, bytes):
        return data
    chunks = [chunk for chunk in data if len(chunk)]
    nbytes = sum(map(len, chunks))
    if nbytes < _LARGE:
        return joined(chunks)
    whole, at = np.empty(nbytes, np.uint8), 0
    for chunk in chunks:
        whole[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
    return whole.data
