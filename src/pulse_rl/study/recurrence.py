"""What an element's last change tells of its next one: counts, and the order-0 entropies that follow from them.

The estimator: all elements of 1, 2 and 4 bytes, of all tensors and of all counted steps (from one state to the next)
are pooled by dtype, and frequencies are taken as known, as if their tables were free. With ``n`` elements of a class,
of which ``k`` changed, a class costs ``n H(k / n)`` bits for the positions; signs and sizes of the steps cost their
empirical entropy in theirs. The classes are

========  =======================================  ====================================================
bits      without history                          with history
========  =======================================  ====================================================
position  old exponent                             old exponent and age
sign      (one)                                    direction of the last step and age
size      old exponent                             old exponent, and whether the last step was above 1
========  =======================================  ====================================================

An age is the number of versions since the last change, in octaves; "not yet" is a class of its own in all three. The
classes of the right column refine those of the left one, so that its bits are never more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..state.tensors import DType, UIntArray
from .entropy import exponents_of, flag_bits, summed, symbol_bits
from .last_changes import CLASSES, LastChanges, Step

_CHUNK = 1 << 20
_SIZE_BITS = 33
_LENGTHS = 3

Counts = npt.NDArray[np.int64]


class Bits(NamedTuple):
    """Bits of all counted changes without and with history."""

    position: tuple[float, float]
    sign: tuple[float, float]
    size: tuple[float, float]


class ChangeTable:
    """Counts of elements of ``dtype`` (at most 4 bytes): all and changed ones [old exponent, class of the age], steps
    [class of the age, last direction, down or up], and sizes by exponent and last step."""

    def __init__(self, dtype: DType) -> None:
        exponents = 1 << (dtype.exponent[1] if dtype.exponent else 0)
        self.dtype = dtype
        self.elements = np.zeros((exponents, CLASSES), np.int64)
        self.changed = np.zeros((exponents, CLASSES), np.int64)
        self.signs = np.zeros((CLASSES, 3, 2), np.int64)
        self._sizes = np.empty(0, np.int64), np.empty(0, np.int64)

    def add(self, old: UIntArray, step: Step, last: LastChanges) -> None:
        """One step of a block with the elements ``old`` before it and the changes ``last`` before that."""
        for start in range(0, old.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            self.elements += self._cells(old[part], last.ages(part))
        ages = last.ages(step.positions)
        self.changed += self._cells(step.old, ages)
        sizes = step.sizes(self.dtype)
        np.add.at(self.signs, (ages, last.directions(step.positions), (sizes > 0).astype(np.intp)), 1)
        classes = exponents_of(step.old, self.dtype).astype(np.int64) * _LENGTHS + last.lengths(step.positions)
        found = np.unique((classes << _SIZE_BITS) | np.abs(sizes), return_counts=True)
        self._sizes = summed(*self._sizes, *found)

    def merge(self, other: ChangeTable) -> None:
        self.elements += other.elements
        self.changed += other.changed
        self.signs += other.signs
        self._sizes = summed(*self._sizes, *other._sizes)

    def bits(self) -> Bits:
        """Of all changes."""
        position = flag_bits(self.elements.sum(1), self.changed.sum(1))
        with_age = flag_bits(self.elements.reshape(-1), self.changed.reshape(-1))
        sign = symbol_bits(self.signs.sum((0, 1)))
        with_direction = sum(symbol_bits(cell) for cell in self.signs.reshape(-1, 2))
        return Bits((position, with_age), (sign, with_direction), (self._size_bits(_LENGTHS), self._size_bits(1)))

    def _cells(self, old: UIntArray, ages: npt.NDArray[np.uint8]) -> Counts:
        cells = exponents_of(old, self.dtype) * np.uint16(CLASSES) + ages
        return np.bincount(cells, minlength=self.elements.size).reshape(self.elements.shape)

    def _size_bits(self, joined: int) -> float:
        """Where ``joined`` classes at a time are one."""
        keys, counts = self._sizes
        classes, sizes = (keys >> _SIZE_BITS) // joined, keys & ((1 << _SIZE_BITS) - 1)
        nothing = np.empty(0, np.int64), np.empty(0, np.int64)
        keys, counts = summed(*nothing, (classes << _SIZE_BITS) | sizes, counts)
        return sum(symbol_bits(counts[keys >> _SIZE_BITS == c]) for c in np.unique(classes))


class BlockRecurrence:
    """A block's steps one after another, each by what was known of the elements before it."""

    def __init__(self, dtype: DType, elements: int) -> None:
        self.dtype = dtype
        self._last = LastChanges(elements)
        self._step: Step | None = None

    @property
    def nbytes(self) -> int:
        """Memory: one byte an element, and the last step's changes."""
        step = sum(part.nbytes for part in self._step) if self._step else 0
        return self._last.nbytes + step

    def add(self, step: Step) -> Counts:
        """Takes the next step; how many of its changes have which class of the age [CLASSES]."""
        if self._step is not None:
            self._last.advance(self._step.positions, self._step.sizes(self.dtype))
        self._step = step
        return np.bincount(self._last.ages(step.positions), minlength=CLASSES)

    def table(self, old: UIntArray) -> ChangeTable:
        """Counts of the step last taken; ``old`` is the block before it."""
        assert self._step is not None
        table = ChangeTable(self.dtype)
        table.add(old, self._step, self._last)
        return table
