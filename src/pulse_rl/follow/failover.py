"""Which of the stores of a stream is read, and what is its newest version (docs/protocol.md,
sections 4 and 8).

Each store is read as if it were the only one, so that nothing that is wrong in one can make
another's versions wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from .._util.retry import jittered
from ..errors import (
    FormatError,
    IntegrityError,
    PulseError,
    StoreError,
    StreamError,
    StreamForked,
    StreamRecreated,
)
from ..events import Listener, fell_back
from ..store.base import DEFAULT_LATE_SECONDS, UNREADABLE
from ..stream.manifest import Manifest, Payload
from ..stream.stream import Head, Stream
from ..sync.host_state import HostState, catch_up

DEFAULT_PATIENCE_SECONDS = 30.0
_PASSED = (StoreError, StreamError, FormatError, IntegrityError)

T = TypeVar("T")


def check_recreated(
    version: int, root: str, stream: Stream, found: Head, known: Sequence[Stream]
) -> None:
    """Raises StreamRecreated if another stream stands where ours was, of which ``version`` with
    this ``root`` is held, and StreamForked if it has another history of ours than the one that was
    read in ``known``. Only looks where something speaks for it: that version is gone from the
    listing, or is not listed as it was, or others are above it.
    """
    is_there = stream.still_has_manifest if found.listed[-1:] == [version] else stream.has_manifest
    ours = found.manifest
    if stream.stream_id is None or (ours and ours.root == root and is_there(ours)):
        return
    other = stream.newest(anybody=True).manifest
    if other and other.stream_id != stream.stream_id:
        raise StreamRecreated(
            f"the stream {stream.name!r} was deleted and recreated: it is {other.stream_id} now, "
            "at version "
            f"{other.version}, and was {stream.stream_id} at version {version}"
        )
    if other and _is_forked(version, root, other, known):
        raise StreamForked(
            f"the store of the stream {stream.name!r} went back in time: its newest version is "
            f"{other.version} with root {other.root[:16]}…, and version {version} with root "
            f"{root[:16]}… is held"
        )


def _is_forked(version: int, root: str, newest: Manifest, known: Sequence[Stream]) -> bool:
    """Whether the held version does not lead to ``newest``, nor that one to it. A lower version
    proves it by another root than it had, or by being made later: numbers only grow."""
    if newest.version >= version:
        return newest.version == version and newest.root != root
    before = [was for stream in known if (was := stream.kept(newest.version))]
    held = [was for stream in known if (was := stream.kept(version)) and was.root == root]
    return any(was.root != newest.root for was in before) or any(
        was.created < newest.created for was in held
    )


class Failover:
    """``streams`` are one stream in each of several stores, the nearest first; the last one is the
    origin.

    A nearer store decides what is newest, unless it is away or damaged, or a farther one has had a
    newer version for ``patience_seconds``; from then on the farther one decides, until the nearer
    one has what was taken from there. Farther ones are looked at every ``patience_seconds`` or so,
    a quarter more or less. A nearer store that is late by ``patience_seconds`` in one call is
    passed over. One that failed after some time is left alone for as long.
    """

    def __init__(self, streams: Sequence[Stream], listener: Listener | None) -> None:
        self.streams = tuple(streams)
        self.patience_seconds = DEFAULT_PATIENCE_SECONDS
        self._listener = listener
        self._followed = self.streams[0]
        self._at: int | None = None
        self._look_at = 0.0
        self._ahead: tuple[int, float] | None = None
        self._rests_until = [0.0] * len(self.streams)

    def follow(self, host: HostState) -> dict[str, float]:
        """Moves to the newest version that can be read and trusted; returns seconds by phase (see
        `Synced`). Raises what the last of the stores raises where none could be read, and
        StreamRecreated where the origin is another stream now."""
        phases: dict[str, float] = {}
        error: PulseError | None = None
        answered = False
        for place, stream in enumerate(self.streams):
            is_origin = place == len(self.streams) - 1
            if not is_origin and time.monotonic() < self._rests_until[place]:
                continue
            try:
                with self._limited(place):
                    for phase, seconds in self._to_newest(host, stream).items():
                        phases[phase] = phases.get(phase, 0.0) + seconds
            except _PASSED as refused:
                # Only the origin says that the stream is another one: a nearer store may be of an
                # earlier one.
                if len(self.streams) == 1 or (is_origin and isinstance(refused, StreamRecreated)):
                    raise
                error = self._pass(place, refused)
                continue
            answered, error = True, None
            # Enough, unless this store lost the version meanwhile, or a farther one has been ahead
            # for too long.
            if (
                host.version is not None
                and stream.was_listed(host.version)
                and not self._is_late(host.version, host.digest.root, place)
            ):
                return phases
        # What some stores refused does not count where another one has answered.
        if error and (host.version is None or not answered):
            raise error
        self._ahead = None  # what is listed there cannot be reached: it is looked at again later
        return phases

    def reach(self, host: HostState, target: int) -> dict[str, float]:
        """Moves to version ``target``. Raises what `catch_up` raises from the last of the
        stores."""
        return self._from_nearest(lambda stream: self._to(host, stream, target))

    def fetch(self, payload: Payload, kind: str) -> bytes:
        """The verified bytes of a payload. Raises what `Stream.fetch` raises from the last of the
        stores."""
        return self._from_nearest(lambda stream: stream.fetch(payload, kind))

    def manifest(self, version: int) -> Manifest:
        """The manifest of ``version``, first from the store from which a version came last. Raises
        what the last one raises."""
        for stream in (self._followed, *self.streams[:-1]):
            with suppress(StoreError, *UNREADABLE):
                return stream.manifest(version)
        return self.streams[-1].manifest(version)

    def versions(self) -> tuple[Stream, list[int]]:
        """The versions that the nearest store lists that has any, and its stream."""
        for place, stream in enumerate(self.streams[:-1]):
            with suppress(StoreError), self._limited(place):
                if found := stream.versions():
                    return stream, found
        return self.streams[-1], self.streams[-1].versions()

    def start_over(self) -> None:
        """Forgets whose stream it was. Of several stores the origin says whose it is now; raises
        StoreError, and then forgets nothing."""
        newest = self.streams[-1].newest(anybody=True).manifest if len(self.streams) > 1 else None
        for stream in self.streams:
            stream.forget()
        self._ahead = None
        # A nearer store may have the history that was lost, until a relay has seen it.
        rests_until = time.monotonic() + DEFAULT_PATIENCE_SECONDS
        self._rests_until[:-1] = [rests_until] * (len(self.streams) - 1)
        self.adopt_id(newest.stream_id if newest else None)

    def adopt_id(self, stream_id: str | None) -> None:
        """Says whose stream it is in all stores, None where nothing says so."""
        for stream in self.streams:
            stream.stream_id = stream_id

    # -- one store

    def _to_newest(self, host: HostState, stream: Stream) -> dict[str, float]:
        """Moves to the newest version in one store. Raises StreamRecreated, what `catch_up` raises,
        and in an empty host state the error of the newest manifest."""
        found = stream.newest(host.version - 1 if host.version else None)
        if found.manifest and found.manifest.version != host.version:
            return self._to(host, stream, found.manifest.version)
        if host.version is not None:
            check_recreated(host.version, host.digest.root, stream, found, self.streams)
            self._agree_with(stream, host)
        elif found.error:
            raise found.error
        return {}

    def _to(self, host: HostState, stream: Stream, target: int) -> dict[str, float]:
        """Moves to version ``target``, whose stream ID is that of all stores from then on."""
        known = stream.stream_id
        try:
            if known is None:
                with suppress(*UNREADABLE):
                    stream.adopt(stream.manifest(target))
            phases = catch_up(host, stream, target)
        except BaseException:
            stream.stream_id = known  # what could not be reached decides nothing
            raise
        self._agree_with(stream, host)
        return phases

    def _agree_with(self, stream: Stream, host: HostState) -> None:
        self.adopt_id(stream.stream_id)
        if host.version != self._at:
            self._followed, self._at = stream, host.version

    def _from_nearest(self, read: Callable[[Stream], T]) -> T:
        """What ``read`` returns from the first store from which it can."""
        for place, stream in enumerate(self.streams[:-1]):
            try:
                with self._limited(place):
                    return read(stream)
            except _PASSED as refused:
                self._pass(place, refused)
        with self._limited(len(self.streams) - 1):
            return read(self.streams[-1])

    @contextmanager
    def _limited(self, place: int) -> Iterator[None]:
        is_origin = place == len(self.streams) - 1
        began = time.monotonic()
        try:
            with self.streams[place].limited(
                DEFAULT_LATE_SECONDS if is_origin else self.patience_seconds
            ):
                yield
        except _PASSED:
            # As long as it took to fail: a store that hangs costs half of the time at most.
            now = time.monotonic()
            self._rests_until[place] = now + (now - began)
            raise

    # -- the others

    def _is_late(self, version: int, root: str, place: int) -> bool:
        """Whether a store farther than the one at ``place`` has had a version above ``version`` for
        too long. Raises StreamRecreated if the origin is another stream now."""
        now = time.monotonic()
        if self._ahead and version >= self._ahead[0]:
            self._ahead = None
        farther = self.streams[place + 1 :]
        # A list of another region is not for every poll; when they ask differs between workers.
        if farther and now >= self._look_at:
            self._look_at = now + jittered(self.patience_seconds)
            for there, stream in enumerate(farther, place + 1):
                try:
                    with stream.limited(self.patience_seconds):
                        found = stream.newest(version - 1 if version else None)
                        if found.manifest and found.manifest.version > version:
                            self._ahead = self._ahead or (found.manifest.version, now)
                        else:
                            check_recreated(version, root, stream, found, self.streams)
                except _PASSED as refused:
                    if isinstance(refused, StreamRecreated) and there == len(self.streams) - 1:
                        raise
                    self._pass(there, refused)
        too_long = self._ahead is not None and now - self._ahead[1] >= self.patience_seconds
        return bool(farther) and too_long

    def _pass(self, place: int, error: PulseError) -> PulseError:
        where = f"store {place + 1} of {len(self.streams)}"
        fell_back(self._listener, self.streams[place].name, where, error)
        return error
