"""A subscriber of some tensors: forged headers, a base that changes, names that come later, anchors
on demand."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path

import pytest

from pulse_rl import MemoryStore, Publisher, Relay, Subscriber, gc_stream
from pulse_rl.errors import InputError, StateMismatch
from pulse_rl.patch.header import PatchHeader, parse_header
from tests.hostile.pieces import header_of_many_blocks
from tests.support.publishers import anchor_stream
from tests.support.states import Rng, mutated, present, snapshot, weights
from tests.support.stores import FaultyStore, names
from tests.sync.test_select import part, reader, staged


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
