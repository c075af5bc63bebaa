"""Arrays in one piece of memory: apart from each other, at cache lines."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl import State
from pulse_rl.state.memory import in_one_piece
from tests.support.states import all_dtypes, snapshot


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 1], [1, 64, 63, 65, 0, 5_000_000]])
def test_arrays_do_not_touch(sizes: list[int]) -> None:
    arrays = in_one_piece(sizes)
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
