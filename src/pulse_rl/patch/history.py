"""What changed in the last versions: net steps of elements, by which the next ones are coded
(docs/format.md, 3.9).

A history is a function of the states at the ends of its windows: who came there by single patches,
by folds or as the publisher has the same one.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._native import history_merged, history_records
from .._util.threads import ordered_map
from ..codec import MAX_BLOCK_ELEMENTS, Changes, Past, element_kind
from ..errors import WrongHistory
from ..state.tensors import DType, UIntArray
from .blocks import Block, recut

MAX_WINDOWS = 64
MAX_SPAN = 64

RECORD_BYTES = 4

Records = npt.NDArray[np.uint8]
Blocks = tuple[Block, ...]


class HistoryName(NamedTuple):
    """What a patch says of the history that it needs: the ``spans`` of its windows, oldest first,
    which end at the patch's base, and the first 8 bytes of the SHA-256 of the roots at which they
    begin, 32 bytes each."""

    spans: tuple[int, ...]
    check: bytes


class Window(NamedTuple):
    """The net steps of ``span`` versions from the one with root ``base_root``: records
    (`history_records`) by index of the block of a cut, ``blocks``; what did not change, or is not
    held, is left out."""

    span: int
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

    @property
    def spans(self) -> tuple[int, ...]:
        return tuple(window.span for window in self.windows)

    @cached_property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self.windows)

    @property
    def name(self) -> HistoryName | None:
        """None where nothing is remembered."""
        if not self.windows:
            return None
        roots = b"".join(bytes.fromhex(window.base_root) for window in self.windows)
        return HistoryName(self.spans, sha256(roots).digest()[:8])

    def named(self, name: HistoryName | None, blocks: Blocks) -> History:
        """The part of this history that a patch names, by the patch's blocks; raises WrongHistory
        where it is not that."""
        if name is None:
            return History()
        # A patch may need less than is known. Spans alone say little: the roots show that it is the
        # same past.
        found = History(self.windows[-len(name.spans) :])
        if found.name != name:
            raise WrongHistory(
                f"the patch needs the changes of the last {sum(name.spans)} versions in spans of "
                f"{list(name.spans)}, "
                f"known are {list(self.spans)}"
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
        return tuple((window.records.get(index, _NOTHING), window.span) for window in self.windows)

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

    def after(
        self, window: Window | None, spans: Sequence[int], most: int, *, threads: int | None = None
    ) -> History:
        """What a reader remembers at a version that remembers ``spans``, once it has come there by
        a ``window`` more: as much of it as can be had, and at most so many bytes. None: what that
        changed is not known."""
        if not spans or window is None:
            return History()
        return self.then(window).regrouped(spans, threads=threads).within(most)

    def within(self, nbytes: int) -> History:
        """The last windows, of at most so many bytes."""
        kept = self
        while kept.nbytes > nbytes:
            kept = kept.last(len(kept.windows) - 1)
        return kept

    def regrouped(self, spans: Sequence[int], *, threads: int | None = None) -> History:
        """The same changes in windows of ``spans``, of which several of this history's make one;
        what is older is forgotten, and all that is older than a span which they do not make."""
        groups: list[tuple[Window, ...]] = []
        # From the newest back: that is the end which all readers have, however they came here.
        end = len(self.windows)
        for span in reversed(spans):
            start = end
            while start > 0 and sum(s.span for s in self.windows[start:end]) < span:
                start -= 1
            group = self.windows[start:end]
            if sum(s.span for s in group) != span:
                break
            groups.insert(0, group)
            end = start
        return History(tuple(_merged(group, threads) for group in groups))


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


def _merged(group: Sequence[Window], threads: int | None) -> Window:
    if len(group) == 1:
        return group[0]
    blocks = group[-1].blocks
    group = [window.of(blocks) for window in group]
    indices = sorted({index for window in group for index in window.records})

    def run(index: int) -> Records:
        parts = [(s.records[index], s.span) for s in group if index in s.records]
        return history_merged(parts, blocks[index].elements)

    records = zip(indices, ordered_map(run, indices, threads), strict=True)
    span = sum(window.span for window in group)
    return Window(
        span, group[0].base_root, {index: found for index, found in records if len(found)}, blocks
    )


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
