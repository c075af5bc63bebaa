"""Who sums what in a scattered round, and when rounds are scattered (docs/loco.md, section 4.3). Arithmetic alone: all
trainers compute the same from the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..state import bits
from .gate import Floats
from .parameters import FlatBlock
from .wire import Entries

GRANULE = 256
"""Shares begin at multiples of so many parameters."""
_AT_FIRST = 4

Counts = npt.NDArray[np.int64]
"""By granule of the flat array: the entries of a sum in it, `GRANULE` at most."""


class Unit(NamedTuple):
    """Parameters [start, stop) of a block, counted from its first one: what one payload codes."""

    block: FlatBlock
    start: int
    stop: int

    def of(self, flat: Floats) -> Floats:
        return flat[self.block.start + self.start : self.block.start + self.stop]

    def take(self, entries: Entries) -> Entries:
        """Those of the block's ``entries`` that are in the unit, by their positions in it."""
        positions, values = entries
        first, last = bits.below(positions, (self.start, self.stop))
        return positions[first:last] - np.uint32(self.start), values[first:last]

    def place(self, entries: Entries) -> Entries:
        """The unit's ``entries`` by their positions in the block."""
        return entries[0] + np.uint32(self.start), entries[1]


def whole(blocks: Sequence[FlatBlock]) -> list[Unit]:
    """A unit for each block."""
    return [Unit(block, 0, block.stop - block.start) for block in blocks]


def cut_shares(blocks: Sequence[FlatBlock], trainers: int, counts: Counts | None) -> list[list[Unit]]:
    """The units of each trainer's share, in order: runs of granules of about equal weight, where a granule weighs one
    and the entries that the last sum had in it (none if ``counts`` is None)."""
    parameters = blocks[-1].stop
    weights = np.ones(granules(parameters), np.int64) if counts is None else counts + 1
    passed = np.cumsum(weights)
    targets = [int(passed[-1]) * owner // trainers for owner in range(trainers)]
    bounds = [*(GRANULE * np.searchsorted(passed, targets)).tolist(), parameters]
    return [
        [
            Unit(block, max(first, block.start) - block.start, min(last, block.stop) - block.start)
            for block in blocks
            if max(first, block.start) < min(last, block.stop)
        ]
        for first, last in pairwise(bounds)
    ]


def granules(parameters: int) -> int:
    return -(-parameters // GRANULE)


def granules_of(block: FlatBlock) -> tuple[int, int, int]:
    """(the first granule of a block, the parameters of it that are before the block, how many granules it touches)."""
    first, before = divmod(block.start, GRANULE)
    return first, before, granules(before + block.stop - block.start)


def counts_digest(counts: Counts | None) -> str:
    """SHA-256 of the counts, 64 hexadecimal digits; "" of none."""
    return "" if counts is None else sha256(counts.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Known:
    """What all trainers know alike after a round.

    ``longest``: bytes of the longest message of entries (all its parts, if the round was ``scattered``). ``sums``: of
    the longest message of sums, times the trainers; an estimate if the round was not scattered.
    """

    scattered: bool
    longest: int
    sums: int


def estimated_sums(message_bytes: int, entries: int, summed: int, *, bf16: bool) -> int:
    """The bytes of all sums, of which ``summed`` are not 0: as many an entry as in messages of ``message_bytes`` with
    ``entries`` in all, and one more where those have BF16 values, as sums are FP32."""
    return summed * (message_bytes + (entries if bf16 else 0)) // max(entries, 1)


def scatters(trainers: int, known: Known | None) -> bool:
    """Whether the next round is scattered: where less leaves a process then, by a sixteenth at least if it is a change.

    With R trainers, R - 1 messages leave a process in an all-gather; 1 - 1/R of one, and R - 1 messages of sums, if it
    is scattered. With nothing ``known``, from four trainers on: it costs at most 1/R more, were no position sent twice.
    """
    if known is None:
        return trainers >= _AT_FIRST
    sixteenths = 17 if known.scattered else 15
    return 16 * known.sums < sixteenths * (trainers - 1) * known.longest
