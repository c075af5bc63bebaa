"""Comparing and weighing by vectors and by plain loops: the same positions, the same payloads, the same changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from pulse_rl._native import history_records, scan
from pulse_rl._native._testing import use_vectors
from pulse_rl.codec import Layout, Run, element_kind
from pulse_rl.state.tensors import DTYPES, UIntArray
from tests.support.block_codecs import GAPS, HISTORY


@pytest.fixture(autouse=True)
def vectors_as_they_were() -> Iterator[None]:
    yield
    use_vectors(True)


def both_ways(width: int, old: UIntArray, new: UIntArray) -> list[npt.NDArray[np.uint32]]:
    found = []
    for use in (False, True):
        use_vectors(use)
        found.append(scan(old.view(np.uint8), new.view(np.uint8), width))
    return found


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0, 0.001, 0.02, 0.3, 1])
def test_positions(width: int, density: float, rng: np.random.Generator) -> None:
    for elements in (0, 1, 63, 64, 65, 127, 128, 1000, 4096, 20_000):
        old = rng.integers(0, 256, elements * width, np.uint8).view(f"<u{width}")
        new = old ^ (rng.random(elements) < density)
        for found in both_ways(width, old, new):
            np.testing.assert_array_equal(found, np.flatnonzero(old != new))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_bit_of_every_place_counts(width: int) -> None:
    old = np.zeros(130, f"<u{width}")
    for at in range(len(old)):
        for bit in (0, 8 * width - 1):
            new = old.copy()
            new[at] = new.dtype.type(1 << bit)
            assert [f.tolist() for f in both_ways(width, old, new)] == [[at], [at]]


def elements_of(rng: np.random.Generator, dtype: str, count: int, classes: str) -> UIntArray:
    """Elements as weights have them, in few classes, or any bits at all, in all classes (too many for the vectors)."""
    width = DTYPES[dtype].width
    if classes == "all":
        return rng.integers(0, 256, count * width, np.uint8).view(f"<u{width}")
    weights = (rng.standard_normal(count) * 0.02).astype(np.float32)
    if dtype.startswith("F8"):  # an FP8 element is the upper byte of an FP16 one, with an exponent that fits
        return ((weights * 50).astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
    bits = weights.view(np.uint32)
    return bits if width == 4 else (bits >> (16 if width == 2 else 24)).astype(f"<u{width}")


RUNS = (Run(5, 5, 0), Run(9000, 3000, 7), Run(777, 10, 3), Run(30_011, 30_011, 0))
ELEMENTS = sum(run.elements for run in RUNS)


@pytest.mark.parametrize("classes", ["few", "all"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "I32", "U16", "F8_E4M3", "F8_E5M2", "I8"])
@pytest.mark.parametrize("density", [1e-4, 0.003, 0.05, 0.7])
def test_payloads(dtype: str, density: float, classes: str, rng: np.random.Generator) -> None:
    """Runs that end inside the eights and the 64s of the vectors, rows that are shorter than both, and long ones."""
    old = elements_of(rng, dtype, ELEMENTS, classes)
    new = old + (rng.random(len(old)) < density).astype(old.dtype)
    new[-1] += 1
    layout, context = Layout(DTYPES[dtype], RUNS), GAPS
    payloads = []
    for use in (False, True):
        use_vectors(use)
        payloads.append(context.encode(old, new, layout))
    assert payloads[0] == payloads[1]
    for use in (False, True):
        use_vectors(use)
        changes = context.decode(memoryview(payloads[0][0]), old, layout)
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
        past.append((history_records(at, before[at].view(np.uint8), after[at].view(np.uint8), kind), 1))
    layout, history = Layout(DTYPES[dtype], RUNS, tuple(past)), HISTORY
    encoded = []
    for use in (False, True):
        use_vectors(use)
        encoded.append(history.encode(states[3], states[4], layout))
    assert encoded[0] is not None
    assert encoded[0] == encoded[1]
    for use in (False, True):
        use_vectors(use)
        changes = history.decode(memoryview(encoded[0][0]), states[3], layout)
        np.testing.assert_array_equal(changes.positions, np.flatnonzero(states[3] != states[4]))
        np.testing.assert_array_equal(changes.values, states[4][changes.positions])
