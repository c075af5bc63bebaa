"""The stores of a run, and the origin as a region has it: over a link that is slow, shared by all
processes of the region, and sometimes cut. The link is simulated: all wait as long as their bytes
would take."""

from __future__ import annotations

import fcntl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from pulse_rl import LocalStore, Store
from pulse_rl.errors import StoreUnavailable
from pulse_rl.store import Data, ObjectInfo
from pulse_rl.store.base import joined

from ..grpo.run import RunFolder
from .settings import REGIONS

# What a request and its answer take beside what they carry.
_REQUEST_BYTES = 500
_ROUND_TRIP_SECONDS = 0.04


def origin(folder: RunFolder) -> LocalStore:
    return LocalStore(folder.root / "origin")


def near(folder: RunFolder, region: str) -> LocalStore:
    """The store that a region's relay keeps."""
    return LocalStore(folder.root / f"store-{region}")


def cut(folder: RunFolder, region: str) -> Path:
    """Exists while the region is cut off."""
    return folder.root / f"cut-{region}"


class Direction:
    """One direction of a link, of ``bits_per_second`` for all who have the same ``file``: a
    transfer begins when the one before it has ended."""

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
        self._down = Direction(folder.root / f"link-{region}-down", REGIONS[region])
        self._up = Direction(folder.root / f"link-{region}-up", REGIONS[region])
        self._cut = cut(folder, region)

    def put(self, name: str, data: Data) -> None:
        self._ask()
        whole = joined(data)
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


def link(folder: RunFolder, region: str) -> Link:
    """The origin over the link of ``region``."""
    return Link(origin(folder), folder, region)
