"""Any number of objects that cannot be read keeps nobody out: not a newcomer, and none of the
tools."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl import MemoryStore, Publisher, Relay, Signer, Subscriber, fold_stream, state_root
from pulse_rl.errors import CorruptManifest
from tests.support.publishers import anchor_stream
from tests.support.states import Rng, history, publish_each

COUNTS = [(300, 1), (3, 16 << 20), pytest.param(5000, 1, marks=pytest.mark.slow)]
pytestmark = pytest.mark.parametrize(("count", "nbytes"), COUNTS)


def with_junk(
    rng: Rng, count: int, nbytes: int, versions: int = 3, signer: Signer | None = None
) -> tuple[MemoryStore, list[str]]:
    """A stream below ``count`` objects of ``nbytes`` in the place of versions, and the roots of its
    versions."""
    store, states = MemoryStore(), history(rng, versions)
    with Publisher(store, stream="policy", signer=signer) as publisher:
        publish_each(publisher, states)
    junk = bytes(nbytes)
    for version in range(versions, versions + count):
        store.put(f"policy/versions/{version:012d}.json", junk)
    return store, [state_root(state) for state in states]


def test_a_newcomer_gets_the_newest_version_by_one_sync(count: int, nbytes: int, rng: Rng) -> None:
    store, roots = with_junk(rng, count, nbytes)
    worker = Subscriber(store, stream="policy")
    worker.sync()
    assert (worker.version, worker.root) == (2, roots[2])


def test_updates_begin_at_once(count: int, nbytes: int, rng: Rng) -> None:
    store, _ = with_junk(rng, count, nbytes)
    worker = Subscriber(store, stream="policy")
    assert [
        update.version for update in worker.updates(poll_seconds=0.01, timeout_seconds=0.05)
    ] == [2]


def test_the_tools_find_the_head(count: int, nbytes: int, rng: Rng) -> None:
    store, roots = with_junk(rng, count, nbytes, versions=9)
    head = Publisher(store, stream="policy").head()
    assert (head.version, head.root) == (8, roots[8])
    assert list(fold_stream(store, "policy")) in ([(0, 8)], [])
    near = MemoryStore()
    relay = Relay(store, near, stream="policy")
    relay.sync()
    assert relay.version == 8
    anchored = anchor_stream(store, "policy")
    assert (anchored.root, anchored.changed) == (roots[8], 0)


def test_a_signing_trainer_that_restarts_goes_on_with_its_stream(
    count: int, nbytes: int, rng: Rng, signer: Signer
) -> None:
    store, _ = with_junk(rng, count, nbytes, signer=signer)
    follower = Subscriber(store, stream="policy", trusted_keys=[signer.public_key])
    follower.sync()
    again = Publisher(store, stream="policy", signer=signer)
    done = again.publish({"w": np.ones(8, np.float32)}, anchor=True)
    assert done.stream_id == follower.stream_id
    for _ in range(2 + (done.version or 0) // 256):  # a follower's look is bounded
        follower.sync()
    assert follower.version == done.version


def test_where_nothing_can_be_read_the_reason_is_told(count: int, nbytes: int, rng: Rng) -> None:
    store, _ = with_junk(rng, count, nbytes, versions=1)
    store.delete("policy/versions/000000000000.json")
    worker = Subscriber(store, stream="policy")
    for _ in range(4):
        with pytest.raises(CorruptManifest, match=f"version {count} "):
            worker.sync()
