"""Arrays in one piece of memory, tensors of a device read by pieces, and changes of flat arrays:
all or nothing."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import State, state_root
from pulse_rl.state import bits
from pulse_rl.state.bits import SpareMemory, contiguous
from pulse_rl.state.tensors import DTYPES, DeviceTensor, TensorSpec
from tests.support.states import Rng, snapshot


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 1], [1, 64, 63, 65, 0, 5_000_000]])
def test_arrays_do_not_touch(sizes: list[int]) -> None:
    arrays = contiguous(sizes)
    assert [a.size for a in arrays] == sizes
    for k, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 or not array.size
        array[:] = k
    for k, array in enumerate(arrays):
        assert (array == k).all()


def test_spare_memory_is_lent_to_one_at_a_time_and_used_again() -> None:
    spare = SpareMemory()
    with spare.borrow() as first:
        a, b = first(100), first(50)
        a[:], b[:] = 1, 2
        with spare.borrow() as second:
            c = second(100)
            c[:] = 3
        assert (a.tolist(), b.tolist()) == ([1] * 100, [2] * 50)
    with spare.borrow() as again:
        found = [again(n) for n in (100, 60, 40)]
        assert [len(f) for f in found] == [100, 60, 40]
        assert any(np.shares_memory(f, old) for f in found for old in (a, b, c))
        assert not any(np.shares_memory(f, g) for f, g in combinations(found, 2))


def test_spare_memory_comes_back_after_an_error() -> None:
    spare = SpareMemory()
    with suppress(RuntimeError), spare.borrow() as lend:
        first = lend(10)
        raise RuntimeError
    with spare.borrow() as lend:
        assert np.shares_memory(first, lend(10))


def test_device_tensors_are_copied_by_slices() -> None:
    """What is not in host memory is read piece by piece; a CPU tensor stands in for the device
    here."""
    values = torch.arange(10, dtype=torch.int16)
    spec = TensorSpec("w", DTYPES["I16"], (10,))
    state = State((spec,), {"w": DeviceTensor(values.view(torch.uint8), 2)})
    assert state.read("w", 3, 6).tolist() == [3, 4, 5]
    assert snapshot(state) == snapshot({"w": values}) == snapshot(state.copy())
    assert state_root(state) == state_root({"w": values})


# -- changes in place, whatever positions and base are


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000])
def test_held_sees_every_difference(dtype: type, count: int, rng: Rng) -> None:
    elements = rng.integers(0, 256, 2000).astype(dtype)
    positions = np.sort(rng.permutation(2000)[:count]).astype(np.uint32)
    values = elements[positions]
    assert bits.held(elements, positions, values)
    for k in {0, count // 2, count - 1} if count else set[int]():
        other = values.copy()
        other[k] ^= dtype(1) << dtype(8 * elements.itemsize - 1)
        assert not bits.held(elements, positions, other)


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.lists(st.integers(0, 2**32 - 1), max_size=9),
)
def test_below_counts(places: list[int], ends: list[int]) -> None:
    positions = np.unique(np.array(places, np.uint32))
    assert bits.below(positions, ends) == [int((positions < end).sum()) for end in ends]


@pytest.mark.parametrize("base", [0, 1, 1000, 2**32 - 9])
@pytest.mark.parametrize("length", [0, 1, 8])
def test_no_position_outside_is_touched(base: int, length: int) -> None:
    """Positions below the base, which wrap around, and behind the end; among many that are
    inside."""
    elements = np.arange(length, dtype=np.uint16)
    inside = np.tile(np.arange(length, dtype=np.uint64), 20)
    for offset in (-base, -1, length, length + 1, 2**31, 2**32 - 1 - base):
        place = base + offset
        if not 0 <= place < 2**32 or 0 <= offset < length:
            continue
        for at in (0, len(inside) // 2, len(inside)):
            positions = np.insert(inside + np.uint64(base), at, place).astype(np.uint32)
            with pytest.raises(IndexError):
                bits.take(elements, positions, base)
            with pytest.raises(IndexError):
                bits.put(elements, positions, np.full(len(positions), 7, np.uint16), base)
            assert elements.tolist() == list(range(length))
            if base == 0:
                with pytest.raises(IndexError):
                    bits.held(elements, positions, np.full(len(positions), 7, np.uint16))


def test_all_inside_are_taken_and_put(rng: Rng) -> None:
    for base in (0, 5, 2**32 - 2000):
        elements = rng.integers(0, 1 << 16, 2000, np.uint16)
        at = np.sort(rng.permutation(2000)[:700])
        positions = (at + base).astype(np.uint32)
        np.testing.assert_array_equal(bits.take(elements, positions, base), elements[at])
        expected = elements.copy()
        expected[at] = values = rng.integers(0, 1 << 16, 700, np.uint16)
        bits.put(elements, positions, values, base)
        np.testing.assert_array_equal(elements, expected)
