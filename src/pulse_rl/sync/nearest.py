"""One stream in several stores, the nearest first (docs/protocol.md, section 8).

Each store is read as if it were the only one, so that nothing that is wrong in one can make another's versions wrong.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress

from ..errors import FormatError, IntegrityError, PulseError, StoreError, StreamError, StreamRecreated
from ..events import FallbackUsed, Listener
from ..stream.manifest import Manifest
from ..stream.stream import Stream
from ..stream.unreadable import UNREADABLE
from .host_state import HostState
from .newest import check_identity, move_to, move_to_newest

DEFAULT_PATIENCE_SECONDS = 30.0
_PASSED = (StoreError, StreamError, FormatError, IntegrityError)
_JITTER = 0.25


class Nearest:
    """``streams`` are one stream in each store, the nearest first; the last one is the stream's own, the origin.

    A nearer store decides what is newest, unless it is away or damaged, or a farther one has had a newer version for
    ``patience_seconds``; from then on the farther one decides, until the nearer one has what was taken from there.
    Farther ones are looked at every ``patience_seconds`` or so, a quarter more or less.
    """

    def __init__(self, streams: Sequence[Stream], patience_seconds: float, listener: Listener | None) -> None:
        self.streams = tuple(streams)
        self._patience = patience_seconds
        self._listener = listener
        self._followed = self.streams[0]
        self._at: int | None = None
        self._look_at = 0.0
        self._ahead: tuple[int, float] | None = None

    def move_to_newest(self, host: HostState) -> dict[str, float]:
        """Moves to the newest version; returns seconds by phase (see `Synced`). Raises what the last of the stores
        raises where none could be read, and StreamRecreated where the origin is another stream now."""
        if len(self.streams) == 1:
            return move_to_newest(host, self.streams[0])
        phases: dict[str, float] = {}
        error: PulseError | None = None
        answered = False
        for place, stream in enumerate(self.streams):
            try:
                self._add(phases, move_to_newest(host, stream))
                self._agree_with(stream, host)
                answered, error = True, None
            except StreamRecreated as replaced:
                if self._is_origin(place):
                    raise
                error = self._pass(place, replaced)
                continue
            except _PASSED as refused:
                error = self._pass(place, refused)
                continue
            if host.version is not None and stream.shows(host.version) and not self._is_late(host.version, place):
                return phases
        if error and (host.version is None or not answered):
            raise error
        self._ahead = None  # what is listed there cannot be reached: it is looked at again later
        return phases

    def move_to(self, host: HostState, target: int) -> dict[str, float]:
        """Moves to version ``target``. Raises what `catch_up` raises from the last of the stores."""
        for place, stream in enumerate(self.streams[:-1]):
            try:
                phases = move_to(host, stream, target)
                self._agree_with(stream, host)
                return phases
            except _PASSED as refused:
                self._pass(place, refused)
        phases = move_to(host, self.streams[-1], target)
        self._agree_with(self.streams[-1], host)
        return phases

    def manifest(self, version: int) -> Manifest:
        """The manifest of ``version``, first from the store from which a version came last. Raises what the last one
        raises."""
        for stream in (self._followed, *self.streams[:-1]):
            with suppress(StoreError, *UNREADABLE):
                return stream.manifest(version)
        return self.streams[-1].manifest(version)

    def versions(self) -> tuple[Stream, list[int]]:
        """The versions that the nearest store lists that has any, and its stream."""
        for stream in self.streams[:-1]:
            with suppress(StoreError):
                if found := stream.versions():
                    return stream, found
        return self.streams[-1], self.streams[-1].versions()

    def lists(self, version: int, after: int | None) -> bool:
        """Whether a store lists ``version``, above ``after``."""
        if version in self.streams[0].versions(after):
            return True
        for stream in self.streams[1:]:
            with suppress(StoreError):
                if stream.lists(version):
                    return True
        return False

    def begin_anew(self) -> None:
        """Forgets whose stream it was. Of several stores the origin says whose it is now; raises StoreError, and then
        forgets nothing."""
        newest = self.streams[-1].newest(anybody=True).manifest if len(self.streams) > 1 else None
        for stream in self.streams:
            stream.forget()
        self._ahead = None
        self.adopt_id(newest.stream_id if newest else "")

    def adopt_id(self, stream_id: str) -> None:
        """Says whose stream it is in all stores, "" where nothing says so."""
        for stream in self.streams:
            stream.stream_id = stream_id or None

    def _is_late(self, version: int, place: int) -> bool:
        """Whether a store farther than the one at ``place`` has had a version above ``version`` for too long. Raises
        StreamRecreated if the origin is another stream now."""
        now = time.monotonic()
        if self._ahead and version >= self._ahead[0]:
            self._ahead = None
        farther = self.streams[place + 1 :]
        if farther and now >= self._look_at:
            self._look_at = now + self._patience * random.uniform(1 - _JITTER, 1 + _JITTER)
            for there, stream in enumerate(farther, place + 1):
                try:
                    found = stream.newest(version - 1 if version else None)
                    if found.manifest and found.manifest.version > version:
                        self._ahead = self._ahead or (found.manifest.version, now)
                    else:
                        check_identity(version, stream, found)
                except StreamRecreated:
                    if self._is_origin(there):
                        raise
                except _PASSED as refused:
                    self._pass(there, refused)
        return bool(farther) and self._ahead is not None and now - self._ahead[1] >= self._patience

    def _is_origin(self, place: int) -> bool:
        """Only the origin says that the stream is another one: a nearer store may be of an earlier one."""
        return place == len(self.streams) - 1

    def _agree_with(self, stream: Stream, host: HostState) -> None:
        if host.version is not None:
            self.adopt_id(stream.stream_id or "")
        if host.version is not None and host.version != self._at:
            self._followed, self._at = stream, host.version

    def _pass(self, place: int, error: PulseError) -> PulseError:
        if self._listener:
            where = f"store {place + 1} of {len(self.streams)}"
            self._listener(FallbackUsed(self.streams[place].name, where, str(error), error.kind))
        return error

    @staticmethod
    def _add(phases: dict[str, float], more: dict[str, float]) -> None:
        for phase, seconds in more.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
