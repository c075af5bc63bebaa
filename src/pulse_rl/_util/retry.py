"""Waits between two polls, and between two attempts of a call that fails."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from .settings import checked_number

R = TypeVar("R")

LONGEST_POLL = 1e6
"""The longest time that callers may set, in seconds."""


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


def retrying(
    call: Callable[[], R],
    passes: Callable[[Exception], bool],
    backoff: Backoff,
    *,
    tries: float = math.inf,
    seconds: float = math.inf,
    failed: Callable[[Exception, float], None] | None = None,
) -> R:
    """Repeat ``call`` after each wait of ``backoff`` until it succeeds; return its result.

    Args:
        call: The call.
        passes: Whether an error may pass. Other errors are raised at once.
        backoff: The waits.
        tries: The maximum number of attempts. Default: no limit.
        seconds: Start no attempt after this time. Default: no limit.
        failed: Called before each wait with the error and the seconds that are left.
    Raises: The last error of ``call``.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception as error:
            tries -= 1
            # The error of the last attempt is the one to report: it is the newest cause.
            left = until - time.monotonic()
            if tries < 1 or left <= 0 or not passes(error):
                raise
            if failed:
                failed(error, left)
        time.sleep(min(backoff.wait(), left))
