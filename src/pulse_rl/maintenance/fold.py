"""Folds for an already published stream (docs/protocol.md, section 3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .. import codec as codecs
from ..events import Listener
from ..store import Store, open_store
from ..stream.stream import Stream
from ..sync.catch_up import catch_up
from ..sync.folds import DEFAULT_FOLDS, FoldMaker
from ..sync.host_state import HostState


def fold_stream(
    store: Store | str,
    stream: str,
    folds: Collection[int] = DEFAULT_FOLDS,
    *,
    codec: str = codecs.DEFAULT,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Iterator[tuple[int, int]]:
    """Makes the folds that ``stream`` in ``store`` lacks, on any machine, and yields (base, version) of each that is
    there then.

    ``folds`` are the spans in versions, ``codec`` encodes their blocks, ``threads`` limits parallelism; ``on_event``
    gets the events of folding and replay. Restores the stream at the base of the first missing fold and replays it.
    Raises ChainGap if a version is unreachable.
    """
    where = Stream(open_store(store), stream)
    listed = {(link.base, link.version) for link in where.links()}
    versions = where.versions()
    there = set(versions)
    missing = {(v - s, v) for s in folds for v in versions if v % s == 0 and v - s in there} - listed
    if not missing:
        return
    maker = FoldMaker(where, folds, codec=codec, skip=listed, threads=threads, listener=on_event)
    host = HostState(threads=threads, listener=on_event, watcher=maker)
    first, last = min(b for b, _ in missing), max(v for _, v in missing)
    for version in versions:
        if first <= version <= last:
            catch_up(host, where, version)
    maker.wait()
    there_now = {(link.base, link.version) for link in where.links()}
    yield from sorted(missing & there_now)
