"""One block's part of a study: changed elements against the states k before, and the cost of some patches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import codec as codecs
from ..patch.blocks import Block
from ..patch.header import BlockEntry
from ..state import bits
from ..state.tensors import UIntArray
from .entropy import ClassCounts
from .history import BlockHistory, EarlierBlock

CODECS = ("context", "zstd")


class Pair(NamedTuple):
    """The states ``new - k`` and ``new``, numbered from 0."""

    k: int
    new: int


class ChangeCount(NamedTuple):
    """Changed elements by segment of the block, and elements of the block that changed in any step between."""

    changed: npt.NDArray[np.int64]
    touched: int


@dataclass(frozen=True, slots=True)
class CodedBlock:
    """The block in the patch of one pair: its entry with each codec, and its classes by segment."""

    entries: dict[str, BlockEntry]
    classes: tuple[ClassCounts, ...]


class BlockRecord:
    """Compares a block's states one after another; ``coded`` are the pairs whose patches are built."""

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
        """The block in the next state; ``elements`` are copied."""
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

    def release(self) -> None:
        """Lets the states go; counts and coded blocks stay."""
        self._history = BlockHistory(0)

    @property
    def _now(self) -> UIntArray:
        assert self._history.newest is not None
        return self._history.newest

    def _count(self, earlier: EarlierBlock) -> ChangeCount:
        positions = bits.differing(earlier.elements, self._now)
        changed = np.diff(np.searchsorted(positions, self._ends), prepend=0)
        return ChangeCount(changed.astype(np.int64), int(np.count_nonzero(earlier.touched)))

    def _code(self, old: UIntArray) -> CodedBlock:
        entries = {}
        for name in CODECS:
            encoded = codecs.encode_block(codecs.by_name(name), old, self._now, self.block.layout)
            digest = sha256(encoded.payload).digest()
            entries[name] = BlockEntry(encoded.codec_id, encoded.changed, len(encoded.payload), digest)
        classes = []
        for start, stop in zip([0, *self._ends[:-1].tolist()], self._ends.tolist(), strict=True):
            counts = ClassCounts(self.block.dtype)
            counts.add(old[start:stop], self._now[start:stop])
            classes.append(counts)
        return CodedBlock(entries, tuple(classes))
