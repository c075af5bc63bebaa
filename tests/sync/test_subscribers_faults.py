"""Many streams at stores and servers that misbehave: no storm, nothing lost, no stream held up."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from pulse_rl import LocalStore, MemoryStore, MultiSubscriber, Publisher, Store
from pulse_rl.stores.server import FolderServer
from tests.support.http import CountedHttpStore, asked
from tests.support.states import Rng, history, roots
from tests.support.stores import FaultyStore

pytestmark = pytest.mark.slow

#: Within this many seconds everything comes; nothing waits for it to pass.
SOON = 30.0


def published(store: Store, rng: Rng, *names: str) -> list[Publisher]:
    state = history(rng, 1)[0]
    publishers = [Publisher(store, stream=name, threads=1, anchor_ratio=1e9) for name in names]
    for publisher in publishers:
        publisher.publish(state)
    return publishers


def test_the_first_update_comes_again_where_its_loop_was_left(rng: Rng, store: MemoryStore) -> None:
    published(store, rng, "0")
    with MultiSubscriber(store, ["0"], poll_seconds=0.02) as subscribers:
        for _ in range(2):
            updates = subscribers.updates(timeout_seconds=SOON)
            assert next(updates)[1].previous is None
            updates.close()  # type: ignore[attr-defined]
        updates = subscribers.updates(timeout_seconds=SOON)
        name, update = next(updates)
        assert (name, update.previous) == ("0", None)
        update.acknowledge()
        updates.close()  # type: ignore[attr-defined]
        assert list(subscribers.updates(timeout_seconds=0.3)) == [], "now it was acknowledged"


def test_no_patience_is_no_storm(rng: Rng, faulty: FaultyStore) -> None:
    published(faulty, rng, "0")
    with MultiSubscriber(
        [faulty, faulty.inner], ["0"], poll_seconds=0.2, patience_seconds=0
    ) as subscribers:
        next(subscribers.updates(timeout_seconds=SOON))[1].acknowledge()
        faulty.calls.clear()
        assert list(subscribers.updates(timeout_seconds=1)) == []
        assert 1 <= sum(call == "list" for call, _ in faulty.calls) <= 20


def test_junk_above_the_newest_version_makes_neither_a_storm_nor_a_delay(
    tmp_path: Path, rng: Rng
) -> None:
    folder = LocalStore(tmp_path)
    states = history(rng, 3)
    publisher = Publisher(folder, stream="0", threads=1)
    publisher.publish(states[0])
    with FolderServer(tmp_path) as server:
        store = CountedHttpStore(server.url)
        with MultiSubscriber(store, ["0"], poll_seconds=0.25) as subscribers:
            next(subscribers.updates(timeout_seconds=SOON))[1].acknowledge()
            folder.put("0/versions/000000000900.json", b"junk")
            time.sleep(2)
            asked(store)
            assert list(subscribers.updates(timeout_seconds=2)) == []
            assert len(asked(store)) <= 40
            updates = subscribers.updates(timeout_seconds=SOON)
            for version, root in enumerate(roots(states)[1:], 1):
                publisher.publish(states[version])
                began = time.monotonic()
                assert next(updates)[1].root == root
                assert time.monotonic() - began < 8


def test_an_error_that_is_not_ours_is_told_once_and_holds_up_no_other(rng: Rng) -> None:
    store = FaultyStore(MemoryStore())
    published(store, rng, "0", "1", "2")

    def damage(name: str, data: bytes) -> bytes:
        if name.startswith("1/"):
            raise PermissionError(name)
        return data

    store.damage = damage
    with MultiSubscriber(store, ["0", "1", "2"], threads=1, poll_seconds=0.02) as subscribers:
        time.sleep(1)
        assert 2 <= sum(call == "get" and name.startswith("1/") for call, name in store.calls) <= 8
        found, raised = [], 0
        deadline = time.monotonic() + SOON
        while len(found) < 2 and time.monotonic() < deadline:
            try:
                found.extend(name for name, _ in subscribers.updates(timeout_seconds=0.1))
            except PermissionError:
                raised += 1
        assert sorted(found) == ["0", "2"]
        assert raised <= 2
        store.damage = lambda name, data: data
        while not found.count("1") and time.monotonic() < deadline:
            try:
                found.extend(name for name, _ in subscribers.updates(timeout_seconds=0.1))
            except PermissionError:
                raised += 1
        assert "1" in found


def test_a_thread_survives_what_a_sync_cannot_handle(
    rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, whole = MemoryStore(), MultiSubscriber._sync
    published(store, rng, "0")
    failed = threading.Event()

    def fails_once(self: MultiSubscriber, followed: object) -> None:
        if not failed.is_set():
            failed.set()
            raise MemoryError
        whole(self, followed)  # type: ignore[arg-type]

    monkeypatch.setattr(MultiSubscriber, "_sync", fails_once)
    with MultiSubscriber(store, ["0"], threads=1, poll_seconds=0.02) as subscribers:
        assert next(subscribers.updates(timeout_seconds=SOON))[0] == "0"
        assert failed.is_set()
