"""Flat arrays of bits: memory for many of them, and in-place comparison, gather and scatter.

The native kernels check bounds and release the GIL. All arrays are contiguous and aligned, as those
of a `State` are; other arrays raise ValueError or TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .._native import gather, holds, scan, scatter

#: A flat numpy array of uint8, uint16, uint32 or uint64.
UIntArray = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]


def differing(old: UIntArray, new: UIntArray) -> Positions:
    """The positions, ascending, at which two arrays of one dtype differ.

    Both have the same length, below 2^32 elements.
    """
    return scan(old.view(np.uint8), new.view(np.uint8), old.dtype.itemsize)


def below(positions: Positions, ends: Sequence[int]) -> list[int]:
    """For each of ``ends``: how many of the ascending ``positions`` are below it.

    The ``ends`` are below 2^32.
    """
    # searchsorted would convert all positions to the dtype of the ends, so the few ends are
    # converted.
    found: list[int] = positions.searchsorted(np.array(ends, positions.dtype)).tolist()
    return found


def take(elements: UIntArray, positions: Positions, base: int = 0) -> UIntArray:
    """``elements[positions - base]``; raises IndexError."""
    taken = gather(elements.view(np.uint8), elements.dtype.itemsize, positions, base)
    return taken.view(elements.dtype)


def held(elements: UIntArray, positions: Positions, values: UIntArray) -> bool:
    """Whether ``elements[positions]`` equal ``values``; raises IndexError."""
    return holds(
        elements.view(np.uint8), elements.dtype.itemsize, positions, 0, values.view(np.uint8)
    )


def put(elements: UIntArray, positions: Positions, values: UIntArray, base: int = 0) -> None:
    """Set ``elements[positions - base] = values``.

    On IndexError nothing is written. Writing the same values again changes nothing, so an undo may
    repeat it.
    """
    scatter(
        elements.view(np.uint8), elements.dtype.itemsize, positions, base, values.view(np.uint8)
    )


# -- memory

T = TypeVar("T", bound=np.generic)

#: Bytes of a cache line.
LINE = 64

#: Allocates uninitialized memory of the given number of bytes.
Allocate = Callable[[int], npt.NDArray[np.uint8]]


def pageable(nbytes: int) -> npt.NDArray[np.uint8]:
    """Allocate ordinary memory."""
    return np.empty(nbytes, np.uint8)


class SpareMemory:
    """A pool of temporary memory for several threads. Each page of new memory costs a page fault.

    The memory is freed with the pool.
    """

    def __init__(self) -> None:
        self._free: list[npt.NDArray[np.uint8]] = []

    @contextmanager
    def borrow(self) -> Iterator[Allocate]:
        """Lend memory until the end of the ``with`` block."""
        taken: list[npt.NDArray[np.uint8]] = []

        def lend(nbytes: int) -> npt.NDArray[np.uint8]:
            try:
                memory = self._free.pop()
            except IndexError:
                memory = pageable(nbytes)
            if memory.nbytes < nbytes:
                memory = pageable(nbytes)
            taken.append(memory)
            return memory[:nbytes]

        try:
            yield lend
        finally:
            self._free += taken


def contiguous(sizes: Sequence[int], allocate: Allocate = pageable) -> list[npt.NDArray[np.uint8]]:
    """Allocate uninitialized arrays of the given ``sizes`` in bytes, as slices of one allocation.

    Each array starts at a cache line. The system gives large pages to large allocations, for which
    numpy asks. Separate tensors of a megabyte each would cost a page fault for every 4 KiB. The
    memory is freed with the last of the arrays.
    """
    # One extra line, because the allocation itself may start inside a cache line.
    places = list(accumulate((size + -size % LINE for size in sizes), initial=0))
    memory = allocate(places[-1] + LINE)
    memory = memory[-memory.ctypes.data % LINE :]
    return [
        memory[start : start + size]
        for (start, _), size in zip(pairwise(places), sizes, strict=True)
    ]


def joined(arrays: Sequence[npt.NDArray[T]]) -> npt.NDArray[T] | None:
    """One view of flat ``arrays`` that are adjacent in one allocation of `contiguous`; else None.

    The view is writable if all arrays are.
    """
    memory = arrays[0].base
    if not isinstance(memory, np.ndarray) or memory.dtype != np.uint8 or memory.ndim != 1:
        return None
    # Each array must start where the one before ends, in the same allocation.
    start = at = arrays[0].ctypes.data - memory.ctypes.data
    for array in arrays:
        if array.base is not memory or array.ctypes.data - memory.ctypes.data != at:
            return None
        at += array.nbytes
    view = memory[start:at].view(arrays[0].dtype)
    view.flags.writeable = view.flags.writeable and all(array.flags.writeable for array in arrays)
    return view
