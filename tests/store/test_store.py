"""One conformance suite for every store, and what is peculiar to each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from pulse_rl import (
    AlreadyExists,
    InvalidName,
    LocalStore,
    MemoryStore,
    NotFound,
    ObjectStore,
    Store,
    StoreError,
    StoreUnavailable,
    open_store,
)
from pulse_rl.store import create_or_confirm
from pulse_rl.store.check import check_store
from tests.support.states import Rng
from tests.support.stores import names, s3_store

counter = itertools.count()


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(tmp_path / "store")
    if request.param == "memory":
        return open_store("memory://")
    return s3_store(request.getfixturevalue("s3"), f"prefix/{next(counter)}")


def test_it_is_what_open_store_says(store: Store) -> None:
    assert isinstance(store, Store)
    assert isinstance(store, LocalStore | MemoryStore | ObjectStore)


def test_what_was_put_is_got(store: Store, rng: Rng) -> None:
    for k, data in enumerate([b"", b"x", rng.bytes(100_000)]):
        store.put(f"a/{k}", data)
        assert store.get(f"a/{k}") == data
        info = store.head(f"a/{k}")
        assert (info.name, info.nbytes) == (f"a/{k}", len(data))
        assert info.modified > 1e9
        assert list(store.list("a"))[-1] == info


def test_put_replaces(store: Store) -> None:
    store.put("a/b", b"first, longer")
    store.put("a/b", b"second")
    assert store.get("a/b") == b"second"
    assert store.head("a/b").nbytes == 6
    assert names(store, "a") == ["a/b"]


def test_put_new_refuses_to_replace(store: Store) -> None:
    store.put_new("a/b", b"first")
    for data in (b"second", b"first"):
        with pytest.raises(AlreadyExists, match="a/b"):
            store.put_new("a/b", data)
    assert store.get("a/b") == b"first"
    store.delete("a/b")
    store.put_new("a/b", b"third")
    assert store.get("a/b") == b"third"


@pytest.mark.parametrize(
    "chunks", [[], [b""], [b"a", b"", b"bc"], [memoryview(b"xyz")[1:], np.arange(3, dtype="u1").data]]
)
def test_put_takes_chunks(store: Store, chunks: list[Any]) -> None:
    expected = b"".join(bytes(c) for c in chunks)
    store.put("a/list", chunks)
    store.put("a/iterator", iter(chunks))
    assert store.get("a/list") == store.get("a/iterator") == expected


def test_a_large_object_is_streamed(store: Store, rng: Rng) -> None:
    """Twelve megabytes, more than one part of a multipart upload, from chunks of odd sizes."""
    data = rng.bytes(12 << 20)
    cuts = [0, 1, 5 << 20, (5 << 20) + 17, 11 << 20, len(data)]
    store.put("a/large", (memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)))
    assert store.head("a/large").nbytes == len(data)
    assert store.get("a/large") == data
    assert store.get("a/large", 5 << 20, (5 << 20) + 100) == data[5 << 20 : (5 << 20) + 100]


@pytest.mark.parametrize("megabytes", [0, 7])
def test_an_upload_that_breaks_leaves_nothing(store: Store, megabytes: int) -> None:
    """A reader must never see half an object, whether or not one stood there before."""
    store.put("a/old", b"old")

    def breaks() -> Iterator[bytes]:
        for _ in range(megabytes):
            yield bytes(1 << 20)
        raise ValueError("the source broke")

    for name in ("a/new", "a/old"):
        with pytest.raises(Exception, match="source broke"):
            store.put(name, breaks())
    assert names(store, "a") == ["a/old"]
    assert store.get("a/old") == b"old"


def test_ranges(store: Store) -> None:
    store.put("a/b", b"0123456789")
    cases = [((0, 10), b"0123456789"), ((3, 7), b"3456"), ((9,), b"9"), ((10,), b""), ((4, 4), b""), ((0, 0), b"")]
    for bounds, expected in cases:
        assert store.get("a/b", *bounds) == expected
    assert store.get("a/b", stop=2) == b"01"
    for bounds in [(0, 11), (11, 11), (11,), (5, 3), (-1, 3), (0, -1), (10, 12)]:
        with pytest.raises(StoreError) as caught:
            store.get("a/b", *bounds)
        assert not isinstance(caught.value, NotFound | StoreUnavailable)


def test_what_is_absent_is_not_found(store: Store) -> None:
    store.put("a/b", b"x")
    for name in ("a/c", "a", "b", "a/b2"):
        for call in (store.get, store.head, lambda n: store.get(n, 0, 1)):
            with pytest.raises(NotFound, match=name):
                call(name)
    assert names(store, "nothing") == []


def test_lists_are_in_order_and_below_the_folder(store: Store) -> None:
    inside = ["a/0010", "a/0002", "a/0001", "a/b/c", "a/b.x", "a/b-x", "a/B", "a/z"]
    for name in [*inside, "a.b", "a2/x", "ab", "b/a/x", "A/x"]:
        store.put(name, name.encode())
    assert names(store, "a") == sorted(inside)
    assert [(i.name, i.nbytes) for i in store.list("a/b")] == [("a/b/c", 5)]


def test_lists_go_on_after_a_name(store: Store) -> None:
    everything = [f"a/{k:03}" for k in range(0, 40, 2)]
    for name in everything:
        store.put(name, b"")
    assert names(store, "a", "a/000") == everything[1:]
    assert names(store, "a", "a/021") == everything[11:]
    assert names(store, "a", "a/038") == []
    assert names(store, "a", "A/9") == everything
    assert names(store, "a", "b/0") == []


def test_lists_of_more_than_a_page(store: Store) -> None:
    expected = [f"a/{k:04}" for k in range(1003)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.put(name, b""), reversed(expected)))
    assert names(store, "a") == expected
    assert names(store, "a", expected[1]) == expected[2:]


def test_deleting_30_keeps_300(store: Store) -> None:
    for name in ("a/x-30", "a/x-300", "a/x-3", "a/x-30.json"):
        store.put(name, b"x")
    store.delete("a/x-30")
    assert names(store, "a") == ["a/x-3", "a/x-30.json", "a/x-300"]


def test_deleting_what_is_absent_is_no_error(store: Store) -> None:
    store.put("a/b", b"x")
    for name in ("a/b", "a/b", "a/c", "nothing"):
        store.delete(name)
    with pytest.raises(NotFound):
        store.get("a/b")


def test_deleting_a_folders_name_deletes_nothing(store: Store) -> None:
    store.put("a/b/c", b"x")
    store.delete("a/b")
    assert names(store, "a") == ["a/b/c"]


def test_of_racing_creates_one_wins(store: Store) -> None:
    racers, rounds = 6, 5
    barrier = Barrier(racers)

    def create(name: str, data: bytes) -> bytes | None:
        barrier.wait(30)
        try:
            store.put_new(name, data)
        except AlreadyExists:
            return None
        return data

    with ThreadPoolExecutor(racers) as pool:
        for k in range(rounds):
            name = f"a/{k}"
            tries = [pool.submit(create, name, bytes([r]) * 1000) for r in range(racers)]
            winners = [t.result() for t in tries if t.result() is not None]
            assert winners == [store.get(name)]


BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "a/../b",
    "a/..",
    "/a",
    "a/",
    "a//b",
    ".a",
    "a/.b",
    "-a",
    "a b",
    "a\\b",
    "ü",
    "a\0b",
]
BAD_NAMES += ["a\n", "a:b", "a?b", "a%2e%2e", "~", "x" * 513]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_escape_are_refused(store: Store, name: str, tmp_path: Path) -> None:
    store.put("kept/x", b"x")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    calls: list[Callable[[], object]] = [
        lambda: store.put(name, b"y"),
        lambda: store.put_new(name, b"y"),
        lambda: store.get(name),
        lambda: store.get(name, 0, 1),
        lambda: store.head(name),
        lambda: list(store.list(name)),
        lambda: store.delete(name),
    ]
    for call in calls:
        with pytest.raises(InvalidName):
            call()
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
    assert names(store, "kept") == ["kept/x"]


def test_the_longest_name(store: Store) -> None:
    name = "/".join(["x" * 127] * 4) + "y"
    assert len(name) == 512
    store.put_new(name, b"x")
    assert store.get(name) == b"x"


def test_create_or_confirm(store: Store) -> None:
    assert create_or_confirm(store, "a/b", b"mine")
    assert create_or_confirm(store, "a/b", b"mine"), "its own object is success"
    assert not create_or_confirm(store, "a/b", b"other")
    assert store.get("a/b") == b"mine"


def test_check_store_finds_a_good_store_safe_and_leaves_nothing(store: Store) -> None:
    findings = check_store(store, rounds=5)
    assert [f.guarantee for f in findings if not f.held] == []
    assert len(findings) == 5
    assert names(store, "pulse-store-check") == []
