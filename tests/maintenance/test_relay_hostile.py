"""Relays between stores that others write to, and streams that are recreated or published from
elsewhere."""

from __future__ import annotations

import tracemalloc
from hashlib import sha256

import pytest

from pulse_rl import MemoryStore, Publisher, Relay, Signer, Subscriber, verify_stream
from pulse_rl.errors import PublisherConflict, StreamForked, StreamRecreated
from pulse_rl.events import Event, Relayed
from tests.hostile.pieces import header_of_many_blocks
from tests.support.folds import fold_link
from tests.support.relays import assert_whole, newest_root
from tests.support.states import Rng, TinyTrainer, history, publish_each, reach, roots
from tests.support.stores import names

KEY = Signer(bytes(range(32)))

JUNK: dict[str, tuple[str, bytes]] = {
    "a version far ahead": ("policy/versions/000000099999.json", b"junk"),
    "the next version": ("policy/versions/000000000003.json", b""),
    "a payload that nobody names": (f"policy/payloads/{sha256(b'x').hexdigest()}.patch", b"x"),
    "a link to nothing": fold_link("policy", 0, 2, (sha256(b"x").hexdigest(), 7)),
    "a huge link": (
        f"policy/links/{2:012d}-{0:012d}-{7:015d}-{sha256(b'x').hexdigest()}",
        bytes(5000),
    ),
    "a claim": ("policy/epochs/000000000009", b"00ff00ff00ff00ff"),
    "something else": ("policy/README", b"hello"),
}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("what", JUNK)
def test_junk_is_not_passed_on(what: str, signed: bool, rng: Rng, source: MemoryStore) -> None:
    states = history(rng, 3)
    target = MemoryStore()
    keys = [KEY.public_key] if signed else None
    publish_each(Publisher(source, stream="policy", signer=KEY if signed else None), states)
    source.put(*JUNK[what])
    Relay(source, target, stream="policy", trusted_keys=keys, threads=1).sync()
    assert newest_root(target, trusted_keys=keys) == roots(states)[-1]
    assert JUNK[what][0] not in names(target, "policy")


def relayed_once() -> tuple[MemoryStore, MemoryStore, str]:
    """A stream of 18 versions, a target that has the first, and the root of the last."""
    source, target, trainer = MemoryStore(), MemoryStore(), TinyTrainer()
    publisher = Publisher(source, stream="s", threads=1, anchor_ratio=1e9)
    for version in range(18):
        root = trainer.publish(publisher).root
        if version == 0:
            Relay(source, target, stream="s", threads=1).sync()
    return source, target, root


def test_a_fold_that_is_none_is_not_passed_on() -> None:
    """A patch of one version, listed as one over sixteen: followers of the target would be stuck
    behind it."""
    source, target, root = relayed_once()
    patch = Subscriber(source, stream="s").stream.manifest(1).patch
    (part,) = patch.parts
    false, listed = fold_link("s", 0, 16, (part.sha256, part.bytes))
    source.put(false, listed)
    assert Relay(source, target, stream="s", threads=1).sync() is not None
    assert false not in names(target, "s/links")
    assert len(names(target, "s/versions")) == 18
    assert newest_root(target, "s") == root
    assert_whole(target, "s")


def test_only_what_a_trusted_key_has_signed_is_passed_on(rng: Rng, source: MemoryStore) -> None:
    states = history(rng, 4)
    target = MemoryStore()
    Publisher(source, stream="policy", signer=KEY).publish(states[0])
    relay = Relay(source, target, stream="policy", trusted_keys=[KEY.public_key], threads=1)
    relay.sync()
    stranger = Signer(bytes(32))
    Publisher(source, stream="policy", signer=stranger).publish(states[1])
    assert relay.sync() is None
    assert names(target, "policy/versions") == ["policy/versions/000000000000.json"]


def test_a_stream_that_is_recreated(rng: Rng, source: MemoryStore) -> None:
    """As for a subscriber: refused, or followed where that is wished; the followers of the target
    see the same."""
    target = MemoryStore()
    states = history(rng, 6)
    publish_each(Publisher(source, stream="policy"), states[:4])
    careful = Relay(source, target, stream="policy", threads=1)
    careful.sync()
    reader = Subscriber(target, stream="policy", threads=1)
    reader.allow_recreated = True
    reader.sync()
    for name in names(source, "policy"):
        source.delete(name)
    root = Publisher(source, stream="policy").publish(states[5]).root
    for relay in (careful, Relay(source, target, stream="policy", threads=1)):
        with pytest.raises(StreamRecreated):
            relay.sync()
    assert newest_root(target) == roots(states)[3]
    done = Relay(source, target, stream="policy", allow_recreated=True, threads=1).sync()
    assert (done.version, newest_root(target)) == (0, root)
    reach(reader, root, 0)
    assert names(target, "policy/payloads") == names(source, "policy/payloads")


def test_a_store_that_somebody_publishes_to_is_no_target(rng: Rng) -> None:
    """Source and target in the wrong order must not cost a stream."""
    states = history(rng, 2)
    origin, other = MemoryStore(), MemoryStore()
    Publisher(origin, stream="policy").publish(states[0])
    Publisher(other, stream="policy").publish(states[1])
    before = names(origin, "policy")
    with pytest.raises(PublisherConflict):
        Relay(other, origin, stream="policy", allow_recreated=True, threads=1).sync()
    assert names(origin, "policy") == before
    mine = Relay(MemoryStore(), origin, stream="policy", allow_recreated=True, threads=1)
    assert mine.sync() is None
    assert names(origin, "policy") == before


def test_a_trainer_that_moved_to_the_target_stops_the_relay(rng: Rng, source: MemoryStore) -> None:
    states = history(rng, 3)
    target = MemoryStore()
    publisher = Publisher(source, stream="policy")
    publisher.publish(states[0])
    relay = Relay(source, target, stream="policy", threads=1)
    relay.sync()
    moved = Publisher(target, stream="policy").publish(states[1])
    assert moved.version == 1
    publisher.publish(states[2])
    publisher.publish(states[1])
    with pytest.raises(PublisherConflict):
        relay.sync()


def test_what_lies_in_the_place_of_a_version_makes_room(rng: Rng, source: MemoryStore) -> None:
    """The target is the relay's. A publisher would skip the number; a copy cannot."""
    states = history(rng, 2)
    target = MemoryStore()
    publisher = Publisher(source, stream="policy")
    publisher.publish(states[0])
    target.put("policy/versions/000000000000.json", b"junk")
    target.put("policy/versions/000000000001.json", b"")
    relay = Relay(source, target, stream="policy", threads=1)
    relay.sync()
    publisher.publish(states[1])
    relay.sync()
    assert newest_root(target) == roots(states)[1]
    assert_whole(target)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("anchored", [None, 2, 3])
@pytest.mark.parametrize("published", [1, 2, 3, 4])
def test_a_source_that_was_set_back_does_not_break_the_target(
    rng: Rng, published: int, anchored: int | None, restarted: bool
) -> None:
    """A store that was restored from a backup goes on from an earlier version. The target has
    version 2 of the time before, and keeps it until the relay may start over."""
    states = history(rng, 8)
    source, target = MemoryStore(), MemoryStore()
    with Publisher(source, stream="policy", threads=1, anchor_ratio=1e9) as publisher:
        publisher.publish(states[0])
        backup = {name: source.get(name) for name in names(source, "policy")}
        publish_each(publisher, states[1:3])
    relay = Relay(source, target, stream="policy", threads=1)
    relay.sync()
    for name in names(source, "policy"):
        source.delete(name)
    for name, data in backup.items():
        source.put(name, data)
    with Publisher(source, stream="policy", threads=1, anchor_ratio=1e9) as publisher:
        for version, state in enumerate(states[4 : 4 + published], 1):
            root = publisher.publish(state, anchor=version == anchored).root
    if restarted:
        relay = Relay(source, target, stream="policy", threads=1)
    for _ in range(2):
        with pytest.raises(StreamForked):
            relay.sync()
    assert newest_root(target) == roots(states)[2], "the target shows what it had"
    found: list[Event] = []
    Relay(
        source, target, stream="policy", allow_recreated=True, threads=1, on_event=found.append
    ).sync()
    assert newest_root(target) == root
    assert all(version.ok for version in verify_stream(target, "policy"))
    assert [type(event) for event in found] == [Relayed], "nothing was avoided on the way"


def test_what_lies_in_the_place_of_versions_costs_no_second_call(rng: Rng) -> None:
    states = history(rng, 3)
    source, target = MemoryStore(), MemoryStore()
    with Publisher(source, stream="policy", anchor_ratio=1e9) as publisher:
        publish_each(publisher, states)
    for version in range(3):
        target.put(f"policy/versions/{version:012}.json", b"junk")
    found: list[Event] = []
    Relay(source, target, stream="policy", threads=1, on_event=found.append).sync()
    assert newest_root(target) == roots(states)[2]
    assert [type(event) for event in found] == [Relayed]


def test_a_fold_of_another_size_of_state_is_not_cut(rng: Rng) -> None:
    source, target, root = relayed_once()
    bomb = header_of_many_blocks()
    name = f"s/payloads/{sha256(bomb).hexdigest()}.patch"
    source.put(name, bomb)
    link, listed = fold_link("s", 0, 16, (sha256(bomb).hexdigest(), len(bomb)))
    source.put(link, listed)
    tracemalloc.start()
    Relay(source, target, stream="s", threads=1).sync()
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    assert newest_root(target, "s") == root
    assert link not in names(target, "s/links")
