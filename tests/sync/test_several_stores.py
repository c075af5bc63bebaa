"""A subscriber with several stores: none that is away, stale or damaged makes a worker wrong, or
stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pulse_rl import MemoryStore, Publisher, Relay, Signer, Store, Subscriber, Update, state_root
from pulse_rl.errors import ChainGap, InputError, StoreUnavailable, StreamRecreated
from pulse_rl.events import Event, FallbackUsed
from pulse_rl.store import ObjectInfo
from tests.support.lying_store import LyingStore
from tests.support.states import Live, Rng, Tensors, history, present, reach, taken
from tests.support.stores import FaultyStore, names


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("pulse_rl.follow.failover.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Away(MemoryStore):
    """A store that is unreachable while ``away``."""

    away = False

    def __getattribute__(self, name: str) -> object:
        if name in ("get", "head", "list", "put", "put_new", "delete") and object.__getattribute__(
            self, "away"
        ):
            raise StoreUnavailable("the store is away")
        return super().__getattribute__(name)


class Prompt(Subscriber):
    """A worker whose live model has each update as soon as it is returned."""

    def sync(self, target: int | None = None) -> Update | None:
        if update := super().sync(target):
            update.acknowledge()
        return update


class Fleet:
    """An origin with its publisher, and a near store that a relay fills."""

    def __init__(self, rng: Rng, versions: int = 12, **options: object) -> None:
        self.states = history(rng, versions)
        self.origin, self.near = FaultyStore(Away()), FaultyStore(Away())
        self.publisher = Publisher(self.origin, stream="policy", threads=1, **options)  # type: ignore[arg-type]
        self.relay = Relay(self.origin, self.near, stream="policy", threads=1)
        self.published = 0

    def publish(self, count: int = 1, *, relayed: bool = True) -> str:
        for _ in range(count):
            self.publisher.publish(self.states[self.published])
            self.published += 1
        if relayed:
            self.relay.sync()
        return state_root(self.states[self.published - 1])

    def worker(
        self, *, patience_seconds: float = 30.0, allow_recreated: bool = False, **options: object
    ) -> Subscriber:
        worker = Prompt([self.near, self.origin], stream="policy", threads=1, **options)  # type: ignore[arg-type]
        worker.patience_seconds = patience_seconds
        worker.allow_recreated = allow_recreated
        return worker


@pytest.fixture
def fleet(rng: Rng) -> Fleet:
    return Fleet(rng)


def forget_calls(*stores: FaultyStore) -> None:
    for store in stores:
        store.calls.clear()


def test_what_is_near_is_not_fetched_from_the_origin(rng: Rng, clock: Clock) -> None:
    fleet, live = Fleet(rng), Live()
    worker = fleet.worker()
    for _ in range(4):
        root = fleet.publish()
        forget_calls(fleet.near, fleet.origin)
        live.apply(worker.sync())
        assert live.root == worker.root == root
        assert not any("/payloads/" in name for _, name in fleet.origin.calls)


def test_the_load_on_the_origin_is_one_listing_in_a_while(clock: Clock, fleet: Fleet) -> None:
    fleet.publish(3)
    worker = fleet.worker(patience_seconds=30)
    worker.sync()
    forget_calls(fleet.origin, fleet.near)
    for _ in range(600):
        clock.now += 1
        assert worker.sync() is None
    assert set(fleet.origin.calls) == {("list", "policy/versions")}
    assert 600 / 30 / 1.25 - 1 <= len(fleet.origin.calls) <= 600 / 30 / 0.75 + 1
    assert fleet.near.calls == [("list", "policy/versions")] * 600


def test_a_near_store_that_is_away_or_empty(rng: Rng) -> None:
    fleet, live, seen = Fleet(rng), Live(), list[Event]()
    worker = fleet.worker(on_event=seen.append)
    fleet.near.inner.away = fleet.origin.inner.away = True  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable):
        worker.sync()
    fleet.origin.inner.away = False  # type: ignore[attr-defined]
    assert worker.sync() is None
    root = fleet.publish(2, relayed=False)
    live.apply(worker.sync())
    assert live.root == root
    assert {e.link for e in seen if isinstance(e, FallbackUsed)} == {"store 1 of 2", "store 2 of 2"}
    fleet.near.inner.away = False  # type: ignore[attr-defined]
    assert worker.sync() is None
    root = fleet.publish(2)
    live.apply(worker.sync())
    assert live.root == root
    fleet.origin.inner.away = True  # type: ignore[attr-defined]
    assert worker.sync() is None, "the near store is enough"


def test_a_stale_near_store_is_passed_over(rng: Rng, clock: Clock) -> None:
    """Not at once: a relay needs its time. And it is taken again when it has caught up."""
    fleet, live = Fleet(rng), Live()
    fleet.publish()
    worker = fleet.worker(patience_seconds=30)
    live.apply(worker.sync())
    root = fleet.publish(2, relayed=False)
    started = clock.now
    while worker.sync() is None:
        clock.now += 1
        assert clock.now - started <= 30 * 2.25 + 1, "the bound that the documents give"
    assert clock.now - started >= 30
    assert worker.root == root
    root = fleet.publish(relayed=False)
    assert worker.sync() is not None, "the near store is known to be late"
    assert worker.root == root
    fleet.relay.sync()
    assert worker.sync() is None
    root = fleet.publish()
    forget_calls(fleet.origin)
    assert worker.sync() is not None
    assert worker.root == root
    assert not any("/payloads/" in name for _, name in fleet.origin.calls)


def test_without_patience_the_newest_of_all_is_taken(fleet: Fleet) -> None:
    fleet.publish()
    worker = fleet.worker(patience_seconds=0)
    worker.sync()
    root = fleet.publish(relayed=False)
    reach(worker, root)


def test_a_farther_store_that_promises_too_much_holds_nobody_up(rng: Rng, clock: Clock) -> None:
    """A newer version that the origin lists and cannot give."""
    fleet = Fleet(rng, anchor_ratio=1e9)
    root = fleet.publish(2)
    worker = fleet.worker(patience_seconds=30)
    worker.sync()
    fleet.publish(relayed=False)
    head = present(fleet.publisher.head())
    assert head.patch is not None
    fleet.origin.delete(f"policy/payloads/{head.patch.parts[0].sha256}.patch")
    fleet.origin.put("policy/versions/000000099999.json", b"junk")
    for _ in range(200):
        clock.now += 1
        assert worker.sync() is None
    assert worker.root == root


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("folder", ["versions", "payloads", "links"])
@pytest.mark.parametrize("how", [*DAMAGE, "gone"])
def test_a_damaged_near_store_never_makes_a_worker_wrong(how: str, folder: str, rng: Rng) -> None:
    fleet, live = Fleet(rng, anchor_ratio=0.05), Live()
    worker = fleet.worker()
    fleet.publish(2)
    live.apply(worker.sync())
    root = fleet.publish(4)
    for name in names(fleet.near, f"policy/{folder}"):
        data = fleet.near.inner.get(name)
        fleet.near.inner.delete(name)
        if how != "gone" and data:
            fleet.near.inner.put(name, DAMAGE[how](data))
    for _ in range(2):
        live.apply(worker.sync())
    newcomer = fleet.worker()
    newcomer.sync()
    if folder == "versions":  # what a nearer store does not show is newer elsewhere: after a while
        worker, newcomer = fleet.worker(patience_seconds=0), fleet.worker(patience_seconds=0)
        live.apply(worker.sync())
        newcomer.sync()
    assert live.root == newcomer.root == root


def test_a_worker_ahead_of_the_near_store_stays_where_it_is(fleet: Fleet) -> None:
    fleet.publish()
    root = fleet.publish(3, relayed=False)
    worker = fleet.worker(patience_seconds=0)
    worker.sync()
    assert worker.version == 3
    for _ in range(3):
        assert worker.sync() is None
        assert (worker.version, worker.root) == (3, root)


def test_a_target_version_is_found_where_it_is(fleet: Fleet) -> None:
    fleet.publish(2)
    root = fleet.publish(2, relayed=False)
    worker = fleet.worker()
    worker.sync(target=3)
    assert (worker.version, worker.root) == (3, root)
    with pytest.raises(ChainGap):
        worker.sync(target=9)


def test_a_base_is_found_in_the_store_that_has_versions(fleet: Fleet) -> None:
    fleet.publish(2, relayed=False)
    worker = fleet.worker(base=fleet.states[0])
    update = present(worker.sync())
    assert update.previous == 0


def replace_origin(fleet: Fleet, state: Tensors) -> str:
    for name in names(fleet.origin, "policy"):
        fleet.origin.delete(name)
    return Publisher(fleet.origin, stream="policy").publish(state).root


def test_only_the_origin_says_that_a_stream_is_another_one(fleet: Fleet) -> None:
    """A near store that holds an earlier stream of the name does not take anybody back to it."""
    fleet.publish(3)
    careful = fleet.worker(patience_seconds=0)
    willing = fleet.worker(patience_seconds=0, allow_recreated=True)
    for worker in (careful, willing):
        worker.sync()
    root = replace_origin(fleet, fleet.states[7])
    with pytest.raises(StreamRecreated):
        careful.sync()
    assert careful.version == 2
    for worker in (willing, fleet.worker(patience_seconds=0)):
        reach(worker, root, 0)
        assert worker.sync() is None
        assert worker.root == root
    pinned = fleet.worker(patience_seconds=0, stream_id=careful.stream_id)
    with pytest.raises(StreamRecreated):
        pinned.sync()


def test_a_near_store_of_another_stream_is_passed_over(fleet: Fleet) -> None:
    root = fleet.publish(2, relayed=False)
    Publisher(fleet.near, stream="policy").publish(fleet.states[9])
    for worker in (
        fleet.worker(stream_id=fleet.publisher.stream_id),
        fleet.worker(patience_seconds=0),
    ):
        reach(worker, root)
        assert worker.sync() is None


def test_a_hostile_near_store_cannot_lead_astray(rng: Rng) -> None:
    states, signer = history(rng, 3), Signer(bytes(range(32)))
    origin, near = MemoryStore(), MemoryStore()
    root = Publisher(origin, stream="policy", signer=signer).publish(states[0]).root
    Publisher(near, stream="policy", signer=Signer(bytes(32))).publish(states[1])
    reach(Subscriber([near, origin], stream="policy", trusted_keys=[signer.public_key]), root)


def test_a_cache_serves_all_stores(tmp_path: Path, fleet: Fleet) -> None:
    root = fleet.publish(3)
    fleet.worker(cache=tmp_path).sync()
    fleet.near.inner.away = True  # type: ignore[attr-defined]
    forget_calls(fleet.origin)
    again = fleet.worker(cache=tmp_path)
    reach(again, root)
    assert not any("/payloads/" in name for _, name in fleet.origin.calls)


def test_one_store_is_one_store(rng: Rng, faulty: FaultyStore) -> None:
    """A list of one costs what a store costs."""
    Publisher(faulty, stream="policy").publish(history(rng, 1)[0])
    worker = Subscriber([faulty], stream="policy")
    taken(worker)
    faulty.calls.clear()
    assert worker.sync() is None
    assert faulty.calls == [("list", "policy/versions")]


@pytest.mark.parametrize("stores", [[], ()])
def test_no_store_is_refused(stores: list[Store]) -> None:
    with pytest.raises(InputError):
        Subscriber(stores, stream="policy")
    with pytest.raises(InputError):
        Subscriber([MemoryStore()], stream="policy").patience_seconds = -1


def test_a_stream_recreated_behind_two_stale_stores_is_noticed(rng: Rng, clock: Clock) -> None:
    fleet, middle = Fleet(rng), MemoryStore()
    fleet.publish(3)
    Relay(fleet.origin, middle, stream="policy", threads=1).sync()
    stores = [fleet.near, middle, fleet.origin]
    worker = Subscriber(stores, stream="policy", threads=1)
    worker.sync()
    replace_origin(fleet, fleet.states[7])
    clock.now += 100
    with pytest.raises(StreamRecreated):
        worker.sync()


def test_a_base_of_an_earlier_stream_in_a_stale_store_holds_nobody(fleet: Fleet) -> None:
    fleet.publish(3)
    root = replace_origin(fleet, fleet.states[7])
    for options in ({}, {"allow_recreated": True}):
        worker = fleet.worker(base=fleet.states[2], patience_seconds=0, **options)
        update = present(worker.sync())
        assert (worker.version, worker.root, update.previous) == (0, root, None)


def test_a_restart_is_followed_once_the_origin_can_be_asked(fleet: Fleet) -> None:
    """What was followed is not forgotten before the origin has said what it is now."""
    fleet.publish(3)
    worker = fleet.worker(patience_seconds=0, allow_recreated=True)
    worker.sync()
    root = replace_origin(fleet, fleet.states[7])
    stream = worker._failover.streams[-1]
    newest, asked = stream.newest, list[bool]()

    def away_at_second(after: int | None = None, *, anybody: bool = False) -> object:
        asked.append(anybody)
        if anybody and asked.count(True) == 2:
            raise StoreUnavailable("the origin is away")
        return newest(after, anybody=anybody)

    stream.newest = away_at_second  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailable):
        worker.sync()
    assert worker.version == 2
    reach(worker, root, 0)


def test_a_near_store_that_lists_slowly_is_passed_over_and_left_alone_for_a_while(
    rng: Rng, clock: Clock
) -> None:
    def endless(liar: object, folder: str, right: object) -> Iterator[ObjectInfo]:
        """Each name a hundredth of a second late."""
        for version in range(10**6):
            clock.now += 0.01
            yield ObjectInfo(f"{folder}/{version:012d}.json", 9, 1.0)
        raise AssertionError("the listing was followed to its end")

    fleet, near = Fleet(rng), LyingStore(MemoryStore(), "list", endless)
    root = fleet.publish(relayed=False)
    worker = Subscriber([near, fleet.origin], stream="policy", threads=1)
    worker.patience_seconds = 20
    began = clock.now
    reach(worker, root)
    assert clock.now - began < 40
    assert near.lies == 1
    fleet.publish(relayed=False)
    worker.sync()
    assert (worker.version, near.lies) == (1, 1)
    clock.now += 100
    worker.sync()
    assert near.lies == 2


def test_a_near_store_whose_every_answer_is_late_is_passed_over(clock: Clock, fleet: Fleet) -> None:
    """The worker goes on in the origin from the version that it has reached."""
    fleet.publish()
    near = LyingStore(MemoryStore())
    worker = Subscriber([near, fleet.origin], stream="policy", threads=1)
    worker.patience_seconds = 60
    worker.sync()
    for _ in range(7):
        root = fleet.publish(relayed=False)
    Relay(fleet.origin, near, stream="policy", threads=1).sync()
    began = clock.now

    def late(liar: object, name: str, right: Callable[[], object]) -> object:
        clock.now += 11
        return right()

    near.tell("every", late)
    reach(worker, root)
    assert clock.now - began < 120
