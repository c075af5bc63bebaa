"""What a relay asks of its source: the numbers of docs/clusters.md; where the source can be waited
for, it waits."""

from __future__ import annotations

from collections import Counter

import pytest

from pulse_rl import MemoryStore, Publisher, Relay, Subscriber
from tests.support.relays import Counted
from tests.support.states import Rng, history, reach, roots
from tests.support.stores import FaultyStore, requests

pytestmark = pytest.mark.slow


def test_a_version_costs_a_list_a_manifest_and_the_patch(rng: Rng) -> None:
    states, source = history(rng, 4), FaultyStore(MemoryStore())
    publisher = Publisher(source, stream="policy", anchor_ratio=1e9)
    publisher.publish(states[0])
    relay = Relay(source, MemoryStore(), stream="policy", threads=1)
    relay.sync()
    look = Counter({"list versions": 1})
    version = look + Counter(
        {
            "get versions": 1,
            "head payloads": 1,
            "get payloads": 1,
            "head digests": 1,
            "get digests": 1,
        }
    )
    for state in states[1:]:
        publisher.publish(state)
        assert requests(source, relay) == version
        assert requests(source, relay) == look


def test_the_origin_serves_each_payload_once_to_a_hundred_workers(rng: Rng) -> None:
    """Which have it in their lists of stores, but behind the relay's."""
    states, source, near = history(rng, 5), Counted(), MemoryStore()
    publisher = Publisher(source, stream="policy", anchor_ratio=1e9)
    relay = Relay(source, near, stream="policy", threads=1)
    workers = [Subscriber([near, source], stream="policy", threads=1) for _ in range(100)]
    for state, root in zip(states, roots(states), strict=True):
        publisher.publish(state)
        relay.sync()
        for worker in workers:
            reach(worker, root)
    stored = {info.name: info.nbytes for info in source.list("policy/payloads")}
    assert len(stored) == len(states)
    assert source.payloads_read() == stored
