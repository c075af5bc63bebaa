"""Arrays in one piece of memory: apart from each other, at cache lines."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest

from pulse_rl import State
from pulse_rl.state.memory import SpareMemory, contiguous
from tests.support.states import all_dtypes, snapshot


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 1], [1, 64, 63, 65, 0, 5_000_000]])
def test_arrays_do_not_touch(sizes: list[int]) -> None:
    arrays = contiguous(sizes)
    assert [a.size for a in arrays] == sizes
    for k, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 or not array.size
        array[:] = k
    for k, array in enumerate(arrays):
        assert (array == k).all()


def test_a_state_of_every_dtype_fits(rng: np.random.Generator) -> None:
    state = State.of(all_dtypes(rng))
    copied = state.copy()
    assert snapshot(copied) == snapshot(state)
    for spec in state.specs:
        copied.read(spec.name).view(np.uint8)[:] = 7
    assert snapshot(copied) != snapshot(state)


def test_spare_memory_is_lent_to_one_at_a_time_and_used_again() -> None:
    spare = SpareMemory()
    with spare.lent() as first:
        a, b = first(100), first(50)
        a[:], b[:] = 1, 2
        with spare.lent() as second:
            c = second(100)
            c[:] = 3
        assert (a.tolist(), b.tolist()) == ([1] * 100, [2] * 50)
    with spare.lent() as again:
        found = [again(n) for n in (100, 60, 40)]
        assert [len(f) for f in found] == [100, 60, 40]
        assert any(np.shares_memory(f, old) for f in found for old in (a, b, c))
        assert not any(np.shares_memory(f, g) for f, g in combinations(found, 2))


def test_spare_memory_comes_back_after_an_error() -> None:
    spare = SpareMemory()
    with suppress(RuntimeError), spare.lent() as lend:
        first = lend(10)
        raise RuntimeError
    with spare.lent() as lend:
        assert np.shares_memory(first, lend(10))
