"""What changed in the last versions: net steps of elements, by which the next ones are coded
(docs/format.md, 3.9).

A history at a version has one window for each version since the last start: an anchor, or a version
at which the publisher starts it anew (docs/protocol.md, section 12). Every way into the stream ends
at a start, so a reader that follows the patches from there has the publisher's history.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._native import history_records
from ..codec import MAX_BLOCK_ELEMENTS, Changes, Past, element_kind
from ..errors import WrongHistory
from ..state.bits import UIntArray
from ..state.tensors import DType
from .blocks import Block, recut

MAX_WINDOWS = 64

RECORD_BYTES = 4

Records = npt.NDArray[np.uint8]
Blocks = tuple[Block, ...]


class HistoryName(NamedTuple):
    """The history that a patch needs: the number of ``windows`` that end at the patch's base, and
    as ``check`` the first 8 bytes of the SHA-256 of the roots at which these windows begin, oldest
    first, 32 bytes each."""

    windows: int
    check: bytes


class Window(NamedTuple):
    """The net steps from the version with root ``base_root`` to the next one: records
    (`history_records`) by index of the block of a cut, ``blocks``; what did not change, or is not
    held, is left out."""

    base_root: str
    records: Mapping[int, Records]
    blocks: Blocks

    @property
    def nbytes(self) -> int:
        return sum(records.nbytes for records in self.records.values())

    def of(self, blocks: Blocks) -> Window:
        """The same by another cut of the same tensors."""
        if self.blocks == blocks:
            return self
        changes = {index: _decoded(records) for index, records in self.records.items()}
        made = recut(changes, self.blocks, blocks)
        return self._replace(
            records={index: _encoded(found) for index, found in made.items()}, blocks=blocks
        )


@dataclass(frozen=True)
class History:
    """Windows that follow each other, oldest first. Never changed: replaced with the version at
    which it ends."""

    windows: tuple[Window, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self.windows)

    @property
    def name(self) -> HistoryName | None:
        """None where nothing is remembered."""
        if not self.windows:
            return None
        roots = b"".join(bytes.fromhex(window.base_root) for window in self.windows)
        return HistoryName(len(self.windows), sha256(roots).digest()[:8])

    def named(self, name: HistoryName | None, blocks: Blocks) -> History:
        """The part of this history that a patch names, by the patch's blocks; raises WrongHistory
        where it is not that."""
        if name is None:
            return History()
        # A patch may need less than is known. The number alone shows little: the roots show that
        # it is the same past.
        found = self.last(name.windows)
        if found.name != name:
            raise WrongHistory(
                f"the patch needs the changes of the last {name.windows} versions; the reader "
                f"knows those of {len(self.windows)}, or other ones"
            )
        return found.of(blocks)

    def of(self, blocks: Blocks) -> History:
        """The same by another cut of the same tensors."""
        one = self.windows[0].blocks if self.windows else blocks
        if one == blocks and all(
            window.blocks is one for window in self.windows
        ):  # a cut is compared once
            return self
        return History(tuple(window.of(blocks) for window in self.windows))

    def past(self, index: int) -> Past:
        """What is known of a block: all windows, also where nothing in it changed."""
        return tuple(window.records.get(index, _NOTHING) for window in self.windows)

    def then(self, window: Window) -> History:
        """Followed by one more window."""
        if self.windows and window.blocks == (blocks := self.windows[-1].blocks):
            window = window._replace(blocks=blocks)
        return History((*self.windows, window))

    def last(self, count: int) -> History:
        """The last so many windows."""
        return (
            History(self.windows[len(self.windows) - count :])
            if count < len(self.windows)
            else self
        )

    def after(self, window: Window | None, windows: int, most: int) -> History:
        """The history at the next version, whose manifest remembers the last ``windows``: those of
        this history and ``window``, in at most ``most`` bytes. None: the reader does not know what
        the version changed."""
        if window is None or not windows:
            return History()
        return self.then(window).last(windows).within(most)

    def within(self, nbytes: int) -> History:
        """The last windows, of at most so many bytes."""
        kept = self
        while kept.nbytes > nbytes:
            kept = kept.last(len(kept.windows) - 1)
        return kept


def records_of(
    dtype: DType, positions: npt.NDArray[np.uint32], old: UIntArray, new: UIntArray
) -> Records | None:
    """What a window of one version remembers of a block of which the elements at ``positions`` went
    from ``old`` to ``new``; None where that is nothing."""
    if dtype.width > 4 or not len(positions):
        return None
    records = history_records(
        positions, old.view(np.uint8), new.view(np.uint8), element_kind(dtype)
    )
    return records if len(records) else None


class Recorder:
    """Collects the records of a window by block, of any number of threads, while they take at most
    ``most`` bytes (None: any number of them); beyond that there are none. ``only``: of these
    blocks."""

    def __init__(self, most: int | None = None, only: Collection[int] | None = None) -> None:
        self.records: dict[int, Records] | None = {}
        self._left = most
        self._only = only
        self._lock = allocate_lock()

    def add(self, index: int, dtype: DType, changes: Changes, before: UIntArray) -> None:
        """The ``changes`` of a block whose elements were ``before``."""
        if dtype.width > 4 or (self._only is not None and index not in self._only):
            return
        # Counted before records are made: what is too much costs no time either.
        with self._lock:
            if self._left is not None:
                self._left -= RECORD_BYTES * len(changes.positions)
                if self._left < 0:
                    self.records = None
        if self.records is None:
            return
        found = records_of(dtype, changes.positions, changes.replaced(before), changes.values)
        with self._lock:
            if self.records is not None and found is not None:
                self.records[index] = found


_LONGEST_GAP = 65535
"""A record: u16 elements since the one before, the net step, the class. A longer gap is said by
records of its own, with so many elements and step 0."""


def _decoded(records: Records) -> Changes:
    """The positions of which records speak, and what they say as numbers."""
    said = records.view("<u4")
    speaks = (said & 0xFFFFFF) != _LONGEST_GAP
    ends = np.cumsum((said & _LONGEST_GAP) + speaks, dtype=np.int64)
    speaks &= ends <= MAX_BLOCK_ELEMENTS
    return Changes((ends[speaks] - 1).astype(np.uint32), said[speaks] >> 16)


def _encoded(changes: Changes) -> Records:
    gaps = np.diff(changes.positions.astype(np.int64), prepend=-1) - 1
    longer, rest = np.divmod(gaps, _LONGEST_GAP)
    records = np.full(len(gaps) + int(longer.sum()), _LONGEST_GAP, "<u4")
    records[np.arange(len(gaps)) + np.cumsum(longer)] = rest.astype(
        np.uint32
    ) | changes.values << np.uint32(16)
    return records.view(np.uint8)


_NOTHING: Records = np.empty(0, np.uint8)
