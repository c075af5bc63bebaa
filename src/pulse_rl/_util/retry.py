"""Waits between two polls, and between two tries of what fails."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from .settings import checked_number

R = TypeVar("R")

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


def retrying(
    call: Callable[[], R],
    passes: Callable[[Exception], bool],
    backoff: Backoff,
    *,
    tries: float = math.inf,
    seconds: float = math.inf,
    failed: Callable[[Exception, float], None] | None = None,
) -> R:
    """The result of ``call``, which is repeated after each wait of ``backoff`` while it fails.

    Args:
        call: What is tried.
        passes: Whether an error may pass. Others are raised at once.
        backoff: The waits.
        tries: How often it is called at most.
        seconds: For how long it is repeated.
        failed: Called before each wait with the error and the seconds that are left.
    Raises: The last error of ``call``.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception as error:
            tries -= 1
            left = until - time.monotonic()
            if tries < 1 or left <= 0 or not passes(error):
                raise
            if failed:
                failed(error, left)
        time.sleep(min(backoff.wait(), left))
