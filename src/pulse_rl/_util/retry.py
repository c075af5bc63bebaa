"""Waits between two polls, and between two attempts of a call that fails (docs/stores.md)."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from ..errors import AlreadyExists, NotFound, PulseError, StoreUnavailable
from .settings import checked_number
from .threads import checkpoint

T = TypeVar("T")
_log = logging.getLogger("pulse_rl")
#: The default of ``retry_timeout``, in seconds.
RETRY_SECONDS = 180.0
#: The same for a reader of several stores: it asks the next one instead.
BRIEF_SECONDS = 5.0
# Until a store has answered once it is more likely to be misconfigured than away.
_FIRST_SECONDS = 5.0
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 4.0
# A sleep is cut into pieces, so that an operation that is asked to stop does so soon.
_PIECE_SECONDS = 0.25
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


class Try(NamedTuple):
    """One of the tries that `retrying` yields. The last one begins before ``until``."""

    until: float

    @property
    def left(self) -> float:
        """The seconds for which there are more tries; 0 for the last one."""
        return max(0.0, self.until - time.monotonic())


def retrying(first: float, longest: float, *, seconds: float) -> Iterator[Try]:
    """Yield the tries of what may fail, and sleep between them.

    The caller raises what must not be tried again, and what fails when no time is `Try.left`.

    Args:
        first: The seconds after the first try, a quarter more or less; later waits are longer.
        longest: The longest wait in seconds.
        seconds: The seconds after which there is no other try.
    """
    backoff, made = Backoff(first, longest), Try(time.monotonic() + seconds)
    while True:
        yield made
        wake = time.monotonic() + min(backoff.wait(), made.left)
        while (rest := wake - time.monotonic()) > 0:
            checkpoint()
            time.sleep(min(rest, _PIECE_SECONDS))


class Outage:
    """Logs one line when something begins to fail, and one when it works again.

    Args:
        what: The thing that fails, for example the address of a store.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = None

    def failed(self, error: PulseError) -> None:
        if self._since is None:
            self._since = time.monotonic()
            _log.warning("%s; trying again (%s)", error, self._what)

    def ended(self) -> None:
        if self._since is not None:
            seconds, self._since = time.monotonic() - self._since, None
            _log.warning("%s works again after %.0f s", self._what, seconds)


class Patience:
    """Repeats the calls of one store for as long as they fail in a way that may pass.

    Args:
        store: The store's address, for the log.
        seconds: The time for which a call is repeated. Until the store has answered once it is 5 s
            at most.
    Raises:
        InputError: ``seconds`` is out of range.
    """

    def __init__(self, store: str, seconds: float) -> None:
        self._store = store
        self._seconds = checked_number("retry_timeout", seconds, maximum=LONGEST_POLL)
        self._answered = False

    def __call__(self, work: Callable[[], T]) -> T:
        """The result of ``work``. Raises the StoreUnavailable of its last try."""
        seconds = self._seconds if self._answered else min(self._seconds, _FIRST_SECONDS)
        outage = Outage(self._store)
        for attempt in retrying(_FIRST_WAIT, _LONGEST_WAIT, seconds=seconds):
            checkpoint()
            try:
                found = work()
            except StoreUnavailable as error:
                if not attempt.left:
                    raise
                if self._answered:
                    outage.failed(error)
                continue
            except (NotFound, AlreadyExists):
                self._answered = True
                outage.ended()
                raise
            self._answered = True
            outage.ended()
            return found
        raise AssertionError("retrying ends with a try that returns or raises")
