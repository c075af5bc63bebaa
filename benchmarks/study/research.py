"""What the library's study leaves out: the order-0 bound and the density by exponent of some pairs,
and what history knows of the steps from one state to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from hashlib import sha256
from typing import Any

from benchmarks.study.recurrence import (
    BlockRecurrence,
    HistoryTally,
    Remembered,
    StateStep,
    first_step,
    steps_to_code,
)
from benchmarks.study.theory import ClassCounts, exponent_rows
from pulse_rl import State
from pulse_rl.codec import HISTORY, encode_block
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.build import entry_of
from pulse_rl.patch.header import PatchHeader, all_of
from pulse_rl.patch.history import records_of
from pulse_rl.state import bits
from pulse_rl.state.tensors import DType
from pulse_rl.study.tally import Pair

# Stand for the roots of a patch header, whose size they do not change.
_ROOTS = sha256(b"old").hexdigest(), sha256(b"new").hexdigest()


class Research:
    """Takes the states of a run, the first one and ``last`` more, and adds to their study the keys
    ``history`` and ``exponents``, and ``entropy_bound`` to the rows of the ``coded`` pairs."""

    def __init__(self, first: State, coded: Collection[Pair], last: int) -> None:
        self._specs, self._blocks = first.specs, cut(first.specs)
        self._coded, self._last = coded, last
        self._kept: dict[int, State] = {}
        self._states = 0
        # The bound, by k, and the classes of the smallest k in the dtype of most elements.
        self._bits, self._changed = Counter[int](), Counter[int]()
        self._exponents = ClassCounts(_main_dtype(first))
        # History: elements of more than 4 bytes have none.
        self._steps = steps_to_code(last) if last > 1 else set()
        self._recurrences = {
            index: BlockRecurrence(block.dtype, block.elements)
            for index, block in enumerate(self._blocks)
            if block.dtype.width <= 4
        }
        self._remembered = Remembered(first.specs)
        self._tally = HistoryTally()

    def add(self, state: State) -> None:
        """Take the next state; it is copied where a later one is compared with it."""
        number, state = self._states, state.copy()
        if number:
            self._add_step(number, self._kept[number - 1], state)
        for pair in self._coded:
            if pair.new == number:
                self._add_bound(pair, self._kept[pair.new - pair.k], state)
        needed = {pair.new - pair.k for pair in self._coded if pair.new > number}
        self._kept = {n: kept for n, kept in self._kept.items() if n in needed} | {number: state}
        self._states += 1

    def add_to(self, study: dict[str, Any], lr: float | None = None) -> None:
        """Add what was found to ``study``; ``lr`` adds the densities that theory predicts."""
        for row in study["rows"]:
            changed = self._changed[row["k"]]
            row["entropy_bound"] = self._bits[row["k"]] / 8 / changed if changed else None
        study["exponents"] = exponent_rows(self._exponents, lr)
        study["history"] = self._history() if self._states > 2 else None

    def _add_bound(self, pair: Pair, old: State, new: State) -> None:
        smallest = min(coded.k for coded in self._coded)
        for spec in self._specs:
            counts = ClassCounts(spec.dtype)
            counts.add(old.read(spec.name), new.read(spec.name))
            self._bits[pair.k] += sum(counts.bits())
            self._changed[pair.k] += int(counts.changed.sum())
            if pair.k == smallest and counts.dtype == self._exponents.dtype:
                self._exponents.merge(counts)

    def _add_step(self, number: int, old: State, new: State) -> None:
        history, records = self._remembered.now, {}
        self._tally.names[number] = history.name
        for index, block in enumerate(self._blocks):
            before, after = block.read(old), block.read(new)
            if recurrence := self._recurrences.get(index):
                positions = bits.differing(before, after)
                step = StateStep(
                    positions, bits.take(before, positions), bits.take(after, positions)
                )
                self._tally.add_ages(number, recurrence.add(step))
                found = records_of(block.dtype, *step)
                if found is not None:
                    records[index] = found
            if number in self._steps:
                entries = {
                    name: entry_of(encode_block(before, after, block.layout._replace(past=past)))
                    for name, past in (("history", history.past(index)), ("auto", ()))
                }
                table = recurrence.table(before) if recurrence else None
                self._tally.add_coded(number, entries, table)
        self._remembered.take(records, number)

    def _history(self) -> dict[str, Any]:
        tally, first = self._tally, first_step(self._last)
        counted, sums = tally.changed(), tally.bits()
        found = {
            "first": first,
            **tally.recurrence(first),
            "coded_steps": len(tally.entries),
        }
        # Bits a change by class, and their sums in bytes.
        for at, suffix in enumerate(("", "_with_history")):
            for name, pair in sums._asdict().items():
                found[f"{name}_bits{suffix}"] = pair[at] / counted if counted else None
            bound = sum(pair[at] for pair in sums) / 8
            found[f"entropy_bound{suffix}"] = bound / counted if counted else None
        # Bytes a change of whole patch files.
        for codec in ("history", "auto"):
            nbytes = sum(self._file_bytes(number, codec) for number in tally.entries)
            entries = [entry for step in tally.entries.values() for entry in step[codec]]
            changed = sum(entry.changed for entry in entries)
            found[f"bytes_per_changed_{codec}"] = nbytes / changed if changed else None
        return found

    def _file_bytes(self, number: int, codec: str) -> int:
        entries = self._tally.entries[number][codec]
        used = any(entry.codec_id == HISTORY for entry in entries)
        name = self._tally.names[number] if used else None
        header = PatchHeader(*_ROOTS, all_of(self._specs), tuple(entries), name)
        return len(header.to_bytes()) + header.body_bytes


def _main_dtype(state: State) -> DType:
    elements = Counter[DType]()
    for spec in state.specs:
        elements[spec.dtype] += spec.elements
    return elements.most_common(1)[0][0]
