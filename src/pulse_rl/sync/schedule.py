"""Which of many streams is looked at next."""

from __future__ import annotations

import heapq
import threading
import time
from itertools import count


class Turn:
    """One stream's place in a `Schedule`."""

    __slots__ = ("again", "ended", "entry", "taken")

    def __init__(self) -> None:
        self.entry = -1
        self.taken = False
        self.again = False
        self.ended = False


class Schedule:
    """Turns that become due, handed to the threads that ask: the one that has been due for longest first."""

    def __init__(self) -> None:
        self._later: list[tuple[float, int, Turn]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, turn: Turn, seconds: float = 0.0) -> None:
        """``turn`` is due in ``seconds``, whatever was said before. One that a thread has taken is due again as soon as
        it is given back."""
        with self._changed:
            turn.again = turn.taken
            if not turn.taken:
                self._push(turn, seconds)

    def give_back(self, turn: Turn, seconds: float, *, at_once: bool = True) -> None:
        """``turn``, which was taken, is due in ``seconds``; where it was put meanwhile, and ``at_once``, now."""
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
