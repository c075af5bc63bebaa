"""Waits between two polls, and between two attempts of a call that fails."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from itertools import count

from .settings import checked_number

#: The longest time that callers may set, in seconds.
LONGEST_POLL = 1e6


def jittered(seconds: float) -> float:
    """``seconds``, a quarter more or less at random: workers that start together must not poll
    together."""
    return seconds * random.uniform(0.75, 1.25)


def pause(poll_seconds: float, max_seconds: float = math.inf) -> None:
    """Sleep between two polls: ``poll_seconds``, a quarter more or less, but at most
    ``max_seconds``.

    Raises InputError.
    """
    checked_number("poll_seconds", poll_seconds, maximum=LONGEST_POLL)
    checked_number("max_seconds", max_seconds)
    time.sleep(min(jittered(poll_seconds), max_seconds))


class Backoff:
    """Waits between failing attempts: ``first`` seconds, then twice as long each time.

    No wait exceeds ``longest``. Each is a quarter longer or shorter at random.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def wait(self) -> float:
        """The seconds to wait before the next attempt."""
        seconds = min(self._next, self._longest)
        self._next = 2 * self._next
        return jittered(seconds)

    def reset(self) -> None:
        """Start over after a successful attempt."""
        self._next = self._first


class Try:
    """One of the tries that `retrying` yields."""

    def __init__(self, until: float, *, is_last: bool) -> None:
        self._until, self.is_last = until, is_last

    @property
    def left(self) -> float:
        """The seconds for which there are more tries; 0 for the last one."""
        return 0.0 if self.is_last else max(0.0, self._until - time.monotonic())


def retrying(
    first: float, longest: float, *, tries: int | None = None, seconds: float = math.inf
) -> Iterator[Try]:
    """Yield the tries of what may fail, and sleep between them.

    The caller raises what must not be tried again, and what fails when no time is `Try.left`.

    Args:
        first: The seconds after the first try, a quarter more or less; later waits are longer.
        longest: The longest wait in seconds.
        tries: The maximum number of tries. Default: no limit.
        seconds: The seconds after which there is no other try.
    """
    backoff, until = Backoff(first, longest), time.monotonic() + seconds
    for number in count(1):
        made = Try(until, is_last=number == tries)
        yield made
        if made.is_last:
            return
        time.sleep(min(backoff.wait(), made.left))
