"""Objects in the store are damaged or gone: another path is taken, or an error names what is
missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256

import msgspec
import pytest

from pulse_rl import MemoryStore, Publisher, PulseError, Subscriber, verify_stream
from pulse_rl.errors import ChainGap
from pulse_rl.events import Event, FallbackUsed, Synced
from pulse_rl.stream.manifest import AnchorRef, Manifest, Payload
from tests.support.checkpoints import entry, file_of
from tests.support.manifests import FULL, manifest_of
from tests.support.publishers import tuned
from tests.support.states import (
    Live,
    Rng,
    Tensors,
    bits,
    history,
    present,
    publish_each,
    reach,
    state_root,
)
from tests.support.stores import FaultyStore


def stream_of(
    states: list[Tensors], anchors: set[int] = frozenset(), **options: int
) -> FaultyStore:  # type: ignore[assignment]
    """A stream with an anchor at version 0 and at each of ``anchors``."""
    store = FaultyStore(MemoryStore())
    publisher = tuned(store, stream="policy", anchor_ratio=1e9, **options)
    for version, state in enumerate(states):
        publisher.publish(state, anchor=version in anchors)
    return store


def manifest(store: FaultyStore, version: int) -> Manifest:
    return manifest_of(store, "policy", version)


def patch_name(store: FaultyStore, version: int) -> str:
    patch = present(manifest(store, version).patch)
    return f"policy/payloads/{patch.parts[0].sha256}.patch"


def shard_names(store: FaultyStore, version: int) -> list[str]:
    anchor = present(manifest(store, version).anchor)
    return [f"policy/payloads/{p.sha256}.safetensors" for p in anchor.shards]


def manifest_name(version: int) -> str:
    return f"policy/versions/{version:012}.json"


def flip(store: FaultyStore, name: str) -> None:
    data = bytearray(store.inner.get(name))
    data[len(data) // 2] ^= 4
    store.inner.put(name, bytes(data))


def truncate(store: FaultyStore, name: str) -> None:
    store.inner.put(name, store.inner.get(name)[:-5])


def lengthen(store: FaultyStore, name: str) -> None:
    store.inner.put(name, store.inner.get(name) + b"x")


def empty(store: FaultyStore, name: str) -> None:
    store.inner.put(name, b"")


def flip_first(store: FaultyStore, name: str) -> None:
    """In a shard this is its header's length, in a patch the magic, in a manifest the brace."""
    data = store.inner.get(name)
    store.inner.put(name, bytes([data[0] ^ 0x80]) + data[1:])


def gone(store: FaultyStore, name: str) -> None:
    store.inner.delete(name)


Damage = Callable[[FaultyStore, str], None]
DAMAGES: list[Damage] = [flip, truncate, lengthen, empty, flip_first, gone]
damages = pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)


def follow(store: FaultyStore, start: int | None = None) -> tuple[Live, Subscriber, list[Event]]:
    """A subscriber with a live model, synced to ``start`` where given; what it is told from then
    on."""
    seen: list[Event] = []
    subscriber, live = Subscriber(store, stream="policy", threads=1, on_event=seen.append), Live()
    if start is not None:
        live.apply(subscriber.sync(start))
    seen.clear()
    return live, subscriber, seen


def failed_links(seen: list[Event]) -> list[str]:
    return [e.link for e in seen if isinstance(e, FallbackUsed)]


@damages
def test_a_damaged_patch_is_avoided_by_a_later_anchor(damage: Damage, rng: Rng) -> None:
    states = history(rng, 6)
    store = stream_of(states, anchors={4})
    live, subscriber, seen = follow(store, start=1)
    damage(store, patch_name(store, 3))
    update = present(subscriber.sync())
    assert not update.full, "the model is told the difference, as the tensors are the same"
    live.apply(update)
    assert (subscriber.version, live.root) == (5, state_root(states[5]))
    if damage is not lengthen:
        assert failed_links(seen) == ["the patch 2->3"]


@damages
def test_a_damaged_anchor_is_avoided_by_an_earlier_one(damage: Damage, rng: Rng) -> None:
    states = history(rng, 6)
    store = stream_of(states, anchors={4}, shard_bytes=4000)
    for name in shard_names(store, 4)[1:2]:
        damage(store, name)
    live, subscriber, seen = follow(store)
    live.apply(subscriber.sync())
    assert (subscriber.version, live.root) == (5, state_root(states[5]))
    if damage is not lengthen:
        assert failed_links(seen) == ["the anchor of version 4"]


@damages
def test_a_damaged_patch_without_another_path_is_a_gap_that_names_it(
    damage: Damage, rng: Rng
) -> None:
    states = history(rng, 5)
    store = stream_of(states)
    live, subscriber, _ = follow(store, start=1)
    name = patch_name(store, 3)
    damage(store, name)
    if damage is lengthen:
        return
    for _ in range(2):
        with pytest.raises(ChainGap) as caught:
            live.apply(subscriber.sync())
        assert name in str(caught.value)
        assert "the patch 2->3" in str(caught.value)
        assert subscriber.status == "ready"
        assert subscriber.version == 2
        assert subscriber.root == state_root(subscriber.state) == state_root(states[2])


@pytest.mark.parametrize("damage", [flip_first, truncate, empty, gone], ids=lambda d: d.__name__)
def test_a_damaged_manifest_in_between_is_a_gap_or_a_detour(damage: Damage, rng: Rng) -> None:
    states = history(rng, 6)
    for anchors in (set[int](), {4}):
        store = stream_of(states, anchors)
        live, subscriber, _ = follow(store, start=1)
        damage(store, manifest_name(3))
        if anchors:
            live.apply(subscriber.sync())
            assert live.root == state_root(states[5])
        else:
            with pytest.raises(ChainGap, match=r"000000000003|version 3"):
                subscriber.sync()
            assert subscriber.version in (1, 2)
            assert subscriber.root == state_root(states[subscriber.version])


def test_a_short_answer_is_damage_and_not_a_crash(rng: Rng) -> None:
    """A store that returns fewer bytes than were asked for."""
    states = history(rng, 3)
    store = stream_of(states, anchors={2})
    (shard,) = shard_names(store, 2)
    store.damage = lambda name, data: data[:-1] if name == shard and len(data) < 9000 else data
    live, subscriber, _ = follow(store)
    live.apply(subscriber.sync())
    assert live.root == state_root(states[2])


def test_a_manifest_that_points_at_another_patch_is_noticed(rng: Rng) -> None:
    """A rewritten manifest passes for canonical, but the patch's own roots tell that it does not
    belong there."""
    states = history(rng, 4)
    store = stream_of(states)
    second, third = manifest(store, 2), manifest(store, 3)
    assert second.patch is not None
    assert third.patch is not None
    swapped = msgspec.structs.replace(second.patch, parts=third.patch.parts)
    store.inner.put(
        manifest_name(2), msgspec.structs.replace(second, patch=swapped).sealed().to_bytes()
    )
    _, subscriber, _ = follow(store, start=1)
    with pytest.raises(ChainGap, match="applies to root"):
        subscriber.sync(2)
    store.inner.put(
        manifest_name(2), msgspec.structs.replace(second, root="0" * 64).sealed().to_bytes()
    )
    _, subscriber, _ = follow(store, start=1)
    with pytest.raises(ChainGap, match="leads to root"):
        subscriber.sync(2)
    assert (subscriber.version, subscriber.root) == (1, state_root(states[1]))


def test_a_manifest_that_claims_terabytes_is_refused_before_they_are_allocated() -> None:
    """Manifest and shard agree on 16 TiB, the stored object has its header and a little more."""
    nbytes = 1 << 44
    head = file_of({"w": entry("BF16", [nbytes // 2], [0, nbytes])})
    payload = Payload(sha256(head).hexdigest(), len(head) + nbytes)
    claim = msgspec.structs.replace(
        FULL,
        version=0,
        elements=nbytes // 2,
        dense_bytes=nbytes,
        patch=None,
        anchor=AnchorRef((payload,)),
    ).sealed()
    store = MemoryStore()
    store.put(f"policy/payloads/{payload.sha256}.safetensors", head + bytes(70_000))
    store.put(manifest_name(0), claim.to_bytes())
    with pytest.raises(ChainGap):
        Subscriber(store, stream="policy").sync()


@pytest.mark.parametrize("where", ["patch", "anchor"])
def test_aliases_that_do_not_fit_are_refused(where: str, rng: Rng) -> None:
    """An alias of a tensor that does not exist would fail much later, in a worker's model."""
    states = history(rng, 3)
    store = stream_of(states, anchors={1} if where == "anchor" else set())
    wrong = msgspec.structs.replace(manifest(store, 1), aliases={"head": "absent"}).sealed()
    store.inner.put(manifest_name(1), wrong.to_bytes())
    _, subscriber, _ = follow(store, start=0 if where == "patch" else None)
    with pytest.raises(PulseError):
        subscriber.sync(1)
    assert subscriber.version in (None, 0)


@damages
def test_verify_names_the_damage_and_goes_on(damage: Damage, rng: Rng) -> None:
    states = history(rng, 6)
    store = stream_of(states, anchors={4})
    damage(store, patch_name(store, 2))
    reports = {r.version: r for r in verify_stream(store, "policy")}
    if damage is lengthen:
        assert [v for v, r in reports.items() if not r.ok] in ([], [2, 3, 4])
        return
    assert [v for v, r in reports.items() if not r.ok] == [2, 3, 4]
    assert patch_name(store, 2) in reports[2].problems[0]
    assert reports[4].links == ("the anchor of version 4",)
    assert reports[5].links == ("the patch 4->5",)


def test_verify_checks_every_anchor_too(rng: Rng) -> None:
    states = [s | {"more": bits(rng, "F16", 9)} for s in history(rng, 5)]
    store = stream_of(states, anchors={2})
    assert all(r.ok for r in verify_stream(store, "policy"))
    flip(store, shard_names(store, 2)[0])
    reports = list(verify_stream(store, "policy"))
    assert [r.version for r in reports if not r.ok] == [2]
    assert "the anchor of version 2" in reports[2].problems[0]
    assert reports[2].links == ("the patch 1->2",)


def test_a_synced_event_tells_only_of_what_was_followed(rng: Rng) -> None:
    states = history(rng, 4)
    store = stream_of(states, anchors={2})
    flip(store, patch_name(store, 1))
    _, subscriber, seen = follow(store, start=0)
    subscriber.sync()
    (synced,) = [e for e in seen if isinstance(e, Synced)]
    assert synced.links == ("the anchor of version 2", "the patch 2->3")
    assert synced.previous == 0


def test_a_worker_whose_version_was_given_again_starts_from_an_anchor(rng: Rng) -> None:
    """Somebody took manifests away; a restarted publisher gave their numbers to other states. The
    next patch is of these, and cannot be applied to what the worker has."""
    states, store = history(rng, 6), MemoryStore()
    with Publisher(store, stream="policy") as publisher:
        publish_each(publisher, states[:4])
    worker = Subscriber(store, stream="policy")
    worker.sync()
    for version in (2, 3):
        store.delete(f"policy/versions/{version:012}.json")
    with Publisher(store, stream="policy") as publisher:
        for number in (4, 5, 4):
            publisher.publish(states[number], anchor=number == 5)
        assert publisher.publish(states[0]).version == 5
    reach(worker, state_root(states[0]), 5)


def test_manifests_of_lost_versions_do_not_stand_for_those_of_their_numbers(rng: Rng) -> None:
    """A store came back from a backup, after a worker had read of versions that it could not fetch:
    what it knows of these is not true of the new ones, which have another history."""
    states, tensor, store = history(rng, 8), bits(rng, "F32", 3), FaultyStore(MemoryStore())
    with tuned(store, stream="policy", anchor_ratio=1e9) as publisher:
        publish_each(publisher, states[:4])
        worker = Subscriber(store, stream="policy", threads=1)
        worker.sync()
        for state in states[4:]:
            publisher.publish(state | {"new": tensor})
    assert manifest(store, 4).patch is None
    store.damage = lambda name, data: data[:-1] if "/payloads/" in name else data
    with pytest.raises(ChainGap):
        worker.sync()
    store.damage = lambda name, data: data
    for version in range(2, 8):
        store.delete(f"policy/versions/{version:012}.json")
    with tuned(store, stream="policy", anchor_ratio=1e9) as publisher:
        for number in (6, 5, 4, 7, 6, 5):
            publisher.publish(states[number], anchor=True)
        assert publisher.publish(states[4]).version == 8
    reach(worker, state_root(states[4]), 8)


def test_a_worker_keeps_the_manifest_of_the_state_that_it_has(rng: Rng) -> None:
    """Also where the store has another version under the same number by now."""
    states, store = history(rng, 3), MemoryStore()
    with Publisher(store, stream="policy") as publisher:
        publisher.publish(states[0])
        publisher.publish(states[1], metadata={"step": 1})
    worker = Subscriber(store, stream="policy")
    worker.sync()
    store.delete("policy/versions/000000000001.json")
    with Publisher(store, stream="policy") as publisher:
        assert publisher.publish(states[2], metadata={"step": 2}).version == 1
    with suppress(PulseError):
        worker.sync()
    assert worker.manifest.root == worker.root
