"""The density-drift warning: something about the training changed, or the workers' link will soon be too narrow."""

from __future__ import annotations

from collections import deque
from statistics import median

from ..events import DensityDrift, Event, Listener, Published

WINDOW = 100
"""Versions over which the running median is taken."""
QUIET = 50
"""Versions without a judgement: density peaks at steps 10 to 40, the end of warm-up, at 2 to 3 times what follows."""
FACTOR = 3.0
"""The band: from a third of the median to three times the median."""
IN_A_ROW = 3
"""Versions outside the band before it counts; a single step without a reward to learn from is no drift."""


class DriftWatch:
    """Hands events on to ``listener``, and a `DensityDrift` when density has left its band.

    The rule, per stream: three versions in a row with a density below a third of the running median, or above three
    times the median. The median is that of the last 100 densities inside the band. The first 50 versions are not
    judged. After a drift the watch starts anew, with what follows as the usual, so that each drift is told once.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._bands: dict[str, _Band] = {}

    def __call__(self, event: Event) -> None:
        self._listener(event)
        if isinstance(event, Published) and event.density is not None:
            band = self._bands.setdefault(event.stream, _Band())
            if left := band.leaves(event.density):
                self._listener(DensityDrift(event.stream, event.version, event.density, *left))


class _Band:
    """What is usual for the density of one stream."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._outside = 0

    def leaves(self, density: float) -> tuple[float, float] | None:
        """The band, from low to high, if ``density`` is the one that makes it a drift."""
        if len(self._usual) < QUIET:
            self._usual.append(density)
            return None
        usual = median(self._usual)
        low, high = usual / FACTOR, usual * FACTOR
        if low <= density <= high:
            self._usual.append(density)
            self._outside = 0
            return None
        self._outside += 1
        if self._outside < IN_A_ROW:
            return None
        self._usual.clear()
        self._outside = 0
        return low, high
