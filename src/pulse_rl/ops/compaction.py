"""Shorter ways to the newest version of a stream that is there already: folds, and an anchor
(docs/protocol.md, 3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from .. import codec as codecs
from .._util.settings import checked_collection
from .._util.threads import checked_threads, ordered_map
from ..codec import Changes
from ..errors import EmptyStream, InputError
from ..events import CallFailed, Event, Folded, Listener, Published, checked_listener, kind_of
from ..patch.blocks import cut
from ..patch.build import encode_proved, entry_of
from ..patch.header import JoinedHeader, PatchHeader, slices_of
from ..state.digest import StateDigest
from ..state.tensors import Segment, State
from ..store import Store, open_store
from ..store.base import UNREADABLE
from ..stream.manifest import Link
from ..stream.signing import Signer, keys_of, trusted_by
from ..stream.stream import Stream
from ..sync.commit import store_patch
from ..sync.host_state import HostState, catch_up
from ..sync.publisher import Publisher
from ..sync.subscriber import Subscriber
from .undo import UndoLog, by_whole_blocks

DEFAULT_FOLDS = (8, 64)
"""The spans of folds, in versions."""


def checked_folds(folds: Collection[int]) -> list[int]:
    """The spans in ascending order, each once. Raises InputError unless each is a whole number of
    at least 2."""
    spans = checked_collection("folds", folds, "(8, 64)")
    if any(isinstance(span, bool) or not isinstance(span, int) or span < 2 for span in spans):
        raise InputError(f"folds span whole numbers of versions, 2 or more, not {list(folds)}")
    return sorted(set(folds))


def fold_stream(
    store: Store | str,
    stream: str,
    folds: Collection[int] = DEFAULT_FOLDS,
    *,
    signer: Signer | None = None,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Iterator[tuple[int, int]]:
    """Make the folds that a stream lacks, on any machine, and yield (base, version) of each.

    Restores the stream at the base of the first missing fold and replays it. Versions that cannot
    be read are passed over.

    Args:
        store: A store, or its address.
        stream: The stream's name.
        folds: The spans in versions.
        signer: Signs the folds' links; workers with trusted keys use no others.
        trusted_keys: Ed25519 public keys, 64 hexadecimal digits each; versions signed by one of
            them, or by the ``signer``, are folded.
        stream_id: The stream's ID, where it is known.
        threads: The maximum number of threads. None: one per core.
        on_event: Gets the events of folding and replay.

    Raises:
        InputError: An argument makes no sense.
        EmptyStream: There is no version, while it yields.
        ChainGap: A version is unreachable, while it yields.
    """
    checked_threads(threads)
    checked_listener(on_event)
    spans = checked_folds(checked_collection("folds", folds, "(8, 64)"))
    trusted = trusted_by(keys_of(signer, trusted_keys))
    where = Stream(open_store(store), stream, trusted, signer=signer, stream_id=stream_id)
    return _fold(where, spans, threads, on_event)


def _fold(
    where: Stream, spans: list[int], threads: int | None, on_event: Listener | None
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
    maker = _FoldMaker(where, spans, listed | passed, threads=threads, listener=on_event)
    host = HostState(threads=threads, listener=on_event, watcher=maker)
    first, last = min(b for b, _ in missing), max(v for _, v in missing)
    for version in versions:
        with where.limited():
            if first <= version <= last and _is_readable(where, version):
                catch_up(host, where, version)
    yield from sorted(maker.stored)


class _Span(NamedTuple):
    """A fold under way: the old bits since its base, and the bytes of the patches that it spans."""

    log: UndoLog
    patch_bytes: int


class _FoldMaker:
    """Makes the folds that are due as a host state moves from version to version; those of
    ``skip``, as (base, version), are there already.

    A fold of span s leads from version k·s to (k+1)·s, and is stored only if it is smaller than the
    patches that it spans. The old bits of what changed since each span's last multiple take about 6
    bytes for every BF16 weight that changed in that time.
    """

    def __init__(
        self,
        stream: Stream,
        spans: Collection[int],
        skip: Collection[tuple[int | None, int]],
        *,
        threads: int | None,
        listener: Listener | None,
    ) -> None:
        self._stream = stream
        self._spans = spans
        self._skip = skip
        self._threads = threads
        self._listener = listener
        self._under_way: dict[int, _Span] = {}
        self._version: int | None = None
        self.stored: list[tuple[int, int]] = []
        """The folds that were stored, as (base, version)."""

    def advanced(
        self,
        link: Link,
        header: JoinedHeader,
        undo: Mapping[int, Changes],
        state: State,
        digest: StateDigest,
    ) -> None:
        """The state has moved along a patch with this ``header``; ``undo`` has the old bits by
        its blocks."""
        assert link.base is not None
        undo = by_whole_blocks(header, undo)
        if link.base != self._version:
            self._under_way.clear()  # the old bits do not lead back from here
        self._version = link.version
        for span in self._spans:
            # A span begins at its multiples only, so that whoever folds the stream makes the same
            # folds.
            if link.base % span == 0:
                self._under_way[span] = _Span(UndoLog(link.base, header.base_root), 0)
            if (kept := self._under_way.get(span)) is None:
                continue
            kept.log.record(undo)
            kept = self._under_way[span] = kept._replace(patch_bytes=kept.patch_bytes + link.nbytes)
            # Numbers may be passed over: then no version ends the span.
            if link.version >= kept.log.base + span:
                del self._under_way[span]
                fold = (kept.log.base, link.version)
                if link.version == kept.log.base + span and fold not in self._skip:
                    self._emit(self._made(kept, link.version, state, digest))

    def replaced(self) -> None:
        """The state has moved in another way: what was kept does not lead back."""
        self._under_way.clear()
        self._version = None

    def _made(self, kept: _Span, version: int, state: State, digest: StateDigest) -> Event:
        base = kept.log.base
        try:
            nbytes = self._fold(kept, version, state, digest)
        except Exception as error:  # whatever it is: the patches are there
            reason = f"the fold {base}->{version}: {error}"
            return CallFailed(self._stream.name, "fold", kind_of(error), reason)
        return Folded(self._stream.name, base, version, nbytes, kept.patch_bytes)

    def _fold(self, kept: _Span, version: int, state: State, digest: StateDigest) -> int:
        """Stores the fold, if it is smaller than the patches; its bytes."""
        # 1. Code what differs between the two ends, block by block.
        blocks = cut(state.specs)

        def code(index: int) -> codecs.Encoded:
            after = blocks[index].read(state)
            return encode_proved(blocks[index], kept.log.rewind(index, after), after)[0]

        coded = list(ordered_map(code, range(len(blocks)), self._threads))
        segments = [Segment(spec, 0, spec.elements) for spec in state.specs]
        header = PatchHeader(
            kept.log.base_root,
            digest.root,
            slices_of(state.specs, segments),
            tuple(map(entry_of, coded)),
            None,
        )
        chunks = [header.to_bytes(), *(encoded.payload for encoded in coded)]
        nbytes = sum(map(len, chunks))
        if nbytes >= kept.patch_bytes:
            return nbytes
        # 2. The payload first, the link last: a fold that is listed can be fetched.
        payload = store_patch(self._stream, chunks)
        self._stream.put_fold_link(kept.log.base, version, [payload])
        self.stored.append((kept.log.base, version))
        return nbytes

    def _emit(self, event: Event) -> None:
        if self._listener:
            self._listener(event)


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
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Published:
    """Publishes the newest version of ``stream`` in ``store`` once more, as it is, with an anchor,
    and returns what it cost: newcomers start there, whatever was lost or signed by a key that they
    do not trust before it.

    ``signer`` signs it; then only versions that its key or one of ``trusted_keys`` (Ed25519, 64
    hexadecimal digits each) has signed are taken. ``stream_id``: the
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
