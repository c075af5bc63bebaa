"""What a worker asks of a store: the numbers of docs/clusters.md."""

from __future__ import annotations

from collections import Counter

from pulse_rl import MemoryStore, Publisher, Subscriber
from tests.support.states import Rng, history
from tests.support.stores import FaultyStore, requests


def test_requests_of_a_look_and_of_a_sync(rng: Rng) -> None:
    states, store = history(rng, 4), FaultyStore(MemoryStore())
    publisher = Publisher(store, stream="policy", anchor_ratio=1e9)
    publisher.publish(states[0])
    whole = Subscriber(store, stream="policy", threads=1)
    part = Subscriber(store, stream="policy", select="embed.*", threads=1)
    for worker in (whole, part):
        worker.sync()
    look, patch = Counter({"list versions": 1}), Counter({"get versions": 1, "head payloads": 1})
    for state in states[1:]:
        publisher.publish(state)
        assert requests(store, whole) == look + patch + Counter({"get payloads": 1})
        found = requests(store, part)
        ranges = found.pop("get payloads")
        assert found == look + patch + Counter({"get digests": 1})
        assert ranges <= 3, (
            "the header in one or two pieces, and the blocks that lie together in one"
        )
        for worker in (whole, part):
            assert requests(store, worker) == look
