"""The store goes away, or the caller is interrupted, at any single point: nothing is lost, the next
call goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from pulse_rl import MemoryStore, ObjectInfo, Publisher, PulseError, Subscriber, verify_stream
from pulse_rl.errors import ChainGap, PublisherConflict, StoreUnavailable
from pulse_rl.events import CallFailed, Event
from tests.support.manifests import manifest_of
from tests.support.publishers import tuned
from tests.support.states import (
    Live,
    Rng,
    Tensors,
    bits,
    history,
    mutated,
    policy,
    present,
    publish_each,
    roots,
    snapshot,
    state_root,
)
from tests.support.stores import FaultyStore

Options = dict[str, float]
OPTIONS: dict[str, Options] = {
    "patches": {},
    "anchors of several shards": {"anchor_ratio": 0.0, "shard_bytes": 4000},
}


def every_call(setup: Callable[[], FaultyStore], after: bool, least: int) -> Iterator[FaultyStore]:
    """Yields a fresh store that fails at its call number 0, 1, 2 …, until a run makes fewer calls
    than that."""
    for at in itertools.count():
        store = setup()
        store.fail(at, after=after)
        yield store
        if not store.fired:
            assert at >= least, f"only {at} store calls were tried"
            return


def assert_nothing_lost(store: FaultyStore, published: dict[int, str], head: Tensors) -> None:
    """The chain is whole, holds what was reported as published, and continues from each version to
    the next."""
    reports = list(verify_stream(store, "policy"))
    assert [r.version for r in reports] == list(range(len(reports)))
    assert [r.problems for r in reports] == [()] * len(reports)
    found = {r.version: r.root for r in reports}
    assert {v: found[v] for v in published} == published
    assert found[max(found)] == state_root(head)
    for version in range(1, len(reports)):
        patch = manifest_of(store, "policy", version).patch
        assert patch is None or patch.base == version - 1, (
            "a subscriber of the version before could not follow"
        )


def try_then_go_on(
    store: FaultyStore, publisher: Publisher, first: Tensors, last: Tensors
) -> dict[int, str]:
    """Publishes one state through the failure and one after it; what was reported as published."""
    published = {}
    try:
        done = publisher.publish(first)
        published[done.version] = done.root
    except StoreUnavailable:
        assert store.fired
    store.heal()
    done = publisher.publish(last)
    return published | {done.version: done.root}


publishers = pytest.mark.parametrize(
    "warm", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["running", "restarted"]
)
after = pytest.mark.parametrize("after", [False, True], ids=["before", "reply-lost"])


@after
@pytest.mark.parametrize(
    "options",
    [
        OPTIONS["patches"],
        pytest.param(OPTIONS["anchors of several shards"], marks=pytest.mark.slow),
    ],
    ids=OPTIONS,
)
@pytest.mark.parametrize("again", ["same", "next", "other tensors", "the first"])
@publishers
def test_publish_at_every_call(
    warm: bool, again: str, options: Options, after: bool, rng: Rng
) -> None:
    """Then with the same state again (a retry) or with the next one (a trainer that goes on), which
    may be of another set of tensors; and where nothing was published before."""
    states = history(rng, 4, elements=1000)
    if again == "other tensors":
        states[2] |= {"more": bits(rng, "F16", 9)}
        states[3] = mutated(rng, states[2])
    last = states[2] if again == "same" else states[3]
    before = states[:2] if again != "the first" else []
    ready: dict[str, Publisher] = {}

    def setup() -> FaultyStore:
        store = FaultyStore(MemoryStore())
        publisher = tuned(store, stream="policy", threads=1, **options)
        publish_each(publisher, before)
        if not warm:
            publisher = tuned(store, stream="policy", threads=1, **options)
        ready["publisher"] = publisher
        return store

    for store in every_call(setup, after, least=(2 if warm else 6) if before else 3):
        published = try_then_go_on(store, ready["publisher"], states[2], last)
        assert_nothing_lost(store, published | dict(enumerate(roots(before))), last)


def test_a_publish_that_failed_reports_nothing_and_can_be_repeated_for_long(rng: Rng) -> None:
    """Ten outages in a row, the trainer going on meanwhile: one patch from the last committed
    version follows."""
    states = history(rng, 12, elements=1000)
    store, seen = FaultyStore(MemoryStore()), list[Event]()
    publisher = Publisher(store, stream="policy", on_event=seen.append)
    publisher.publish(states[0])
    seen.clear()
    for state in states[1:11]:
        store.fail(0)
        with pytest.raises(StoreUnavailable):
            publisher.publish(state)
    assert not [e for e in seen if type(e).__name__ == "Published"]
    assert publisher.publish(states[11]).version == 1
    assert_nothing_lost(store, {}, states[11])


def sync_cases(rng: Rng) -> dict[str, tuple[list[Tensors], dict[str, float], int | None]]:
    """(states, the publisher's options, the version at which the subscriber is when the trouble
    starts)."""
    plain = history(rng, 5, elements=1000)
    other = [*plain[:3], *(s | {"more": bits(rng, "F16", 9)} for s in plain[3:])]
    return {
        "newcomer": (plain, {}, None),
        "newcomer to shards": (plain, {"anchor_ratio": 0.0, "shard_bytes": 4000}, None),
        "one behind": (plain, {}, 3),
        "three behind": (plain, {}, 1),
        "other tensors": (other, {}, 1),
    }


@pytest.mark.parametrize(
    "case", ["newcomer", "newcomer to shards", "one behind", "three behind", "other tensors"]
)
def test_sync_at_every_call(case: str, rng: Rng) -> None:
    """After the failure the state is a verified version, and the next sync brings a live model to
    the head."""
    states, options, start = sync_cases(rng)[case]
    inner = MemoryStore()
    publisher = tuned(inner, stream="policy", **options)
    expected = [publisher.publish(s).root for s in states]
    ready: dict[str, tuple[Subscriber, Live]] = {}

    def setup() -> FaultyStore:
        store = FaultyStore(inner)
        subscriber, live = ready["it"] = Subscriber(store, stream="policy", threads=1), Live()
        if start is not None:
            live.apply(subscriber.sync(start))
        return store

    for store in every_call(setup, False, least=2 if start == 3 else 4):
        subscriber, live = ready["it"]
        try:
            live.apply(subscriber.sync())
        except StoreUnavailable:
            assert store.fired
            assert_at_rest(subscriber, expected)
        store.heal()
        live.apply(subscriber.sync())
        assert subscriber.version == 4
        assert subscriber.root == live.root == expected[4]


def assert_at_rest(subscriber: Subscriber, expected: list[str]) -> None:
    if subscriber.version is None:
        assert subscriber.status == "empty"
    else:
        assert subscriber.status == "ready"
        assert subscriber.root == state_root(subscriber.state) == expected[subscriber.version]


def test_verify_tells_an_outage_from_damage(rng: Rng) -> None:
    """A store that is away for a moment must not be reported as a stream that is broken."""
    inner = MemoryStore()
    publisher = Publisher(inner, stream="policy", anchor_ratio=0.01)
    publish_each(publisher, history(rng, 3, elements=1000))
    for store in every_call(lambda: FaultyStore(inner), False, least=8):
        try:
            reports = list(verify_stream(store, "policy"))
        except StoreUnavailable:
            assert store.fired
            continue
        assert not store.fired
        assert all(r.ok for r in reports)


class Interrupts:
    """A listener that raises at its event number ``at``, once: a user's Ctrl-C, or a metrics logger
    that broke."""

    def __init__(self, error: type[BaseException]) -> None:
        self.at: int | None = None
        self.fired = False
        self._error = error

    def __call__(self, event: Event) -> None:
        if self.at is None:
            return
        self.at -= 1
        if self.at < 0:
            self.at, self.fired = None, True
            raise self._error(f"at {event}")


interruptions = pytest.mark.parametrize(
    "error", [KeyboardInterrupt, pytest.param(RuntimeError, marks=pytest.mark.slow)]
)


@interruptions
@pytest.mark.parametrize("case", ["newcomer", "three behind", "other tensors"])
def test_sync_interrupted_at_every_event(case: str, error: type[BaseException], rng: Rng) -> None:
    states, options, start = sync_cases(rng)[case]
    inner = MemoryStore()
    publisher = tuned(inner, stream="policy", **options)
    expected = [publisher.publish(s).root for s in states]
    for at in itertools.count():
        listener = Interrupts(error)
        subscriber, live = Subscriber(inner, stream="policy", threads=1, on_event=listener), Live()
        if start is not None:
            live.apply(subscriber.sync(start))
        listener.at = at
        try:
            live.apply(subscriber.sync())
        except error:
            assert listener.fired
        listener.at = None
        live.apply(subscriber.sync())
        assert subscriber.status == "ready"
        assert subscriber.root == live.root == state_root(subscriber.state) == expected[4]
        if not listener.fired:
            break
    assert at > 6


@interruptions
@publishers
def test_publish_interrupted_at_every_event(
    warm: bool, error: type[BaseException], rng: Rng
) -> None:
    states = history(rng, 5, elements=1000)
    for at in itertools.count():
        store, listener = FaultyStore(MemoryStore()), Interrupts(error)
        publisher = Publisher(store, stream="policy", threads=1, on_event=listener)
        publish_each(publisher, states[:3])
        if not warm:
            publisher = Publisher(store, stream="policy", threads=1, on_event=listener)
        listener.at = at
        try:
            publisher.publish(states[3])
        except error:
            assert listener.fired
        listener.at = None
        publisher.publish(states[4])
        assert_nothing_lost(store, dict(enumerate(roots(states[:3]))), states[4])
        if not listener.fired:
            break
    assert at >= (4 if warm else 15)


def test_an_interrupted_apply_poisons_until_the_state_is_verified(rng: Rng) -> None:
    """The state may be half-way: it cannot be read, and leaves `poisoned` only as a version whose
    root was checked."""
    states = history(rng, 2, elements=1000)
    inner, listener = MemoryStore(), Interrupts(KeyboardInterrupt)
    publisher = Publisher(inner, stream="policy")
    subscriber = Subscriber(inner, stream="policy", threads=1, on_event=listener)
    publisher.publish(states[0])
    subscriber.sync()
    publisher.publish(states[1])
    listener.at = 1
    with pytest.raises(KeyboardInterrupt):
        subscriber.sync()
    assert subscriber.status == "poisoned"
    for ask in (lambda: subscriber.state, lambda: subscriber.root, subscriber.full_update):
        with pytest.raises(PulseError) as caught:
            ask()
        assert caught.value.kind == "integrity"
    subscriber.sync()
    assert subscriber.status == "ready"
    assert snapshot(subscriber.state) == snapshot(states[1])


def test_a_state_left_half_way_is_given_up_and_restored(rng: Rng) -> None:
    """Even the undo was cut short: hashing tells, and an anchor replaces the state."""
    states = history(rng, 2, elements=1000)
    inner, listener = MemoryStore(), Interrupts(KeyboardInterrupt)
    publisher = Publisher(inner, stream="policy")
    subscriber, live = Subscriber(inner, stream="policy", threads=1, on_event=listener), Live()
    publisher.publish(states[0])
    live.apply(subscriber.sync())
    publisher.publish(states[1])
    listener.at = 1
    with pytest.raises(KeyboardInterrupt):
        subscriber.sync()
    subscriber._host.state.read("embed.weight")[5] ^= 1
    update = present(subscriber.sync())
    assert update.full
    live.apply(update)
    assert live.root == subscriber.root == state_root(states[1])


@after
def test_a_replaced_publisher_is_told_at_every_call(after: bool, rng: Rng) -> None:
    """Whatever reply is lost, the loser never believes that it won, and the chain stays the
    winner's."""
    states = history(rng, 3, elements=1000)
    ready: dict[str, Publisher] = {}

    def setup() -> FaultyStore:
        store = FaultyStore(MemoryStore())
        for name in ("one", "two"):
            ready[name] = Publisher(store, stream="policy", threads=1)
        ready["one"].publish(states[0])
        ready["two"].publish(states[1])
        return store

    for store in every_call(setup, after, least=2):
        loser = ready["one"]
        with pytest.raises((PublisherConflict, StoreUnavailable)):
            loser.publish(states[2])
        store.heal()
        for _ in range(2):
            with pytest.raises(PublisherConflict):
                loser.publish(states[2])
        assert_nothing_lost(store, {}, states[1])
        ready["two"].publish(states[2])
        assert_nothing_lost(store, {}, states[2])


def test_calls_that_raise_are_told(rng: Rng, faulty: FaultyStore) -> None:
    events: list[Event] = []
    publisher = Publisher(faulty, stream="policy", on_event=events.append)
    faulty.fail_on("put", "payloads")
    with pytest.raises(StoreUnavailable) as raised:
        publisher.publish(policy(rng))
    assert events[-1] == CallFailed("policy", "publish", "store_unavailable", str(raised.value))
    publisher.publish(policy(rng))
    subscriber = Subscriber(faulty, stream="policy", on_event=events.append)
    with pytest.raises(ChainGap) as gap:
        subscriber.sync(7)
    assert events[-1] == CallFailed("policy", "sync", "chain_gap", str(gap.value))


class Away(MemoryStore):
    """A store that fails the next ``calls`` listings."""

    calls = 0

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        if self.calls:
            self.calls -= 1
            raise StoreUnavailable("the store is away")
        return super().list(folder, start_after)


def test_updates_go_on_through_an_outage(rng: Rng, caplog: pytest.LogCaptureFixture) -> None:
    store, states = Away(), history(rng, 3)
    publisher = Publisher(store, stream="policy")
    with Subscriber(store, stream="policy") as worker:
        updates = worker.updates(poll_seconds=0.01, timeout_seconds=60)
        for state in states:
            publisher.publish(state)
            store.calls = 5
            assert next(updates).root == state_root(state)
        assert caplog.text.count("the store is away; trying again") == len(states)
        assert caplog.text.count("works again") == len(states)
        store.calls = 1_000_000
        ends = worker.updates(poll_seconds=0.01, timeout_seconds=0.1)
        with pytest.raises(StoreUnavailable):
            next(ends)
