"""Whatever a store answers, every call on it ends: with what is right or an error of the library, and within the budget
of docs/protocol.md, section 2."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from pulse_rl import (
    Bits,
    GroupMember,
    MemoryStore,
    Publisher,
    Relay,
    Store,
    Subscriber,
    Subscribers,
    anchor_stream,
    fold_stream,
    gc_stream,
    state_root,
    verify_stream,
)
from pulse_rl.errors import PulseError, StoreUnavailable
from pulse_rl.store import Data, ObjectInfo
from pulse_rl.study import StoredStream
from tests.support.publishers import tuned

VERSIONS = 12
MOST_REQUESTS, MOST_LISTED = 500, 2000
Lie = Callable[["Liar", str, Any], Any]


def states() -> list[dict[str, Bits]]:
    rng = np.random.default_rng(0)
    found = [rng.integers(0x3C00, 0x4000, (100, 40)).astype(np.uint16)]
    for _ in range(VERSIONS):
        found.append(found[-1] ^ (rng.random(found[-1].shape) < 0.05).astype(np.uint16))
    return [{"a": Bits(array, "BF16"), "b": Bits(array[:3] ^ 1, "BF16")} for array in found]


STATES = states()
ROOTS = [state_root(state) for state in STATES]


class Liar:
    """A store that answers a kind of call as ``lie`` makes of the right answer. Counts what it is asked for."""

    def __init__(self, inner: Store, call: str, lie: Lie) -> None:
        self.inner = inner
        self._call, self._lie = call, lie
        self.requests = self.listed = self.nbytes = self.lies = 0

    def _answer(self, call: str, name: str, right: Callable[[], Any]) -> Any:
        self.requests += 1
        assert self.requests < MOST_REQUESTS, "requests without end"
        if call != self._call and self._call != "every":
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
    def told(liar: Liar, folder: str, right: Callable[[], Iterable[ObjectInfo]]) -> Iterator[ObjectInfo]:
        yield from right()
        for number in count(10**6):
            yield ObjectInfo(names(folder, number), 1, 0.0)

    return told


def each(change: Callable[[ObjectInfo], ObjectInfo]) -> Lie:
    return lambda liar, folder, right: map(change, right())


def of(change: Callable[[Any], Any]) -> Lie:
    return lambda liar, name, right: change(right())


def other(liar: Liar, name: str, right: object) -> bytes:
    return liar.inner.get(next(iter(liar.inner.list("s/payloads"))).name)


LIES: dict[str, tuple[str, Lie]] = {
    "endless versions": ("list", endless(lambda folder, number: f"{folder}/{number:012d}.json")),
    "endless links": ("list", endless(lambda folder, number: f"{folder}/{number:012d}-anchor-000000000005")),
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


def followed(store: Any, **options: Any) -> None:
    worker = Subscriber(store, stream="s", threads=1, **options)
    try:
        worker.sync()
    finally:
        assert worker.version is None or options.get("select") or worker.root == ROOTS[worker.version]


def by_many(store: Store) -> None:
    with Subscribers(store, streams=["s"], threads=1, poll_seconds=0.01) as many:
        for _, update in many.updates(timeout_seconds=0.02):
            assert update.root == ROOTS[update.version]


def published(store: Store) -> None:
    with Publisher(store, stream="s", threads=1) as publisher:
        assert publisher.publish(STATES[-1]).root == ROOTS[-1]


def relayed(source: Store, target: Store) -> None:
    Relay(source, target, stream="s", keep=2, threads=1).sync()


def polled(store: Store) -> None:
    member = GroupMember(Subscriber(store, stream="s", threads=1), group="g", name="m")
    member.poll()


def collected(store: Store) -> None:
    gc_stream(store, "s", keep=VERSIONS, grace_seconds=0)


OPERATIONS: dict[str, Callable[[Store, Any], object]] = {
    "a newcomer": lambda liar, whole: followed(liar),
    "a follower": lambda liar, whole: followed(liar, base=STATES[3]),
    "a selection": lambda liar, whole: followed(liar, select="a"),
    "a cache": lambda liar, whole: followed(liar, cache=whole()),
    "a near store": lambda liar, whole: followed([liar, whole(MemoryStore)]),
    "many": lambda liar, whole: by_many(liar),
    "a publisher": lambda liar, whole: published(liar),
    "the head": lambda liar, whole: Publisher(liar, stream="s").head(),
    "verify": lambda liar, whole: list(verify_stream(liar, "s", threads=1)),
    "gc": lambda liar, whole: collected(liar),
    "fold": lambda liar, whole: list(fold_stream(liar, "s", (2, 4), threads=1)),
    "anchor": lambda liar, whole: anchor_stream(liar, "s", threads=1),
    "a source": lambda liar, whole: relayed(liar, MemoryStore()),
    "a target": lambda liar, whole: relayed(whole(MemoryStore), liar),
    "a group": lambda liar, whole: polled(liar),
    "a study": lambda liar, whole: StoredStream(liar, "s", threads=1),
}


@pytest.fixture(scope="module")
def stream() -> dict[str, bytes]:
    store = MemoryStore()
    with tuned(store, stream="s", folds=(8,), threads=1) as publisher:
        for state in STATES[:VERSIONS]:
            publisher.publish(state)
    return {info.name: store.get(info.name) for info in store.list("s")}


def copied(stream: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for name, data in stream.items():
        store.put(name, data)
    return store


def told_by(stream: dict[str, bytes], call: str, lie: Lie, operation: str, tmp_path: Any) -> PulseError | None:
    """The error with which an operation ended on a store that lies."""
    liar = Liar(copied(stream), call, lie)

    def whole(kind: object = None) -> Any:
        return copied(stream) if kind else tmp_path

    max_bytes = 20 * sum(map(len, stream.values()))
    try:
        OPERATIONS[operation](liar, whole)
    except PulseError as error:
        return error
    finally:
        assert liar.nbytes < max_bytes
        assert liar.listed <= MOST_LISTED * 10
        if operation == "gc":  # all are kept
            assert all(report.ok for report in verify_stream(liar.inner, "s", threads=1))
    return None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_ends_within_its_budget(
    operation: str, stream: dict[str, bytes], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_rl.store.wrappers.MAX_LISTED", MOST_LISTED)
    for call, lie in LIES.values():
        told_by(stream, call, lie, operation, tmp_path)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in ("a near store", "many")])
def test_a_store_whose_every_answer_is_late_ends_it(
    operation: str, stream: dict[str, bytes], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, late = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late[0])

    def tardy(liar: Liar, name: str, right: Callable[[], Any]) -> Any:
        late[0] += 350.0
        assert late[0] < 60 * 350.0, "no end"
        found = right()
        return list(found) if isinstance(found, Iterator) else found

    error = told_by(stream, "every", tardy, operation, tmp_path)
    assert operation == "the head" or isinstance(error, StoreUnavailable), error
