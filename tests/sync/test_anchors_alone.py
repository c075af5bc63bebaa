"""Versions without a patch: where one would be no smaller than the state, the version is an anchor
alone."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl import Bits, MemoryStore, Publisher, Subscriber, state_root, verify_stream
from pulse_rl.errors import StoreUnavailable
from pulse_rl.events import FallbackUsed
from tests.support.publishers import FoldingPublisher
from tests.support.relays import Counted
from tests.support.states import Live, Rng, Tensors, present
from tests.support.stores import FaultyStore

ELEMENTS = 200_000


def noise(rng: Rng) -> Tensors:
    """Bits that share nothing with any other state, and that nothing makes smaller."""
    return {"w": Bits(rng.integers(0, 1 << 16, ELEMENTS, dtype=np.uint16), "BF16")}


def step(state: Tensors, rng: Rng) -> Tensors:
    after = Bits(state["w"].array.copy(), "BF16")
    after.array[rng.choice(ELEMENTS, ELEMENTS // 100, replace=False)] ^= np.uint16(1)
    return {"w": after}


def test_a_patch_no_smaller_than_the_state_becomes_an_anchor(rng: Rng) -> None:
    first, third = noise(rng), noise(rng)
    chain, store = [first, step(first, rng), third, step(third, rng), noise(rng)], MemoryStore()
    publisher = FoldingPublisher(store, stream="s", threads=1, folds=(2,))
    done = [publisher.publish(state) for state in chain]
    publisher.close()
    assert [d.changed is None for d in done] == [True, False, True, False, True]
    assert [d.anchored for d in done] == [True, False, True, False, True]
    assert [d.patch_bytes > 0 for d in done] == [False, True, False, True, False]
    assert "a patch would have" in done[2].reason
    assert not done[3].reason
    assert [r.problems for r in verify_stream(store, "s")] == [()] * 5
    for way in ([0, 1, 2, 3, 4], [0, 4], [1, 3], [2, 3, 4], [4], [0, 1, 4]):
        subscriber, live = Subscriber(store, stream="s", threads=1), Live()
        for version in way:
            update = present(subscriber.sync(version))
            live.apply(update)
        assert live.root == state_root(chain[way[-1]])


def test_its_baseline_moves_only_after_the_commit(rng: Rng) -> None:
    first, second, store = noise(rng), noise(rng), FaultyStore(MemoryStore())
    third = step(second, rng)
    publisher = Publisher(store, stream="s", threads=1)
    publisher.publish(first)
    store.fail_on("put_new", "versions")
    with pytest.raises(StoreUnavailable):
        publisher.publish(second)
    done = publisher.publish(third)  # the pending version is committed first
    assert (done.version, done.changed) == (2, ELEMENTS // 100)
    assert [r.problems for r in verify_stream(store, "s")] == [()] * 3


def test_a_version_without_a_patch_is_reached_by_its_own_anchor() -> None:
    """A newcomer once fetched every anchor of a stream without patches, the oldest first."""
    store, weights = Counted(), np.zeros(1000, np.float32)
    publisher = Publisher(store, stream="s")
    follower = Subscriber(store, stream="s")
    for i in range(12):
        publisher.publish({f"w{i}": weights})  # another name: no patch leads there
        if i == 0:
            follower.sync()
    store.reset()
    events: list[object] = []
    Subscriber(store, stream="s", on_event=events.append).sync()
    follower.sync()
    ((shard, nbytes),) = store.payloads_read().items()
    assert nbytes <= 4 * store.head(shard).nbytes, "of the newest, once by each"
    assert not any(isinstance(event, FallbackUsed) for event in events)
