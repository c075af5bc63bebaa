"""New memory for many arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

_LINE = 64  # bytes of a cache line


def in_one_piece(sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """Arrays of so many bytes, uninitialised, each at a cache line of one allocation.

    The system gives large pages to large allocations (numpy asks for them): tensors of a megabyte each would cost a
    page fault for every 4 KiB. The memory is freed with the last of the arrays.
    """
    places = list(accumulate((size + -size % _LINE for size in sizes), initial=0))
    memory = np.empty(places[-1] + _LINE, np.uint8)
    memory = memory[-memory.ctypes.data % _LINE :]
    return [memory[start : start + size] for (start, _), size in zip(pairwise(places), sizes, strict=True)]
