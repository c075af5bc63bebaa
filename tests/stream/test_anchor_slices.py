"""Anchors whose shards hold slices of tensors, as ranks of a sharded trainer store them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from pulse_rl import State
from pulse_rl.errors import CorruptCheckpoint, DigestMismatch
from pulse_rl.sharding.layout import SlicedState
from pulse_rl.state.header import header_length
from pulse_rl.state.tensors import Segment
from pulse_rl.stream.anchor import SLICES_KEY
from pulse_rl.stream.manifest import Payload
from tests.stream.test_anchor import reader, restored, whole
from tests.support.parts import payload, shard, slices_of
from tests.support.states import Rng, all_dtypes, bits, snapshot, weights


def state_of(rng: Rng) -> State:
    return State.of(
        all_dtypes(rng) | {"large": weights(rng, 3000, 1001), "long": bits(rng, "F32", 700_001)}
    ).copy()


@cache
def in_three_shards() -> tuple[State, list[tuple[Payload, bytes]]]:
    rng = np.random.default_rng(20260203)
    state = state_of(rng)
    return state, shards_of(state, rng, 3)


def shards_of(state: State, rng: Rng, ranks: int) -> list[tuple[Payload, bytes]]:
    return [
        (payload(data), data) for data in (shard(state, of) for of in slices_of(state, rng, ranks))
    ]


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_restored_anchor_is_the_state(ranks: int, threads: int, rng: Rng) -> None:
    state = state_of(rng)
    told: list[int] = []
    readers = [(payload, reader(data)) for payload, data in shards_of(state, rng, ranks)]
    found, digest = whole(readers, state, threads, progress=told.append)
    assert snapshot(found) == snapshot(state)
    assert sum(told) == state.nbytes
    assert digest.root == whole(readers, state, threads)[1].root


def test_slices_that_do_not_tile_are_refused(rng: Rng) -> None:
    state = state_of(rng)
    shards = shards_of(state, rng, 3)
    again = shard(state, [Segment(state.spec("large"), 5, 9)])
    for wrong, words in (
        (shards[:2], "lack element|manifest"),
        ([*shards, shards[1]], "twice"),
        ([*shards, (payload(again), again)], "twice"),
    ):
        with pytest.raises(CorruptCheckpoint, match=words):
            restored(wrong, state)


def test_a_flipped_bit_is_named(rng: Rng) -> None:
    state = state_of(rng)
    shards = shards_of(state, rng, 3)
    said, data = shards[1]
    flipped = bytearray(data)
    flipped[-1] ^= 1
    with pytest.raises(DigestMismatch, match=f"shard {said.sha256[:16]}"):
        restored([shards[0], (said, bytes(flipped)), shards[2]], state)


def edited(data: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The shard with another text in its metadata."""
    end = 8 + header_length(data, len(data))
    header = json.loads(data[8:end])
    slices = json.loads(header["__metadata__"][SLICES_KEY])
    edit(slices)
    header["__metadata__"][SLICES_KEY] = json.dumps(slices)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda s: s.update(other={"shape": [4], "start": 0}), "does not hold"),
        (lambda s: s["large"].update(start=-1), "does not lie"),
        (lambda s: s["large"].update(start=10**9), "does not lie"),
        (lambda s: s["large"].update(start=1.0), "malformed"),
        (lambda s: s["large"].update(start=True), "malformed"),
        (lambda s: s["large"].update(shape=[3]), "does not lie"),
        (lambda s: s["large"].update(shape=[-1, -9]), "malformed"),
        (lambda s: s["large"].update(shape="many"), "malformed"),
        (lambda s: s["large"].update(shape=[2**40, 2**40]), "malformed"),
        (lambda s: s["large"].update(more=1), "malformed"),
        (lambda s: s.update(large=[1]), "malformed"),
        (lambda s: s["large"].update(shape=[3000, 1002]), "differ"),
    ],
)
def test_what_a_shard_says_of_its_slices_is_checked(
    edit: Callable[[dict[str, Any]], None], words: str
) -> None:
    state, shards = in_three_shards()
    data = edited(shards[1][1], edit)
    with pytest.raises(CorruptCheckpoint, match=words):
        restored([shards[0], (payload(data), data), shards[2]], state)


def test_a_sliced_state_has_its_segments_only(rng: Rng) -> None:
    state = state_of(rng)
    segment = Segment(state.spec("large"), 100, 2000)
    sliced = SlicedState.allocate([segment])
    sliced.read(*segment.place)[:] = state.read(*segment.place)
    assert (sliced.read("large", 150, 160) == state.read("large", 150, 160)).all()
    for start, stop in ((99, 200), (1999, 2001)):
        with pytest.raises(IndexError, match="not held"):
            sliced.read("large", start, stop)
