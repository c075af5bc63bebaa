"""Folds for an already published stream (docs/protocol.md, section 3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .. import codec as codecs
from .._util.settings import checked_collection
from .._util.threads import checked_threads
from ..errors import EmptyStream
from ..events import Listener, checked_listener
from ..store import Store, open_store
from ..stream.signing import Signer, TrustedKeys
from ..stream.stream import Stream
from ..stream.unreadable import UNREADABLE
from ..sync.catch_up import catch_up
from ..sync.folds import DEFAULT_FOLDS, FoldMaker, checked_folds
from ..sync.host_state import HostState


def fold_stream(
    store: Store | str,
    stream: str,
    folds: Collection[int] = DEFAULT_FOLDS,
    *,
    codec: str = codecs.AUTO,
    signer: Signer | None = None,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Iterator[tuple[int, int]]:
    """Makes the folds that ``stream`` in ``store`` lacks, on any machine, and yields (base, version) of each.

    ``folds`` are the spans in versions, ``codec`` encodes their blocks, ``threads`` limits parallelism; ``on_event``
    gets the events of folding and replay. ``signer`` signs the folds' links: workers with trusted keys use no others;
    its key and ``trusted_keys`` (Ed25519, 64 hexadecimal digits each) are those whose versions are folded.
    ``stream_id``: the stream's, where it is known. Versions that cannot be read are passed over. Restores the stream at
    the base of the first missing fold and replays it. Raises InputError; while it yields EmptyStream, and ChainGap if a
    version is unreachable.
    """
    checked_threads(threads)
    checked_listener(on_event)
    spans = checked_folds(checked_collection("folds", folds, "(8, 64)"))
    codecs.check_codec(codec)
    keys = [*([signer.public_key] if signer else ()), *(trusted_keys or ())]
    where = Stream(open_store(store), stream, TrustedKeys(keys) if keys else None, signer=signer, stream_id=stream_id)
    return _fold(where, spans, codec, threads, on_event)


def _fold(
    where: Stream, spans: list[int], codec: str, threads: int | None, on_event: Listener | None
) -> Iterator[tuple[int, int]]:
    listed = {(link.base, link.version) for link in where.links()}
    head = where.newest().manifest
    if head is None:
        raise EmptyStream(f"stream {where.name!r} has no versions")
    where.stream_id = where.stream_id or head.stream_id or None
    versions = [version for version in where.versions() if version <= head.version]
    there = set(versions)
    missing = {(v - s, v) for s in spans for v in versions if v % s == 0 and v - s in there} - listed
    if not missing:
        return
    maker = FoldMaker(where, spans, codec=codec, skip=listed, threads=threads, listener=on_event)
    host = HostState(threads=threads, listener=on_event, watcher=maker)
    first, last = min(b for b, _ in missing), max(v for _, v in missing)
    for version in versions:
        if first <= version <= last and _is_readable(where, version):
            catch_up(host, where, version)
    maker.wait()
    yield from sorted(maker.stored)


def _is_readable(stream: Stream, version: int) -> bool:
    try:
        stream.manifest(version)
    except UNREADABLE:
        return False
    return True
