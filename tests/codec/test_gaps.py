"""The native gaps codec against its specification, byte for byte; comparing and weighing with and
without vectors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from pulse_rl._native import history_records, scan
from pulse_rl.codec import Layout, Run, element_kind
from pulse_rl.errors import CorruptPatch
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DTYPES
from tests.support.arrays import both_ways, made_alike
from tests.support.block_codecs import GAPS, HISTORY, flat_layout
from tests.support.gaps_oracle import ABSENT, Kind, Reader, code_levels
from tests.support.gaps_oracle import decode as oracle_decode
from tests.support.gaps_oracle import encode as oracle_encode
from tests.support.states import present

NAMES = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U16", "I32", "BOOL"]


def random_block(rng: np.random.Generator, name: str) -> tuple[np.ndarray, np.ndarray, Layout]:
    """Old and new elements in runs of ragged rows, some of them like weights, from no change to
    every element."""
    dtype = DTYPES[name]
    rows = [int(rng.integers(1, 60)) for _ in range(rng.integers(1, 4))]
    runs = tuple(Run(int(rng.integers(0, 400)), row, int(rng.integers(0, row))) for row in rows)
    count, top = sum(run.elements for run in runs), 1 << 8 * dtype.width
    old = rng.integers(0, top, count, dtype=np.uint64).astype(dtype.uint)
    if name == "BF16":
        old = (rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
    new = old.copy()
    changed = rng.random(count) < rng.choice([0, 0.002, 0.02, 0.2, 0.9, 1])
    if rng.random() < 0.7:
        new[changed] += rng.choice([1, top - 1], changed.sum()).astype(dtype.uint)
    else:
        new[changed] = rng.integers(0, top, changed.sum(), dtype=np.uint64).astype(dtype.uint)
    return old, new, Layout(dtype, runs)


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_reads_and_writes_the_same_bytes(name: str) -> None:
    rng = np.random.default_rng(NAMES.index(name))
    kind = Kind(*element_kind(DTYPES[name]))
    for _ in range(12):
        old, new, layout = random_block(rng, name)
        payload, changed = GAPS.encode(old, new, layout)
        assert changed == np.count_nonzero(old != new)
        if not changed:
            continue
        assert oracle_decode(payload, old.tolist(), kind, list(layout.runs)) == new.tolist()
        decoded = GAPS.decode(memoryview(payload), old, layout)
        np.testing.assert_array_equal(decoded.positions, np.flatnonzero(old != new))
        np.testing.assert_array_equal(decoded.values, new[decoded.positions])
        head = next(i for i, byte in enumerate(payload) if byte < 128) + 1
        boost, first, count = payload[head], payload[head + 1], payload[head + 2] + 1
        levels = [ABSENT] * 256
        code_levels(Reader(payload[head + 3 :]), levels, first, count)
        assert (
            oracle_encode(old.tolist(), new.tolist(), kind, list(layout.runs), boost, levels)
            == payload
        )


def weights_and_update(
    rng: np.random.Generator, elements: int, lr: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """(old, new, bits per change of the ideal code that knows each element's chance to change)."""
    old = (rng.normal(0, 0.03, elements).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    step = np.ldexp(1.0, ((old >> 7) & 255).astype(np.int32) - 134)
    chance = np.minimum(lr / step, 1)
    changed = rng.random(elements) < chance
    up = rng.random(elements) < 0.5
    new = np.where(changed, np.where(up, old + 1, old - 1), old).astype(np.uint16)
    sure = (chance == 0) | (chance == 1)
    p = np.where(sure, 0.5, chance)
    entropy = (
        np.where(sure, 0, -p * np.log2(p) - (1 - p) * np.log2(1 - p)).sum() / changed.sum() + 1
    )
    return old, new, float(entropy)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-7, 1e-6, 1e-5, 3e-5])
def test_size_is_within_two_percent_of_the_entropy(lr: float) -> None:
    """Half-octave levels and an adaptive rate are nearly free, from 0.4% to 40% density."""
    old, new, entropy = weights_and_update(np.random.default_rng(3), 1 << 21, lr)
    payload, changed = GAPS.encode(old, new, flat_layout(DTYPES["BF16"], len(old)))
    assert entropy * 0.98 < 8 * len(payload) / changed < entropy * 1.02 + 800 / changed


def test_a_row_with_changes_draws_more() -> None:
    """An embedding whose touched rows change densely costs little more than those rows alone
    would."""
    rng = np.random.default_rng(5)
    old = (rng.normal(0, 0.03, (4096, 256)).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    new = old.copy()
    touched = rng.choice(4096, 40, replace=False)
    new[touched] ^= (rng.random((40, 256)) < 0.2).astype(np.uint16)
    layout = Layout(DTYPES["BF16"], (Run(old.size, 256, 0),))
    rows, changed = GAPS.encode(old.ravel(), new.ravel(), layout)
    flat, _ = GAPS.encode(old.ravel(), new.ravel(), flat_layout(DTYPES["BF16"], old.size))
    assert len(rows) < len(flat)
    assert 8 * len(rows) / changed < 5.6


def test_a_long_wait_is_coded_in_pieces() -> None:
    """One change at each end of a block: the weight between them is many times what one interval
    covers."""
    old = np.full(1 << 20, 0x3C00, np.uint16)
    new = old.copy()
    new[[0, 1, 2, 3, -1]] += 1
    layout = flat_layout(DTYPES["BF16"], len(old))
    payload, _ = GAPS.encode(old, new, layout)
    decoded = GAPS.decode(memoryview(payload), old, layout)
    assert decoded.positions.tolist() == [0, 1, 2, 3, len(old) - 1]
    assert len(payload) < 40


@pytest.mark.parametrize("tail", [b"\0", b"\xff", bytes(8), bytes(1000)])
def test_a_code_of_another_length_is_refused(tail: bytes) -> None:
    old, new, _ = weights_and_update(np.random.default_rng(1), 20_000, 1e-5)
    layout = flat_layout(DTYPES["BF16"], len(old))
    payload, _ = GAPS.encode(old, new, layout)
    longer = payload + bytes(8) + tail
    for bad in (longer, payload[:-9]):
        with pytest.raises(CorruptPatch):
            GAPS.decode(memoryview(bad), old, layout)


# -- comparing and weighing, by vectors and by plain loops


def scanned(width: int, old: UIntArray, new: UIntArray) -> list[npt.NDArray[np.uint32]]:
    return [scan(old.view(np.uint8), new.view(np.uint8), width) for _ in both_ways()]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0, 0.001, 0.02, 0.3, 1])
def test_positions(width: int, density: float, rng: np.random.Generator) -> None:
    for elements in (0, 1, 63, 64, 65, 127, 128, 1000, 4096, 20_000):
        old = rng.integers(0, 256, elements * width, np.uint8).view(f"<u{width}")
        new = old ^ (rng.random(elements) < density)
        for found in scanned(width, old, new):
            np.testing.assert_array_equal(found, np.flatnonzero(old != new))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_bit_of_every_place_counts(width: int) -> None:
    old = np.zeros(130, f"<u{width}")
    for at in range(len(old)):
        for bit in (0, 8 * width - 1):
            new = old.copy()
            new[at] = new.dtype.type(1 << bit)
            assert [f.tolist() for f in scanned(width, old, new)] == [[at], [at]]


def elements_of(rng: np.random.Generator, dtype: str, count: int, classes: str) -> UIntArray:
    """Elements as weights have them, in few classes, or any bits at all, in all classes (too many
    for the vectors)."""
    width = DTYPES[dtype].width
    if classes == "all":
        return rng.integers(0, 256, count * width, np.uint8).view(f"<u{width}")
    weights = (rng.standard_normal(count) * 0.02).astype(np.float32)
    if dtype.startswith(
        "F8"
    ):  # an FP8 element is the upper byte of an FP16 one, with an exponent that fits
        return ((weights * 50).astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
    bits = weights.view(np.uint32)
    return bits if width == 4 else (bits >> (16 if width == 2 else 24)).astype(f"<u{width}")


RUNS = (Run(5, 5, 0), Run(9000, 3000, 7), Run(777, 10, 3), Run(30_011, 30_011, 0))
ELEMENTS = sum(run.elements for run in RUNS)


@pytest.mark.parametrize("classes", ["few", "all"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "I32", "U16", "F8_E4M3", "F8_E5M2", "I8"])
@pytest.mark.parametrize("density", [1e-4, 0.003, 0.05, 0.7])
def test_payloads(dtype: str, density: float, classes: str, rng: np.random.Generator) -> None:
    """Runs that end inside the eights and the 64s of the vectors, rows that are shorter than both,
    and long ones."""
    old = elements_of(rng, dtype, ELEMENTS, classes)
    new = old + (rng.random(len(old)) < density).astype(old.dtype)
    new[-1] += 1
    layout = Layout(DTYPES[dtype], RUNS)
    payload, _ = made_alike(lambda: GAPS.encode(old, new, layout))
    for _ in both_ways():
        changes = GAPS.decode(memoryview(payload), old, layout)
        np.testing.assert_array_equal(changes.positions, np.flatnonzero(old != new))
        np.testing.assert_array_equal(changes.values, new[changes.positions])


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "I32", "U16", "F8_E4M3", "I8"])
@pytest.mark.parametrize("density", [0.003, 0.05, 0.5])
def test_payloads_with_a_past(dtype: str, density: float, rng: np.random.Generator) -> None:
    """Elements that are remembered weigh nothing, all others what their class does."""
    kind = element_kind(DTYPES[dtype])
    start = elements_of(rng, dtype, ELEMENTS, "few")
    mobile = rng.random(ELEMENTS) < density
    states = [start]
    for _ in range(4):
        states.append(states[-1] + (mobile & (rng.random(ELEMENTS) < 0.6)).astype(start.dtype))
    past = []
    for before, after in pairwise(states[:4]):
        at = np.flatnonzero(before != after).astype(np.uint32)
        old, new = before[at].view(np.uint8), after[at].view(np.uint8)
        past.append(history_records(at, old, new, kind))
    layout = Layout(DTYPES[dtype], RUNS, tuple(past))
    payload, _ = present(made_alike(lambda: HISTORY.encode(states[3], states[4], layout)))
    for _ in both_ways():
        changes = HISTORY.decode(memoryview(payload), states[3], layout)
        np.testing.assert_array_equal(changes.positions, np.flatnonzero(states[3] != states[4]))
        np.testing.assert_array_equal(changes.values, states[4][changes.positions])
