"""What a publisher and a subscriber hold: no more with what was missed, and nothing once nobody
uses them."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

from pulse_rl import Bits, MemoryStore, Publisher, Relay, Subscriber, state_root
from tests.support.states import Rng, present, taken


@pytest.mark.slow
def test_catching_up_takes_no_more_memory_for_more_versions(rng: Rng, store: MemoryStore) -> None:
    """A fifth of the weights changes in each version: some new ones, most of them again."""
    state = {"w": Bits(rng.integers(0, 1 << 16, 1 << 19, dtype=np.uint16), "BF16")}
    changing = rng.permutation(1 << 19)
    with Publisher(store, stream="policy", anchor_ratio=1e9) as publisher:
        publisher.publish(state)
        worker = Subscriber(store, stream="policy", threads=1)
        first = present(worker.sync())
        first.acknowledge()
        del first
        for version in range(1, 41):
            state["w"].array[changing[version * 500 :][:100_000]] ^= version
            publisher.publish(state)
    np.unique(changing[:2])  # it imports something at its first call
    tracemalloc.start()
    update = worker.sync()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert update is not None
    assert 115_000 < update.changed < 120_000
    assert worker.root == state_root(state)
    assert held < 2e6, "the changes are held once, 10 bytes an element"
    assert peak < 15e6, "40 times 100,000 changes are 40 MB"


@pytest.mark.slow
def test_indices_take_memory_when_they_are_asked_for(rng: Rng, store: MemoryStore) -> None:
    """Half of the weights changes: as int64 their indices are twice the state."""
    size = 1 << 20
    state = {"w": Bits(rng.integers(0, 1 << 16, size, dtype=np.uint16), "BF16")}
    with (
        Publisher(store, stream="policy") as publisher,
        Subscriber(store, stream="policy", threads=1) as worker,
    ):
        publisher.publish(state)
        taken(worker)
        model = state["w"].array.copy()
        changed = rng.permutation(size)[: size // 2]
        state["w"].array[changed] ^= 1
        publisher.publish(state)
        tracemalloc.start()
        update = worker.sync()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert update is not None
    assert peak < 3e6, "a payload, and no indices"
    (tensor,) = update.tensors
    assert (tensor.elements, tensor.whole, update.changed) == (size // 2, False, size // 2)
    indices = present(tensor.indices)
    assert indices.dtype == np.int64
    assert indices.tolist() == sorted(changed.tolist())
    model[indices] = tensor.values
    np.testing.assert_array_equal(model, state["w"].array)


@pytest.mark.parametrize("closed", [True, False])
def test_who_is_dropped_is_gone_without_a_garbage_collection(closed: bool) -> None:
    """Each holds a state's memory: until a collection, which a program without cycles may never
    see."""
    store, copy = MemoryStore(), MemoryStore()
    state = {"w": Bits(np.arange(100, dtype=np.uint16), "BF16")}
    publisher = Publisher(store, stream="s")
    relay = Relay(store, copy, stream="s")
    worker = Subscriber(copy, stream="s")
    publisher.publish(state)
    relay.sync()
    worker.sync()
    if closed:
        publisher.close(), worker.close()
    watched = [weakref.ref(owner) for owner in (publisher, relay, worker)]
    gc.collect()
    gc.disable()
    try:
        publisher = relay = worker = None  # type: ignore[assignment]
        assert [watch() for watch in watched] == [None, None, None]
    finally:
        gc.enable()
