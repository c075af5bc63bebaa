"""Objects that could not be read or trusted, and when to look at each of them again.

Junk in a store must not cost every poll what it cost the first ones, and a good object that was damaged on its way must
not be given up: each is tried again at the next three looks, then after 2, 4, 8 … further ones.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import FormatError, NotFound, PulseError, Untrusted

UNREADABLE = (NotFound, FormatError, Untrusted)
"""Errors for which a reader passes over an object. With others, such as an unavailable store, it cannot know."""

_LEAST_COST = 1 << 17
_BUDGET = 32 << 20
_MOST_DOUBTS = 1 << 14
_MOST_PATIENCE = 1 << 10


class _Doubt(NamedTuple):
    failures: int
    due: int
    error: PulseError


class Doubts:
    """What was refused among numbered objects. Each `look` may read 32 MiB, and no more than 256 objects."""

    def __init__(self) -> None:
        self._doubts: dict[int, _Doubt] = {}
        self._looks = 0
        self._budget = 0

    def look(self) -> None:
        """Begins another look."""
        self._looks += 1
        self._budget = _BUDGET

    def order(self, numbers: list[int]) -> list[int]:
        """The ``numbers`` that are to be tried: first those without a doubt, then those whose time has come."""
        doubted = [n for n in numbers if n in self._doubts and self._doubts[n].due <= self._looks]
        return [n for n in numbers if n not in self._doubts] + doubted

    def spend(self, nbytes: int) -> bool:
        """Whether this look may still read an object of ``nbytes``."""
        self._budget -= max(nbytes, _LEAST_COST)
        return self._budget >= 0

    def add(self, number: int, error: PulseError) -> bool:
        """Takes note that an object was refused. Whether that is new."""
        last = self._doubts.pop(number, None)
        failures = last.failures + 1 if last else 1
        while len(self._doubts) >= _MOST_DOUBTS:
            del self._doubts[next(iter(self._doubts))]
        self._doubts[number] = _Doubt(failures, self._looks + min(1 << max(failures - 3, 0), _MOST_PATIENCE), error)
        return last is None

    def clear(self, number: int) -> None:
        """The object was read after all."""
        self._doubts.pop(number, None)

    def error(self, numbers: list[int]) -> PulseError | None:
        """Why the first of the ``numbers`` that is doubted was refused."""
        return next((self._doubts[n].error for n in numbers if n in self._doubts), None)
