"""One block's part of a study: changed elements against the states k before, and the cost of some
patches.

Where history counts, too: what the changes of each step had been before, and the cost of some steps
by the codec that knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import codec as codecs
from ..codec import CODECS, Changes, Past
from ..patch.blocks import Block
from ..patch.build import entry_of
from ..patch.header import BlockEntry
from ..patch.history import Records, records_of
from ..state import bits
from ..state.tensors import UIntArray
from .recurrence import BlockRecurrence, ChangeTable, Counts, StateStep
from .theory import ClassCounts


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

    def last_step(self) -> StateStep:
        """What changed from the state before to the newest one, of two and more."""
        newest, undo = self.newest, self._undo[-1]
        assert newest is not None
        if isinstance(undo, Changes):
            return StateStep(undo.positions, undo.values, bits.take(newest, undo.positions))
        positions = bits.differing(undo, newest)
        return StateStep(positions, bits.take(undo, positions), bits.take(newest, positions))

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


WITH_HISTORY = ("history", "auto")
"""The codecs of steps from one state to the next where history counts."""


class Pair(NamedTuple):
    """The states ``new - k`` and ``new``, numbered from 0."""

    k: int
    new: int


class ChangeCount(NamedTuple):
    """Changed elements by segment of the block, and elements of the block that changed in any step
    between."""

    changed: npt.NDArray[np.int64]
    touched: int


@dataclass(frozen=True, slots=True)
class PricedBlock:
    """The block in the patch of one pair: its entry with each codec, and its classes by segment."""

    entries: dict[str, BlockEntry]
    classes: tuple[ClassCounts, ...]


@dataclass(frozen=True, slots=True)
class PricedStep:
    """The block in the patch from one state to the next: its entry by codec, and the counts of its
    step; None for elements of more than 4 bytes."""

    entries: dict[str, BlockEntry]
    table: ChangeTable | None


class BlockRecord:
    """Compares a block's states one after another; ``coded`` are the pairs whose patches are built.
    ``steps``: where history counts, the numbers of the states to which the steps lead that are
    coded with it; None: it does not."""

    def __init__(
        self,
        block: Block,
        ks: Collection[int],
        coded: Collection[Pair] = (),
        *,
        steps: Collection[int] | None = None,
    ) -> None:
        self.block = block
        self.counts: dict[Pair, ChangeCount] = {}
        self.coded_blocks: dict[Pair, PricedBlock] = {}
        self.ages: dict[int, Counts] = {}
        self.coded_steps: dict[int, PricedStep] = {}
        self.records: Records | None = None
        self._steps = steps
        recurs = steps is not None and block.dtype.width <= 4
        self._recurrence = BlockRecurrence(block.dtype, block.elements) if recurs else None
        self._ks = frozenset(ks)
        self._pairs_to_code = frozenset(coded)
        self._ends = np.cumsum([s.stop - s.start for s in block.segments])
        self._history = BlockHistory(max(ks))
        self._states = 0

    @property
    def nbytes(self) -> int:
        """Memory that the kept states take."""
        return self._history.nbytes + (self._recurrence.nbytes if self._recurrence else 0)

    def add(self, elements: UIntArray, past: Past = ()) -> None:
        """The block in the next state; ``elements`` are copied. ``past``: what is remembered of it
        at the state before. Sets ``records``, what is to be remembered of this step."""
        self._history.push(elements)
        if self._states and self._steps is not None:
            self._add_step(past)
        for earlier in self._history.earlier():
            if earlier.k in self._ks:
                pair = Pair(earlier.k, self._states)
                self.counts[pair] = self._count(earlier)
                if pair in self._pairs_to_code:
                    self.coded_blocks[pair] = self._code(earlier.elements)
        self._states += 1

    def code_newest(self) -> dict[Pair, PricedBlock]:
        """The coded block of each pair that ends in the newest state."""
        return {
            Pair(earlier.k, self._states - 1): self._code(earlier.elements)
            for earlier in self._history.earlier()
            if earlier.k in self._ks
        }

    def code_newest_step(self, past: Past) -> dict[int, PricedStep]:
        """The step to the newest state, coded with history; nothing of the first state."""
        return {self._states - 1: self._code_step(past)} if self._states > 1 else {}

    @property
    def _now(self) -> UIntArray:
        assert self._history.newest is not None
        return self._history.newest

    def _add_step(self, past: Past) -> None:
        if self._recurrence is not None:
            step = self._history.last_step()
            self.ages[self._states] = self._recurrence.add(step)
            self.records = records_of(self.block.dtype, *step)
        if self._steps and self._states in self._steps:
            self.coded_steps[self._states] = self._code_step(past)

    def _code_step(self, past: Past) -> PricedStep:
        old = next(self._history.earlier()).elements
        entries = {
            name: self._entry(name, old, past if name == "history" else ()) for name in WITH_HISTORY
        }
        return PricedStep(entries, self._recurrence.table(old) if self._recurrence else None)

    def _entry(self, codec: str, old: UIntArray, past: Past = ()) -> BlockEntry:
        layout = self.block.layout._replace(past=past)
        return entry_of(
            codecs.encode_block(
                old, self._now, layout, codec="zstd" if codec == "zstd" else codecs.AUTO
            )
        )

    def _count(self, earlier: EarlierBlock) -> ChangeCount:
        positions = bits.differing(earlier.elements, self._now)
        changed = np.diff(np.searchsorted(positions, self._ends), prepend=0)
        return ChangeCount(changed.astype(np.int64), int(np.count_nonzero(earlier.touched)))

    def _code(self, old: UIntArray) -> PricedBlock:
        entries = {name: self._entry(name, old) for name in CODECS}
        classes = []
        for start, stop in zip([0, *self._ends[:-1].tolist()], self._ends.tolist(), strict=True):
            counts = ClassCounts(self.block.dtype)
            counts.add(old[start:stop], self._now[start:stop])
            classes.append(counts)
        return PricedBlock(entries, tuple(classes))
