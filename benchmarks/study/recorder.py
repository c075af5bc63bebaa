"""Measures a run while it goes: each state against those k before, in the steady part of the run in
full."""

from __future__ import annotations

from typing import Any

from benchmarks.study.research import Research
from benchmarks.study.settings import KS, Settings
from pulse_rl import State
from pulse_rl.study.run import evenly_spaced
from pulse_rl.study.tally import BlockRecord, Pair, Tally, study_dict

_CODED = 2


class Recorder:
    """``study`` covers pairs from the run's ``steady_from`` on; ``density`` has k = 1 for every
    step from 1 on."""

    def __init__(self, settings: Settings, first: State) -> None:
        self.settings = settings
        self.density: list[float] = []
        self._tally = Tally(first.specs, KS)
        steady = settings.steady_from
        coded = {
            Pair(k, new) for k in KS for new in evenly_spaced(steady + k, settings.steps, _CODED)
        }
        self._records = [BlockRecord(block, KS, coded) for block in self._tally.blocks]
        self._research = Research(first, coded, settings.steps)
        self._states = 0
        self.add(first)

    def add(self, state: State) -> None:
        """The next state; it is copied."""
        changed = 0
        for record in self._records:
            record.add(record.block.read(state))
            latest = record.counts.get(Pair(1, self._states))
            changed += int(latest.changed.sum()) if latest else 0
            record.counts = {
                p: c for p, c in record.counts.items() if p.new - p.k >= self.settings.steady_from
            }
            self._tally.add(record)
        self._tally.finish_pairs()
        self._research.add(state)
        if self._states:
            self.density.append(changed / self._tally.elements)
        self._states += 1

    def result(self, gradients: list[float]) -> dict[str, Any]:
        """Study of the steady part, and the density of every step. ``gradients`` are densities by
        step."""
        study = study_dict(
            self._tally,
            source=self.settings.name,
            states=[f"step {i}" for i in range(self._states)],
            gradients=[None, *gradients],
        )
        self._research.add_to(study, self.settings.lr)
        peak = max(self.density)
        return {
            "study": study,
            "density": self.density,
            "peak": peak,
            "peak_step": self.density.index(peak) + 1,
        }
