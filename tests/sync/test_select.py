"""A subscriber of some tensors only: it fetches, holds, verifies and shows these, proved by the
version's root."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pulse_rl import (
    MemoryStore,
    Publisher,
    Relay,
    Signer,
    Store,
    Subscriber,
    Update,
    fold_stream,
    gc_stream,
)
from pulse_rl.errors import ChainGap, InputError, StateMismatch
from pulse_rl.events import Event, Synced
from pulse_rl.patch.header import PatchHeader, parse_header
from pulse_rl.stream.manifest import AnchorRef, Payload
from tests.hostile.pieces import header_of_many_blocks
from tests.support import states
from tests.support.manifests import manifest_of
from tests.support.publishers import anchor_stream, tuned
from tests.support.relays import Counted
from tests.support.states import (
    Rng,
    Tensors,
    all_dtypes,
    bits,
    mutated,
    present,
    publish_each,
    snapshot,
    weights,
)
from tests.support.stores import FaultyStore, names

STAGES = 8


def staged(rng: Rng, elements: int = 3000, layers: int = 16) -> Tensors:
    """A model of eight pipeline stages."""
    tensors = {}
    for layer in range(layers):
        name = f"stages.{layer * STAGES // layers}.layers.{layer:02d}"
        tensors[f"{name}.mlp.weight"] = weights(rng, elements // 10, 10)
        tensors[f"{name}.norm.weight"] = bits(rng, "F32", 16)
    return tensors


def part(tensors: Tensors, prefix: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Live(states.Live):
    """Says what it has taken."""

    def apply(self, update: Update | None) -> None:
        assert update is not None
        super().apply(update)
        update.acknowledge()


def reader(store: Store, select: str | Collection[str], **options: object) -> Subscriber:
    return Subscriber(store, stream="policy", select=select, threads=1, **options)  # type: ignore[arg-type]


def test_small_tensors_of_other_parts_in_a_block_are_held_and_not_shown(rng: Rng) -> None:
    """All tensors of this state are in two blocks; and nothing of the neighbors is seen."""
    store, state = MemoryStore(), all_dtypes(rng)
    publisher = Publisher(store, stream="policy", threads=1)
    publisher.publish(state)
    worker = reader(store, ["BF16.*", "I64.values"])
    worker.sync()
    for _ in range(4):
        state = mutated(rng, state)
        publisher.publish(state)
        update = present(worker.sync())
        expected = {n: t for n, t in state.items() if n.startswith("BF16.") or n == "I64.values"}
        assert snapshot(worker.state) == snapshot(expected)
        assert {t.spec.name for t in update.tensors} <= set(expected)
        assert {name for name, _, _ in worker.full_update()} == set(expected)


@pytest.mark.slow
def test_an_eighth_costs_an_eighth(rng: Rng, tmp_path: Path) -> None:
    """Of the bytes, of anchor and patch, plus 5%; and of the memory. A stage's weights are a
    block."""
    store, state = Counted(), staged(rng, elements=1 << 20, layers=4 * STAGES)
    dense = sum(tensor.array.nbytes for tensor in state.values())
    publisher = tuned(store, stream="policy", anchor_ratio=1e9, shard_bytes=8 << 20)
    anchored = publisher.publish(state)
    seen: list[Event] = []
    worker = reader(store, "stages.5.*", on_event=seen.append)

    def fetched() -> int:
        store.read.clear()
        worker.sync()
        read = sum(store.read.values())
        told = [event.fetched_bytes for event in seen if isinstance(event, Synced)][-1]
        manifest = sum(nbytes for name, nbytes in store.read.items() if "/versions/" in name)
        assert 0.9 * (read - manifest) <= told <= read, "what the event says was fetched"
        return read

    tracemalloc.start()
    assert fetched() <= anchored.anchor_bytes / STAGES * 1.05
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= dense / STAGES + (4 << 20)
    assert peak <= dense / STAGES + (12 << 20), (
        "nor more in between: a chunk of the anchor is 8 MiB"
    )
    for _ in range(2):
        state = mutated(rng, state, density=0.02)
        published = publisher.publish(state)
        assert fetched() <= published.patch_bytes / STAGES * 1.05
    assert snapshot(worker.state) == snapshot(part(state, "stages.5."))


@pytest.mark.slow
def test_a_flipped_bit_matters_to_those_whose_it_is(rng: Rng, store: MemoryStore) -> None:
    """Each byte of the patch and of the anchor behind the headers, tried in some places."""
    old = staged(rng, elements=1 << 20, layers=16)
    new = mutated(rng, old, density=0.002)
    publisher = Publisher(store, stream="policy", anchor_ratio=1e9)
    publisher.publish(old)
    publisher.publish(new)
    refused = {"patch": 0, "safetensors": 0}
    spared = {"patch": 0, "safetensors": 0}
    for name in names(store, "policy/payloads"):
        kind, good = name.rpartition(".")[2], store.get(name)
        for at in np.linspace(len(good) // 8, len(good) - 1, 8).astype(int):
            store.put(name, good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
            for stage in (0, 7):
                worker = reader(store, f"stages.{stage}.*")
                try:
                    worker.sync(target=1)
                except ChainGap:
                    refused[kind] += 1
                    assert worker.version in (None, 0)
                else:
                    spared[kind] += 1
                    assert snapshot(worker.state) == snapshot(part(new, f"stages.{stage}."))
            store.put(name, good)
    assert all(refused.values()), refused
    assert spared["patch"] > refused["patch"]
    assert spared["safetensors"] > refused["safetensors"]


def test_digests_that_lie_are_refused(rng: Rng) -> None:
    old = staged(rng)
    states = [old, mutated(rng, old)]
    for folder_kind in (".tensors", ".leaves"):
        for damage in ("flip", "cut", "longer", "empty", "gone"):
            store = MemoryStore()
            publish_each(Publisher(store, stream="policy"), states)
            for name in [n for n in names(store, "policy/digests") if n.endswith(folder_kind)]:
                good = store.get(name)
                store.delete(name)
                bad = {
                    "flip": good[:-1] + bytes([good[-1] ^ 1]),
                    "cut": good[:-32],
                    "longer": good + bytes(32),
                    "empty": b"",
                }
                if damage in bad:
                    store.put(name, bad[damage])
            worker = reader(store, "stages.0.*")
            with pytest.raises(ChainGap):
                worker.sync()
            assert worker.version is None or snapshot(worker.state) == snapshot(
                part(states[0], "stages.0.")
            )


def test_a_tensor_under_a_false_name_is_not_left_out(rng: Rng) -> None:
    """Whoever can write to the store, but not sign, must not make a worker miss a tensor: names are
    proved, too."""
    signer, store, state = Signer(bytes(range(32))), MemoryStore(), staged(rng)
    Publisher(store, stream="policy", signer=signer).publish(state)
    for name in names(store, "policy"):
        data = store.get(name)
        if name.endswith((".leaves", ".safetensors")):
            false = data.replace(b"stages.0.layers.01.norm", b"stages.0.layers.01.mlq0")
            assert len(false) == len(data)
            assert false != data
            store.put(name, false)
    worker = reader(store, "stages.0.*norm*", trusted_keys=[signer.public_key])
    with pytest.raises(ChainGap):
        worker.sync()


def test_what_is_stored_is_what_the_format_says(rng: Rng) -> None:
    """Computed here from the document, format.md 7."""
    store = MemoryStore()
    state = staged(rng, elements=600_000, layers=2) | {"empty": bits(rng, "F32", 0, 4)}
    root = Publisher(store, stream="policy").publish(state).root
    tensors = store.get(f"policy/digests/{root}.tensors")
    leaves = store.get(f"policy/digests/{root}.leaves")
    assert sha256(b"pulse.state.1\0" + tensors).hexdigest() == root
    length = int.from_bytes(leaves[:8], "little")
    header = json.loads(leaves[8 : 8 + length])
    assert list(header) == sorted(state)
    expected, offset = b"", 0
    for name in sorted(state):
        data = state[name].array.tobytes()
        entry = {"dtype": state[name].dtype, "shape": list(state[name].array.shape)}
        assert header[name] == entry | {"data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        expected += b"".join(
            sha256(data[at : at + (1 << 20)]).digest() for at in range(0, len(data), 1 << 20)
        )
    assert leaves[8 + length :] == expected


def test_a_version_without_digests_says_so(rng: Rng) -> None:
    store, state = MemoryStore(), staged(rng)
    Publisher(store, stream="policy").publish(state)
    for name in names(store, "policy/digests"):
        store.delete(name)
    with pytest.raises(ChainGap, match=r"digests/.*tensors"):
        reader(store, "stages.0.*").sync()


def test_names_that_are_not_there(rng: Rng) -> None:
    store, state = MemoryStore(), staged(rng)
    Publisher(store, stream="policy").publish(state)
    with pytest.raises(InputError, match=r"layers\.99"):
        reader(store, ["stages.0.*", "layers.99.*"]).sync()
    for select in ("", [], [""], [3]):
        with pytest.raises(InputError):
            reader(store, select)  # type: ignore[arg-type]


@pytest.mark.slow
def test_folds_a_base_and_several_stores(rng: Rng) -> None:
    states = [staged(rng)]
    while len(states) < 18:
        states.append(mutated(rng, states[-1], density=0.002))
    store, near = MemoryStore(), MemoryStore()
    publisher = Publisher(store, stream="policy", anchor_ratio=1e9)
    publish_each(publisher, states)
    list(fold_stream(store, "policy", (8,), threads=1))
    Relay(store, near, stream="policy", threads=1).sync()
    seen: list[Event] = []
    for options in ({"base": states[0]}, {"stream_id": publisher.stream_id}):
        for stores in (store, near, [near, store]):
            worker = reader(stores, "stages.2.*", on_event=seen.append, **options)  # type: ignore[arg-type]
            update = present(worker.sync())
            assert update.previous == (0 if "base" in options else None)
            assert snapshot(worker.state) == snapshot(part(states[-1], "stages.2."))
    assert any(
        "fold" in link for event in seen if isinstance(event, Synced) for link in event.links
    )


def test_aliases_are_selected_with_the_tensor_that_they_name(rng: Rng, store: MemoryStore) -> None:
    embed, head = weights(rng, 300, 10), weights(rng, 10, 10)
    publisher = Publisher(store, stream="policy")
    for step in range(3):
        embed.array[step] ^= 1
        publisher.publish({"embed.weight": embed, "lm_head.weight": embed, "other.weight": head})
        worker = reader(store, "lm_head.weight")
        worker.sync()
        assert worker.state.names == ["embed.weight", "lm_head.weight"]
        assert worker.state.read("lm_head.weight").tobytes() == embed.array.tobytes()
        other = reader(store, "other.*")
        other.sync()
        assert other.state.names == ["other.weight"]


def test_another_set_of_tensors(rng: Rng) -> None:
    store, state = MemoryStore(), staged(rng)
    publisher = Publisher(store, stream="policy")
    publisher.publish(state)
    worker = reader(store, "stages.0.*")
    worker.sync()
    state["stages.0.layers.00.extra"] = weights(rng, 40)
    publisher.publish(state)
    update = present(worker.sync())
    assert update.full
    assert snapshot(worker.state) == snapshot(part(state, "stages.0."))


def test_requests_that_fail_leave_the_last_version(rng: Rng) -> None:
    state, inner = staged(rng), MemoryStore()
    publisher = Publisher(inner, stream="policy", anchor_ratio=1e9)
    publisher.publish(state)
    store = FaultyStore(inner)
    worker = reader(store, "stages.0.*")
    worker.sync()
    for at in range(12):
        state = mutated(rng, state)
        publisher.publish(state)
        store.fail(at)
        try:
            worker.sync()
        except Exception as error:
            assert type(error).__name__ == "StoreUnavailable"  # noqa: PT017
            worker.sync()
        store.heal()
        assert snapshot(worker.state) == snapshot(part(state, "stages.0."))


def test_digests_go_with_their_versions(rng: Rng) -> None:
    """gc takes those that no kept version has; a relay takes them along."""
    store, near, state = MemoryStore(), MemoryStore(), staged(rng)
    publisher = Publisher(store, stream="policy")
    relay = Relay(store, near, stream="policy", threads=1)
    for step in range(6):
        publisher.publish(state, anchor=step == 3)
        state = mutated(rng, state)
        relay.sync()
    assert names(near, "policy/digests") == names(store, "policy/digests")
    for name in names(store, "policy/digests"):
        assert near.get(name) == store.get(name)
    gc_stream(store, "policy", keep=1, grace_seconds=3600)
    assert len(names(store, "policy/digests")) == 8
    gc_stream(store, "policy", keep=1, grace_seconds=0)
    assert len(names(store, "policy/digests")) == 4
    worker = reader(store, "stages.1.*")
    worker.sync()
    assert worker.version == 5


def test_a_large_header_is_parsed_only_where_something_vouches_for_it(rng: Rng) -> None:
    """60 MB of JSON in a stranger's shard took 1.6 GB as Python objects, and so did that in a tree.
    Here of 6 MB."""
    store, state = MemoryStore(), staged(rng)
    Publisher(store, stream="policy", threads=1).publish(state)
    junk = b"[" + b"[]," * 2_000_000 + b"[]]"
    for name in names(store, "policy"):
        good = store.get(name)
        if name.endswith((".leaves", ".safetensors")):
            store.put(name, len(junk).to_bytes(8, "little") + junk + good)
    (shard,) = names(store, "policy/payloads")
    zero = manifest_of(store, "policy", 0)
    claimed = AnchorRef((Payload(shard.rpartition("/")[2][:64], store.head(shard).nbytes),))
    store.put(
        "policy/versions/000000000000.json",
        msgspec.structs.replace(zero, anchor=claimed).sealed().to_bytes(),
    )
    for options in ({}, {"select": "stages.0.*"}):
        tracemalloc.start()
        with pytest.raises(ChainGap, match=r"large|more than"):
            Subscriber(store, stream="policy", threads=1, **options).sync()  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 60 << 20


def shortened(patch: bytes) -> bytes:
    """A patch file of the same length, whose header is for a state of one element less."""
    header = parse_header(memoryview(patch)).header
    ((start, stop),) = header.slices
    (last,) = [k for k, entry in enumerate(header.blocks) if entry.length][-1:]
    blocks = list(header.blocks)
    while True:
        forged = PatchHeader(
            header.base_root, header.target_root, ((start, stop - 1),), tuple(blocks)
        )
        head = forged.to_bytes()
        missing = len(patch) - len(head) - forged.body_bytes
        if missing == 0:
            return head + bytes(forged.body_bytes)
        blocks[last] = blocks[last]._replace(length=blocks[last].length + missing)


@pytest.mark.parametrize("how", ["shortened", "bomb"])
def test_a_forged_header_in_the_near_store_is_avoided(how: str, rng: Rng) -> None:
    store, near, old = MemoryStore(), MemoryStore(), staged(rng)
    new = mutated(rng, old, density=0.02)
    publisher = Publisher(store, stream="policy", anchor_ratio=1e9)
    publisher.publish(old)
    publisher.publish(new)
    Relay(store, near, stream="policy", threads=1).sync()
    (name,) = [name for name in names(near, "policy/payloads") if name.endswith(".patch")]
    good = near.get(name)
    near.put(
        name,
        shortened(good) if how == "shortened" else header_of_many_blocks().ljust(len(good), b"\0"),
    )
    assert len(near.get(name)) == len(good)
    worker = reader([near, store], "stages.0.*")
    tracemalloc.start()
    worker.sync()
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert (worker.version, worker.root) == (1, Subscriber(store, stream="policy").sync().root)  # type: ignore[union-attr]
    assert snapshot(worker.state) == snapshot(part(new, "stages.0."))


def test_a_cache_keeps_no_ranges(rng: Rng, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ranges"):
        reader(MemoryStore(), "stages.0.*", cache=tmp_path / "cache")


def test_a_base_that_is_changed_while_it_is_copied_is_not_believed(rng: Rng) -> None:
    """It is the caller's memory, such as a live model's."""
    state, store = staged(rng), FaultyStore(MemoryStore())
    Publisher(store, stream="policy").publish(state)
    worker = reader(store, "stages.0.*", base=state)
    read = worker.stream.manifest

    def meanwhile(version: int) -> object:
        state["stages.0.layers.00.mlp.weight"].array[0] ^= 1
        return read(version)

    worker.stream.manifest = meanwhile  # type: ignore[method-assign, assignment]
    with pytest.raises(StateMismatch, match="while it was copied"):
        worker.sync()
    assert worker.version is None


def test_other_names_that_a_version_adds_reach_who_selects(rng: Rng, store: MemoryStore) -> None:
    """A tensor with a name that the base does not know is delivered whole; that of a tensor which
    is not held stops nobody."""
    embed, other = weights(rng, 300, 10), weights(rng, 2100, 2100)  # of a block of its own
    publisher = Publisher(store, stream="policy", anchor_ratio=1e9)
    publisher.publish({"a.embed": embed, "a.head": embed, "z.other": other})
    base = {"a.embed": dataclasses.replace(embed, array=embed.array.copy()), "z.other": other}
    worker = reader(store, "a.*")
    worker.sync()
    embed.array[0] ^= 1
    publisher.publish({"a.embed": embed, "a.head": embed, "z.other": other, "a.late": other})
    for starting in (
        Subscriber(store, stream="policy", base=base),
        reader(store, "a.*", base=base),
    ):
        update = present(starting.sync())
        assert update.previous == 0
        assert [t.indices for t in update.tensors if t.spec.name == "a.embed"] == [None]
    assert worker.sync() is not None
    assert worker.state.names == ["a.embed", "a.head"]


def test_an_anchor_on_demand_has_digests(rng: Rng) -> None:
    state, store = staged(rng), MemoryStore()
    Publisher(store, stream="policy").publish(state)
    anchor_stream(store, "policy", threads=1)
    gc_stream(store, "policy", keep=1, grace_seconds=0)
    assert names(store, "policy/versions") == ["policy/versions/000000000001.json"]
    worker = reader(store, "stages.0.*")
    worker.sync()
    assert snapshot(worker.state) == snapshot(part(state, "stages.0."))
