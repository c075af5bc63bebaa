"""What a publisher does for workers that cannot reach its newest version: it reads their heartbeats
and stores an anchor (docs/protocol.md, section 6)."""

from __future__ import annotations

import time

from .._util.retry import Backoff
from ..errors import PulseError, StoreError
from ..stream.stream import Stream
from ..sync.planner import BROKEN_LINK
from .fleet import workers_of

_LOOK_SECONDS = 20.0
# A heartbeat that is older and was not seen to change is of a worker that is gone. By two clocks.
_ALIVE_SECONDS = 120.0
# One failure may be a damaged reply.
_LEAST_ERRORS = 2
# Workers that an anchor does not help must not cost a state each minute. In seconds.
_FIRST_WAIT, _LONGEST_WAIT = 60.0, 3600.0


class StuckWorkers:
    """Whether workers of ``stream`` report that no path leads them to its newest version."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._look_at = self._not_before = 0.0
        self._seen: dict[str, float] = {}
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT)
        self._kinds = {kind for error in BROKEN_LINK for kind in _kinds(error)}

    def need_anchor(self) -> bool:
        """Whether the next version should have an anchor for them; at most every 20 seconds the
        store is asked. A store that fails is no reason to stop."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_SECONDS
        try:
            workers = workers_of(self._stream)
        except StoreError:
            return False
        before, self._seen = self._seen, {name: worker.seen for name, worker in workers.items()}
        stuck = [
            name
            for name, worker in workers.items()
            if worker.errors >= _LEAST_ERRORS
            and worker.kind in self._kinds
            and (
                abs(time.time() - worker.seen) < _ALIVE_SECONDS
                or before.get(name, worker.seen) != worker.seen
            )
        ]
        if not stuck:
            self._backoff.reset()
            return False
        if now < self._not_before:
            return False
        self._not_before = now + self._backoff.wait()
        return True


def _kinds(error: type[PulseError]) -> set[str]:
    return {error.kind}.union(*(_kinds(kind) for kind in error.__subclasses__()))
