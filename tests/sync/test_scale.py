"""Ten thousand versions in one stream and sixty subscribers on one store, measured in calls and
listed names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.counted import CountedStore
from pulse_rl import Bits, MemoryStore, Publisher, State, Subscriber, state_root
from pulse_rl.follow.checkpoint import serialize
from pulse_rl.ops import diff
from pulse_rl.state.digest import state_digest
from pulse_rl.stream.manifest import AnchorRef, PatchRef, Payload
from pulse_rl.stream.names import PATCH, SHARD
from pulse_rl.stream.stream import Stream
from tests.support.manifests import FULL
from tests.support.publishers import FoldingPublisher, took_over
from tests.support.states import present, reach

pytestmark = pytest.mark.slow

STREAM_ID = "5eed" * 8
LENGTHS = (100, 1000, 10_000)
FOLDS = (8, 64)
CYCLE = 5
ANCHOR_EVERY = 600


class Counted(CountedStore):
    """A store in memory; payloads that are read are counted by themselves."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if "/payloads/" in name:
            self.count.update({"payload": 1})
        return super().get(name, start, stop)


@cache
def cycle() -> tuple[list[State], list[str]]:
    """Five tiny states that the stream goes through again and again, and their roots."""
    rng = np.random.default_rng(0)
    states = [State.of({"w": Bits(rng.integers(0, 1 << 16, 2048, np.uint16), "BF16")})]
    for _ in range(CYCLE - 1):
        array = states[-1].read("w").copy()
        array[rng.integers(0, array.size, 3)] ^= 1
        states.append(State.of({"w": Bits(array, "BF16")}))
    return states, [state_root(state) for state in states]


@cache
def patch_between(base: int, target: int) -> bytes:
    states, _ = cycle()
    return diff.build_patch(
        states[base], states[target], state_digest(states[base]), threads=1
    ).to_bytes()


def long_stream(versions: int) -> Counted:
    """What a publisher with folds leaves after so many versions; written directly, since publishing
    takes too long."""
    store = Counted()
    stream = Stream(store, "s")
    states, roots = cycle()
    stream.claims.acquire("c" * 16, STREAM_ID, 0, born=False)
    for version in range(versions):
        at = version % CYCLE
        patch_ref = anchor_ref = None
        if version:
            data = patch_between((version - 1) % CYCLE, at)
            payload = Payload(sha256(data).hexdigest(), len(data))
            stream.put_payload(payload, PATCH, data)
            patch_ref = PatchRef(version - 1, roots[at - 1], 1, (payload,))
        if version % ANCHOR_EVERY == 0:
            data = b"".join(map(bytes, serialize(states[at], states[at].specs)))
            shard = Payload(sha256(data).hexdigest(), len(data))
            stream.put_payload(shard, SHARD, data)
            anchor_ref = AnchorRef((shard,))
            stream.put_anchor_link(version, shard.bytes)
        made = replace(
            FULL,
            stream="s",
            version=version,
            epoch=1,
            root=roots[at],
            elements=states[at].elements,
            dense_bytes=states[at].nbytes,
            aliases={},
            metadata={},
            files=(),
            patch=patch_ref,
            anchor=anchor_ref,
        ).sealed()
        assert stream.commit(made)
        for span in FOLDS:
            if version and version % span == 0:
                data = patch_between((version - span) % CYCLE, at)
                payload = Payload(sha256(data).hexdigest(), len(data))
                stream.put_payload(payload, PATCH, data)
                stream.put_fold_link(version - span, version, [payload])
    store.reset()
    return store


@pytest.fixture(scope="module")
def streams() -> dict[int, Counted]:
    return {versions: long_stream(versions) for versions in LENGTHS}


def root_of(version: int) -> str:
    return cycle()[1][version % CYCLE]


def test_who_follows_lists_only_what_is_new(streams: dict[int, Counted]) -> None:
    """The same few calls and names however long the stream is: with nothing new, one version
    behind, and a few."""
    costs = {}
    for versions, store in streams.items():
        head = versions - 1
        cost = []
        for behind in (0, 1, 3, 7):
            subscriber = Subscriber(store, stream="s", threads=1)
            subscriber.sync(head - behind)
            store.reset()
            reach(subscriber, root_of(head), head)
            assert store.count["listed"] == behind + 1, (
                "its own version, too: a sign that the stream is still there"
            )
            cost.append((store.requests, store.count["listed"]))
        costs[versions] = cost
    assert len({tuple(cost) for cost in costs.values()}) == 1, costs
    assert costs[LENGTHS[0]][0] == (1, 1), "one listing tells that nothing is new"


def test_publishing_lists_only_what_is_new(streams: dict[int, Counted]) -> None:
    costs = {}
    for versions, store in streams.items():
        publisher = Publisher(store, stream="s", anchor_ratio=1e9, threads=1)
        states, _ = cycle()
        publisher.publish(states[(versions - 1) % CYCLE])  # resumes
        cost = []
        for k in range(4):
            store.reset()
            published = publisher.publish(states[(versions + k) % CYCLE])
            assert published.version == versions + 1 + k
            publisher.wait()
            cost.append((store.requests, store.count["listed"]))
        costs[versions] = cost
        # As it was, for the tests that follow.
        for version in range(versions, versions + 5):
            store.delete(f"s/versions/{version:012d}.json")
    assert len({tuple(cost) for cost in costs.values()}) == 1, costs
    assert all(calls <= 5 and listed == 0 for calls, listed in costs[LENGTHS[0]]), costs


def test_a_publisher_resumes_with_the_manifests_since_the_last_anchor(
    streams: dict[int, Counted],
) -> None:
    """Its cost depends on how far back the last anchor is, which `anchor_ratio` bounds, not on the
    stream's length."""
    store = streams[10_000]
    store.reset()
    publisher = Publisher(store, stream="s", threads=1)
    head = present(publisher.head())
    assert head.version == 9999
    since_anchor = 9999 % ANCHOR_EVERY + 1
    took_over(publisher, cycle()[0][9999 % CYCLE])
    assert publisher._rank._baseline.version == 9999
    assert store.count["payload"] == 0, "the trainer's own state is the head"
    assert store.count["get"] <= since_anchor + 5


@pytest.mark.parametrize("versions", LENGTHS)
def test_a_late_joiner_takes_the_logarithm_of_fetches(
    streams: dict[int, Counted], versions: int
) -> None:
    """From an anchor or from long ago: some folds of 64, and at either end fewer than 8 folds of 8
    and 8 patches."""
    store, head = streams[versions], versions - 1
    seen: list[Any] = []
    newcomer = Subscriber(store, stream="s", threads=1, on_event=seen.append)
    store.reset()
    reach(newcomer, root_of(head), head)
    since_anchor = head % ANCHOR_EVERY
    most = since_anchor // 64 + 4 * 7
    assert len(seen[-1].links) <= most + 1
    assert store.count["payload"] <= most + 4, "the anchor is read in a few ranges"
    assert store.count["list"] <= 3
    for behind in (b for b in (10, 70, 500, 5000) if b <= head):
        late = Subscriber(store, stream="s", threads=1)
        late.sync(head - behind)
        store.reset()
        reach(late, root_of(head))
        assert store.count["payload"] <= behind // 64 + 4 * 7
        assert store.count["listed"] <= 2 * (behind + behind / 8 + behind / 64 + 20)


def test_ten_thousand_versions_behind_without_an_anchor_nearby() -> None:
    """10,000 / 64 folds and a few more, where single patches would be 10,000 fetches."""
    store = long_stream(10_000)
    for name in [i.name for i in store.list("s/links") if "-anchor-" in i.name]:
        store.delete(name)
    seen: list[Any] = []
    late = Subscriber(store, stream="s", threads=1, on_event=seen.append)
    late.sync(0)
    store.reset()
    reach(late, root_of(9999))
    assert len(seen[-1].links) <= 9999 // 64 + 2 * 7
    assert store.count["payload"] == len(seen[-1].links)


def test_many_subscribers_on_one_store() -> None:
    """Workers that join at different versions follow together; each costs the store a few calls a
    version."""
    store = Counted()
    publisher = FoldingPublisher(store, stream="s", folds=FOLDS, anchor_ratio=1e9, threads=1)
    states, _ = cycle()
    for version in range(20):
        publisher.publish(states[version % CYCLE])
    publisher.wait()
    subscribers = [Subscriber(store, stream="s", threads=1) for _ in range(60)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda pair: pair[1].sync(pair[0] % 20), enumerate(subscribers)))
        list(pool.map(lambda s: s.sync(), subscribers))
        for version in range(20, 23):
            store.reset()
            publisher.publish(states[version % CYCLE])
            mine = store.requests
            list(pool.map(lambda s: s.sync(), subscribers))
            assert {(s.version, s.root) for s in subscribers} == {(version, root_of(version))}
            each = (store.requests - mine) / len(subscribers)
            assert each <= 5, "a listing, a manifest with its length, a patch with its length"
            assert store.count["listed"] <= 2 * len(subscribers)
        store.reset()
        list(pool.map(lambda s: s.sync(), subscribers))
        assert dict(store.count) == {"list": 60, "listed": 60}
