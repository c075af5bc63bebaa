"""Warns of density drift: training has changed, and the network to the workers may soon be too slow."""

from __future__ import annotations

from collections import deque
from statistics import median

from ..events import DensityDrift, Event, Listener, Published

WINDOW = 100
"""Versions over which the running median is taken."""
QUIET = 50
"""Versions that are not judged: density peaks at steps 10 to 40, the end of warm-up, at 2 to 3 times what follows."""
FACTOR = 3.0
"""The band: from a third of the median to three times the median."""
IN_A_ROW = 3
"""Versions outside the band before it counts; a single step without a reward to learn from is not a drift."""


class DriftWatch:
    """Passes events on to ``listener``, and adds a `DensityDrift` when density has left its band.

    The rule, per stream: three versions in a row with a density below a third of the running median, or above three
    times the median. The median is that of the last 100 densities inside the band. The first 50 versions are not
    judged, and versions without a patch never are. After a drift the watch starts over, so that each drift is reported
    once.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._bands: dict[str, _Band] = {}

    def __call__(self, event: Event) -> None:
        self._listener(event)
        if isinstance(event, Published) and event.changed is not None:
            band = self._bands.setdefault(event.stream, _Band())
            if left := band.leaves(event.density):
                self._listener(DensityDrift(event.stream, event.version, event.density, *left))


class _Band:
    """The band of usual densities of one stream."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._outside = 0

    def leaves(self, density: float) -> tuple[float, float] | None:
        """The band, from low to high, if ``density`` is the one that makes it a drift."""
        if len(self._window) < QUIET:
            self._window.append(density)
            return None
        middle = median(self._window)
        low, high = middle / FACTOR, middle * FACTOR
        if low <= density <= high:
            self._window.append(density)
            self._outside = 0
            return None
        self._outside += 1
        if self._outside < IN_A_ROW:
            return None
        self._window.clear()
        self._outside = 0
        return low, high
