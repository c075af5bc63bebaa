"""Many streams followed by a few threads: none is missed, none holds up another, and all of it ends
in time, whatever stores do."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pulse_rl import (
    LocalStore,
    MemoryStore,
    MultiSubscriber,
    Publisher,
    Relay,
    Store,
    Update,
    state_root,
)
from pulse_rl.errors import ChainGap, InputError
from pulse_rl.events import CallFailed, Event
from pulse_rl.follow.multi_subscriber import Schedule
from pulse_rl.stores.server import FolderServer
from tests.support.http import CountedHttpStore, asked
from tests.support.states import Rng, history, roots
from tests.support.stores import FaultyStore

#: Within this many seconds everything comes; nothing waits for it to pass.
SOON = 30.0


class Fleet:
    """Publishers of the streams "0", "1", … of one store."""

    def __init__(self, store: Store, count: int, rng: Rng, versions: int = 4) -> None:
        self.states = history(rng, versions)
        self.roots = roots(self.states)
        self.names = [str(k) for k in range(count)]
        self.publishers = {
            name: Publisher(store, stream=name, threads=1, anchor_ratio=1e9) for name in self.names
        }

    def publish(self, version: int, *names: str) -> None:
        for name in names or self.names:
            self.publishers[name].publish(self.states[version])


def take(updates: Iterator[tuple[str, Update]], count: int) -> dict[str, str]:
    """The roots of so many updates by stream."""
    return {name: update.root for name, update in (next(updates) for _ in range(count))}


def running_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_hundreds_of_streams_take_a_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_rl._util.serial._IDLE_SECONDS", 0.05)  # of the publishers' threads
    store, state = MemoryStore(), {"adapter": np.zeros(64, np.float32)}
    root = state_root(state)
    publishers = [Publisher(store, stream=f"adapter-{k}", threads=1) for k in range(300)]
    for publisher in publishers:
        publisher.publish(state)
    time.sleep(1)
    before = running_threads()
    with MultiSubscriber(store, [f"adapter-{k}" for k in range(300)], threads=3) as subscribers:
        seen: Counter[str] = Counter()
        most = 0
        for name, update in subscribers.updates(timeout_seconds=SOON):
            assert update.root == root
            seen[name] += 1
            most = max(most, running_threads())
            if len(seen) == 300:
                break
        time.sleep(1.5)
        assert max(most, running_threads()) - before <= 3
        assert subscribers["adapter-7"].root == root
        assert set(seen.values()) == {1}
    ended = time.monotonic() + SOON
    while running_threads() > before + 1 and time.monotonic() < ended:
        time.sleep(0.05)
    assert running_threads() <= before + 1


def test_updates_come_one_after_another(rng: Rng, store: MemoryStore) -> None:
    fleet = Fleet(store, 5, rng)
    with MultiSubscriber(store, fleet.names, poll_seconds=0.02) as subscribers:
        updates = subscribers.updates(timeout_seconds=SOON)
        for version in range(4):
            fleet.publish(version)
            assert take(updates, 5) == dict.fromkeys(fleet.names, fleet.roots[version])
        assert list(subscribers.updates(timeout_seconds=0.2)) == []
        assert subscribers.failures == {}
        assert [subscribers[name].version for name in subscribers] == [3] * len(subscribers)


def test_a_stream_rests_while_its_update_is_used(rng: Rng, store: MemoryStore) -> None:
    fleet = Fleet(store, 2, rng)
    fleet.publish(0)
    with MultiSubscriber(store, ["0"], poll_seconds=0.02) as subscribers:
        updates = subscribers.updates(timeout_seconds=SOON)
        next(updates)
        fleet.publish(1, "0")
        time.sleep(0.3)
        assert subscribers["0"].version == 0
        assert subscribers["0"].root == fleet.roots[0]
        name, update = next(updates)
        assert (name, update.previous, update.version) == ("0", 0, 1)


def test_what_was_not_acknowledged_comes_again(rng: Rng, store: MemoryStore) -> None:
    """A reader that broke out of its loop has not said that it has the update."""
    fleet = Fleet(store, 1, rng)
    fleet.publish(0)
    with MultiSubscriber(store, fleet.names, poll_seconds=0.02) as subscribers:
        for _ in range(2):
            updates = subscribers.updates(timeout_seconds=SOON)
            assert next(updates)[1].previous is None
            updates.close()  # type: ignore[attr-defined]
        updates = subscribers.updates(timeout_seconds=SOON)
        assert next(updates)[1].previous is None
        fleet.publish(1)
        next(updates)
        updates.close()  # type: ignore[attr-defined]
        fleet.publish(2)
        late = subscribers.updates(timeout_seconds=SOON)
        found = [next(late)[1]]
        while found[-1].version < 2:
            found.append(next(late)[1])
        assert found[0].previous == 0


def test_a_stream_that_fails_holds_up_no_other(rng: Rng, faulty: FaultyStore) -> None:
    fleet = Fleet(faulty, 6, rng)
    fleet.publish(0)
    told: list[Event] = []
    with MultiSubscriber(
        faulty, fleet.names, threads=1, poll_seconds=0.02, on_event=told.append
    ) as subscribers:
        updates = subscribers.updates(timeout_seconds=SOON)
        take(updates, 6)
        faulty.damage = lambda name, data: data[:-1] if name.startswith("3/payloads") else data
        for version in (1, 2):
            fleet.publish(version)
            found = take(updates, 5)
            assert found == {name: fleet.roots[version] for name in fleet.names if name != "3"}
        deadline = time.monotonic() + SOON
        while not subscribers.failures and time.monotonic() < deadline:
            time.sleep(0.01)
        assert isinstance(subscribers.failures["3"], ChainGap)
        assert any(isinstance(event, CallFailed) and event.stream == "3" for event in told)
        faulty.damage = lambda name, data: data
        assert take(updates, 1) == {"3": fleet.roots[2]}
        assert subscribers.failures == {}


def test_streams_come_and_go(rng: Rng, store: MemoryStore) -> None:
    fleet = Fleet(store, 3, rng)
    fleet.publish(0)
    with MultiSubscriber(store, poll_seconds=0.02) as subscribers:
        updates = subscribers.updates(timeout_seconds=SOON)
        for name in fleet.names:
            assert subscribers.add(name) is subscribers[name]
            assert take(updates, 1) == {name: fleet.roots[0]}
        subscribers.remove("1")
        assert "1" not in subscribers
        assert list(subscribers) == ["0", "2"]
        fleet.publish(1)
        assert take(updates, 2) == {"0": fleet.roots[1], "2": fleet.roots[1]}
        subscribers.add("1")
        assert take(updates, 1) == {"1": fleet.roots[1]}
        subscribers.add("later")
        later = Publisher(store, stream="later", threads=1)
        later.publish(fleet.states[2])
        assert take(updates, 1) == {"later": fleet.roots[2]}


def test_a_stream_is_given_what_a_subscriber_is(tmp_path: Path, rng: Rng) -> None:
    store = MemoryStore()
    states = history(rng, 1)
    publisher = Publisher(store, stream="whole", threads=1)
    publisher.publish(states[0])
    with MultiSubscriber(store, poll_seconds=0.02) as subscribers:
        subscribers.add("whole", select="embed.*", stream_id=publisher.stream_id)
        _, update = next(subscribers.updates(timeout_seconds=SOON))
        assert [tensor.spec.name for tensor in update.tensors] == ["embed.weight"]
    with MultiSubscriber(store, poll_seconds=0.02, cache=tmp_path / "cache") as subscribers:
        with pytest.raises(InputError, match="select and cache do not go together"):
            subscribers.add("whole", select="embed.*")
        assert "whole" not in subscribers
        subscribers.add("whole")
        next(subscribers.updates(timeout_seconds=SOON))
        assert list((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_several_threads_share_the_updates(rng: Rng, store: MemoryStore) -> None:
    fleet = Fleet(store, 20, rng)
    fleet.publish(0)
    seen: list[str] = []
    with MultiSubscriber(store, fleet.names, poll_seconds=0.05) as subscribers:

        def read() -> None:
            for name, _ in subscribers.updates(timeout_seconds=SOON):
                seen.append(name)
                if len(seen) == len(fleet.names):
                    subscribers.close()

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert sorted(seen) == sorted(fleet.names)


@pytest.mark.slow
def test_closing_does_not_wait_for_a_store_that_hangs(
    rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_rl.follow.multi_subscriber._CLOSE_SECONDS", 0.5)
    store, hangs, reached = FaultyStore(MemoryStore()), threading.Event(), threading.Event()
    fleet = Fleet(store, 3, rng)
    fleet.publish(0)

    def hang(name: str, data: bytes) -> bytes:
        reached.set()
        hangs.wait(SOON)
        return data

    store.damage = hang
    subscribers = MultiSubscriber(store, fleet.names)
    assert reached.wait(SOON)
    began = time.monotonic()
    subscribers.close()
    subscribers.close()
    assert time.monotonic() - began < 20
    assert list(subscribers.updates()) == []
    hangs.set()
    with pytest.raises(InputError, match="closed"):
        subscribers.add("4")


def test_closing_ends_an_iteration(rng: Rng) -> None:
    subscribers = MultiSubscriber(MemoryStore(), ["nothing"])
    threading.Timer(0.3, subscribers.close).start()
    assert list(subscribers.updates(timeout_seconds=SOON)) == []


def test_refusals() -> None:
    with MultiSubscriber(MemoryStore(), ["a"]) as subscribers:
        for wrong in (
            lambda: subscribers.add("a"),
            lambda: subscribers.remove("b"),
            lambda: subscribers["b"],
            lambda: MultiSubscriber(MemoryStore(), "a"),
            lambda: MultiSubscriber(MemoryStore(), threads=0),
            lambda: MultiSubscriber(MemoryStore(), poll_seconds=0),
            lambda: MultiSubscriber([]),
        ):
            with pytest.raises(InputError):
                wrong()
        with pytest.raises(InputError):
            subscribers.add("../a")
        assert list(subscribers) == ["a"]


def test_what_a_listener_raises_reaches_the_reader(rng: Rng, store: MemoryStore) -> None:
    Fleet(store, 1, rng).publish(0)

    def listen(_: Event) -> None:
        raise ZeroDivisionError("of the listener")

    with (
        MultiSubscriber(store, ["0"], on_event=listen) as subscribers,
        pytest.raises(ZeroDivisionError, match="of the listener"),
    ):
        next(subscribers.updates(timeout_seconds=SOON))


@pytest.mark.slow
def test_a_farther_store_is_read_where_the_nearer_one_is_stale(tmp_path: Path, rng: Rng) -> None:
    origin, near = LocalStore(tmp_path / "origin"), LocalStore(tmp_path / "near")
    fleet = Fleet(origin, 2, rng)
    fleet.publish(0)
    for name in fleet.names:
        Relay(origin, near, stream=name).sync()
    with MultiSubscriber(
        [near, origin], fleet.names, poll_seconds=0.02, patience_seconds=0.2
    ) as subscribers:
        updates = subscribers.updates(timeout_seconds=SOON)
        take(updates, 2)
        fleet.publish(1)
        assert take(updates, 2) == dict.fromkeys(fleet.names, fleet.roots[1])


def test_the_schedule_takes_what_has_been_due_for_longest() -> None:
    schedule: Schedule[str] = Schedule()
    first, second, _ = names = ["first", "second", "third"]
    for name in names:
        schedule.put(name)
    assert [schedule.take() for _ in names] == names
    schedule.put(second)
    schedule.put(first)
    assert schedule.take() is second
    schedule.put(second, 99.0)
    assert schedule.take() is first
    schedule.put(second)
    schedule.put(first)
    assert schedule.remove(first)
    assert schedule.take() is second
    threading.Timer(0.1, schedule.close).start()
    assert schedule.take() is None


# -- stores and servers that misbehave: no storm, nothing lost, no stream held up


@pytest.mark.slow
def test_no_patience_is_no_storm(rng: Rng, faulty: FaultyStore) -> None:
    Fleet(faulty, 1, rng).publish(0)
    with MultiSubscriber(
        [faulty, faulty.inner], ["0"], poll_seconds=0.2, patience_seconds=0
    ) as subscribers:
        next(subscribers.updates(timeout_seconds=SOON))[1].acknowledge()
        faulty.calls.clear()
        assert list(subscribers.updates(timeout_seconds=1)) == []
        assert 1 <= sum(call == "list" for call, _ in faulty.calls) <= 20


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_error_that_is_not_ours_is_told_once_and_holds_up_no_other(rng: Rng) -> None:
    store = FaultyStore(MemoryStore())
    Fleet(store, 3, rng).publish(0)

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


@pytest.mark.slow
def test_a_thread_survives_what_a_sync_cannot_handle(
    rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, whole = MemoryStore(), MultiSubscriber._sync
    Fleet(store, 1, rng).publish(0)
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
