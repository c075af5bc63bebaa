"""Two publishers on one stream: the newer one takes over, the older one is told, and the chain
stays whole."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pulse_rl import LocalStore, MemoryStore, Publisher, gc_stream, verify_stream
from pulse_rl.errors import PublisherConflict, StoreUnavailable
from tests.support.publishers import took_over
from tests.support.states import Rng, history, roots
from tests.support.stores import FaultyStore, names


def test_equal_states_of_two_publishers_are_a_conflict_too(rng: Rng, faulty: FaultyStore) -> None:
    """Each would otherwise take the other's version for its own. The listing hides the claim of the
    second, so that only the commit can tell."""
    states = history(rng, 2)
    one, two = Publisher(faulty, stream="policy"), Publisher(faulty, stream="policy")
    one.publish(states[0])
    two.publish(states[1])
    faulty.hidden = set(names(faulty.inner, "policy/epochs"))
    with pytest.raises(PublisherConflict):
        one.publish(states[1])


def test_a_late_commit_of_the_older_publisher_is_gone_on_from(rng: Rng) -> None:
    """It did not see yet that it was replaced: its version stands, and the newer one's follows."""
    states = history(rng, 4)
    store = FaultyStore(MemoryStore())
    one, two = Publisher(store, stream="policy"), Publisher(store, stream="policy")
    one.publish(states[0])
    took_over(two, states[0])
    store.hidden = set(names(store.inner, "policy/epochs"))
    assert one.publish(states[1]).version == 1
    store.hidden = set()
    assert two.publish(states[2]).version == 2
    with pytest.raises(PublisherConflict):
        one.publish(states[2])
    assert two.publish(states[3]).version == 3
    assert [r.root for r in verify_stream(store, "policy")] == roots(states)


def test_publishers_that_race_from_threads_leave_a_whole_chain(tmp_path: Path, rng: Rng) -> None:
    states = history(rng, 12, elements=500)
    store = LocalStore(tmp_path)
    won: list[str] = []

    def run(mine: list[Any]) -> None:
        publisher = Publisher(store, stream="policy", threads=1)
        for state in mine:
            try:
                won.append(publisher.publish(state).root)
            except PublisherConflict:
                publisher = Publisher(store, stream="policy", threads=1)

    threads = [threading.Thread(target=run, args=(states[k::3],)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports = list(verify_stream(store, "policy"))
    assert all(r.ok for r in reports)
    assert sorted(str(r.root) for r in reports) == sorted(won)


def test_a_claim_that_arrives_damaged_is_read_again(rng: Rng, faulty: FaultyStore) -> None:
    """The older publisher took it for junk and committed once more."""
    states = history(rng, 3)
    one, two = Publisher(faulty, stream="policy"), Publisher(faulty, stream="policy")
    one.publish(states[0])
    two.publish(states[1])
    replies = [b"", b"!"]
    faulty.damage = lambda name, data: replies.pop() if "/epochs/" in name and replies else data
    with pytest.raises(PublisherConflict, match="taken over"):
        one.publish(states[2])
    assert not replies


def test_a_commit_is_not_repeated_below_what_came_since(rng: Rng, faulty: FaultyStore) -> None:
    """Its reply was lost, another publisher went on, gc took the version: it must not come back."""
    states = history(rng, 5)
    one = Publisher(faulty, stream="policy", anchor_ratio=0)
    one.publish(states[0])
    faulty.fail_on("put_new", "versions", after=True)
    with pytest.raises(StoreUnavailable):
        one.publish(states[1])
    Publisher(faulty, stream="policy", anchor_ratio=0).publish(states[2])
    gc_stream(faulty, "policy", keep=1, grace_seconds=3600)
    faulty.hidden = set(names(faulty.inner, "policy/epochs"))
    assert one.publish(states[3]).version == 3, (
        "it has to take the stream over: it sees nothing of the other one"
    )
    assert [name[-6:] for name in names(faulty, "policy/versions")] == ["2.json", "3.json"]


def test_who_was_superseded_does_not_come_back_when_its_head_is_gone(rng: Rng) -> None:
    """It claimed the stream again, and gave a version a number that had been used."""
    states = history(rng, 4)
    store = MemoryStore()
    one, two = Publisher(store, stream="policy"), Publisher(store, stream="policy")
    one.publish(states[0])
    two.publish(states[1])
    two.publish(states[2], anchor=True)
    gc_stream(store, "policy", keep=1, grace_seconds=0)
    store.put("policy/versions/000000000002.json", b"{")
    with pytest.raises(PublisherConflict, match="taken over"):
        one.publish(states[3])
    assert two.publish(states[3]).version == 3
