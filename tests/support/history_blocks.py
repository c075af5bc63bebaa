"""Blocks with a past, for the tests of the history codec."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from pulse_rl.codec import Layout, Past, Run, element_kind
from pulse_rl.errors import CorruptPatch
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DTYPES
from tests.support import history_oracle as oracle
from tests.support.arrays import both_ways
from tests.support.block_codecs import HISTORY, history_encode
from tests.support.gaps_oracle import Kind
from tests.support.history_oracle import Steps
from tests.support.sparse_blocks import weights

NAMES = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U16", "I32", "BOOL"]
#: How many windows blocks have, one after another.
WINDOWS = [1, 3, 2, 7, 4, 11, 12, 5]


class Block(NamedTuple):
    """``states`` at the starts of the windows and at their end, and the elements that come then."""

    layout: Layout
    states: list[UIntArray]
    new: UIntArray
    past: list[Steps]

    @property
    def old(self) -> UIntArray:
        return self.states[-1]

    @property
    def kind(self) -> Kind:
        return Kind(*element_kind(self.layout.dtype))


def moved(
    rng: np.random.Generator, now: UIntArray, mobile: np.ndarray, drift: np.ndarray, large: float
) -> UIntArray:
    """Some of the ``mobile`` elements go on by a step, mostly where they ``drift``; of a small
    block, some become anything."""
    top = 1 << 8 * now.dtype.itemsize
    hit = rng.random(len(now)) < np.where(mobile, 0.5, 0.01)
    step = np.where(rng.random(len(now)) < 0.85, drift, -drift)
    size = np.where(rng.random(len(now)) < large, rng.integers(2, 200, len(now)), 1)
    new = now + np.where(hit, step * size % top, 0).astype(now.dtype)
    anywhere = rng.random(len(now)) < (0.002 if len(now) < 2000 else 0)
    new[anywhere] = rng.integers(0, top, anywhere.sum(), dtype=np.uint64).astype(now.dtype)
    return new


def random_block(
    rng: np.random.Generator,
    name: str,
    count_of_windows: int,
    elements: int = 400,
    large: float | None = None,
) -> Block:
    """A block of ragged rows whose changes come again, and its states at the starts of the
    windows."""
    dtype = DTYPES[name]
    rows = [int(rng.integers(1, 60)) for _ in range(rng.integers(1, 4))]
    runs = tuple(
        Run(int(rng.integers(1, elements)), row, int(rng.integers(0, row))) for row in rows
    )
    count, top = sum(run.elements for run in runs), 1 << 8 * dtype.width
    now = rng.integers(0, top, count, dtype=np.uint64).astype(dtype.uint)
    if name in ("BF16", "F32", "F16"):
        values = rng.normal(0, 0.02, count)
        bits = (
            values.astype(np.float16).view(np.uint16)
            if name == "F16"
            else values.astype(np.float32).view(np.uint32)
        )
        now = (bits >> 16 if name == "BF16" else bits).astype(dtype.uint)
    mobile, drift = rng.random(count) < rng.choice([0.05, 0.3, 1]), rng.choice([-1, 1], count)
    large = float(rng.choice([0, 0.1, 0.9])) if large is None else large
    states, windows = [now], []
    kind = Kind(*element_kind(dtype))
    for _ in range(count_of_windows):
        now = moved(rng, now, mobile, drift, large)
        windows.append(oracle.window(states[-1].tolist(), now.tolist(), kind))
        states.append(now)
    past = native_past(states, kind)
    return Block(Layout(dtype, runs, past), states, moved(rng, now, mobile, drift, large), windows)


def classes_of(state: UIntArray, kind: Kind) -> list[int]:
    return ((state.astype(np.int64) >> kind.shift) & kind.mask).tolist()


def all_steps(kind: Kind, before: UIntArray, after: UIntArray) -> Steps:
    """Of all that changed, those of 0 modulo 256 too."""
    changed = np.flatnonzero(before != after).tolist()
    return {
        p: oracle.signed(kind.ordered(int(after[p])) - kind.ordered(int(before[p])), 8)
        for p in changed
    }


def native_past(states: list[UIntArray], kind: Kind) -> Past:
    """``states``: where the windows start, and where the last one ends."""
    return tuple(
        np.frombuffer(
            oracle.records(all_steps(kind, a, b), dict(enumerate(classes_of(b, kind)))), np.uint8
        )
        for a, b in pairwise(states)
    )


def encoded(block: Block) -> bytes | None:
    found = history_encode(block.old, block.new, block.layout)
    if found is None:
        return None
    assert found[1] == np.count_nonzero(block.old != block.new)
    return found[0]


def check_decoded(payload: bytes, block: Block) -> None:
    found = HISTORY.decode(memoryview(payload), block.old, block.layout)
    np.testing.assert_array_equal(found.positions, np.flatnonzero(block.old != block.new))
    np.testing.assert_array_equal(found.values, block.new[found.positions])
    np.testing.assert_array_equal(found.before, block.old[found.positions])


def refused(payload: bytes, block: Block) -> None:
    for _ in both_ways():
        with pytest.raises(CorruptPatch):
            HISTORY.decode(memoryview(payload), block.old, block.layout)


def large_block(rng: np.random.Generator, name: str, large: float) -> Block:
    """A block that is coded by groups: many elements, a twentieth of which changes, mostly
    again."""
    dtype, kind = DTYPES[name], Kind(*element_kind(DTYPES[name]))
    runs = (Run(100_001, 500, 33), Run(7, 3, 1), Run(70_300, 512, 0))
    count = sum(run.elements for run in runs)
    now = weights(rng, name, count)
    mobile, drift = rng.random(count) < 0.09, rng.choice([-1, 1], count)
    states, windows = [now], []
    for _ in range(4):
        hit = np.where(mobile, rng.random(count) < 0.5, rng.random(count) < 0.01)
        size = np.where(rng.random(count) < large, rng.geometric(0.3, count), 1)
        step = np.where(rng.random(count) < 0.9, drift, -drift) * size
        now = now + np.where(hit, step % (1 << 8 * dtype.width), 0).astype(dtype.uint)
        if len(states) < 4:
            windows.append(oracle.window(states[-1].tolist(), now.tolist(), kind))
            states.append(now)
    layout = Layout(dtype, runs, native_past(states, kind))
    return Block(layout, states, now, windows)


def blocks(name: str, count: int = 12) -> list[Block]:
    rng = np.random.default_rng(NAMES.index(name))
    return [random_block(rng, name, WINDOWS[k % len(WINDOWS)]) for k in range(count)]
