"""A relay: one copy of each payload crosses, what it shows is whole, and who follows it reaches the
newest version."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulse_rl import (
    LocalStore,
    MemoryStore,
    Publisher,
    Relay,
    Signer,
    Subscriber,
    fold_stream,
    gc_stream,
)
from pulse_rl.errors import ChainGap, InputError
from pulse_rl.events import Event, FallbackUsed, Relayed
from tests.support.folds import fold_link
from tests.support.publishers import FoldingPublisher, tuned
from tests.support.relays import Counted, assert_whole, newest_root
from tests.support.states import Rng, TinyTrainer, history, publish_each, reach, roots
from tests.support.stores import FaultyStore, names, s3_store

KEY = Signer(bytes(range(32)))


@pytest.mark.parametrize("signed", [False, True])
def test_a_follower_of_the_target_is_where_the_source_is(signed: bool, rng: Rng) -> None:
    states = history(rng, 12)
    source, target = Counted(), MemoryStore()
    keys = [KEY.public_key] if signed else None
    publisher = tuned(
        source, stream="policy", signer=KEY if signed else None, anchor_ratio=0.05, shard_bytes=3000
    )
    relay = Relay(source, target, stream="policy", trusted_keys=keys, threads=1)
    assert relay.sync() is None
    reader = Subscriber(target, stream="policy", trusted_keys=keys, threads=1)
    for version, (state, root) in enumerate(zip(states, roots(states), strict=True)):
        published = publisher.publish(state)
        done = relay.sync()
        assert (done.version, done.previous) == (version, version - 1 if version else None)
        assert done.nbytes == published.patch_bytes + published.anchor_bytes
        reach(reader, root, version)
        assert relay.sync() is None
    payloads = {info.name: info.nbytes for info in source.list("policy/payloads")}
    assert source.payloads_read() == payloads, "each payload is fetched once, and whole"
    for folder in ("versions", "links", "payloads"):
        assert names(target, f"policy/{folder}") == names(source, f"policy/{folder}")
    for name in names(target, "policy"):
        assert target.get(name) == source.get(name)
    assert names(target, "policy/epochs") == [], "claims are for publishers"
    assert_whole(target)


def test_who_was_cut_off_comes_back_by_folds() -> None:
    """No full state crosses, nor the patches that a fold stands for; and what is then shown is a
    whole stream."""
    source, target, trainer = Counted(), MemoryStore(), TinyTrainer()
    publisher = FoldingPublisher(source, stream="s", threads=1, folds=(4, 16), anchor_ratio=1e9)

    def publish(versions: int) -> str:
        root = trainer.publish(publisher, versions).root
        publisher.wait()
        return root

    publish(3)
    relay = Relay(source, target, stream="s", threads=1)
    relay.sync()
    reader = Subscriber(target, stream="s", threads=1)
    reader.sync()
    root = publish(40)
    source.read.clear()
    done = Relay(source, target, stream="s", threads=1).sync()
    assert done.links[:2] == ("the patch 2->3", "the patch 3->4")
    assert "the fold 16->32" in done.links
    assert not any("anchor" in link for link in done.links)
    assert done.nbytes == sum(source.payloads_read().values())
    reach(reader, root, 42)
    assert newest_root(target, "s") == root
    assert_whole(target, "s")
    root = publish(1)
    relay.sync()
    reach(reader, root)


def test_what_a_relay_skipped_can_be_collected_around(source: MemoryStore) -> None:
    target, trainer = MemoryStore(), TinyTrainer()
    publisher = FoldingPublisher(source, stream="s", threads=1, folds=(4,), anchor_ratio=1e9)
    for version in range(30):
        root = trainer.publish(publisher, anchor=version == 3).root
        publisher.wait()
        if version in (0, 3, 29):
            Relay(source, target, stream="s", threads=1).sync()
    assert "s/versions/000000000015.json" not in names(target, "s/versions")
    plan = gc_stream(target, "s", keep=1, grace_seconds=0)
    assert plan.oldest == 3
    assert newest_root(target, "s") == root
    assert_whole(target, "s")


def test_a_fold_with_the_bytes_of_a_patch_can_be_collected_around(rng: Rng) -> None:
    """Nothing changed in version 1, so that the fold 0->2 is the patch 1->2; the relay has not
    copied version 1."""
    source, target = MemoryStore(), MemoryStore()
    first, second = history(rng, 2)
    publisher = Publisher(source, stream="policy", threads=1, anchor_ratio=1e9)
    publisher.publish(first)
    Relay(source, target, stream="policy", threads=1).sync()
    publish_each(publisher, (first, second))
    manifests = Subscriber(source, stream="policy").stream
    unchanged, patch = manifests.manifest(1).patch, manifests.manifest(2).patch
    assert patch is not None
    source.delete(f"policy/payloads/{unchanged.parts[0].sha256}.patch")
    source.put(*fold_link("policy", 0, 2, (patch.parts[0].sha256, patch.parts[0].bytes)))
    done = Relay(source, target, stream="policy", threads=1).sync()
    assert done.links == ("the fold 0->2",)
    assert gc_stream(target, "policy", keep=5, grace_seconds=0).oldest == 0
    assert newest_root(target) == roots([second])[0]
    assert_whole(target)


def test_what_was_stored_before_is_not_fetched_again(rng: Rng) -> None:
    """Nor believed for its name and length."""
    source, target = Counted(), MemoryStore()
    tuned(source, stream="policy", shard_bytes=3000).publish(history(rng, 1)[0])
    shards = names(source, "policy/payloads")
    assert len(shards) > 2
    target.put(shards[0], source.store.get(shards[0]))
    target.put(shards[1], bytes(source.head(shards[1]).nbytes))
    target.put(shards[2], b"short")
    Relay(source, target, stream="policy", threads=1).sync()
    assert shards[0] not in source.read
    assert {shards[1], shards[2]} <= set(source.read)
    assert_whole(target)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_payload_is_not_passed_on(damage: str, source: MemoryStore) -> None:
    """The relay goes around it, and says so."""
    target, trainer = MemoryStore(), TinyTrainer()
    seen: list[Event] = []
    publisher = FoldingPublisher(source, stream="s", threads=1, folds=(4,), anchor_ratio=1e9)
    relay = Relay(source, target, stream="s", threads=1, on_event=seen.append)
    for version in range(5):
        root = trainer.publish(publisher).root
        publisher.wait()
        if version == 0:
            relay.sync()
    assert publisher.head() is not None
    lost = Subscriber(source, stream="s").stream.manifest(2).patch
    name = f"s/payloads/{lost.parts[0].sha256}.patch"
    data = source.get(name)
    source.delete(name)
    if damage != "delete":
        source.put(name, data[:-1] if damage == "truncate" else data[:-1] + bytes([data[-1] ^ 1]))
    done = relay.sync()
    assert done.links[-1] == "the fold 0->4"
    assert [e.kind for e in seen if isinstance(e, FallbackUsed)] in (
        ["digest_mismatch"],
        ["not_found"],
    )
    assert name not in names(target, "s/payloads")
    assert newest_root(target, "s") == root
    assert_whole(target, "s")


def test_a_reply_that_was_damaged_on_its_way_is_asked_for_again(rng: Rng) -> None:
    source, target = FaultyStore(MemoryStore()), MemoryStore()
    root = Publisher(source, stream="policy").publish(history(rng, 1)[0]).root
    hits = []

    def once(name: str, data: bytes) -> bytes:
        if "/payloads/" in name and not hits:
            hits.append(name)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    source.damage = once
    Relay(source, target, stream="policy", threads=1).sync()
    assert hits
    assert newest_root(target) == root


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "leaves"])
def test_digests_that_the_source_showed_damaged_are_tried_again(
    kind: str, restarted: bool, rng: Rng
) -> None:
    """A cache on the way shows another object for a while: workers of a part follow after it."""
    source, target, seen = FaultyStore(MemoryStore()), MemoryStore(), list[Event]()
    Publisher(source, stream="policy").publish(history(rng, 1)[0])
    relay = Relay(source, target, stream="policy", threads=1, on_event=seen.append)
    damaged = next(n for n in names(source, "policy/digests") if n.endswith(kind))
    source.damage = lambda name, data: bytes(len(data)) if name == damaged else data
    relay.sync()
    reported = [event.link for event in seen if isinstance(event, FallbackUsed)]
    assert set(reported) == {"the digests of version 0"}
    relay.sync()
    assert len([event for event in seen if isinstance(event, FallbackUsed)]) == len(reported)
    source.damage = lambda name, data: data
    if restarted:
        relay = Relay(source, target, stream="policy", threads=1)
    relay.sync()
    assert names(target, "policy/digests") == names(source, "policy/digests")
    reader = Subscriber(target, stream="policy", select="layer*", threads=1)
    reader.sync()
    assert reader.version == 0
    source.calls.clear()
    assert relay.sync() is None
    assert source.calls == [("list", "policy/versions")]


def test_digests_that_stay_damaged_cost_less_and_less(rng: Rng, faulty: FaultyStore) -> None:
    Publisher(faulty, stream="policy").publish(history(rng, 1)[0])
    name = next(name for name in names(faulty, "policy/digests") if name.endswith("tensors"))
    faulty.put(name, b"junk")
    relay = Relay(faulty, MemoryStore(), stream="policy", threads=1)
    for _ in range(5):
        relay.sync()
    faulty.calls.clear()
    for _ in range(50):
        assert relay.sync() is None
    assert set(faulty.calls) == {("list", "policy/versions")}


def test_a_gap_in_the_source_is_named(rng: Rng, source: MemoryStore) -> None:
    target = MemoryStore()
    states = history(rng, 3)
    publisher = Publisher(source, stream="policy", anchor_ratio=1e9)
    publisher.publish(states[0])
    relay = Relay(source, target, stream="policy", threads=1)
    relay.sync()
    publish_each(publisher, states[1:])
    head = publisher.head()
    source.delete(f"policy/payloads/{head.patch.parts[0].sha256}.patch")
    with pytest.raises(ChainGap, match="version 2"):
        relay.sync()
    assert newest_root(target) == roots(states)[1]
    assert_whole(target)
    root = publisher.publish(states[0], anchor=True).root
    relay.sync()
    assert newest_root(target) == root


def test_folds_are_passed_on_with_their_signatures(source: MemoryStore) -> None:
    target, trainer = MemoryStore(), TinyTrainer()
    publisher = Publisher(source, stream="s", threads=1, signer=KEY, anchor_ratio=1e9)
    keys = [KEY.public_key]
    for version in range(17):
        root = trainer.publish(publisher).root
        if version == 0:
            Relay(source, target, stream="s", trusted_keys=keys, threads=1).sync()
    list(fold_stream(source, "s", (16,), signer=KEY, threads=1))
    done = Relay(source, target, stream="s", trusted_keys=keys, threads=1).sync()
    assert done.links == ("the fold 0->16",)
    assert newest_root(target, "s", trusted_keys=keys) == root


def test_an_idle_look_costs_a_listing_on_each_side(rng: Rng) -> None:
    source, target = FaultyStore(MemoryStore()), FaultyStore(MemoryStore())
    publisher = Publisher(source, stream="policy")
    relay = Relay(source, target, stream="policy", threads=1)
    for state in history(rng, 3):
        publisher.publish(state)
        relay.sync()
    relay.sync()
    for _ in range(3):
        source.calls.clear()
        target.calls.clear()
        assert relay.sync() is None
        assert source.calls == target.calls == [("list", "policy/versions")]


def test_memory_is_bounded_by_pieces_not_by_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_rl.ops.relay._CHUNK_BYTES", 1 << 16)
    largest = 0

    class Pieces(LocalStore):
        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            nonlocal largest
            data = super().get(name, start, stop)
            largest = max(largest, len(data) if "/payloads/" in name else 0)
            return data

    trainer = TinyTrainer()
    Publisher(LocalStore(tmp_path / "far"), stream="s").publish(trainer.state)
    Relay(Pieces(tmp_path / "far"), Pieces(tmp_path / "near"), stream="s").sync()
    assert largest == 1 << 16
    assert_whole(LocalStore(tmp_path / "near"), "s")


def test_events_and_refusals(rng: Rng, source: MemoryStore) -> None:
    seen: list[Event] = []
    Publisher(source, stream="policy").publish(history(rng, 1)[0])
    done = Relay(source, MemoryStore(), stream="policy", on_event=seen.append).sync()
    assert seen == [done]
    assert isinstance(done, Relayed)
    with pytest.raises(InputError):
        Relay(source, MemoryStore(), stream="policy", keep=0)
    with pytest.raises(InputError):
        Relay(source, MemoryStore(), stream="policy", allow_recreated=True, stream_id="0" * 32)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [None, 1])
def test_from_bucket_to_bucket(s3: str, rng: Rng, threads: int | None) -> None:
    """Payloads are read from one object store while they are written to another."""
    source, target = (s3_store(s3, f"{name}-{threads}") for name in ("home", "near"))
    states = history(rng, 3)
    with Publisher(source, stream="policy") as publisher:
        relay = Relay(source, target, stream="policy", threads=threads)
        for state in states:
            publisher.publish(state, files={"config.json": b"{}", "empty.txt": b""})
            relay.sync()
    assert_whole(target)
    reader = Subscriber(target, stream="policy")
    reader.sync()
    assert reader.root == roots(states)[-1]
    assert reader.files() == {"config.json": b"{}", "empty.txt": b""}
