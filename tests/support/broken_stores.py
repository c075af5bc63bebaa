"""Stores that look right, each with one guarantee missing."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pulse_rl import MemoryStore
from pulse_rl.errors import AlreadyExists, InputError, NotFound
from pulse_rl.store import Data, ObjectInfo
from pulse_rl.store.base import check_name, joined


class Overwrites(MemoryStore):
    """Like servers that ignore If-None-Match."""

    def put_new(self, name: str, data: bytes) -> None:
        self.put(name, data)


class RefusesButOverwrites(MemoryStore):
    def put_new(self, name: str, data: bytes) -> None:
        try:
            super().put_new(name, data)
        except AlreadyExists:
            self.put(name, data)
            raise


class LooksBeforeItCreates(MemoryStore):
    """Only a race shows it: a create that comes late enough is refused."""

    def put_new(self, name: str, data: bytes) -> None:
        taken = name in self._objects
        time.sleep(0.02)
        if taken:
            raise AlreadyExists(f"{name} already exists")
        self.put(name, data)


class CreatesBeforeItWrites(MemoryStore):
    """One racer wins, but for a while the others find nothing in what it made."""

    def put_new(self, name: str, data: bytes) -> None:
        super().put_new(name, b"")
        time.sleep(0.02)
        self.put(name, data)


class CreatesBesidePuts(MemoryStore):
    """Refuses what it has created itself, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._created: set[str] = set()

    def put_new(self, name: str, data: bytes) -> None:
        with self._lock:
            if name in self._created:
                raise AlreadyExists(f"{name} already exists")
            self._created.add(name)
        self.put(name, data)

    def delete(self, name: str) -> None:
        self._created.discard(name)
        super().delete(name)


class ShowsHalf(MemoryStore):
    def put(self, name: str, data: Data) -> None:
        written = b""
        for chunk in [data] if isinstance(data, bytes) else data:
            written += bytes(chunk)
            super().put(name, written)
        super().put(name, written)


class KeepsHalf(MemoryStore):
    """What came before the error is stored."""

    def put(self, name: str, data: Data) -> None:
        if isinstance(data, bytes):
            return super().put(name, data)
        written = []
        try:
            written.extend(bytes(chunk) for chunk in data)
        finally:
            super().put(name, b"".join(written))


class HidesErrors(MemoryStore):
    """A put that fails looks like one that did not."""

    def put(self, name: str, data: Data) -> None:
        try:
            super().put(name, data)
        except InputError:
            raise
        except ValueError:
            return


class KeepsTheFirst(MemoryStore):
    def put(self, name: str, data: Data) -> None:
        if name not in self._objects:
            super().put(name, data)


class TakesOneChunk(MemoryStore):
    def put(self, name: str, data: Data) -> None:
        super().put(name, data if isinstance(data, bytes) else bytes(next(iter(data), b"")))


class ReadsStale(MemoryStore):
    """A cache that nobody invalidates."""

    def __init__(self) -> None:
        super().__init__()
        self._read: dict[str, bytes] = {}

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if (start, stop) != (0, None):
            return super().get(name, start, stop)
        return self._read.setdefault(name, super().get(name))


class IgnoresRanges(MemoryStore):
    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return super().get(name)


class Slices(MemoryStore):
    """Past the end there is less, and what is negative counts from the end."""

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return super().get(name)[start:stop]


class RaisesKeyErrors(MemoryStore):
    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            return super().get(name, start, stop)
        except NotFound:
            raise KeyError(name) from None


class TellsTheTimeOfTheFirstWrite(MemoryStore):
    def put(self, name: str, data: Data) -> None:
        first = self._objects.get(name)
        super().put(name, data)
        if first:
            self._objects[name] = (self._objects[name][0], first[1])


class CountsInMilliseconds(MemoryStore):
    def head(self, name: str) -> ObjectInfo:
        info = super().head(name)
        return info._replace(modified=info.modified * 1000)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return iter([self.head(info.name) for info in super().list(folder, start_after)])


class ListsInDisorder(MemoryStore):
    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        yield from reversed(list(super().list(folder, start_after)))


class ListsFoldersFirst(MemoryStore):
    """As a walk through a tree does: a/b/c comes before a/b-x."""

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        yield from sorted(super().list(folder, start_after), key=lambda info: info.name.split("/"))


class ListsOnePage(MemoryStore):
    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        yield from list(super().list(folder, start_after))[:30]


class ListsByPrefix(MemoryStore):
    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        found = [
            self.head(n)
            for n in self._objects
            if n.startswith(check_name(folder)) and n > (start_after or "")
        ]
        yield from sorted(found)


class ListsOneLevel(MemoryStore):
    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return (
            i
            for i in super().list(folder, start_after)
            if "/" not in i.name.removeprefix(f"{folder}/")
        )


class ListsByOffset(MemoryStore):
    """A delete moves the next name to where the reader already was."""

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        at = 0
        while at < len(rest := list(super().list(folder, start_after))):
            yield from rest[at : at + 3]
            at += 3


class ForgetsWhereToGoOn(MemoryStore):
    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return super().list(folder)


class DeletesByPrefix(MemoryStore):
    def delete(self, name: str) -> None:
        for found in [n for n in self._objects if n.startswith(name)]:
            super().delete(found)


class DeletesNothing(MemoryStore):
    def delete(self, name: str) -> None:
        pass


class DeletesOnce(MemoryStore):
    """The second delete is told that there is nothing."""

    def delete(self, name: str) -> None:
        self.head(name)
        super().delete(name)


class TakesAnyName(MemoryStore):
    def put(self, name: str, data: Data) -> None:
        self._set(name, (joined(data), time.time()))
