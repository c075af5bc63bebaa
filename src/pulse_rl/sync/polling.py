"""When a stream is looked at: the pause between two looks, and which of many streams is next."""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from itertools import count

from .._util.settings import checked_number

LONGEST_POLL = 1e6
"""Of what callers give, in seconds."""


def jittered(seconds: float) -> float:
    """``seconds``, a quarter more or less: workers that were started together do not ask together
    for ever."""
    return seconds * random.uniform(0.75, 1.25)


def pause(poll_seconds: float, max_seconds: float = math.inf) -> None:
    """Sleeps between two polls: for ``poll_seconds``, a quarter more or less, and at most
    ``max_seconds``. Raises InputError."""
    checked_number("poll_seconds", poll_seconds, maximum=LONGEST_POLL)
    checked_number("max_seconds", max_seconds)
    time.sleep(min(jittered(poll_seconds), max_seconds))


class Backoff:
    """The waits between tries that fail: ``first`` seconds, then twice as long each time, up to
    ``longest``; each a quarter more or less."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def wait(self) -> float:
        """The seconds to wait before the next try."""
        seconds = min(self._next, self._longest)
        self._next = 2 * self._next
        return jittered(seconds)

    def reset(self) -> None:
        """A try has succeeded."""
        self._next = self._first


class Turn:
    """One stream's place in a `Schedule`."""

    __slots__ = ("ended", "entry", "taken")

    def __init__(self) -> None:
        self.entry = -1
        self.taken = False
        self.ended = False


class Schedule:
    """Turns that become due, handed to the threads that ask: the one that has been due for longest
    first."""

    def __init__(self) -> None:
        self._later: list[tuple[float, int, Turn]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, turn: Turn, seconds: float = 0.0) -> None:
        """Makes ``turn``, which is new or was taken, due in ``seconds``."""
        with self._changed:
            turn.taken = False
            self._push(turn, seconds)

    def end(self, turn: Turn) -> None:
        """``turn`` is never handed out again."""
        with self._changed:
            turn.ended = True
            turn.entry = -1

    def take(self) -> Turn | None:
        """Waits for the next turn; None once the schedule is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                while self._later and self._later[0][0] <= now:
                    _, entry, turn = heapq.heappop(self._later)
                    if entry == turn.entry:
                        turn.entry, turn.taken = -1, True
                        return turn
                self._changed.wait(self._later[0][0] - now if self._later else None)
            return None

    def _push(self, turn: Turn, seconds: float) -> None:
        if not turn.ended:
            turn.entry = next(self._numbers)
            heapq.heappush(self._later, (time.monotonic() + seconds, turn.entry, turn))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
