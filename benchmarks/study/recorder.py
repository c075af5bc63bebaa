"""Measures a run while it goes: each state against those k before, in the steady part of the run in
full."""

from __future__ import annotations

from typing import Any

from benchmarks.study.settings import KS, Settings
from pulse_rl import State
from pulse_rl.study.record import BlockRecord, Pair
from pulse_rl.study.recurrence import Remembered, steps_to_code
from pulse_rl.study.result import Tally, study_dict
from pulse_rl.study.run import evenly_spaced

_CODED = 2


class Recorder:
    """``study`` covers pairs from the run's ``steady_from`` on; ``density`` has k = 1 for every
    step from 1 on."""

    def __init__(self, settings: Settings, first: State) -> None:
        self.settings = settings
        self.density: list[float] = []
        self._tally = Tally(first.specs, KS, history=True)
        steady = settings.steady_from
        coded = {
            Pair(k, new) for k in KS for new in evenly_spaced(steady + k, settings.steps, _CODED)
        }
        steps = steps_to_code(settings.steps)
        self._records = [BlockRecord(block, KS, coded, steps=steps) for block in self._tally.blocks]
        self._remembered = Remembered(first.specs, dict(enumerate(self._tally.blocks)))
        self._states = 0
        self.add(first)

    def add(self, state: State) -> None:
        """The next state; it is copied."""
        changed = 0
        for index, record in enumerate(self._records):
            record.add(record.block.read(state), self._remembered.now.past(index))
            latest = record.counts.get(Pair(1, self._states))
            changed += int(latest.changed.sum()) if latest else 0
            record.counts = {
                p: c for p, c in record.counts.items() if p.new - p.k >= self.settings.steady_from
            }
            self._tally.add(record)
        self._tally.finish_pairs()
        self._remember()
        if self._states:
            self.density.append(changed / self._tally.elements)
        self._states += 1

    def _remember(self) -> None:
        if self._states and self._tally.history:
            self._tally.history.names[self._states] = self._remembered.now.name
            found = {
                index: r.records for index, r in enumerate(self._records) if r.records is not None
            }
            self._remembered.take(found, self._states)

    def result(self, gradients: list[float]) -> dict[str, Any]:
        """Study of the steady part, and the density of every step. ``gradients`` are densities by
        step."""
        study = study_dict(
            self._tally,
            source=self.settings.name,
            states=[f"step {i}" for i in range(self._states)],
            lr=self.settings.lr,
            gradients=[None, *gradients],
        )
        peak = max(self.density)
        return {
            "study": study,
            "density": self.density,
            "peak": peak,
            "peak_step": self.density.index(peak) + 1,
        }
