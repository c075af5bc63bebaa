"""What an element's last change tells of its next one: counts, and the order-0 entropies that
follow from them.

The estimator: all elements of 1, 2 and 4 bytes, of all tensors and of all counted steps (from one
state to the next) are pooled by dtype, and frequencies are taken as known, as if their tables were
free. With ``n`` elements of a class, of which ``k`` changed, a class costs ``n H(k / n)`` bits for
the positions; signs and sizes of the steps cost their empirical entropy in theirs. The classes are

========  =======================================  =================================================
bits      without history                          with history
========  =======================================  =================================================
position  old exponent                             old exponent and age
sign      (one)                                    direction of the last step and age
size      old exponent                             old exponent, and whether the last step was above
          1
========  =======================================  =================================================

An age is the number of versions since the last change, in octaves; "not yet" is a class of its own
in all three. The classes of the right column refine those of the left one, so that its bits are
never more.

`Remembered` is what a publisher would remember of the states that a study goes through, one version
each; `HistoryTally` adds up what that tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.study.theory import exponents_of, flag_bits, summed, symbol_bits
from pulse_rl.history import START_SPAN, most_remembered, next_history
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.header import BlockEntry
from pulse_rl.patch.history import History, HistoryName, Records, Window
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DType, TensorSpec

#: Ages in versions, first and last of each octave; the last one has no end.
OCTAVES: tuple[tuple[int, int | None], ...] = (
    (1, 1),
    (2, 2),
    (3, 4),
    (5, 8),
    (9, 16),
    (17, 32),
    (33, None),
)

#: Classes of the age: 0 for elements that have not changed yet, then one for each octave.
CLASSES = 1 + len(OCTAVES)

#: Directions of the last step.
NEVER, DOWN, UP = range(3)

_OLDEST = 63
_AGE, _LARGE, _UP = 4, 2, 1


class StateStep(NamedTuple):
    """What changed from one state to the next: uint32 positions [n], old and new bits [n]."""

    positions: npt.NDArray[np.uint32]
    old: UIntArray
    new: UIntArray

    def sizes(self, dtype: DType) -> npt.NDArray[np.int64]:
        """The signed steps [n] as codecs count them: how many values of ``dtype`` further
        (docs/format.md, 3.6.2)."""
        steps = _ordered(self.new, dtype) - _ordered(self.old, dtype)
        return steps.view(f"i{steps.itemsize}").astype(np.int64)


class LastChanges:
    """The last change of each of ``elements``: its age in versions, exact below 63, its direction,
    whether its step was larger than 1. One byte an element, `nbytes`."""

    def __init__(self, elements: int) -> None:
        self._known = np.zeros(elements, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._known.nbytes

    def advance(self, positions: npt.NDArray[np.uint32], sizes: npt.NDArray[np.int64]) -> None:
        """One version more, in which the elements at ``positions`` [n] made steps of ``sizes``
        [n]."""
        known = self._known
        grows = (known - np.uint8(_AGE)) < np.uint8((_OLDEST - 1) * _AGE)
        known += grows.view(np.uint8) * np.uint8(_AGE)
        known[positions] = _AGE + _LARGE * (np.abs(sizes) > 1) + _UP * (sizes > 0)

    def ages(self, where: npt.NDArray[np.uint32] | slice) -> npt.NDArray[np.uint8]:
        """The class of the age of each element ``where``; an element that changed in the last
        version has age 1."""
        found: npt.NDArray[np.uint8] = _CLASS_OF[self._known[where]]
        return found

    def directions(self, where: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """`NEVER`, `DOWN` or `UP` of each element ``where``."""
        known = self._known[where]
        return np.where(known == 0, NEVER, DOWN + (known & _UP)).astype(np.uint8)

    def lengths(self, where: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """Of each element ``where`` 0 if it has not changed yet, 1 if its last step was 1, 2 if
        that was larger."""
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


_CHUNK = 1 << 20
_SIZE_BITS = 33
_LENGTHS = 3

Counts = npt.NDArray[np.int64]


class ChangeBits(NamedTuple):
    """Bits of all counted changes without and with history."""

    position: tuple[float, float]
    sign: tuple[float, float]
    size: tuple[float, float]


class ChangeTable:
    """Counts of elements of ``dtype`` (at most 4 bytes): all and changed ones [old exponent, class
    of the age], steps [class of the age, last direction, down or up], and sizes by exponent and
    last step."""

    def __init__(self, dtype: DType) -> None:
        exponents = 1 << (dtype.exponent[1] if dtype.exponent else 0)
        self.dtype = dtype
        self.elements = np.zeros((exponents, CLASSES), np.int64)
        self.changed = np.zeros((exponents, CLASSES), np.int64)
        self.signs = np.zeros((CLASSES, 3, 2), np.int64)
        self._sizes = np.empty(0, np.int64), np.empty(0, np.int64)

    def add(self, old: UIntArray, step: StateStep, last: LastChanges) -> None:
        """One step of a block with the elements ``old`` before it and the changes ``last`` before
        that."""
        for start in range(0, old.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            self.elements += self._cells(old[part], last.ages(part))
        ages = last.ages(step.positions)
        self.changed += self._cells(step.old, ages)
        sizes = step.sizes(self.dtype)
        np.add.at(
            self.signs, (ages, last.directions(step.positions), (sizes > 0).astype(np.intp)), 1
        )
        classes = exponents_of(step.old, self.dtype).astype(np.int64) * _LENGTHS + last.lengths(
            step.positions
        )
        found = np.unique((classes << _SIZE_BITS) | np.abs(sizes), return_counts=True)
        self._sizes = summed(*self._sizes, *found)

    def merge(self, other: ChangeTable) -> None:
        self.elements += other.elements
        self.changed += other.changed
        self.signs += other.signs
        self._sizes = summed(*self._sizes, *other._sizes)

    def bits(self) -> ChangeBits:
        """Of all changes."""
        position = flag_bits(self.elements.sum(1), self.changed.sum(1))
        with_age = flag_bits(self.elements.reshape(-1), self.changed.reshape(-1))
        sign = symbol_bits(self.signs.sum((0, 1)))
        with_direction = sum(symbol_bits(cell) for cell in self.signs.reshape(-1, 2))
        return ChangeBits(
            (position, with_age),
            (sign, with_direction),
            (self._size_bits(_LENGTHS), self._size_bits(1)),
        )

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
        self._step: StateStep | None = None

    @property
    def nbytes(self) -> int:
        """Memory: one byte an element, and the last step's changes."""
        step = sum(part.nbytes for part in self._step) if self._step else 0
        return self._last.nbytes + step

    def add(self, step: StateStep) -> Counts:
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


SOON = 8
#: Steps that are coded, of those that count: coding them twice takes most of a study's time.
CODED = 8

# Stands for the roots of versions, which change nothing of a history but its digest.
_ROOT = "00" * 32


def first_step(last: int) -> int:
    """The first step that counts where history does: to the states of the second half, of those up
    to ``last``."""
    return last // 2 + 1


def steps_to_code(last: int) -> set[int]:
    """At most `CODED` of the steps that count, evenly spread, which cost what all do. The rare ones
    from the start of a history, where nothing is remembered, are passed over."""
    steps = [new for new in range(first_step(last), last + 1) if (new - 1) % START_SPAN]
    count = min(CODED, len(steps))
    return {steps[i * (len(steps) - 1) // max(count - 1, 1)] for i in range(count)}


class Remembered:
    """The history by a publisher's own rule, with the states numbered from 0 as versions.

    ``before`` ends one state before ``now``. Memory: at most a twelfth of the state's
    bytes, and the changes of one version.
    """

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        self.now = self.before = History()
        self._cut = cut(specs)
        self._nbytes = sum(block.nbytes for block in self._cut)

    def take(self, records: Mapping[int, Records], version: int) -> None:
        """The next version, and what is to be remembered of it by index of the block."""
        self.before = self.now
        window = Window(_ROOT, records, self._cut)
        most = most_remembered(self._nbytes)
        self.now = next_history(self.now, window, version - 1, version, most)


class HistoryTally:
    """Sums over blocks: what each step's changes had been before, and, of some steps, the counts of
    the bound and the blocks as coded; steps are known by the number of the state to which they
    lead."""

    def __init__(self) -> None:
        self.ages: dict[int, Counts] = {}
        self.names: dict[int, HistoryName | None] = {}
        self.entries: dict[int, dict[str, list[BlockEntry]]] = {}
        self._tables: dict[DType, ChangeTable] = {}

    def add_ages(self, new: int, ages: Counts) -> None:
        """How many of a block's changes have which class of the age."""
        self.ages[new] = self.ages.get(new, np.zeros(CLASSES, np.int64)) + ages

    def add_coded(
        self, new: int, entries: Mapping[str, BlockEntry], table: ChangeTable | None
    ) -> None:
        """A block, by codec. Blocks must come in order."""
        for codec, entry in entries.items():
            self.entries.setdefault(new, {}).setdefault(codec, []).append(entry)
        if table is not None:
            self._tables.setdefault(table.dtype, ChangeTable(table.dtype)).merge(table)

    def changed(self) -> int:
        """Changes that the tables have counted."""
        return sum(int(table.changed.sum()) for table in self._tables.values())

    def bits(self) -> ChangeBits:
        """The sums of all dtypes."""
        found = (
            np.sum([table.bits() for table in self._tables.values()], axis=0)
            if self._tables
            else np.zeros((3, 2))
        )
        return ChangeBits(*((without, given) for without, given in found.tolist()))

    def recurrence(self, first: int) -> dict[str, Any]:
        """The shares of the ages, over the steps to the state ``first`` and later ones."""
        counted = [ages for new, ages in self.ages.items() if new >= first]
        total = np.sum(counted, axis=0) if counted else np.zeros(CLASSES, np.int64)
        changed = int(total.sum())
        shares = (total / changed).tolist() if changed else [None] * CLASSES
        ages = [
            {"from": a, "to": b, "share": s} for (a, b), s in zip(OCTAVES, shares[1:], strict=True)
        ]
        soon = [age["share"] for age in ages if age["to"] is not None and age["to"] <= SOON]
        return {
            "steps": len(counted),
            "changed": changed,
            "ages": ages,
            "not_yet": shares[0],
            "within_8": sum(soon) if changed else None,
        }
