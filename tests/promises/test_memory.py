"""Whatever object of a signed stream a stranger replaces: a worker's memory grows by at most 64 MB
above what the signed manifest says."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import numpy as np
import pytest

from pulse_rl import Bits, MemoryStore, Signer, Subscriber
from pulse_rl.errors import PulseError
from tests.support.publishers import tuned
from tests.support.states import Rng

JUNK = b"[],"
SIGNER = Signer(bytes(range(32)))


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    """A signed stream of 8 MB in one shard, whose header is larger than 2^17 bytes, with a patch
    and a fold."""
    rng = np.random.default_rng(0)
    state = {
        f"layer.{k}.{100 * 'x'}": Bits(rng.integers(0, 1 << 16, 4000, dtype=np.uint16), "BF16")
        for k in range(1000)
    }
    found = MemoryStore()
    with tuned(
        found, stream="s", signer=SIGNER, shard_bytes=16 << 20, folds=(2,), threads=2
    ) as publisher:
        for version in range(3):
            state[f"layer.7.{100 * 'x'}"].array[version] ^= 1
            publisher.publish(state)
    return found


def replaced(store: MemoryStore, name: str, nbytes: int) -> MemoryStore:
    """The store with JSON of many values in place of an object, where a header is expected first. A
    payload keeps its length: others are refused unread."""
    copy = MemoryStore()
    for info in store.list("s"):
        copy.put(info.name, store.get(info.name))
    length = store.head(name).nbytes if "/payloads/" in name else 16 + nbytes
    text = b"[" + JUNK * (min(nbytes, length - 16) // len(JUNK)) + b"[]]"
    copy.put(name, (len(text).to_bytes(8, "little") + text).ljust(length, b" ")[:length])
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("select", "nbytes"),
    [(None, 130_000), (None, (1 << 22) - 100), (None, 12 << 20), ("layer.1*", 12 << 20)],
)
def test_one_object_replaced_by_json(
    store: MemoryStore, nbytes: int, select: str | None, rng: Rng
) -> None:
    dense, grown = 8_000_000, {}
    kinds = {  # one object of each
        info.name.rpartition(".")[2] if "." in info.name else info.name.split("/")[1]: info.name
        for info in store.list("s")
    }
    for name in kinds.values():
        worker = Subscriber(
            replaced(store, name, nbytes),
            stream="s",
            select=select,
            trusted_keys=[SIGNER.public_key],
            threads=4,
        )
        tracemalloc.start()
        with suppress(PulseError):
            worker.sync()
        grown[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert max(grown.values()) < 2 * dense + (64 << 20), grown
