"""Shorter ways to the newest version of a stream that is there already: folds, and an anchor
(docs/protocol.md, 3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from .. import codec as codecs
from .._util.collective import Alone, RankGroup
from .._util.settings import checked_collection
from .._util.threads import checked_threads
from ..codec import Changes
from ..errors import EmptyStream
from ..events import Listener, Published, checked_listener
from ..patch.blocks import cut
from ..state.digest import StateDigest
from ..state.tensors import State
from ..store import Store, open_store
from ..stream.manifest import Link
from ..stream.signing import Signer, keys_of, trusted_by
from ..stream.stream import Stream
from ..stream.unreadable import UNREADABLE
from ..sync.folds import DEFAULT_FOLDS, FoldMaker, checked_folds
from ..sync.host_state import HostState, catch_up
from ..sync.layout import whole_layout
from ..sync.pending import Baseline
from ..sync.publisher import Publisher
from ..sync.subscriber import Subscriber


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
    """Makes the folds that ``stream`` in ``store`` lacks, on any machine, and yields (base,
    version) of each.

    ``folds`` are the spans in versions, ``codec`` encodes their blocks, ``threads`` limits
    parallelism; ``on_event`` gets the events of folding and replay. ``signer`` signs the folds'
    links: workers with trusted keys use no others; its key and ``trusted_keys`` (Ed25519, 64
    hexadecimal digits each) are those whose versions are folded. ``stream_id``: the stream's, where
    it is known. Versions that cannot be read are passed over. Restores the stream at the base of
    the first missing fold and replays it. Raises InputError; while it yields EmptyStream, why no
    version can be read where none can, and ChainGap if one is unreachable.
    """
    checked_threads(threads)
    checked_listener(on_event)
    spans = checked_folds(checked_collection("folds", folds, "(8, 64)"))
    codecs.check_codec(codec)
    trusted = trusted_by(keys_of(signer, trusted_keys))
    where = Stream(open_store(store), stream, trusted, signer=signer, stream_id=stream_id)
    return _fold(where, spans, codec, threads, on_event)


def _fold(
    where: Stream, spans: list[int], codec: str, threads: int | None, on_event: Listener | None
) -> Iterator[tuple[int, int]]:
    with where.limited():
        listed = {(link.base, link.version) for link in where.links()}
        head = where.require_newest()
        where.adopt(head)
        versions = [version for version in where.versions() if version <= head.version]
    there = set(versions)
    missing = {
        (v - s, v) for s in spans for v in versions if v % s == 0 and v - s in there
    } - listed
    # A fold ends where a history starts: nobody could read on from elsewhere.
    with where.limited():
        passed = {fold for fold in missing if not _is_start(where, fold[1])}
    missing -= passed
    if not missing:
        return
    maker = FoldMaker(
        where,
        RankGroup(Alone()),
        spans,
        codec=codec,
        threads=threads,
        tell=on_event or (lambda event: None),
        skip=listed | passed,
    )
    host = HostState(threads=threads, listener=on_event, watcher=_Follower(maker))
    first, last = min(b for b, _ in missing), max(v for _, v in missing)
    for version in versions:
        with where.limited():
            if first <= version <= last and _is_readable(where, version):
                catch_up(host, where, version)
    yield from sorted(maker.stored)


class _Follower:
    """Makes the folds that are due as a host state moves from version to version."""

    def __init__(self, maker: FoldMaker) -> None:
        self._maker = maker
        self._at: Baseline | None = None

    def advanced(
        self,
        link: Link,
        base_root: str,
        undo: Mapping[int, Changes],
        state: State,
        digest: StateDigest,
    ) -> None:
        """The state has moved along a patch; ``undo`` has the old bits by block."""
        assert link.base is not None
        layout = whole_layout(state.specs, state.aliases)
        blocks = self._at.blocks if self._at else cut(state.specs)
        segments = layout.segments(0)
        before = Baseline(link.base, base_root, layout, segments, blocks, state, {})
        self._at = before._replace(version=link.version, root=digest.root)
        self._maker.advanced(before, link.nbytes, undo, self._at)
        self._maker.make()

    def replaced(self) -> None:
        """The state has moved in another way: what was kept does not lead back."""
        self._maker.forget()
        self._at = None


def _is_start(stream: Stream, version: int) -> bool:
    try:
        return not stream.manifest(version).remembers
    except UNREADABLE:
        return False


def _is_readable(stream: Stream, version: int) -> bool:
    try:
        stream.manifest(version)
    except UNREADABLE:
        return False
    return True


def anchor_stream(
    store: Store | str,
    stream: str,
    *,
    signer: Signer | None = None,
    attest: bool = False,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Published:
    """Publishes the newest version of ``stream`` in ``store`` once more, as it is, with an anchor,
    and returns what it cost: newcomers start there, whatever was lost or signed by a key that they
    do not trust before it.

    ``signer`` signs it; then only versions that its key or one of ``trusted_keys`` (Ed25519, 64
    hexadecimal digits each) has signed are taken. ``attest`` as for `Publisher`. ``stream_id``: the
    stream's, where it is known. ``threads``: the maximum number (None: one per core); ``on_event``
    gets the events of restoring and publishing. This takes the stream over: a trainer that still
    publishes to it is refused at its next commit; one that is about to start need not call it,
    since ``publish(anchor=True)`` does the same. Raises EmptyStream, and what `Subscriber.sync` and
    `Publisher.publish` raise.
    """
    opened = open_store(store)
    keys = keys_of(signer, trusted_keys)
    with (
        Publisher(
            opened,
            stream=stream,
            signer=signer,
            attest=attest,
            trusted_keys=trusted_keys or (),
            threads=threads,
            on_event=on_event,
        ) as publisher,
        Subscriber(
            opened,
            stream=stream,
            trusted_keys=keys,
            stream_id=stream_id,
            threads=threads,
            on_event=on_event,
        ) as reader,
    ):
        newest = reader.sync()
        if newest is None:
            raise EmptyStream(f"stream {stream!r} has no versions")
        publisher.stream_id = reader.stream_id
        return publisher.publish(reader.state, metadata=newest.metadata, anchor=True)
