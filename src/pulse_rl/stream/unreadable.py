"""Objects that cannot be read or trusted: each is tried a few times and then passed over
(docs/protocol.md, section 2).

Junk in a store must not cost every look what it cost the first ones, and a good object that was
damaged on its way must not be given up at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ..errors import FormatError, NotFound, PulseError, StoreUnavailable, Untrusted
from ..store.base import ObjectInfo

UNREADABLE = (NotFound, FormatError, Untrusted)
"""Errors for which a reader passes over an object. With others, such as an unavailable store, it
cannot know."""

T = TypeVar("T")
_TRIES = 3
_LOOKS_BETWEEN_LATER_TRIES = 64
_MAX_OBJECTS = 256
_MAX_BYTES = 32 << 20
_MAX_SECONDS = 600.0
_READS = 3


def read_again(get: Callable[[], bytes], parse: Callable[[bytes], T]) -> T:
    """What ``parse`` makes of an object, which is fetched up to three times before it is held to be
    damaged: networks corrupt bytes more often than disks do. The same bytes twice are what is
    stored. Raises what ``parse`` raises."""
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


class _Refusal(NamedTuple):
    """``info`` is the object as it was listed when it was refused, for the ``tries``-th time."""

    info: ObjectInfo
    tries: int


class UnreadableObjects:
    """What was refused among numbered objects. Each is tried at three looks and then passed over
    until it is written again, but for one look in 64. ``on_refused`` is told of each object the
    first time that it is refused.

    ``error`` is why the first number of the last look was refused, where that is known.
    """

    def __init__(self, on_refused: Callable[[int, PulseError], None] | None = None) -> None:
        self.error: PulseError | None = None
        self._on_refused = on_refused
        self._refused: dict[int, _Refusal] = {}  # the one that was tried longest ago first
        self._looks = 0

    def first(
        self,
        numbers: Sequence[int],
        listed: Mapping[int, ObjectInfo],
        read: Callable[[int], T],
        *,
        bounded: bool,
    ) -> T | None:
        """What ``read`` returns for the first of the ``numbers``, in the order of preference, for
        which it does not raise an `UNREADABLE`; None if there is none. ``listed`` are their
        objects.

        A ``bounded`` look ends after 256 objects or 32 MiB, and may miss what lies behind them; the
        next ones go on. Any other tries all that were never tried, up to the first that can be
        read. Raises StoreUnavailable where that takes more than ten minutes: the next look goes on.
        """
        self._looks += 1
        # What is gone, or was written again since, is not what was refused.
        self._refused = {n: was for n, was in self._refused.items() if listed.get(n) == was.info}
        if not numbers or numbers[0] not in self._refused:
            self.error = None
        budget = _Budget()
        rare = self._looks % _LOOKS_BETWEEN_LATER_TRIES == 0
        again = [number for number, was in self._refused.items() if was.tries < _TRIES or rare]

        def tried(number: int) -> T | None:
            budget.draw(listed[number].nbytes)
            try:
                found = read(number)
            except UNREADABLE as error:
                self._refuse(number, listed[number], error, is_first=number == numbers[0])
                return None
            self._refused.pop(number, None)
            return found

        found, place = None, len(numbers)
        for at, number in enumerate(numbers):
            if number not in self._refused:
                if bounded and budget.spent:
                    place = at
                    break
                if budget.late:
                    raise StoreUnavailable(
                        f"{len(numbers) - at} objects are left to be looked at after "
                        f"{_MAX_SECONDS:.0f} seconds",
                        hint="Somebody leaves junk in the store. Call again: the next look goes "
                        "on.",
                    )
                if (found := tried(number)) is not None:
                    place = at
                    break
        # What was refused before is tried again, whatever lies below it was found: it may have been
        # damaged on its way.
        places = {number: at for at, number in enumerate(numbers[:place])}
        for number in again:
            if budget.spent:
                break
            if (
                number in places
                and places[number] < place
                and (better := tried(number)) is not None
            ):
                found, place = better, places[number]
        return found

    def _refuse(self, number: int, info: ObjectInfo, error: PulseError, *, is_first: bool) -> None:
        last = self._refused.pop(number, None)
        self._refused[number] = _Refusal(info, last.tries + 1 if last else 1)
        if is_first:
            self.error = error
        if last is None and self._on_refused:
            self._on_refused(number, error)


class _Budget:
    """What one look may read."""

    def __init__(self) -> None:
        self._objects = _MAX_OBJECTS
        self._nbytes = _MAX_BYTES
        self._ends = time.monotonic() + _MAX_SECONDS

    @property
    def spent(self) -> bool:
        return self._objects <= 0 or self._nbytes <= 0

    @property
    def late(self) -> bool:
        return time.monotonic() > self._ends

    def draw(self, nbytes: int) -> None:
        self._objects -= 1
        self._nbytes -= nbytes
