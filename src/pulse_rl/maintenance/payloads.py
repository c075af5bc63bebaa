"""Payloads that a relay copies, in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256

from .._util.threads import ordered_map
from ..errors import NotFound
from ..store import Store
from ..stream.manifest import Payload

_CHUNK_BYTES = 8 << 20


def chunks_of(store: Store, name: str, nbytes: int, threads: int | None) -> Iterator[bytes]:
    """The first ``nbytes`` of an object in order, read in several requests at a time, of at most 8 MiB each."""
    starts = range(0, nbytes, _CHUNK_BYTES)
    with closing(
        ordered_map(lambda at: store.get(name, at, min(at + _CHUNK_BYTES, nbytes)), starts, threads)
    ) as chunks:
        yield from chunks


def holds_whole(store: Store, name: str, payload: Payload, threads: int | None) -> bool:
    """Whether the payload is in the store, whole: what a killed relay left, or somebody else's junk."""
    try:
        if store.head(name).nbytes != payload.bytes:
            return False
        running = sha256()
        for chunk in chunks_of(store, name, payload.bytes, threads):
            running.update(chunk)
    except NotFound:
        return False
    return running.hexdigest() == payload.sha256
