"""The origin as a region has it: over a link that is slow, shared by all processes of the region, and sometimes cut.

Where the regions are network namespaces, that is HTTP over the region's interface; else the link is simulated: all wait
as long as their bytes would take.
"""

from __future__ import annotations

import fcntl
import struct
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from pulse_rl import HttpStore, LocalStore, Store
from pulse_rl.errors import StoreUnavailable
from pulse_rl.store import Data, ObjectInfo
from pulse_rl.store.base import check_name, joined

from . import namespaces
from .settings import INBOX_PORT, PORT, REGIONS, RunFolder, Settings

_REQUEST_BYTES = 500
"""What a request and its answer take beside what they carry."""
_ROUND_TRIP_SECONDS = 0.04


_TIMEOUT_SECONDS = 3.0


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


class Uplink(HttpStore):
    """The origin, read at ``url`` as `pulse serve` shows it; what is put goes to the ``inbox`` beside it."""

    def __init__(self, url: str, inbox: str) -> None:
        super().__init__(url, timeout_seconds=_TIMEOUT_SECONDS)
        self._inbox = inbox

    def put(self, name: str, data: Data) -> None:
        request = urllib.request.Request(f"{self._inbox}/{check_name(name)}", data=joined(data), method="PUT")
        try:
            urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS).close()
        except (OSError, HTTPException) as error:
            raise StoreUnavailable(f"{self._inbox}: {error}") from error


def link(settings: Settings, folder: RunFolder, region: str) -> Store:
    """The origin over the link of ``region``."""
    if settings.links == "namespaces":
        address = namespaces.ORIGIN.address
        return Uplink(f"http://{address}:{PORT}", f"http://{address}:{INBOX_PORT}")
    return Link(LocalStore(folder.origin), folder, region)
