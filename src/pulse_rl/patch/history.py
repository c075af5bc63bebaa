"""The changes of the last versions, by which the next ones are coded (docs/format.md, 3.9).

A history has one window for each version since the last start. A start is an anchor, or a version
at which the publisher starts the history anew (docs/protocol.md, section 12). Every way into the
stream ends at a start. So a reader that follows the patches from there has the publisher's history.
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

# The span of the publisher's histories is 32 (`pulse_rl.history.START_SPAN`); the format allows
# twice as many windows.
MAX_WINDOWS = 64

RECORD_BYTES = 4

Records = npt.NDArray[np.uint8]
Blocks = tuple[Block, ...]


class HistoryName(NamedTuple):
    """The history that a patch needs.

    It has the last ``windows`` windows before the patch's base. ``check`` is the first 8 bytes of
    the SHA-256 of the roots at which these windows begin, oldest first, 32 bytes each.
    """

    windows: int
    check: bytes


class Window(NamedTuple):
    """The net steps from the version with root ``base_root`` to the next version.

    ``records`` has the records (`history_records`) by index of the cut ``blocks``. Blocks without
    changes, and blocks that are not held, are left out.
    """

    base_root: str
    records: Mapping[int, Records]
    blocks: Blocks

    @property
    def nbytes(self) -> int:
        return sum(records.nbytes for records in self.records.values())

    def of(self, blocks: Blocks) -> Window:
        """The same window by another cut of the same tensors."""
        if self.blocks == blocks:
            return self
        changes = {index: _decoded(records) for index, records in self.records.items()}
        made = recut(changes, self.blocks, blocks)
        records = {index: _encoded(found) for index, found in made.items()}
        return self._replace(records=records, blocks=blocks)


@dataclass(frozen=True)
class History:
    """Consecutive windows, oldest first. A history never changes; each version has a new one."""

    windows: tuple[Window, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self.windows)

    @property
    def name(self) -> HistoryName | None:
        """The name of the whole history; None if it has no windows."""
        if not self.windows:
            return None
        roots = b"".join(bytes.fromhex(window.base_root) for window in self.windows)
        return HistoryName(len(self.windows), sha256(roots).digest()[:8])

    def named(self, name: HistoryName | None, blocks: Blocks) -> History:
        """The part of this history that a patch names, by the patch's blocks.

        Raises WrongHistory if this history does not end with it.
        """
        if name is None:
            return History()
        # A patch may need fewer windows than are known. The number alone proves little, so the
        # roots at which the windows begin are compared.
        found = self.last(name.windows)
        if found.name != name:
            raise WrongHistory(
                f"the patch needs the changes of the last {name.windows} versions; the reader "
                f"knows those of {len(self.windows)}, or other ones"
            )
        return found.of(blocks)

    def of(self, blocks: Blocks) -> History:
        """The same history by another cut of the same tensors."""
        one = self.windows[0].blocks if self.windows else blocks
        # By identity: equal cuts are one object.
        if one == blocks and all(window.blocks is one for window in self.windows):
            return self
        return History(tuple(window.of(blocks) for window in self.windows))

    def past(self, index: int) -> Past:
        """The records of one block in all windows; empty ones where nothing changed."""
        return tuple(window.records.get(index, _NOTHING) for window in self.windows)

    def then(self, window: Window) -> History:
        """This history followed by one more window."""
        # Equal cuts become one object: `of` compares cuts by identity first.
        if self.windows and window.blocks == (blocks := self.windows[-1].blocks):
            window = window._replace(blocks=blocks)
        return History((*self.windows, window))

    def last(self, count: int) -> History:
        """The last ``count`` windows."""
        if count >= len(self.windows):
            return self
        return History(self.windows[len(self.windows) - count :])

    def after(self, window: Window | None, windows: int, most: int) -> History:
        """The history at the next version, whose manifest remembers the last ``windows`` windows.

        It has at most ``most`` bytes. ``window`` is the next version's; None if the reader does not
        know what that version changed.
        """
        if window is None or not windows:
            return History()
        return self.then(window).last(windows).within(most)

    def within(self, nbytes: int) -> History:
        """The last windows that take at most ``nbytes``."""
        kept = self
        while kept.nbytes > nbytes:
            kept = kept.last(len(kept.windows) - 1)
        return kept


def records_of(
    dtype: DType, positions: npt.NDArray[np.uint32], old: UIntArray, new: UIntArray
) -> Records | None:
    """The records of one version of a block whose elements at ``positions`` went from ``old`` to
    ``new``.

    None if there is nothing to remember.
    """
    if dtype.width > 4 or not len(positions):
        return None
    records = history_records(
        positions, old.view(np.uint8), new.view(np.uint8), element_kind(dtype)
    )
    return records if len(records) else None


class Recorder:
    """Collects the records of a window by block; several threads may add to it.

    It gives up if they take more than ``most`` bytes (None: no limit). ``only``: record these
    blocks only.
    """

    def __init__(self, most: int | None = None, only: Collection[int] | None = None) -> None:
        self.records: dict[int, Records] | None = {}
        self._left = most
        self._only = only
        self._lock = allocate_lock()

    def add(self, index: int, dtype: DType, changes: Changes, before: UIntArray) -> None:
        """Record the ``changes`` of a block whose elements were ``before``."""
        if dtype.width > 4 or (self._only is not None and index not in self._only):
            return
        # Bytes are counted before the records are made, so a version that is too large costs no
        # time.
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


# A record is 4 bytes: u16 elements since the record before, the net step, the class. A longer gap
# takes records of their own, each with this number of elements and step 0.
_LONGEST_GAP = 65535


def _decoded(records: Records) -> Changes:
    """The positions of records, and their net step and class as one number."""
    said = records.view("<u4")
    # Records of long gaps mark no element.
    speaks = (said & 0xFFFFFF) != _LONGEST_GAP
    ends = np.cumsum((said & _LONGEST_GAP) + speaks, dtype=np.int64)
    # A record beyond any block comes from a damaged file; it must not index memory.
    speaks &= ends <= MAX_BLOCK_ELEMENTS
    return Changes((ends[speaks] - 1).astype(np.uint32), said[speaks] >> 16)


def _encoded(changes: Changes) -> Records:
    gaps = np.diff(changes.positions.astype(np.int64), prepend=-1) - 1
    longer, rest = np.divmod(gaps, _LONGEST_GAP)
    records = np.full(len(gaps) + int(longer.sum()), _LONGEST_GAP, "<u4")
    steps = changes.values << np.uint32(16)
    records[np.arange(len(gaps)) + np.cumsum(longer)] = rest.astype(np.uint32) | steps
    return records.view(np.uint8)


_NOTHING: Records = np.empty(0, np.uint8)
