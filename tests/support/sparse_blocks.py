"""Blocks for the tests of the sparse codec, and the check that both paths and the document agree on
them."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl import codec
from pulse_rl.codec import Layout, element_kind
from pulse_rl.errors import CorruptPatch
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DTYPES
from tests.support.arrays import both_ways
from tests.support.block_codecs import SPARSE
from tests.support.gaps_oracle import Kind
from tests.support.states import present

GROUPS = SPARSE


def kind_of(name: str) -> Kind:
    return Kind(*element_kind(DTYPES[name]))


def weights(rng: np.random.Generator, name: str, count: int, alike: bool = True) -> UIntArray:
    """Elements as weights have them, with a few infinities, zeros and NaNs; or any bits."""
    dtype = DTYPES[name]
    bits = 8 * dtype.width
    if not alike or not kind_of(name).floating:
        return rng.integers(0, 1 << bits, count, dtype=np.uint64).astype(dtype.uint)
    values = rng.normal(0, 0.02, count).astype(np.float32)
    if name in ("BF16", "F32"):
        old = (values.view(np.uint32) >> (32 - bits)).astype(dtype.uint)
    else:
        old = (values.astype(np.float16).view(np.uint16) >> (16 - bits)).astype(dtype.uint)
    odd = np.array(
        [
            0,
            1 << (bits - 1),
            (1 << bits) - 1,
            (1 << (bits - 1)) - 1,
            kind_of(name).mask << kind_of(name).shift,
        ]
    )
    some = rng.random(count) < 0.01
    old[some] = rng.choice(odd, int(some.sum())).astype(dtype.uint)
    return old


def stepped(rng: np.random.Generator, old: UIntArray, steps: str) -> UIntArray:
    """New elements, all of which differ: by one step, a few, sizes of every length, anything, or
    their signs."""
    bits, count = 8 * old.dtype.itemsize, len(old)
    if steps == "flip":
        return old ^ old.dtype.type(1 << (bits - 1))
    if steps == "any":
        return old + rng.integers(1, 1 << bits, count, dtype=np.uint64).astype(old.dtype)
    if steps == "long":
        size = (1 << rng.integers(0, bits, count).astype(np.uint64)).astype(old.dtype)
    else:
        size = np.minimum(rng.geometric(1 if steps == "one" else 0.4, count), 100).astype(old.dtype)
    return old + np.where(rng.random(count) < 0.5, size, -size).astype(old.dtype)


def changed(rng: np.random.Generator, old: UIntArray, density: float, steps: str) -> UIntArray:
    """New elements, of which just so many differ."""
    new = old.copy()
    at = rng.choice(len(old), int(density * len(old)), replace=False)
    new[at] = stepped(rng, old[at], steps)
    return new


def encoded(old: UIntArray, new: UIntArray, layout: Layout) -> bytes:
    """The payload, which must be the same without vectors."""
    payloads = []
    for _ in both_ways():
        made = GROUPS.encode(old, new, layout)
        found = present(codec.encode_block(old, new, layout, only=GROUPS.id).found)
        assert found.positions.tolist() == np.flatnonzero(old != new).tolist()
        assert found.values.tolist() == new[found.positions].tolist()
        payloads.append(made[0])
    assert payloads[0] == payloads[1]
    return payloads[0]


def check_decoded(payload: bytes, old: UIntArray, new: UIntArray, layout: Layout) -> None:
    for _ in both_ways():
        found = GROUPS.decode(memoryview(payload), old, layout)
        np.testing.assert_array_equal(found.positions, np.flatnonzero(old != new))
        np.testing.assert_array_equal(found.values, new[found.positions])
        np.testing.assert_array_equal(found.before, old[found.positions])


def check_round_trip(old: UIntArray, new: UIntArray, layout: Layout) -> None:
    check_decoded(encoded(old, new, layout), old, new, layout)


def refused(payload: bytes, old: UIntArray, layout: Layout, match: str | None = None) -> None:
    for _ in both_ways():
        with pytest.raises(CorruptPatch, match=match):
            GROUPS.decode(memoryview(payload), old, layout)
