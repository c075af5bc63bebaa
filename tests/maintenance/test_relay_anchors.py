"""A relay and anchors: versions come first, none is starved, and what they make superfluous is
collected."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pulse_rl import LocalStore, MemoryStore, Publisher, Relay, Subscriber
from pulse_rl.errors import InputError, StoreUnavailable
from pulse_rl.store import Data
from tests.support.publishers import tuned
from tests.support.relays import assert_whole, newest_root
from tests.support.states import Rng, history, roots, weights
from tests.support.stores import FaultyStore, names


def test_the_newest_version_does_not_wait_for_an_anchor(rng: Rng, source: MemoryStore) -> None:
    """Between two shards of an anchor the relay looks for newer versions, and shows them first."""
    states = history(rng, 3)
    expected = roots(states)
    shown = []

    class Watched(MemoryStore):
        """A target beside which the trainer goes on while an anchor is copied."""

        def put(self, name: str, data: Data) -> None:
            super().put(name, data)
            if name.endswith(".safetensors") and self.head("policy/versions/000000000001.json"):
                shown.append(newest_root(self))
                if len(shown) == 1:
                    publisher.publish(states[2])

    target = MemoryStore()
    publisher = tuned(source, stream="policy", shard_bytes=3000, threads=1, anchor_ratio=1e9)
    publisher.publish(states[0])
    Relay(source, target, stream="policy", threads=1).sync()
    publisher.publish(states[1], anchor=True)
    watched = Watched()
    watched._objects, watched._names = target._objects, target._names
    Relay(source, watched, stream="policy", threads=1).sync()
    assert shown[0] == expected[1]
    assert set(shown[1:]) == {expected[2]}
    assert names(watched, "policy/links") == names(source, "policy/links")


def test_an_anchor_that_was_left_half_way_is_finished(rng: Rng, source: MemoryStore) -> None:
    states = history(rng, 3)
    target = MemoryStore()
    publisher = tuned(source, stream="policy", shard_bytes=3000, anchor_ratio=1e9)
    publisher.publish(states[0])
    Relay(source, target, stream="policy", threads=1).sync()
    publisher.publish(states[1], anchor=True)
    near = FaultyStore(target)
    near.fail_on("put", "links")
    with pytest.raises(StoreUnavailable):
        Relay(source, near, stream="policy", threads=1).sync()
    assert near.fired
    publisher.publish(states[2])
    Relay(source, target, stream="policy", threads=1).sync()
    assert names(target, "policy/links") == names(source, "policy/links")
    assert Relay(source, target, stream="policy", threads=1).sync() is None


def test_its_own_retention(tmp_path: Path, rng: Rng) -> None:
    states = history(rng, 10)
    source, target = MemoryStore(), LocalStore(tmp_path)
    publisher = Publisher(source, stream="policy", anchor_ratio=1e9)
    relay = Relay(source, target, stream="policy", keep=2, threads=1)
    for version, state in enumerate(states):
        publisher.publish(state, anchor=version % 4 == 0)
        relay.sync()
        for file in (tmp_path / "policy" / "payloads").iterdir():
            os.utime(file, (time.time() - 10_000,) * 2)
    assert names(target, "policy/versions")[0] == "policy/versions/000000000004.json"
    assert len(names(source, "policy/versions")) == 10
    assert newest_root(target) == roots(states)[-1]
    assert_whole(target)
    assert len(names(target, "policy/payloads")) < len(names(source, "policy/payloads"))


def test_its_retention_where_versions_come_by_anchors(rng: Rng, source: MemoryStore) -> None:
    target = MemoryStore()
    publisher = Publisher(source, stream="policy", threads=1)
    relay = Relay(source, target, stream="policy", keep=1, threads=1)
    for number, state in enumerate(history(rng, 4)):
        publisher.publish(
            {**state, f"another.{number}": weights(rng, 3)}
        )  # other tensors each time: no patch
        relay.sync()
    assert names(target, "policy/versions") == ["policy/versions/000000000003.json"]
    assert_whole(target)


def test_anchors_that_come_faster_than_one_crosses_do_not_starve_it(rng: Rng) -> None:
    states = iter(history(rng, 40))
    source, target = MemoryStore(), MemoryStore()
    publisher = tuned(source, stream="policy", threads=1, shard_bytes=600, anchor_ratio=1e9)
    publisher.publish(next(states))
    relay = Relay(source, target, stream="policy", threads=1)
    relay.sync()
    shards = len(Subscriber(source, stream="policy").stream.manifest(0).anchor.shards)  # type: ignore[union-attr]
    assert shards > 4
    begun, listed = 0, len(names(target, "policy/links"))
    while len(names(target, "policy/links")) == listed:
        publisher.publish(next(states), anchor=True)
        begun += 1
        relay.sync(shards=2)
    assert begun <= 3 + shards // 2
    assert Subscriber(target, stream="policy", threads=1).sync().version == begun  # type: ignore[union-attr]


def test_a_call_copies_as_many_shards_as_it_is_told(rng: Rng, source: MemoryStore) -> None:
    states = history(rng, 3)
    target = MemoryStore()
    publisher = tuned(source, stream="policy", threads=1, shard_bytes=600, anchor_ratio=1e9)
    publisher.publish(states[0])
    relay = Relay(source, target, stream="policy", threads=1)
    relay.sync()
    publisher.publish(states[1], anchor=True)
    first = relay.sync(shards=1)
    assert (first.version, first.links) == (1, ("the patch 0->1", "the anchor of version 1"))
    while (done := relay.sync(shards=1)) is not None:
        assert done.links == ("the anchor of version 1",)
    assert_whole(target)
    assert len(names(target, "policy/links")) == 2
    with pytest.raises(InputError):
        relay.sync(shards=0)
