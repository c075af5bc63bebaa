"""Back to an earlier version: the old bits of every element that changed since, block by block.

A fold needs its base state only to encode against it, and who looks at neighbouring versions comes
back to them. Keeping what changed costs some bytes per change; a second state would cost all of its
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ..codec import Changes
from ..state import bits
from ..state.tensors import UIntArray
from .blocks import cut, recut
from .header import JoinedHeader

_PIECES = 8

P = TypeVar("P")


def by_whole_blocks(header: JoinedHeader, undo: Mapping[int, Changes]) -> Mapping[int, Changes]:
    """The old bits by block of the cut of whole tensors, from those by block of a patch with this
    ``header``."""
    if header.is_whole:
        return undo
    return recut(undo, header.cuts, cut(header.specs))


class UndoLog:
    """Leads back to version ``base`` with root ``base_root``. Its blocks are whole tensors' or a
    rank's."""

    def __init__(self, base: int, base_root: str) -> None:
        self.base = base
        self.base_root = base_root
        self._pieces: dict[int, list[Changes]] = {}

    def record(self, undo: Mapping[int, Changes]) -> None:
        """Adds the old bits of the next version, by block index."""
        for index, changes in undo.items():
            pieces = self._pieces.setdefault(index, [])
            pieces.append(changes)
            # What changes again and again is kept once: a log is bounded by what changed at all.
            if len(pieces) >= _PIECES:
                self._pieces[index] = [_oldest(pieces)]

    def rewind(self, index: int, now: UIntArray) -> UIntArray:
        """The block's elements at the base, from the current ones; ``now`` itself if nothing
        changed."""
        pieces = self._pieces.get(index)
        if not pieces:
            return now
        changes = _oldest(pieces)
        before = now.copy()
        bits.put(before, changes.positions, changes.values)
        return before


def _oldest(pieces: list[Changes]) -> Changes:
    """One entry a position: of several the first, which holds the bits at the base."""
    if len(pieces) == 1:
        return pieces[0]
    positions = np.concatenate([p.positions for p in pieces])
    unique, first = np.unique(positions, return_index=True)
    return Changes(unique, np.concatenate([p.values for p in pieces])[first])


class Step(NamedTuple, Generic[P]):
    """Two neighbouring places of a trail, of versions ``low`` and ``high``. ``changes`` are the
    bits of the one at which the state is not, by block; ``nbytes`` is what all of this takes."""

    low: int
    below: P
    high: int
    above: P
    changes: Mapping[int, Changes]
    nbytes: int


class Trail(Generic[P]):
    """The places at which a state has been, one after another, with the bits in which neighbours
    differ: it goes back and forth between them. Of the steps the newest stay that take at most so
    many bytes."""

    def __init__(self) -> None:
        self._steps: list[Step[P]] = []
        self._at = 0

    def append(self, step: Step[P], most: int) -> None:
        """The state has moved up by ``step``. What lay above it before is forgotten."""
        self._steps[self._at :] = [step]
        while sum(each.nbytes for each in self._steps) > most:
            del self._steps[0]
        self._at = len(self._steps)

    def toward(self, version: int, target: int) -> Step[P] | None:
        """The next step from ``version`` to the highest place that is not above version ``target``;
        None at the end, and where all places are above it."""
        if version > target and self._at and self._steps[0].low <= target:
            return self._steps[self._at - 1]
        if (
            version < target
            and self._at < len(self._steps)
            and self._steps[self._at].high <= target
        ):
            return self._steps[self._at]
        return None

    def passed(self, step: Step[P], changes: Mapping[int, Changes]) -> None:
        """The state has moved by ``step``, and ``changes`` are the bits that lead back."""
        up = self._at < len(self._steps) and step is self._steps[self._at]
        self._steps[self._at if up else self._at - 1] = step._replace(changes=changes)
        self._at += 1 if up else -1
