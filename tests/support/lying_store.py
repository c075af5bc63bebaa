"""A store that lies, and the lies that it tells: of lengths, of what is there, of what it did, and
without end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

from pulse_rl import Store
from pulse_rl.store import Data, ObjectInfo

S = TypeVar("S", bound=Store)
Lie = Callable[["LyingStore[Any]", str, Any], Any]


class LyingStore(Generic[S]):
    """A store that answers a kind of call as ``lie`` makes of the right answer, or all of them
    truly. Counts what it is asked for."""

    most_requests = 500

    def __init__(self, inner: S, call: str = "", lie: Lie | None = None) -> None:
        self.inner = inner
        self.tell(call, lie)

    def tell(self, call: str = "", lie: Lie | None = None) -> None:
        """From now on it tells this lie, or none, and counts afresh."""
        self.call, self._lie = call, lie
        self.requests = self.listed = self.nbytes = self.lies = 0

    def _answer(self, call: str, name: str, right: Callable[[], Any]) -> Any:
        self.requests += 1
        assert self.requests < self.most_requests, "requests without end"
        if self._lie is None or self.call not in (call, "every"):
            return right()
        self.lies += 1
        return self._lie(self, name, right)

    def put(self, name: str, data: Data) -> None:
        self._answer("put", name, lambda: self.inner.put(name, data))

    def put_new(self, name: str, data: bytes) -> None:
        self._answer("put_new", name, lambda: self.inner.put_new(name, data))

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        assert stop is not None, f"{name} is read to its end, wherever that is"
        self.nbytes += stop - start
        found: bytes = self._answer("get", name, lambda: self.inner.get(name, start, stop))
        return found

    def head(self, name: str) -> ObjectInfo:
        found: ObjectInfo = self._answer("head", name, lambda: self.inner.head(name))
        return found

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        for info in self._answer("list", folder, lambda: self.inner.list(folder, start_after)):
            self.listed += 1
            yield info

    def delete(self, name: str) -> None:
        self._answer("delete", name, lambda: self.inner.delete(name))


def endless(names: Callable[[str, int], str]) -> Lie:
    def told(
        liar: LyingStore[Any], folder: str, right: Callable[[], Iterable[ObjectInfo]]
    ) -> Iterator[ObjectInfo]:
        yield from right()
        for number in count(10**6):
            yield ObjectInfo(names(folder, number), 1, 0.0)

    return told


def each(change: Callable[[ObjectInfo], ObjectInfo]) -> Lie:
    return lambda liar, folder, right: map(change, right())


def of(change: Callable[[Any], Any]) -> Lie:
    return lambda liar, name, right: change(right())


def other(liar: LyingStore[Any], name: str, right: object) -> bytes:
    return next((liar.inner.get(info.name) for info in liar.inner.list("s/payloads")), b"")


LIES: dict[str, tuple[str, Lie]] = {
    "endless versions": ("list", endless(lambda folder, number: f"{folder}/{number:012d}.json")),
    "endless links": (
        "list",
        endless(lambda folder, number: f"{folder}/{number:012d}-anchor-000000000005"),
    ),
    "endless names": ("list", endless(lambda folder, number: f"{folder}/~{number}")),
    "endless of elsewhere": ("list", endless(lambda folder, number: f"~/{number}")),
    "endless of the same": ("list", endless(lambda folder, number: f"{folder}/~")),
    "twice": ("list", lambda liar, folder, right: [info for info in right() for _ in range(2)]),
    "disorder": ("list", lambda liar, folder, right: sorted(right(), reverse=True)),
    "nothing": ("list", lambda liar, folder, right: []),
    "listed as nothing": ("list", each(lambda info: info._replace(nbytes=0))),
    "listed as less than nothing": ("list", each(lambda info: info._replace(nbytes=-1))),
    "listed as more": ("list", each(lambda info: info._replace(nbytes=info.nbytes + 1))),
    "listed as less": ("list", each(lambda info: info._replace(nbytes=max(info.nbytes - 1, 0)))),
    "listed as exabytes": ("list", each(lambda info: info._replace(nbytes=1 << 62))),
    "listed out of time": ("list", each(lambda info: info._replace(modified=float("nan")))),
    "too much": ("get", of(lambda data: data + bytes(1000))),
    "too little": ("get", of(lambda data: data[:-1])),
    "no bytes": ("get", of(lambda data: b"")),
    "zeros": ("get", of(lambda data: bytes(len(data)))),
    "a bit": ("get", of(lambda data: bytes([data[0] ^ 1]) + data[1:] if data else data)),
    "another object": ("get", other),
    "less than it has": ("head", of(lambda info: info._replace(nbytes=0))),
    "less than nothing": ("head", of(lambda info: info._replace(nbytes=-1))),
    "exabytes": ("head", of(lambda info: info._replace(nbytes=1 << 62))),
    "the end of time": ("head", of(lambda info: info._replace(modified=float("inf")))),
    "of another": ("head", of(lambda info: info._replace(name="s/another"))),
    "created, but not": ("put_new", lambda liar, name, right: None),
    "stored, but not": ("put", lambda liar, name, right: None),
    "deleted, but not": ("delete", lambda liar, name, right: None),
}
