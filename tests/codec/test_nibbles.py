"""Packed codes of four bits: as the oracles of the codecs inside say, chosen where that takes fewer
bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pulse_rl import codec
from pulse_rl.codec import Layout, Run
from pulse_rl.errors import CorruptPatch
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DTYPES
from tests.support import gaps_oracle, sparse_oracle
from tests.support.block_codecs import GAPS, BlockCodec, flat_layout
from tests.support.gaps_oracle import Kind
from tests.support.states import Rng

NIBBLES = BlockCodec("nibbles", codec.NIBBLES)
NIBBLE = Kind(1, 0, 15, False)
SIGNED, BY_SPARSE = 1, 2
TURNED = [
    code ^ (7 if code & 8 else 0) ^ 8 for code in range(16)
]  # E2M1 in the order of its numbers


def unpacked(elements: UIntArray, signed: bool) -> list[int]:
    count = 2 * elements.itemsize
    codes = [int(x) >> 4 * k & 15 for x in elements for k in range(count)]
    return [TURNED[code] for code in codes] if signed else codes


def layout_of(dtype: str, elements: UIntArray, row: int) -> Layout:
    half = len(elements) // 2
    return Layout(DTYPES[dtype], (Run(half, row, 0), Run(len(elements) - half, row, 0)))


def stepped(rng: Rng, old: UIntArray, density: float, signed: bool) -> UIntArray:
    """Codes that move by one."""
    new, count = old.copy(), 2 * old.itemsize
    for place in np.flatnonzero(rng.random(count * len(old)) < density).tolist():
        at, shift = place // count, 4 * (place % count)
        code = int(new[at]) >> shift & 15
        number = TURNED[code] if signed else code
        number += (1 if number < 15 else -1) if rng.random() < 0.5 else (-1 if number else 1)
        code = TURNED.index(number) if signed else number
        new[at] = old.dtype.type(int(new[at]) & ~(15 << shift) | code << shift)
    return new


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "elements", "density"), [("U8", 3000, 0.02), ("I32", 700, 0.02), ("U8", 90_000, 0.04)]
)
def test_the_payload_is_that_of_the_codes(
    dtype: str, elements: int, density: float, signed: bool, rng: Rng
) -> None:
    uint = DTYPES[dtype].uint
    old = rng.integers(0, np.iinfo(uint).max, elements, uint, endpoint=True)
    new, layout = stepped(rng, old, density, signed), layout_of(dtype, old, 50)
    payload, changed = NIBBLES.encode(old, new, layout)
    assert changed == np.count_nonzero(old != new)
    found = NIBBLES.decode(memoryview(payload), old, layout)
    np.testing.assert_array_equal(found.positions, np.flatnonzero(old != new))
    np.testing.assert_array_equal(found.values, new[found.positions])
    np.testing.assert_array_equal(found.replaced(old), old[found.positions])
    mode = payload[0]
    assert mode & SIGNED == signed
    assert bool(mode & BY_SPARSE) == (elements > 50_000)
    runs = [tuple(2 * old.itemsize * n for n in run) for run in layout.runs]
    decode: Callable[..., list[int]] = (
        sparse_oracle.decode if mode & BY_SPARSE else gaps_oracle.decode
    )
    assert decode(payload[1:], unpacked(old, signed), NIBBLE, runs) == unpacked(new, signed)


def test_it_is_chosen_where_codes_are_packed(rng: Rng) -> None:
    """And not for integers that are one number, of which low and high half change together."""
    old = rng.integers(0, 256, 20_000, np.uint8)
    packed = stepped(rng, old, 0.01, True)
    whole = np.where(rng.random(old.size) < 0.01, old + np.uint8(1), old)
    layout = layout_of("U8", old, 100)
    made = codec.encode_block(old, packed, layout)
    assert made.codec_id == codec.NIBBLES
    assert len(made.payload) < 0.92 * len(
        codec.encode_block(old, packed, layout, only=codec.GAPS).payload
    )
    assert codec.encode_block(old, whole, layout).codec_id == codec.GAPS


def test_what_is_malformed_is_refused(rng: Rng) -> None:
    old = rng.integers(0, 256, 2000, np.uint8)
    new, layout = stepped(rng, old, 0.05, True), layout_of("U8", old, 100)
    good, _ = NIBBLES.encode(old, new, layout)
    other = flat_layout(DTYPES["F8_E4M3"], len(old))
    steps = np.full(len(old), 0, np.uint8)
    steps[7] = 40  # of a plain integer: more than a code of four bits can take
    codes = np.repeat(old & 15, 2)
    wild, _ = GAPS.encode(codes, codes + np.repeat(steps, 2), layout_of("U8", codes, 200))
    wrong = [
        (b"", layout),
        (b"\4" + good[1:], layout),
        (good[:-3], layout),
        (good, other),
        (b"\0" + wild, layout),
    ]
    for payload, of in wrong:
        with pytest.raises(CorruptPatch):
            NIBBLES.decode(memoryview(payload), old, of)
    for seed in range(300):
        noise = np.random.default_rng(seed)
        bad = bytearray(good)
        bad[int(noise.integers(len(bad)))] ^= int(noise.integers(1, 256))
        try:
            found = NIBBLES.decode(memoryview(bytes(bad)), old, layout)
        except CorruptPatch:
            continue
        assert (np.diff(found.positions.astype(int)) > 0).all()
        assert not len(found.positions) or found.positions[-1] < len(old)
