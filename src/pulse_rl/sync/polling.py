"""When a stream is looked at: the pause between two looks, and which of many streams is next."""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from collections.abc import Collection
from itertools import count, islice

from ..errors import StoreError
from ..store import Store
from ..store.http import MAX_WAIT_SECONDS, MAX_WAITED
from ..store.wrappers import notifier_of

LONGEST_POLL = 1e6
"""Of what callers give, in seconds."""


def jittered(seconds: float) -> float:
    """``seconds``, a quarter more or less: workers that were started together do not ask together
    for ever."""
    return seconds * random.uniform(0.75, 1.25)


class Turn:
    """One stream's place in a `Schedule`."""

    __slots__ = ("again", "ended", "entry", "taken")

    def __init__(self) -> None:
        self.entry = -1
        self.taken = False
        self.again = False
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
        """``turn`` is due in ``seconds``, whatever was said before. One that a thread has taken is
        due again as soon as it is given back."""
        with self._changed:
            turn.again = turn.taken
            if not turn.taken:
                self._push(turn, seconds)

    def give_back(self, turn: Turn, seconds: float, *, at_once: bool = True) -> None:
        """``turn``, which was taken, is due in ``seconds``; where it was put meanwhile, and
        ``at_once``, now."""
        with self._changed:
            turn.taken = False
            self._push(turn, 0.0 if turn.again and at_once else seconds)
            turn.again = False

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


class PollTimer:
    """Pauses between looks at streams of ``store``: until one has something new where the store
    tells, for at most 25 seconds or `max_seconds`; else for the time of a poll."""

    def __init__(self, store: Store) -> None:
        self._notifier = notifier_of(store)
        self.max_seconds = math.inf
        self._told: set[str] = set()

    @property
    def waits(self) -> bool:
        """Whether the store tells."""
        return self._notifier is not None

    def wait(
        self, after: Collection[str], poll_seconds: float, max_seconds: float = math.inf
    ) -> None:
        """``after``: the names behind which each stream's new versions are
        (`Stream.last_accepted`). What turns out to be nothing new, whatever the store says, is
        followed by pauses of ``poll_seconds``, so that no store makes a worker look without end.
        Ends within ``max_seconds``."""
        began = time.monotonic()
        self._told.intersection_update(after)
        waited_for = list(islice((name for name in after if name not in self._told), MAX_WAITED))
        seconds = min(self.max_seconds, MAX_WAIT_SECONDS, max_seconds)
        if len(waited_for) < len(after):  # the others are polled
            seconds = min(seconds, poll_seconds)
        if self._notifier is not None and waited_for and seconds > 0:
            try:
                folders = self._notifier.wait_for_new(waited_for, seconds)
            except StoreError:
                folders = set()
            told = {name for name in waited_for if name.rpartition("/")[0] in folders}
            if told:
                self._told |= told
                return
        passed = time.monotonic() - began
        time.sleep(max(0.0, min(jittered(poll_seconds), max_seconds) - passed))
