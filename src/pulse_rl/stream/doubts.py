"""Objects that could not be read or trusted, and when to look at each of them again.

Junk in a store must not cost every poll what it cost the first ones, and a good object that was damaged on its way must
not be given up: each is tried again at the next three looks, then after 2, 4, 8 … further ones. Where there are very
many, each waits for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ..errors import FormatError, NotFound, PulseError, Untrusted

UNREADABLE = (NotFound, FormatError, Untrusted)
"""Errors for which a reader passes over an object. With others, such as an unavailable store, it cannot know."""

T = TypeVar("T")
_LEAST_COST = 1 << 17
_BUDGET = 32 << 20
_MOST_DOUBTS = 1 << 14
_MOST_PATIENCE = 1 << 10
_RETRIES = 32
_READS = 3


def read_again(get: Callable[[], bytes], parse: Callable[[bytes], T]) -> T:
    """What ``parse`` makes of an object, which is fetched up to three times before it is held to be damaged: networks
    corrupt bytes more often than disks do. The same bytes twice are what is stored. Raises what ``parse`` raises."""
    last: bytes | None = None
    for again in reversed(range(_READS)):
        data = get()
        try:
            return parse(data)
        except (FormatError, Untrusted):
            if data == last or not again:
                raise
        last = data
    raise AssertionError


class _Doubt(NamedTuple):
    failures: int
    due: int
    error: PulseError


class UnreadableObjects:
    """What was refused among numbered objects. A look reads at most 32 MiB, and no more than 256 objects.

    ``on_refused`` is told of each object the first time that it is refused.
    """

    def __init__(self, on_refused: Callable[[int, PulseError], None] | None = None) -> None:
        self._on_refused = on_refused
        self._doubts: dict[int, _Doubt] = {}
        self._looks = 0
        self._budget = 0

    def first(self, numbers: Sequence[int], nbytes: Callable[[int], int], read: Callable[[int], T]) -> T | None:
        """What ``read`` returns for the first of the ``numbers``, in the order of preference, for which it does not
        raise an `UNREADABLE`; None if there is none, or none within the bounds of a look. ``nbytes`` are the lengths of
        the objects."""
        self._looks += 1
        self._budget = _BUDGET
        found, at = None, len(numbers)
        for place, number in enumerate(numbers):
            if number not in self._doubts:
                found = self._try(number, nbytes(number), read)
                if found is not None or self._budget < 0:
                    at = place
                    break
        for number in numbers[:at]:
            if number in self._doubts and self._doubts[number].due <= self._looks:
                better = self._try(number, nbytes(number), read)
                if better is not None or self._budget < 0:
                    return better or found
        return found

    def error(self, numbers: Sequence[int]) -> PulseError | None:
        """Why the first of the ``numbers`` that is doubted was refused."""
        return next((self._doubts[n].error for n in numbers if n in self._doubts), None)

    def _try(self, number: int, nbytes: int, read: Callable[[int], T]) -> T | None:
        self._budget -= max(nbytes, _LEAST_COST)
        if self._budget < 0:
            return None
        try:
            found = read(number)
        except UNREADABLE as error:
            self._add(number, error)
            return None
        self._doubts.pop(number, None)
        return found

    def _add(self, number: int, error: PulseError) -> None:
        last = self._doubts.pop(number, None)
        failures = last.failures + 1 if last else 1
        while len(self._doubts) >= _MOST_DOUBTS:
            del self._doubts[next(iter(self._doubts))]
        patience = max(min(1 << max(failures - 3, 0), _MOST_PATIENCE), len(self._doubts) // _RETRIES)
        self._doubts[number] = _Doubt(failures, self._looks + patience, error)
        if last is None and self._on_refused:
            self._on_refused(number, error)
