"""One block's part of a study: changed elements against the states k before, and the cost of some
patches."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import codec as codecs
from ..codec import CODECS, Changes
from ..patch.blocks import Block
from ..patch.build import entry_of
from ..patch.header import BlockEntry
from ..state import bits
from ..state.bits import UIntArray


class EarlierBlock(NamedTuple):
    """The block ``k`` states before the newest one, and where it changed at least once since.
    Views, valid until the next one is asked for."""

    k: int
    elements: UIntArray
    touched: npt.NDArray[np.bool_]


class BlockHistory:
    """At most ``depth`` states before the newest.

    An older state takes a position and a value a change, or one copy of the block where that is
    less; so the whole takes at most ``depth + 1`` copies.
    """

    def __init__(self, depth: int) -> None:
        self.newest: UIntArray | None = None
        self._undo: deque[Changes | UIntArray] = deque(maxlen=depth)

    @property
    def nbytes(self) -> int:
        held = 0 if self.newest is None else self.newest.nbytes
        return held + sum(
            u.positions.nbytes + u.values.nbytes if isinstance(u, Changes) else u.nbytes
            for u in self._undo
        )

    def push(self, elements: UIntArray) -> None:
        """Takes a copy of the next state's elements."""
        if self.newest is None:
            self.newest = elements.copy()
            return
        positions = bits.differing(self.newest, elements)
        if positions.size * (positions.itemsize + elements.itemsize) < elements.nbytes:
            self._undo.append(Changes(positions, bits.take(self.newest, positions)))
            bits.put(self.newest, positions, bits.take(elements, positions))
        else:
            self._undo.append(self.newest)
            self.newest = elements.copy()

    def earlier(self) -> Iterator[EarlierBlock]:
        """The states before the newest, the latest first."""
        if self.newest is None:
            return
        now = self.newest.copy()
        touched = np.zeros(now.size, np.bool_)
        for k, undo in enumerate(reversed(self._undo), 1):
            if isinstance(undo, Changes):
                bits.put(now, undo.positions, undo.values)
                touched[undo.positions] = True
            else:
                touched |= undo != now
                now = undo.copy()
            yield EarlierBlock(k, now, touched)


class Pair(NamedTuple):
    """The states ``new - k`` and ``new``, numbered from 0."""

    k: int
    new: int


class ChangeCount(NamedTuple):
    """Changed elements by segment of the block, and elements of the block that changed in any step
    between."""

    changed: npt.NDArray[np.int64]
    touched: int


CodedBlock = dict[str, BlockEntry]
"""A block in the patch of one pair, by codec."""


class BlockRecord:
    """Compares the states of a block one after another; ``coded`` are the pairs whose patches are
    built."""

    def __init__(self, block: Block, ks: Collection[int], coded: Collection[Pair] = ()) -> None:
        self.block = block
        self.counts: dict[Pair, ChangeCount] = {}
        self.coded_blocks: dict[Pair, CodedBlock] = {}
        self._ks = frozenset(ks)
        self._pairs_to_code = frozenset(coded)
        self._ends = np.cumsum([s.stop - s.start for s in block.segments])
        self._history = BlockHistory(max(ks))
        self._states = 0

    @property
    def nbytes(self) -> int:
        """Memory that the kept states take."""
        return self._history.nbytes

    def add(self, elements: UIntArray) -> None:
        """Compare the block in the next state; ``elements`` are copied."""
        self._history.push(elements)
        for earlier in self._history.earlier():
            if earlier.k in self._ks:
                pair = Pair(earlier.k, self._states)
                self.counts[pair] = self._count(earlier)
                if pair in self._pairs_to_code:
                    self.coded_blocks[pair] = self._code(earlier.elements)
        self._states += 1

    def code_newest(self) -> dict[Pair, CodedBlock]:
        """The coded block of each pair that ends in the newest state."""
        return {
            Pair(earlier.k, self._states - 1): self._code(earlier.elements)
            for earlier in self._history.earlier()
            if earlier.k in self._ks
        }

    @property
    def _now(self) -> UIntArray:
        assert self._history.newest is not None
        return self._history.newest

    def _count(self, earlier: EarlierBlock) -> ChangeCount:
        positions = bits.differing(earlier.elements, self._now)
        changed = np.diff(np.searchsorted(positions, self._ends), prepend=0)
        return ChangeCount(changed.astype(np.int64), int(np.count_nonzero(earlier.touched)))

    def _code(self, old: UIntArray) -> CodedBlock:
        layout = self.block.layout
        return {
            codec: entry_of(codecs.encode_block(old, self._now, layout, codec=codec))
            for codec in CODECS
        }
