"""Whoever reads a stream reads that of a sharded trainer: select, folds, relay, gc, verify, audit,
several stores."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from pulse_rl import (
    MemoryStore,
    Publisher,
    Relay,
    Subscriber,
    audit,
    fold_stream,
    gc_stream,
    state_root,
    verify_stream,
)
from pulse_rl.errors import ChainGap
from pulse_rl.events import Event, Synced
from pulse_rl.frameworks.torch import to_torch
from pulse_rl.stream.stream import Stream
from tests.integrations.fsdp.conftest import VERSIONS, ShardedStream
from tests.support.sharded import bits, followed
from tests.support.states import present, reach, taken

pytestmark = pytest.mark.slow


def test_every_version_and_link_is_right(sharded_stream: ShardedStream) -> None:
    reports = list(verify_stream(sharded_stream.store(), "policy"))
    assert [report.root for report in reports] == [
        state_root(state) for state in sharded_stream.states
    ]
    assert all(report.ok for report in reports)
    assert [len(report.links) for report in reports] == [1, 1, 1, 1, 1, 2, 1, 1, 1]


def test_parts_and_shards_are_the_ranks(sharded_stream: ShardedStream) -> None:
    stream = Stream(sharded_stream.store(), "policy")
    for version in range(VERSIONS):
        manifest = stream.manifest(version)
        assert manifest.format == "pulse.manifest.1"
        assert (manifest.patch is None) == (version == 0)
        assert manifest.patch is None or len(manifest.patch.parts) == 3
        assert (manifest.anchor is not None) == (version in (0, 5))
        assert manifest.anchor is None or len(manifest.anchor.shards) == 3


def test_files_are_rank_0s(sharded_stream: ShardedStream) -> None:
    reader = followed(sharded_stream.store())
    found = [(reader.sync(version), reader.files())[1] for version in range(VERSIONS)]
    assert found == [{}] * 2 + [{"rank.txt": b"0"}] * 7


def test_what_changed_is_told_exactly(sharded_stream: ShardedStream) -> None:
    """An update along several versions has each changed element once, with its bits now."""
    store = sharded_stream.store()
    reader = followed(store)
    taken(reader, 1)
    first = {name: tensor.clone() for name, tensor in to_torch(reader.state).items()}
    for before, after in pairwise([1, 4, VERSIONS - 1]):
        update = present(reader.sync(after))
        for tensor in update.tensors:
            flat = first[tensor.spec.name].reshape(-1)
            old = sharded_stream.states[before][tensor.spec.name]
            new = sharded_stream.states[after][tensor.spec.name]
            changed = torch.nonzero(old.reshape(-1) != new.reshape(-1)).reshape(-1)
            assert tensor.indices is not None
            assert set(changed.tolist()) <= set(tensor.indices.tolist())
            assert len(set(tensor.indices.tolist())) == len(tensor.indices)
            flat[torch.from_numpy(tensor.indices)] = new.reshape(-1)[
                torch.from_numpy(tensor.indices)
            ]
        update.acknowledge()
        for name, tensor in sharded_stream.states[after].items():
            assert torch.equal(bits(first[name]), bits(tensor)), name


@pytest.mark.parametrize("pattern", ["blocks.0.*", "embed.weight", "*.norm.bias"])
def test_a_selecting_subscriber_holds_its_tensors(
    sharded_stream: ShardedStream, pattern: str
) -> None:
    store = sharded_stream.store()
    reader = followed(store, select=pattern)
    reader.sync(3)  # from an anchor
    for version in range(3, VERSIONS):
        reader.sync(version)
        held = to_torch(reader.state)
        for name, tensor in held.items():
            assert torch.equal(bits(tensor), bits(sharded_stream.states[version][name])), (
                version,
                name,
            )
    assert 0 < len(held) < len(sharded_stream.states[0])


def test_folds_over_parts(sharded_stream: ShardedStream) -> None:
    store = sharded_stream.store()
    assert list(fold_stream(store, "policy", folds=(4,))) == [(0, 4), (4, 8)]
    reader = followed(store)
    reader.sync(0)
    for version in range(1, 8):
        store.delete(f"policy/versions/{version:012d}.json") if version != 4 else None
    reach(reader, state_root(sharded_stream.states[8]))


def without_patches(store: MemoryStore) -> MemoryStore:
    """The store, in which no path but the fold leads from version 0 to 8."""
    stream = Stream(store, "policy")
    for version in range(1, VERSIONS):
        manifest = stream.manifest(version)
        for payload in manifest.patch.parts if manifest.patch else ():
            store.delete(f"policy/payloads/{payload.sha256}.patch")
        for payload in manifest.anchor.shards if manifest.anchor else ():
            store.delete(f"policy/payloads/{payload.sha256}.safetensors")
    return store


def test_a_fold_over_the_ranks_parts(sharded_stream: ShardedStream) -> None:
    """Smaller than the patches."""
    stream = Stream(sharded_stream.store(), "policy")
    (fold,) = [link for link in stream.links() if link.base is not None]
    assert (fold.base, fold.version) == (0, 8)
    parts = present(stream.resolved(fold).payloads)
    assert fold.nbytes == sum(part.bytes for part in parts)
    patches = [stream.manifest(version).patch for version in range(1, 9)]
    assert fold.nbytes < sum(part.bytes for patch in patches if patch for part in patch.parts)


def test_a_worker_that_was_cut_off_comes_back_by_the_fold(sharded_stream: ShardedStream) -> None:
    """It reads less than the patches have, and no anchor; so does one that selects."""
    store = sharded_stream.store()
    fold = next(link for link in Stream(store, "policy").links() if link.base is not None)
    for select in (None, "blocks.0.*"):
        told: list[Event] = []
        reader = followed(store, select=select, on_event=told.append)
        reader.sync(0)
        reader.sync()
        synced = [event for event in told if isinstance(event, Synced)][-1]
        assert synced.links == ("the fold 0->8",)
        # One that selects reads a little behind the parts' headers, and the tensors' digests.
        assert synced.fetched_bytes <= fold.nbytes + (
            3 * 512 + 32 * len(sharded_stream.states[0]) if select else 0
        )
        for name, tensor in to_torch(reader.state).items():
            assert torch.equal(bits(tensor), bits(sharded_stream.states[8][name])), name
    reader = followed(without_patches(store))
    reader.sync(0)
    reach(reader, state_root(sharded_stream.states[8]))


def test_no_fold_is_made_twice(sharded_stream: ShardedStream) -> None:
    assert list(fold_stream(sharded_stream.store(), "policy", folds=(8,))) == []


def test_a_relay_copies_the_ranks_fold(sharded_stream: ShardedStream) -> None:
    source, target = sharded_stream.store(), MemoryStore()
    relay = Relay(source, target, stream="policy", threads=1)
    later = {
        name: data
        for name, data in sharded_stream.objects.items()
        if "versions" in name and name[-6:-5] != "0"
    }
    for name in later:
        source.delete(name)
    while relay.sync():
        pass
    for name, data in later.items():
        source.put(name, data)
    without_patches(source)
    while relay.sync():
        pass
    assert relay.version == 8
    gc_stream(target, "policy", keep=1, grace_seconds=0)
    assert all(report.ok for report in verify_stream(target, "policy"))
    reader = followed(target)
    reach(reader, state_root(sharded_stream.states[8]))


@pytest.mark.parametrize("what", ["part", "link", "lie"])
def test_a_damaged_fold_is_a_broken_link(sharded_stream: ShardedStream, what: str) -> None:
    """The patches lead past it, and gc takes nothing for it."""
    store = sharded_stream.store()
    stream = Stream(store, "policy")
    fold = next(link for link in stream.links() if link.base is not None)
    (name,) = [info.name for info in store.list("policy/links") if "-anchor-" not in info.name]
    if what == "part":
        store.delete(f"policy/payloads/{(stream.resolved(fold).payloads or ())[0].sha256}.patch")
    else:
        data = store.get(name)
        store.delete(name)
        store.put(name, data[:-2] + b"\n" if what == "link" else data[::-1])
    reader = followed(store)
    reader.sync(0)
    reach(reader, state_root(sharded_stream.states[8]))
    gc_stream(store, "policy", keep=1, grace_seconds=0)
    assert all(report.ok for report in verify_stream(store, "policy"))


def test_garbage_collection_keeps_the_parts_of_folds(sharded_stream: ShardedStream) -> None:
    store = sharded_stream.store()
    gc_stream(store, "policy", keep=9, grace_seconds=0)
    reader = followed(without_patches(store))
    reader.sync(0)
    reach(reader, state_root(sharded_stream.states[8]))
    store = sharded_stream.store()
    parts = (
        Stream(store, "policy")
        .resolved(next(x for x in Stream(store, "policy").links() if x.parts))
        .payloads
    )
    gc_stream(store, "policy", keep=2, grace_seconds=0)
    left = {info.name for info in store.list("policy")}
    assert not [name for name in left if "/links/" in name and "-anchor-" not in name]
    assert not [part for part in parts or () if f"policy/payloads/{part.sha256}.patch" in left]


def test_garbage_collection_keeps_all_parts(sharded_stream: ShardedStream) -> None:
    store = sharded_stream.store()
    gc_stream(store, "policy", keep=2, grace_seconds=0)
    assert Stream(store, "policy").versions() == [5, 6, 7, 8]
    assert all(report.ok for report in verify_stream(store, "policy"))


def test_an_audit_names_what_differs(sharded_stream: ShardedStream) -> None:
    reader = followed(sharded_stream.store())
    reader.sync()
    live = {name: tensor.clone() for name, tensor in sharded_stream.states[-1].items()}
    assert audit(live, reader.digest).ok
    live["blocks.1.up.bias"][3] += 1
    assert audit(live, reader.digest).differing == ("blocks.1.up.bias",)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_part_that_is_lost_or_damaged_is_a_broken_link(
    sharded_stream: ShardedStream, part: int
) -> None:
    """The state stays where it was; an anchor leads past it."""
    for damage in (b"", b"damaged"):
        store = sharded_stream.store()
        patch = Stream(store, "policy").manifest(3).patch
        assert patch
        name = f"policy/payloads/{patch.parts[part].sha256}.patch"
        store.delete(name)
        if damage:
            store.put(name, damage)
        reader = followed(store)
        reader.sync(2)
        with pytest.raises(ChainGap, match=patch.parts[part].sha256[:12]):
            reader.sync(3)
        assert reader.root == state_root(sharded_stream.states[2])
        reach(reader, state_root(sharded_stream.states[-1]))


def test_a_publisher_takes_the_stream_over(sharded_stream: ShardedStream) -> None:
    store = sharded_stream.store()
    state = {name: tensor.clone() for name, tensor in sharded_stream.states[-1].items()}
    state["blocks.0.up.bias"][7] += 1
    reader = followed(store)
    reader.sync()
    with Publisher(store, stream="policy") as publisher:
        published = publisher.publish(state)
    assert (published.version, published.changed) == (VERSIONS, 1)
    assert reader.sync() is not None
    assert reader.root == state_root(state)


def test_a_subscriber_of_two_stores(sharded_stream: ShardedStream) -> None:
    near, far = MemoryStore(), sharded_stream.store()
    reach(Subscriber([near, far], stream="policy"), state_root(sharded_stream.states[-1]))
