"""The pause between two looks for new versions."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from itertools import islice

from .._util.timing import jittered
from ..errors import StoreError
from ..store import Store
from ..store.http import MAX_WAITED
from ..store.notifier import notifier_of

LONGEST_POLL = 1e6
"""Of what callers give, in seconds."""

_LONGEST_WAIT = 25.0


class Pause:
    """Pauses between looks at streams of ``store``: until one has something new where the store tells, for at most 25
    seconds or ``most_seconds``; else for the time of a poll."""

    def __init__(self, store: Store, most_seconds: float = math.inf) -> None:
        self._notifier = notifier_of(store)
        self._most = min(most_seconds, _LONGEST_WAIT)
        self._told: set[str] = set()

    @property
    def waits(self) -> bool:
        """Whether the store tells."""
        return self._notifier is not None

    def take(self, after: Collection[str], poll_seconds: float, most_seconds: float = math.inf) -> None:
        """``after``: the names behind which each stream's new versions are (`Stream.last_accepted`). What turns out to
        be nothing new, whatever the store says, is followed by pauses of ``poll_seconds``, so that no store makes a
        worker look without end. Ends within ``most_seconds``."""
        began = time.monotonic()
        self._told.intersection_update(after)
        waited_for = list(islice((name for name in after if name not in self._told), MAX_WAITED))
        seconds = min(self._most, most_seconds)
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
        time.sleep(max(0.0, min(jittered(poll_seconds), most_seconds) - passed))
