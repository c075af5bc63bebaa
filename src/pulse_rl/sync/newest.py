"""Moves a host state to the newest version that can be read, or finds that the stream is another one now.

A store may hold junk above the newest version; and the stream itself may have been deleted and begun anew
(docs/protocol.md, section 4).
"""

from __future__ import annotations

from contextlib import suppress

from ..errors import StreamRecreated
from ..stream.stream import Head, Stream
from ..stream.unreadable import UNREADABLE
from .catch_up import catch_up
from .host_state import HostState


def move_to_newest(host: HostState, stream: Stream) -> dict[str, float]:
    """Moves to the highest version that can be read and trusted; returns seconds by phase (see `Synced`).

    Raises StreamRecreated, what `catch_up` raises, and in an empty host state the error of the newest manifest.
    """
    found = stream.newest(host.version - 1 if host.version else None)
    if found.manifest and found.manifest.version != host.version:
        return move_to(host, stream, found.manifest.version)
    if host.version is not None:
        check_identity(host.version, stream, found)
    elif found.error:
        raise found.error
    return {}


def move_to(host: HostState, stream: Stream, target: int) -> dict[str, float]:
    """Moves to version ``target``, whose stream_id is the stream's from then on. Raises what `catch_up` raises."""
    known = stream.stream_id
    try:
        if known is None:
            with suppress(*UNREADABLE):
                stream.stream_id = stream.manifest(target).stream_id or None
        return catch_up(host, stream, target)
    except BaseException:
        stream.stream_id = known  # what could not be reached decides nothing
        raise


def check_identity(version: int, stream: Stream, found: Head) -> None:
    """Raises StreamRecreated if another stream stands where ours was, of which ``version`` is held. Only looks where
    something speaks for it: that version is gone from the listing, or is not listed as it was, or others are above it.
    """
    holds = stream.still_holds if found.listed[-1:] == [version] else stream.holds
    if stream.stream_id is None or (found.manifest and holds(found.manifest)):
        return
    other = stream.newest(anybody=True).manifest
    if other and other.stream_id != stream.stream_id:
        raise StreamRecreated(
            f"the stream {stream.name!r} was deleted and begun anew: it is {other.stream_id} now, at version "
            f"{other.version}, and was {stream.stream_id} at version {version}"
        )
