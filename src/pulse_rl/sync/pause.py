"""The pause between two looks for a new version."""

from __future__ import annotations

import time

from .._util.jitter import jittered
from ..errors import StoreError
from ..store.notifier import notifier_of
from ..stream.stream import Stream

_LONGEST_WAIT = 25.0


class Pause:
    """Pauses between looks at ``stream``: until it has something new where its store tells, for at most 25 seconds or
    ``most_seconds``; else for the time of a poll."""

    def __init__(self, stream: Stream, most_seconds: float) -> None:
        self._stream = stream
        self._notifier = notifier_of(stream.store)
        self._most = min(most_seconds, _LONGEST_WAIT)
        self._told = ""

    def take(self, poll_seconds: float, most_seconds: float) -> None:
        """What turns out to be nothing new, whatever the store says, is followed by a pause of ``poll_seconds``, so
        that no store makes a worker look without end. Ends within ``most_seconds``."""
        began = time.monotonic()
        seconds = min(self._most, most_seconds)
        if self._notifier is not None and seconds > 0:
            after = self._stream.last_accepted
            try:
                if self._notifier.wait_for_new([after], seconds) and after != self._told:
                    self._told = after
                    return
            except StoreError:
                pass
        passed = time.monotonic() - began
        time.sleep(max(0.0, min(jittered(poll_seconds), most_seconds) - passed))
