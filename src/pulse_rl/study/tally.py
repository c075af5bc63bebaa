"""Adds up the blocks' records: statistics over pairs for the model, its layer types and its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codec import HISTORY
from ..patch.blocks import Block, cut
from ..patch.header import BlockEntry, PatchHeader, all_of
from ..patch.history import HistoryName
from ..state.tensors import TensorSpec
from .entropy import ClassCounts
from .layers import LAYERS, layer_of
from .record import CODECS, BlockRecord, ChangeCount, CodedBlock, CodedStep, Pair
from .remembered import HistoryTally

_ROOTS = sha256(b"old").hexdigest(), sha256(b"new").hexdigest()
"""Stand for the roots of a pair in its patch headers, whose size they do not change."""


class CountStatistics:
    """Mean and extremes of counts [n] over pairs."""

    def __init__(self, n: int) -> None:
        self.pairs = 0
        self.total = np.zeros(n, np.int64)
        self.min = np.full(n, np.iinfo(np.int64).max)
        self.max = np.zeros(n, np.int64)

    def add(self, counts: npt.NDArray[np.int64]) -> None:
        self.pairs += 1
        self.total += counts
        np.minimum(self.min, counts, out=self.min)
        np.maximum(self.max, counts, out=self.max)

    def row(self, i: int, elements: int) -> dict[str, Any]:
        """The fields that all rows of a study share; of a tensor without elements nothing ever changes."""
        whole = max(elements, 1)
        return {
            "elements": elements,
            "changed": int(self.total[i]) / self.pairs,
            "sparsity": 1 - int(self.total[i]) / self.pairs / whole,
            "sparsity_min": 1 - int(self.max[i]) / whole,
            "sparsity_max": 1 - int(self.min[i]) / whole,
        }


@dataclass
class CodedPair:
    """What the patch of one pair costs: blocks in order, bits of the bound, classes of the main dtype."""

    entries: dict[str, list[BlockEntry]]
    bound_bits: float = 0.0
    changed: int = 0


class Tally:
    """The sums of one study. ``specs`` are those after the cast, ``ks`` ascending; ``history``: whether history counts,
    too."""

    def __init__(self, specs: tuple[TensorSpec, ...], ks: Sequence[int], *, history: bool = False) -> None:
        self.specs = specs
        self.ks = tuple(ks)
        self.blocks: list[Block] = cut(specs)
        self.elements = sum(s.elements for s in specs)
        self.layers = [layer_of(s.name) for s in specs]
        self.main_dtype = self._main_dtype()
        self.pairs: list[dict[str, Any]] = []
        self.coded: dict[Pair, CodedPair] = {}
        self.history = HistoryTally() if history else None
        self.exponents = ClassCounts(self.main_dtype)
        self.statistics = {
            k: (CountStatistics(1), CountStatistics(len(LAYERS)), CountStatistics(len(specs))) for k in self.ks
        }
        self.touched = dict.fromkeys(self.ks, 0)
        self._at = {s.name: i for i, s in enumerate(specs)}
        self._layer_index = np.array([LAYERS.index(layer) for layer in self.layers], np.int64)
        self._unfinished: dict[Pair, tuple[npt.NDArray[np.int64], int]] = {}
        self._partial_classes: dict[tuple[Pair, str], ClassCounts] = {}

    def dtypes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for spec in self.specs:
            found[spec.dtype.name] = found.get(spec.dtype.name, 0) + spec.elements
        return found

    def layer_elements(self) -> npt.NDArray[np.int64]:
        result = np.zeros(len(LAYERS), np.int64)
        np.add.at(result, self._layer_index, [s.elements for s in self.specs])
        return result

    def add(self, record: BlockRecord) -> None:
        """Adds what a block's record has found since the last call, and empties it. Blocks must come in order."""
        self._count(record.block, record.counts)
        self.add_coded_blocks(record.block, record.coded_blocks)
        self.add_coded_steps(record.coded_steps)
        if self.history:
            for new, ages in record.ages.items():
                self.history.add_ages(new, ages)
        record.counts, record.coded_blocks, record.ages, record.coded_steps = {}, {}, {}, {}

    def add_coded_steps(self, coded_steps: Mapping[int, CodedStep]) -> None:
        if self.history:
            for new, coded in coded_steps.items():
                self.history.add_coded(new, coded.entries, coded.table)

    def add_coded_blocks(self, block: Block, coded_blocks: Mapping[Pair, CodedBlock]) -> None:
        for pair, coded_block in coded_blocks.items():
            coded = self.coded.setdefault(pair, CodedPair({name: [] for name in CODECS}))
            for name, entry in coded_block.entries.items():
                coded.entries[name].append(entry)
            coded.changed += coded_block.entries[CODECS[0]].changed
            for segment, counts in zip(block.segments, coded_block.classes, strict=True):
                whole = self._partial_classes.pop((pair, segment.spec.name), None)
                if whole is not None:
                    whole.merge(counts)
                    counts = whole
                if segment.stop == segment.spec.elements:
                    coded.bound_bits += sum(counts.bits())
                    if pair.k == self.ks[0] and counts.dtype == self.main_dtype:
                        self.exponents.merge(counts)
                else:
                    self._partial_classes[pair, segment.spec.name] = counts

    def finish_pairs(self) -> None:
        """Adds the pairs to the statistics; call it when all blocks of the states so far were added."""
        for pair in sorted(self._unfinished, key=lambda p: (p.new, p.k)):
            changed, touched = self._unfinished[pair]
            total = int(changed.sum())
            whole, layers, tensors = self.statistics[pair.k]
            whole.add(np.array([total]))
            tensors.add(changed)
            layers.add(np.bincount(self._layer_index, weights=changed, minlength=len(LAYERS)).astype(np.int64))
            self.touched[pair.k] += touched
            sparsity = 1 - total / max(self.elements, 1)
            self.pairs.append(
                {"k": pair.k, "old": pair.new - pair.k, "new": pair.new, "changed": total, "sparsity": sparsity}
            )
        self._unfinished = {}

    def patch_bytes(self, pair: Pair, codec: str) -> int:
        """Bytes of the patch file of a coded pair."""
        return self._file_bytes(self.coded[pair].entries[codec])

    def step_bytes(self, new: int, codec: str) -> int:
        """Bytes of the patch file of a step that was coded with history."""
        assert self.history is not None
        entries = self.history.entries[new][codec]
        used = any(entry.codec_id == HISTORY for entry in entries)
        return self._file_bytes(entries, self.history.names[new] if used else None)

    def _file_bytes(self, entries: Sequence[BlockEntry], history: HistoryName | None = None) -> int:
        header = PatchHeader(*_ROOTS, all_of(self.specs), tuple(entries), history)
        return len(header.to_bytes()) + header.body_bytes

    def _count(self, block: Block, counts: Mapping[Pair, ChangeCount]) -> None:
        for pair, count in counts.items():
            changed, touched = self._unfinished.get(pair) or (np.zeros(len(self.specs), np.int64), 0)
            for segment, n in zip(block.segments, count.changed.tolist(), strict=True):
                changed[self._at[segment.spec.name]] += n
            self._unfinished[pair] = changed, touched + count.touched

    def _main_dtype(self) -> Any:
        found = self.dtypes()
        main = max(found, key=lambda name: found[name])
        return next(s.dtype for s in self.specs if s.dtype.name == main)
