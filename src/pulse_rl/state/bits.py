"""In-place operations on flat arrays of bits: differ, take, put. The native kernels check bounds
and release the GIL.

The arrays are contiguous and aligned, as those of a `State` are: what is not, is refused
(ValueError, TypeError).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .._native import gather, holds, scan, scatter
from .tensors import UIntArray

Positions = npt.NDArray[np.uint32]


def differing(old: UIntArray, new: UIntArray) -> Positions:
    """The positions, ascending, at which two arrays of one dtype and of less than 2^32 elements
    differ."""
    return scan(old.view(np.uint8), new.view(np.uint8), old.dtype.itemsize)


def below(positions: Positions, ends: Sequence[int]) -> list[int]:
    """How many of the ascending ``positions`` are below each of ``ends``, which are below 2^32."""
    # Ends of another dtype than the positions' would have all of these converted.
    found: list[int] = positions.searchsorted(np.array(ends, positions.dtype)).tolist()
    return found


def take(elements: UIntArray, positions: Positions, base: int = 0) -> UIntArray:
    """``elements[positions - base]``; raises IndexError."""
    return gather(elements.view(np.uint8), elements.dtype.itemsize, positions, base).view(
        elements.dtype
    )


def held(elements: UIntArray, positions: Positions, values: UIntArray) -> bool:
    """Whether ``elements[positions]`` are ``values``; raises IndexError."""
    return holds(
        elements.view(np.uint8), elements.dtype.itemsize, positions, 0, values.view(np.uint8)
    )


def put(elements: UIntArray, positions: Positions, values: UIntArray, base: int = 0) -> None:
    """``elements[positions - base] = values``, all or, on IndexError, nothing. Repeating it changes
    nothing."""
    scatter(
        elements.view(np.uint8), elements.dtype.itemsize, positions, base, values.view(np.uint8)
    )
