"""Back to an earlier version: the old bits of every element that changed since, block by block.

A fold needs its base state only to encode against it. Keeping what changed costs some bytes per
change; a second state would cost all of its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..codec import Changes
from ..patch.blocks import cut, recut
from ..patch.header import JoinedHeader
from ..state import bits
from ..state.bits import UIntArray

_PIECES = 8


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
