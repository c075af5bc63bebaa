"""The gate of a scattered round's sums (docs/loco.md, sections 4.4 and 4.5)."""

from __future__ import annotations

import numpy as np

from .._native import add_entries
from ..state.rounding import Rounding
from .gate import Floats, is_finite, scaled_open_entries
from .shares import Unit
from .wire import Entries, Wire


class SumsGate:
    """Lets through, of the sums of one round that one trainer makes, those whose mean would change the next forward
    pass, and keeps the rest, which is to go on in that trainer's residual."""

    def __init__(self, theta: Floats, rounding: Rounding, scale: np.float32, wire: Wire) -> None:
        self.wire = wire
        self._theta, self._rounding, self._scale = theta, rounding, scale
        self._withheld: list[tuple[Unit, Entries]] = []

    def pass_on(self, unit: Unit, sums: Entries, trainers: int) -> Entries:
        """The unit's entries to send, of sums over so many ``trainers``, rounded to the wire dtype. Sums that are not
        finite all pass: no message takes them. Units may be passed on in threads, each once."""
        places, values = sums
        if not len(places) or not is_finite(values).all():
            return sums
        mean = values / np.float32(trainers)
        kept = scaled_open_entries(unit.of(self._theta)[places], mean, self._scale, self._rounding)
        sent, rest = self.wire.round(values[kept]), values.copy()
        rest[kept] -= sent
        left = np.flatnonzero(rest)
        self._withheld.append((unit, (places[left], rest[left])))
        return places[kept], sent

    def add_withheld(self, residual: Floats) -> None:
        """Adds what was kept to the trainer's flat ``residual``, once."""
        withheld, self._withheld = self._withheld, []
        for unit, (places, values) in withheld:
            add_entries(unit.of(residual), places, values)
