"""What a codec is: two functions and an id."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..tensors import DType, UIntArray

MAX_BLOCK_ELEMENTS = 1 << 24
"""Positions in a block fit in 32 bits with room to spare; also the cap on what one block may make a reader allocate."""


class Changes(NamedTuple):
    """The changed elements of one block: uint32 positions, strictly ascending, and the new bits at them."""

    positions: npt.NDArray[np.uint32]
    values: UIntArray


class Codec(Protocol):
    """Codes the changes of one block of elements of one dtype.

    ``id`` is the byte in the patch header and never changes its meaning. ``old`` and ``new`` are flat unsigned arrays
    of the same length, at most `MAX_BLOCK_ELEMENTS`.
    """

    id: int
    name: str

    def supports(self, dtype: DType) -> bool: ...

    def encode(self, old: UIntArray, new: UIntArray, dtype: DType) -> tuple[bytes, int]:
        """(payload, number of changed elements)."""
        ...

    def decode(self, payload: memoryview, old: UIntArray, dtype: DType) -> Changes:
        """The changes; raises CorruptPatch on any payload that `encode` would not have made for some input."""
        ...
