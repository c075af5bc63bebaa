"""Shorter ways to the newest version of a stream that is there already: folds, and an anchor
(docs/protocol.md, 3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from .._util.settings import checked_collection
from .._util.threads import checked_threads
from ..errors import ChainGap, EmptyStream, InputError, kind_of
from ..events import CallFailed, Event, Folded, Listener, Published, checked_listener
from ..state.tensors import State
from ..store import Store, open_store
from ..store.base import UNREADABLE
from ..stream.signing import Signer, keys_of, trusted_by
from ..stream.stream import Stream
from ..sync.commit import store_patch
from ..sync.host_state import HostState, catch_up
from ..sync.publisher import Publisher
from ..sync.subscriber import Subscriber
from .diff import build_patch
from .repair import version_of

#: The spans of folds, in versions.
DEFAULT_FOLDS = (8, 64)


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

    Restores the stream at the base of a missing fold, moves a second state to its version, and
    stores what differs, if that is smaller than the patches between them: two states in memory.
    Shorter folds are made first. Where a version in between cannot be read, there is no fold.

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
    spans = sorted(set(checked_collection("folds", folds, "(8, 64)")))
    if any(isinstance(span, bool) or not isinstance(span, int) or span < 2 for span in spans):
        raise InputError(f"folds span whole numbers of versions, 2 or more, not {list(folds)}")
    trusted = trusted_by(keys_of(signer, trusted_keys))
    where = Stream(open_store(store), stream, trusted, signer=signer, stream_id=stream_id)
    return _fold(where, spans, threads, on_event)


def _fold(
    where: Stream, spans: list[int], threads: int | None, on_event: Listener | None
) -> Iterator[tuple[int, int]]:
    # 1. What there is: versions, and the folds between them.
    with where.limited():
        listed = {(link.base, link.version) for link in where.links()}
        head = where.require_newest()
        where.adopt(head)
        versions = [version for version in where.versions() if version <= head.version]
    there = set(versions)
    stored = []
    for span in spans:
        host = HostState(threads=threads, listener=on_event)
        for version in versions:
            base = version - span
            if version % span or base not in there or (base, version) in listed:
                continue
            with where.limited():
                patch_bytes = _spanned_bytes(where, base, version)
            if patch_bytes is None:
                continue
            # 2. The states at both ends: a copy of the base stays while the state moves on, over
            # the folds of a shorter span where there are some.
            with where.limited():
                catch_up(host, where, base)
            before, digest = host.state.copy(), host.digest
            with where.limited():
                catch_up(host, where, version)
            # 3. The patch between them.
            done: Event
            try:
                built = build_patch(before, host.state, digest, threads=threads)
                if built.nbytes < patch_bytes:
                    # The payload first, the link last: a fold that is listed can be fetched.
                    payload = store_patch(where, built.chunks)
                    where.put_fold_link(base, version, [payload])
                    stored.append((base, version))
                done = Folded(where.name, base, version, built.nbytes, patch_bytes)
            except Exception as error:  # whatever it is: the patches are there
                reason = f"the fold {base}->{version}: {error}"
                done = CallFailed(where.name, "fold", kind_of(error), reason)
            if on_event:
                on_event(done)
    yield from sorted(stored)


def _spanned_bytes(where: Stream, base: int, version: int) -> int | None:
    """The bytes of the patches that a fold spans. None where they do not lead from its base to its
    version, or where that remembers earlier changes: nobody could read on from there."""
    nbytes, at = 0, version
    try:
        if where.manifest(version).remembers:
            return None
        while at > base:
            patch = where.manifest(at).patch
            if patch is None:
                return None
            nbytes += sum(part.bytes for part in patch.parts)
            at = patch.base
    except UNREADABLE:
        return None
    return nbytes if at == base else None


def anchor_stream(
    store: Store | str,
    stream: str,
    *,
    source: State | Store | str | None = None,
    signer: Signer | None = None,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Published:
    """Publish the newest version of a stream once more, as it is, with an anchor.

    New workers start there, whatever was lost before it, or was signed by a key that they do not
    trust. This takes the stream over: a trainer that still publishes to it is refused at its next
    commit. A trainer that is about to start need not call it, since ``publish(anchor=True)`` does
    the same. If the newest version cannot be restored, the newest one that can be is published, and
    the ``reason`` says which.

    Args:
        store: The store, or its address.
        stream: The stream's name.
        source: Where the newest version is read: its state, or another store of the stream.
            Default: in the store itself.
        signer: Signs the version. Then only versions that its key or one of ``trusted_keys`` has
            signed are taken.
        trusted_keys: Ed25519 public keys, 64 hexadecimal digits each.
        stream_id: The stream's ID, where it is known.
        threads: The maximum number of threads. Default: one per core.
        on_event: Called with the events of restoring and publishing.
    Returns: What was published, and what it cost.
    Raises:
        EmptyStream: The stream has no version.
        InputError: ``source`` is a state of another version than the newest.

    It also raises what `Subscriber.sync` and `Publisher.publish` raise.
    """
    opened = open_store(store)
    keys = keys_of(signer, trusted_keys)
    both: dict[str, Any] = {"stream": stream, "threads": threads, "on_event": on_event}
    reading = both | {"trusted_keys": keys}
    with Publisher(opened, signer=signer, trusted_keys=trusted_keys or (), **both) as publisher:
        if stream_id:
            publisher.stream_id = stream_id
        head = publisher.head()
        if head is None:
            raise EmptyStream(f"stream {stream!r} has no versions")
        publisher.stream_id = head.stream_id
        if isinstance(source, State):
            where = Stream(opened, stream, trusted_by(keys), stream_id=head.stream_id)
            state, _, found = version_of(where, source, threads)
            if found.version != head.version:
                raise InputError(
                    f"this is the state of version {found.version}, the newest is {head.version}",
                    hint="To go back, publish it as the next version: `pulse publish --anchor`.",
                )
            state = state.with_aliases(head.aliases)
            return publisher.publish(state, metadata=head.metadata, anchor=True, after=head.version)
        source = opened if source is None else open_store(source)
        with Subscriber(source, stream_id=head.stream_id, **reading) as reader:
            reason = ""
            try:
                reader.sync(head.version)
            except ChainGap as error:
                if reader.version is None:
                    raise
                reason = (
                    f"version {head.version} cannot be restored, so these are the weights of "
                    f"version {reader.version}: {error}"
                )
            done = publisher.publish(
                reader.state, metadata=reader.manifest.metadata, anchor=True, after=head.version
            )
            return replace(done, reason=reason) if reason else done
