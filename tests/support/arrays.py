"""Arrays that tests of kernels share: numbers of all kinds, and addresses that numpy would not
choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pulse_rl._native._kernels import use_vectors

T = TypeVar("T")
Array = np.ndarray[Any, Any]


def misaligned(array: Array, offset: int = 1) -> Array:
    """The same flat bits at an address ``offset`` bytes past a multiple of 8."""
    room = np.empty(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 8 + offset
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def both_ways() -> Iterator[bool]:
    """For a loop of which the kernels run without vectors, and then with them."""
    for use in (False, True):
        use_vectors(use)
        yield use


def made_alike(make: Callable[[], T]) -> T:
    """What is made without vectors and with them, which is the same."""
    plain, by_vectors = (make() for _ in both_ways())
    assert plain == by_vectors
    return plain


def floats(rng: np.random.Generator, count: int, below: float = np.inf) -> npt.NDArray[np.float32]:
    """Numbers of magnitudes under ``below``: weights, any size, beside boundaries, denormal, zero
    of either sign."""
    anything = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    beside = (anything & 0xFFFF0000) + rng.choice([0, 0x7FFF, 0x8000, 0x8001], count).astype(
        np.uint32
    )
    eighths = np.ldexp(rng.integers(-64, 64, count) / 8, rng.integers(-26, 18, count)).astype(
        np.float32
    )
    kinds = [
        rng.normal(0, 0.02, count).astype(np.float32),
        anything.view(np.float32),
        beside.view(np.float32),
        (anything & 0x807FFFFF).view(np.float32),
        (anything & 0x80000000).view(np.float32),
        eighths,  # ties of float16 and float8, too
    ]
    found = np.choose(rng.integers(0, len(kinds), count), kinds)
    found[~(np.abs(found) < below)] = 0
    return found
