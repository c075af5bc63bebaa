"""Comparing and weighing by vectors and by plain loops: the same positions, the same payloads, the same changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from pulse_rl import codec
from pulse_rl._native import scan, use_vectors
from pulse_rl.codec import Layout, Run
from pulse_rl.state.tensors import DTYPES, UIntArray


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
    weights = (rng.standard_normal(count) * 0.02).astype(np.float32).view(np.uint32)
    return weights if width == 4 else (weights >> 16).astype(np.uint16)


@pytest.mark.parametrize("classes", ["few", "all"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "I32", "U16"])
@pytest.mark.parametrize("density", [1e-4, 0.003, 0.05, 0.7])
def test_payloads(dtype: str, density: float, classes: str, rng: np.random.Generator) -> None:
    """Runs that end inside the eights and the 64s of the vectors, rows that are shorter than both, and long ones."""
    runs = tuple(
        Run(n, row, phase) for n, row, phase in ((5, 5, 0), (9000, 3000, 7), (777, 10, 3), (30_011, 30_011, 0))
    )
    old = elements_of(rng, dtype, sum(run.elements for run in runs), classes)
    new = old + (rng.random(len(old)) < density).astype(old.dtype)
    new[-1] += 1
    layout, context = Layout(DTYPES[dtype], runs), codec.by_name("context")
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
