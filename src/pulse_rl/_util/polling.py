"""Waiting: the pause between two looks at a stream, and between tries that fail."""

from __future__ import annotations

import math
import random
import time

from .settings import checked_number

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
