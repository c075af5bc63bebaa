"""A region's link to the origin: slow, shared by all processes of the region, and sometimes cut."""

from __future__ import annotations

import fcntl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from pulse_rl import LocalStore, Store, StoreUnavailable
from pulse_rl.store import Data, ObjectInfo

from .settings import REGIONS, RunFolder

_REQUEST_BYTES = 500
"""What a request and its answer take beside what they carry."""
_ROUND_TRIP_SECONDS = 0.04


class Direction:
    """One direction of a link, of ``bits_per_second`` for all who have the same ``file``: a transfer begins when the
    one before it has ended."""

    def __init__(self, file: Path, bits_per_second: float) -> None:
        self._file, self._rate = file, bits_per_second
        file.touch()

    def carry(self, nbytes: int) -> None:
        """Returns when so many bytes have passed."""
        with self._file.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = file.read(8)
            free = struct.unpack("<d", data)[0] if data else 0.0
            end = max(free, time.time()) + 8 * nbytes / self._rate
            file.seek(0)
            file.write(struct.pack("<d", end))
        time.sleep(max(0.0, end - time.time()))


class Link:
    """The store ``store`` as seen from a region."""

    def __init__(self, store: Store, folder: RunFolder, region: str) -> None:
        self._store = store
        self._down = Direction(folder.link(region, "down"), REGIONS[region])
        self._up = Direction(folder.link(region, "up"), REGIONS[region])
        self._cut = folder.cut(region)

    def put(self, name: str, data: Data) -> None:
        self._ask()
        whole = data if isinstance(data, bytes | bytearray | memoryview) else b"".join(bytes(chunk) for chunk in data)
        self._up.carry(len(whole))
        self._store.put(name, whole)

    def put_new(self, name: str, data: bytes) -> None:
        self._ask()
        self._up.carry(len(data))
        self._store.put_new(name, data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self._ask()
        data = self._store.get(name, start, stop)
        self._down.carry(len(data))
        self._ask()
        return data

    def head(self, name: str) -> ObjectInfo:
        self._ask()
        return self._store.head(name)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        self._ask()
        return self._store.list(folder, start_after)

    def delete(self, name: str) -> None:
        self._ask()
        self._store.delete(name)

    def _ask(self) -> None:
        if self._cut.exists():
            raise StoreUnavailable("the region is cut off")
        self._down.carry(_REQUEST_BYTES)
        time.sleep(_ROUND_TRIP_SECONDS)


def link(folder: RunFolder, region: str) -> Store:
    """The origin over the link of ``region``."""
    return Link(LocalStore(folder.origin), folder, region)
