"""The interface of a codec: two functions and an id."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..state import bits
from ..state.tensors import DType, UIntArray

MAX_BLOCK_ELEMENTS = 1 << 24
"""Positions in a block fit in 32 bits with room to spare; also the cap on what one block may make a reader allocate."""


class Run(NamedTuple):
    """``elements`` of one tensor in a block. ``row`` is the tensor's last dimension (its length, if it has only one),
    ``phase`` the position of the run's first element in its row."""

    elements: int
    row: int
    phase: int


Past = tuple[tuple[npt.NDArray[np.uint8], int], ...]
"""What changed in a block in the last versions: records (`pulse_rl._native.history_records`) and how many versions they
span, oldest first; the last ones end at the old bits."""


class Layout(NamedTuple):
    """What both sides know about a block besides the old bits: its dtype, its tensors' rows, and its ``past``."""

    dtype: DType
    runs: tuple[Run, ...]
    past: Past = ()

    @classmethod
    def flat(cls, dtype: DType, elements: int) -> Layout:
        """The layout of a block that is one 1-D tensor of ``elements`` elements of ``dtype``."""
        return cls(dtype, (Run(elements, max(elements, 1), 0),))


class Changes(NamedTuple):
    """The changed elements of one block: uint32 positions, strictly ascending, and the new bits at them. ``before``:
    the old bits, where a decoder had them at hand."""

    positions: npt.NDArray[np.uint32]
    values: UIntArray
    before: UIntArray | None = None

    def replaced(self, old: UIntArray) -> UIntArray:
        """The old bits, of a block with the elements ``old``."""
        return bits.take(old, self.positions) if self.before is None else self.before


def as_changes(
    found: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.uint8]], dtype: DType
) -> Changes:
    """What a kernel has decoded: positions, and the bytes of the new and of the old elements."""
    positions, values, before = found
    return Changes(positions, values.view(dtype.uint), before.view(dtype.uint))


class Codec(Protocol):
    """Encodes the changes of one block of elements of one dtype.

    ``id`` is the byte in the patch header and never changes its meaning. ``old`` and ``new`` are flat unsigned arrays
    of the layout's elements, at most ``MAX_BLOCK_ELEMENTS``.
    """

    id: int
    name: str

    def supports(self, dtype: DType) -> bool:
        """Whether blocks of ``dtype`` can be encoded."""
        ...

    def encode(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int] | None:
        """(payload, number of changed elements) of the change from ``old`` to ``new``, described by ``layout``; None
        where another codec is as small."""
        ...

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        """The changes to ``old``, described by ``layout``, that ``payload`` encodes. Raises FormatError on a malformed
        payload; accepted positions are in range and ascending.
        """
        ...


def element_kind(dtype: DType) -> tuple[int, int, int, bool]:
    """(width, shift, mask, floating), as the kernels take them: the class of an element is its exponent field; integers
    are all of one class."""
    if dtype.exponent is None:
        return dtype.width, 0, 0, False
    shift, width = dtype.exponent
    return dtype.width, shift, (1 << width) - 1, True
