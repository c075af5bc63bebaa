"""What a publisher would remember of the states that a study goes through, one version each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..patch.blocks import Block
from ..patch.header import BlockEntry
from ..patch.history import History, HistoryName, Records, Window
from ..state.tensors import DType, TensorSpec
from ..sync.history_policy import Memory
from .last_changes import CLASSES, OCTAVES
from .recurrence import Bits, ChangeTable, Counts

SOON = 8
_ROOT = "00" * 32
"""Stands for the roots of versions, which change nothing of a history but its digest."""


def first_step(last: int) -> int:
    """The first step that counts where history does: to the states of the second half, of those up to ``last``."""
    return last // 2 + 1


def steps_to_code(last: int) -> set[int]:
    """Some of the steps that count, which cost what all do: all, or one for each number of versions since the last
    window was merged, evenly spread. The rare ones where all has just been forgotten are passed over."""
    steps, rule = range(first_step(last), last + 1), Memory()
    if len(steps) <= rule.window:
        return set(steps)
    found: dict[int, int] = {}
    for i in range(rule.window):
        target = steps[0] + i * (len(steps) - 1) / (rule.window - 1)
        left = [new for new in steps if (new - 1) % rule.anew and (new - 1) % rule.window not in found]
        new = min(left, key=lambda new: abs(new - target))
        found[(new - 1) % rule.window] = new
    return set(found.values())


class Remembered:
    """The history by a publisher's own rule, with folds of 8 and 64 and the states numbered from 0 as versions.

    ``before`` ends one state before ``now``. Where only a part of the state's blocks is worked on, its cap is a share
    of their bytes. Memory: at most a twelfth of those bytes, and the changes of one version.
    """

    def __init__(self, specs: tuple[TensorSpec, ...], blocks: Mapping[int, Block]) -> None:
        self.now = self.before = History()
        self._rule = Memory()
        self._specs = specs
        self._nbytes = {index: block.nbytes for index, block in blocks.items()}

    def take(self, records: Mapping[int, Records], version: int, *, threads: int | None = None) -> None:
        """The next version, and what is to be remembered of it by index of the block."""
        self.before = self.now
        window = Window(1, _ROOT, records)
        nbytes = sum(self._nbytes.values())
        self.now = self._rule.after(self.now, window, version - 1, version, self._specs, nbytes, threads=threads)

    def keep(self, indices: Collection[int]) -> None:
        """Lets go of all other blocks."""
        self._nbytes = {index: nbytes for index, nbytes in self._nbytes.items() if index in indices}
        windows = []
        for window in self.now.windows:
            kept = {index: records for index, records in window.records.items() if index in indices}
            windows.append(window._replace(records=kept))
        self.now = self.before = History(tuple(windows))


class HistoryTally:
    """Sums over blocks: what each step's changes had been before, and, of some steps, the counts of the bound and the
    blocks as coded; steps are known by the number of the state to which they lead."""

    def __init__(self) -> None:
        self.ages: dict[int, Counts] = {}
        self.names: dict[int, HistoryName | None] = {}
        self.entries: dict[int, dict[str, list[BlockEntry]]] = {}
        self._tables: dict[DType, ChangeTable] = {}

    def add_ages(self, new: int, ages: Counts) -> None:
        """How many of a block's changes have which class of the age."""
        self.ages[new] = self.ages.get(new, np.zeros(CLASSES, np.int64)) + ages

    def add_coded(self, new: int, entries: Mapping[str, BlockEntry], table: ChangeTable | None) -> None:
        """A block, by codec. Blocks must come in order."""
        for codec, entry in entries.items():
            self.entries.setdefault(new, {}).setdefault(codec, []).append(entry)
        if table is not None:
            self._tables.setdefault(table.dtype, ChangeTable(table.dtype)).merge(table)

    def changed(self) -> int:
        """Changes that the tables have counted."""
        return sum(int(table.changed.sum()) for table in self._tables.values())

    def bits(self) -> Bits:
        """The sums of all dtypes."""
        found = np.sum([table.bits() for table in self._tables.values()], axis=0) if self._tables else np.zeros((3, 2))
        return Bits(*((without, given) for without, given in found.tolist()))

    def recurrence(self, first: int) -> dict[str, Any]:
        """The shares of the ages, over the steps to the state ``first`` and later ones."""
        counted = [ages for new, ages in self.ages.items() if new >= first]
        total = np.sum(counted, axis=0) if counted else np.zeros(CLASSES, np.int64)
        changed = int(total.sum())
        shares = (total / changed).tolist() if changed else [None] * CLASSES
        ages = [{"from": a, "to": b, "share": s} for (a, b), s in zip(OCTAVES, shares[1:], strict=True)]
        soon = [age["share"] for age in ages if age["to"] is not None and age["to"] <= SOON]
        return {
            "steps": len(counted),
            "changed": changed,
            "ages": ages,
            "not_yet": shares[0],
            "within_8": sum(soon) if changed else None,
        }
