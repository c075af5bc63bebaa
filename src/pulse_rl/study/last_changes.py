"""When and how each element of a block changed last, in one byte an element."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..state.tensors import DType, UIntArray

OCTAVES: tuple[tuple[int, int | None], ...] = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, None))
"""Ages in versions, first and last of each octave; the last one has no end."""

CLASSES = 1 + len(OCTAVES)
"""Classes of the age: 0 for elements that have not changed yet, then one for each octave."""

NEVER, DOWN, UP = range(3)
"""Directions of the last step."""

_OLDEST = 63
_AGE, _LARGE, _UP = 4, 2, 1


class Step(NamedTuple):
    """What changed from one state to the next: uint32 positions [n], old and new bits [n]."""

    positions: npt.NDArray[np.uint32]
    old: UIntArray
    new: UIntArray

    def sizes(self, dtype: DType) -> npt.NDArray[np.int64]:
        """The signed steps [n] as codecs count them: how many values of ``dtype`` further (docs/format.md, 3.6.2)."""
        steps = _ordered(self.new, dtype) - _ordered(self.old, dtype)
        return steps.view(f"i{steps.itemsize}").astype(np.int64)


class LastChanges:
    """The last change of each of ``elements``: its age in versions, exact below 63, its direction, whether its step was
    larger than 1. One byte an element, `nbytes`."""

    def __init__(self, elements: int) -> None:
        self._known = np.zeros(elements, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._known.nbytes

    def advance(self, positions: npt.NDArray[np.uint32], sizes: npt.NDArray[np.int64]) -> None:
        """One version more, in which the elements at ``positions`` [n] made steps of ``sizes`` [n]."""
        known = self._known
        grows = (known - np.uint8(_AGE)) < np.uint8((_OLDEST - 1) * _AGE)
        known += grows.view(np.uint8) * np.uint8(_AGE)
        known[positions] = _AGE + _LARGE * (np.abs(sizes) > 1) + _UP * (sizes > 0)

    def ages(self, where: npt.NDArray[np.uint32] | slice) -> npt.NDArray[np.uint8]:
        """The class of the age of each element ``where``; an element that changed in the last version has age 1."""
        found: npt.NDArray[np.uint8] = _CLASS_OF[self._known[where]]
        return found

    def directions(self, where: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """`NEVER`, `DOWN` or `UP` of each element ``where``."""
        known = self._known[where]
        return np.where(known == 0, NEVER, DOWN + (known & _UP)).astype(np.uint8)

    def lengths(self, where: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """Of each element ``where`` 0 if it has not changed yet, 1 if its last step was 1, 2 if that was larger."""
        known = self._known[where]
        return np.where(known == 0, 0, 1 + (known & _LARGE) // _LARGE).astype(np.uint8)


def _ordered(elements: UIntArray, dtype: DType) -> UIntArray:
    if dtype.exponent is None:
        return elements
    sign = elements.dtype.type(1 << (8 * dtype.width - 1))
    ordered: UIntArray = np.where(elements & sign, ~elements, elements | sign)
    return ordered


def _class_of_age(age: int) -> int:
    return sum(age >= first for first, _ in OCTAVES)


_CLASS_OF = np.array([_class_of_age(known // _AGE) for known in range(256)], np.uint8)
