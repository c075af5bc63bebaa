"""Whatever a store answers, every call on it ends: with what is right or an error of the library,
and within the budget of docs/protocol.md, section 2."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pulse_rl import (
    Bits,
    MemoryStore,
    MultiSubscriber,
    Publisher,
    Relay,
    Store,
    Subscriber,
    fold_stream,
    gc_stream,
    state_root,
    verify_stream,
)
from pulse_rl.errors import PulseError, StoreUnavailable
from pulse_rl.study import study
from tests.support.lying_store import LIES, Lie, LyingStore
from tests.support.publishers import anchor_stream, tuned

VERSIONS = 12
MOST_LISTED = 2000


def states() -> list[dict[str, Bits]]:
    rng = np.random.default_rng(0)
    found = [rng.integers(0x3C00, 0x4000, (100, 40)).astype(np.uint16)]
    for _ in range(VERSIONS):
        found.append(found[-1] ^ (rng.random(found[-1].shape) < 0.05).astype(np.uint16))
    return [{"a": Bits(array, "BF16"), "b": Bits(array[:3] ^ 1, "BF16")} for array in found]


STATES = states()
ROOTS = [state_root(state) for state in STATES]


def followed(store: Any, **options: Any) -> None:
    worker = Subscriber(store, stream="s", threads=1, **options)
    try:
        worker.sync()
    finally:
        assert (
            worker.version is None or options.get("select") or worker.root == ROOTS[worker.version]
        )


def by_many(store: Store) -> None:
    with MultiSubscriber(store, streams=["s"], threads=1, poll_seconds=0.01) as many:
        for _, update in many.updates(timeout_seconds=0.02):
            assert update.root == ROOTS[update.version]


def published(store: Store) -> None:
    with Publisher(store, stream="s", threads=1) as publisher:
        assert publisher.publish(STATES[-1]).root == ROOTS[-1]


def relayed(source: Store, target: Store) -> None:
    Relay(source, target, stream="s", keep=2, threads=1).sync()


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
    "a study": lambda liar, whole: study(liar, stream="s", threads=1),
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


def told_by(
    stream: dict[str, bytes], call: str, lie: Lie, operation: str, tmp_path: Any
) -> PulseError | None:
    """The error with which an operation ended on a store that lies."""
    liar = LyingStore(copied(stream), call, lie)

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
        if operation == "a target" and call in ("get", "head", "list"):  # all is there already
            assert stream.keys() <= {info.name for info in liar.inner.list("s")}
        if operation == "gc":  # all are kept
            assert all(report.ok for report in verify_stream(liar.inner, "s", threads=1))
    return None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_ends_within_its_budget(
    operation: str, stream: dict[str, bytes], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_rl.store.base.MAX_LISTED", MOST_LISTED)
    for call, lie in LIES.values():
        told_by(stream, call, lie, operation, tmp_path)


@pytest.mark.parametrize(
    "operation", [name for name in OPERATIONS if name not in ("a near store", "many")]
)
def test_a_store_whose_every_answer_is_late_ends_it(
    operation: str, stream: dict[str, bytes], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, late = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late[0])

    def tardy(liar: LyingStore[Store], name: str, right: Callable[[], Any]) -> Any:
        late[0] += 350.0
        assert late[0] < 60 * 350.0, "no end"
        found = right()
        return list(found) if isinstance(found, Iterator) else found

    error = told_by(stream, "every", tardy, operation, tmp_path)
    assert operation == "the head" or isinstance(error, StoreUnavailable), error
