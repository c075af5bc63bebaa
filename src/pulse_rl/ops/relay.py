"""A relay: mirrors a stream into another store, for the workers near that one (docs/protocol.md,
section 8)."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from functools import partial
from hashlib import sha256
from typing import NamedTuple

from .._util.retry import pause
from .._util.settings import checked_count
from .._util.threads import checked_threads, hit, ordered_map, weak_callback
from ..errors import (
    ChainGap,
    CorruptManifest,
    DigestMismatch,
    FormatError,
    InputError,
    NotFound,
    PublisherConflict,
    PulseError,
    StoreError,
    StreamForked,
    StreamRecreated,
)
from ..events import CallFailed, Listener, Relayed, checked_listener, failures_to, fell_back
from ..follow.digest_trees import copy_digests
from ..follow.failover import check_recreated
from ..follow.patch_files import read_header
from ..patch.header import MAX_HEADER_BYTES, Room
from ..store import Store, open_store
from ..store.base import UNREADABLE
from ..stream.manifest import Link, Manifest, Payload, anchor_bytes
from ..stream.names import FILE, LEAVES, PATCH, SHARD, TENSORS
from ..stream.signing import trusted_by
from ..stream.stream import Stream, name_of
from ..sync.planner import BROKEN_LINK, Planner
from .fleet import HeartbeatRelay
from .gc import gc_stream

_TRIES = 2
_SEARCHED_ANCHORS = 16
_MAX_GIVEN_UP = 2
_MAX_OWED = 16
#: Digests that the source shows damaged are tried at three calls, and at one in 64 after these.
_SOON, _RARELY = 3, 64
_ANOTHER_TARGET = (
    "Give the relay a target, or a stream's name, to which nobody else writes versions."
)
_CHUNK_BYTES = 8 << 20


class _AnchorCopy(NamedTuple):
    """The anchor of ``manifest``'s version, of whose shards the first ``done`` are in the
    target."""

    manifest: Manifest
    done: int = 0
    #: How many copies of older anchors were given up for it.
    given_up: int = 0


class Relay:
    """Keeps a copy of a stream in another store, with each payload fetched once.

    It holds nothing that is not in the stores: one that is killed continues where it was. One
    thread uses it at a time.

    Args:
        source: The store of the stream, or its address (see `open_store`).
        target: The store of the copy, or its address. It belongs to the relay: nobody publishes
            there.
        stream: The stream's name.
        keep: How many of the newest versions the target keeps restorable, as for `gc_stream`.
            Default: all.
        trusted_keys: As for `Subscriber`.
        stream_id: As for `Subscriber`.
        allow_recreated: Empty the target's copy and start over if the stream is recreated, or if
            the source goes back in time.
        threads: The maximum number of parallel requests to the source, with up to 8 MiB in memory
            for each. Default: one per core.
        on_event: Called with `Relayed`, `FallbackUsed` and `CallFailed`.
    Raises:
        InputError: A setting is out of range, or two exclude each other.
        StoreError: A store cannot be opened.
    """

    def __init__(
        self,
        source: Store | str,
        target: Store | str,
        *,
        stream: str,
        keep: int | None = None,
        trusted_keys: Collection[str] | None = None,
        stream_id: str | None = None,
        allow_recreated: bool = False,
        threads: int | None = None,
        on_event: Listener | None = None,
    ) -> None:
        if allow_recreated and stream_id is not None:
            raise InputError(
                "allow_recreated contradicts a fixed stream_id", hint="Give one of the two."
            )
        trusted = trusted_by(trusted_keys)
        self._keep = None if keep is None else checked_count("keep", keep)
        self._threads = checked_threads(threads)
        self._listener = checked_listener(on_event)
        self._trusted_keys = trusted_keys
        self._allow_recreated = allow_recreated
        self.source = Stream(
            open_store(source),
            stream,
            trusted,
            stream_id=stream_id,
            on_refused=weak_callback(self._refused),
        )
        self._target = Stream(open_store(target), stream, trusted, stream_id=stream_id)
        self._heartbeats = HeartbeatRelay(self._target, self.source)
        self._have: int | None = None
        self._committed = 0.0
        self._anchor: _AnchorCopy | None = None
        self._searched = False
        self._links: list[Link] = []
        self._nbytes = 0
        self._files: set[Payload] = set()
        # By version and whether with leaves: the digests that the target lacks, and at how many
        # calls they were tried again.
        self._owed: dict[tuple[int, bool], tuple[Manifest, int]] = {}

    def __repr__(self) -> str:
        held = "nothing yet" if self._have is None else f"version {self._have}"
        return (
            f"<Relay of {self.source.name!r} from {self.source.store!r} to "
            f"{self._target.store!r}: {held}>"
        )

    @property
    def version(self) -> int | None:
        """The newest version in the target when it was last looked at, None while there is none."""
        return self._have

    def sync(self, *, shards: int | None = None) -> Relayed | None:
        """Copy what is new.

        The newest version comes first, by the cheapest path from what the target has; then the
        newest anchor, shard by shard, between which newer versions still come first. A version is
        shown in the target once all is there that leads to it. Payloads are checked against their
        SHA-256 before they are stored, manifests and folds' links as a subscriber checks them.

        Args:
            shards: The most shards of an anchor that one call copies; later calls go on with the
                rest. Default: all.
        Returns: What was copied, or None if nothing is new.
        Raises:
            StreamRecreated: The stream was deleted and recreated; StreamForked, if the source went
                back in time, so that the target has versions that the source has no more.
            PublisherConflict: Somebody publishes to the target.
            ChainGap: No path leads to the newest version.
            StoreError: A store refuses, or is away.

        A repeated call goes on where this one stopped.
        """
        if shards is not None:
            checked_count("shards", shards)
        started = time.perf_counter()
        self._links, self._nbytes = [], 0
        with (
            failures_to(self._listener, self.source.name, "relay"),
            self.source.limited(),
            self._target.limited(),
        ):
            # Also while the copy fails: the publisher must see workers that are stuck.
            if error := self._heartbeats.forward():
                self._failed("heartbeat", error)
            # 1. Where the target stands: its newest version, whose ID is the one that is followed;
            # and once, whether another process left an anchor half copied.
            held = self._target.newest(self._have - 1 if self._have else None).manifest
            if held is None and self._have is not None:  # it was deleted there: what is left below?
                held = self._target.newest().manifest
            if held is not None:
                self._adopt(held)
            else:
                self._anchor = None
                self._owed.clear()
            previous = self._have = held.version if held else None
            if not self._searched:
                self._anchor, self._searched = self._unfinished_anchor(), True
                self._find_missing_digests()
            owed = dict(self._owed)
            # 2. The newest version, which workers wait for; then the anchor, which only new workers
            # need. It takes long: between two shards newer versions come first.
            self._copy_newest()
            copied = 0
            while self._anchor is not None and copied != shards:
                self._copy_shard(self._anchor)
                self._copy_newest()
                copied += 1
            for (version, leaves), (manifest, calls) in owed.items():
                if (version, leaves) in self._owed:
                    self._copy_digests(manifest, leaves=leaves, calls=calls + 1)
        if not self._links:
            return None
        assert self._have is not None
        links = tuple(dict.fromkeys(map(str, self._links)))
        seconds = time.perf_counter() - started
        lag = time.time() - self._committed
        relayed = Relayed(self.source.name, self._have, previous, links, self._nbytes, seconds, lag)
        if self._listener:
            self._listener(relayed)
        return relayed

    def wait_for_new(self, poll_seconds: float = 1.0, max_seconds: float = math.inf) -> None:
        """Sleeps between two calls of `sync` that found nothing: for ``poll_seconds``, a quarter
        more or less, and at most ``max_seconds``. Raises InputError."""
        pause(poll_seconds, max_seconds)

    # -- the newest version

    def _adopt(self, manifest: Manifest) -> None:
        self.source.adopt(manifest)
        self._target.stream_id = self.source.stream_id

    def _copy_newest(self) -> None:
        try:
            self._reach_newest()
        except StreamRecreated:
            if not self._allow_recreated:
                raise
            self._start_over()
            self._reach_newest()

    def _reach_newest(self) -> None:
        found = self.source.newest(self._have - 1 if self._have else None)
        newest = found.manifest
        if newest is not None and (self._have is None or newest.version > self._have):
            self._require_no_publisher()
            self._adopt(newest)
            if self._have is not None:
                self._check_forked(self._have)
            self._reach(newest.version)
        elif self._have is not None:
            root, known = self._target.manifest(self._have).root, (self.source, self._target)
            check_recreated(self._have, root, self.source, found, known)
        elif found.error:
            raise found.error

    def _check_forked(self, version: int) -> None:
        """Raises StreamForked if the source has another ``version`` than the target. Mostly both
        manifests are cached."""
        with suppress(*UNREADABLE):
            there, here = self.source.manifest(version).root, self._target.manifest(version).root
            if there != here:
                raise StreamForked(
                    f"the source of the stream {self.source.name!r} went back in time: its version "
                    f"{version} has root {there[:16]}…, and the target's has {here[:16]}…"
                )

    def _reach(self, version: int) -> None:
        """Copies the cheapest working path of links to ``version``, link by link; avoids one that
        cannot be used."""
        route, at, anchored = Planner(self.source, version), self._have, False
        while self._have != version:
            try:
                path = route.plan(at)
            except ChainGap:
                if at == self._have:
                    raise
                at = self._have  # a path from an anchor broke
                continue
            for planned in path:
                link = planned
                try:
                    manifest = self.source.manifest(planned.version)
                    link = self.source.resolved(planned)
                    self._copy(link, manifest)
                except BROKEN_LINK as error:
                    route.avoid(planned, link, error)
                    self._report(link, error)
                    break
                # On the way from an anchor the version may still be below that of the target: no
                # step back there.
                at = link.version
                anchored = anchored or link.base is None
                self._links.append(link)
                if self._have is None or at > self._have:
                    self._have, self._committed = at, manifest.created
        if anchored:
            self._collect()

    def _copy(self, link: Link, manifest: Manifest) -> None:
        """All that leads along ``link``, then the manifest of its version."""
        if link.base is None:
            # In this order: what is shown can be fetched, and what is listed is shown.
            for payload in link.payloads or ():
                self._copy_payload(payload, SHARD)
            self._copy_digests(manifest, leaves=True)
            self._show(manifest)
            self._target.put_anchor_link(link.version, link.nbytes)
            self._anchor = None  # of an older version
            return
        if link.nbytes > manifest.dense_bytes + MAX_HEADER_BYTES:
            raise FormatError(
                f"{link} has {link.nbytes} bytes, too many for a state of {manifest.dense_bytes}"
            )
        record = self.source.fold(name_of(link))[1] if link.is_fold else None
        # By root, not by number alone: the base in the target must be the one that the patch was
        # made of.
        patch = manifest.patch if record is None else None
        if patch and patch.base_root != self._target.manifest(link.base).root:
            raise DigestMismatch(
                f"{link} starts from another version {link.base} than the one in the target"
            )
        new = [payload for payload in link.payloads or () if self._copy_payload(payload, PATCH)]
        if record is not None:
            self._check_fold(link, manifest, new)
            self._target.store.put(self._target.names.fold(name_of(link)), record)
        self._show(manifest)
        if manifest.anchor and (self._anchor is None or self._anchor.given_up < _MAX_GIVEN_UP):
            self._anchor = _AnchorCopy(
                manifest, given_up=self._anchor.given_up + 1 if self._anchor else 0
            )

    def _check_fold(self, link: Link, manifest: Manifest, new: list[Payload]) -> None:
        """Raises DigestMismatch, and takes back what is ``new``, unless the fold is one from its
        base to its version: anybody may have listed it. What was there before, be it damaged,
        others may name."""
        assert link.base is not None
        try:
            base_root, room = self._target.manifest(link.base).root, Room()
            for payload in link.payloads or ():
                name = self._target.names.payload(payload.sha256, PATCH)
                read = partial(self._target.store.get, name)
                header = read_header(read, payload.bytes, elements=manifest.elements, room=room)
                if (header.base_root, header.target_root) != (base_root, manifest.root):
                    raise DigestMismatch(f"{link} does not lead from one version to the other")
        except BROKEN_LINK:
            for payload in new:
                self._target.store.delete(self._target.names.payload(payload.sha256, PATCH))
            raise

    def _show(self, manifest: Manifest) -> None:
        """Creates the manifest in the target. What cannot be read or trusted there makes room for
        it: the target is the relay's. Raises PublisherConflict where somebody publishes there, and
        StreamForked where another version stands there without that."""
        self._copy_digests(manifest, leaves=False)
        self._copy_files(manifest)
        hit("relay.before")
        for _ in range(_TRIES):
            if self._target.commit(manifest):
                return
            with suppress(*UNREADABLE):
                there = self._target.manifest(manifest.version)
                if there == manifest:  # a reply was damaged
                    return
                self._require_no_publisher()
                raise StreamForked(
                    f"the target has another version {there.version} of {there.stream!r} than the "
                    "source, which went back in time"
                )
            self._target.store.delete(self._target.names.version(manifest.version))
            self._target.versions(self._have)  # what is listed of it is another object's
        raise CorruptManifest(
            f"version {manifest.version} cannot be shown: the target's object is written by others"
        )

    def _require_no_publisher(self) -> None:
        if self._target.claims.superseded_by(0, "", ""):
            raise PublisherConflict(
                f"somebody publishes {self._target.name!r} to the target", hint=_ANOTHER_TARGET
            )

    # -- payloads

    def _copy_payload(self, payload: Payload, kind: str) -> bool:
        new, nbytes = copy_payload(self.source, self._target, payload, kind, self._threads)
        self._nbytes += nbytes
        return new

    def _copy_files(self, manifest: Manifest) -> None:
        """Copies the files of a version that those of the version before are not. One that is lost
        in the source does not hold the weights up, and is tried again with the next version."""
        there = set[Payload]()
        for file in manifest.files:
            try:
                if file.payload not in self._files:
                    self._copy_payload(file.payload, FILE)
                there.add(file.payload)
            except BROKEN_LINK as error:
                self._report(f"{file.name} of version {manifest.version}", error)
        self._files = there

    # -- digests, for workers that select tensors

    def _copy_digests(self, manifest: Manifest, *, leaves: bool, calls: int = 0) -> None:
        """Copies a version's digests. Damaged ones hold no version up. They are tried again, since
        a cache between here and the source may have shown another object."""
        owed, error = (manifest.version, leaves), None
        if calls <= _SOON or calls % _RARELY == 0:
            error = copy_digests(self.source, self._target, manifest, leaves=leaves)
            if error is None:
                self._owed.pop(owed, None)
                return
        self._owed[owed] = manifest, calls
        if error and not calls:
            self._report(f"the digests of version {manifest.version}", error)
        if len(self._owed) > _MAX_OWED:
            del self._owed[min(self._owed)]

    def _find_missing_digests(self) -> None:
        """Notes which digests another process has left out of the newest version, and of the newest
        anchor."""
        anchors = [link.version for link in self._target.links() if link.base is None]
        for version, kind in ((self._have, TENSORS), (max(anchors, default=None), LEAVES)):
            if version is None:
                continue
            with suppress(*UNREADABLE):
                manifest = self._target.manifest(version)
                try:
                    self._target.store.head(self._target.names.digests_of(manifest.root, kind))
                except NotFound:
                    self._owed[version, kind == LEAVES] = manifest, 0

    # -- anchors, and what they make superfluous

    def _copy_shard(self, copy: _AnchorCopy) -> None:
        """Copies one more shard; with the last one the anchor is listed. An anchor that is damaged
        in the source is given up: another one comes."""
        assert copy.manifest.anchor is not None
        link = Link(None, copy.manifest.version, anchor_bytes(copy.manifest))
        try:
            self._copy_payload(copy.manifest.anchor.shards[copy.done], SHARD)
        except BROKEN_LINK as error:
            self._anchor = None
            self._report(link, error)
            return
        self._links.append(link)
        self._anchor = copy._replace(done=copy.done + 1)
        if self._anchor.done == len(copy.manifest.anchor.shards):
            self._anchor = None
            self._copy_digests(copy.manifest, leaves=True)
            self._target.put_anchor_link(link.version, link.nbytes)
            # Where digests from here on are damaged, workers that select need a newer anchor.
            if any(version >= link.version for version, _ in self._owed):
                self._anchor = self._unfinished_anchor()
            self._collect()

    def _unfinished_anchor(self) -> _AnchorCopy | None:
        """The newest anchor whose version the target shows, unless it is listed there: what another
        process left."""
        if self._have is None:
            return None
        listed = {link.version for link in self._target.links() if link.base is None}
        there = sorted(
            {link.version for link in self.source.links() if link.base is None}, reverse=True
        )
        for version in [v for v in there if v <= self._have][:_SEARCHED_ANCHORS]:
            with suppress(*UNREADABLE):
                manifest = self._target.manifest(version)
                if manifest.anchor:
                    return None if version in listed else _AnchorCopy(manifest)
        return None

    def _collect(self) -> None:
        if self._keep is None:
            return
        try:
            gc_stream(
                self._target.store,
                self._target.name,
                keep=self._keep,
                trusted_keys=self._trusted_keys,
                stream_id=self._target.stream_id,
            )
        except StoreError:
            raise
        except PulseError as error:  # what is kept for longer harms nobody
            self._failed("gc", error)

    def _start_over(self) -> None:
        """Empties the target's copy, in the order of garbage collection, and forgets whose stream
        it was."""
        self._require_no_publisher()
        names = self._target.names
        # What refers to something goes first: a reader in between finds the stream shorter, never
        # torn.
        for folder in (names.links, names.versions, names.payloads, names.digests):
            found = [
                info.name for info in self._target.store.list(folder) if names.parse(info.name)
            ]
            for name in reversed(found):
                self._target.store.delete(name)
        self.source.forget()
        self._target.forget()
        self._have, self._anchor = None, None
        self._files = set()
        self._owed.clear()

    def _refused(self, version: int, error: PulseError) -> None:
        self._report(f"version {version}", error)

    def _failed(self, call: str, error: PulseError) -> None:
        if self._listener:
            self._listener(CallFailed(self._target.name, call, error.kind, str(error)))

    def _report(self, link: Link | str, error: PulseError) -> None:
        fell_back(self._listener, self.source.name, str(link), error)


def copy_payload(
    source: Stream, target: Stream, payload: Payload, kind: str, threads: int | None
) -> tuple[bool, int]:
    """Copies a payload unless it is in the target, whole; returns whether nothing was there of its
    name, and the bytes that were read. Raises NotFound and DigestMismatch; a damaged reply is asked
    for once more."""
    name = source.names.payload(payload.sha256, kind)
    if whole := holds_whole(target, payload, kind, threads):
        return False, 0
    nbytes = 0

    def fetched() -> Iterator[bytes]:
        # An error takes the place of the end of wrong bytes, so that no store keeps them.
        nonlocal nbytes
        running = sha256()
        for chunk in _chunks_of(source.store, name, payload.bytes, threads):
            nbytes += len(chunk)
            running.update(chunk)
            yield chunk
        if running.hexdigest() != payload.sha256:
            raise DigestMismatch(
                f"{name} does not hold the {payload.bytes} bytes that its name promises"
            )

    for again in reversed(range(_TRIES)):
        try:
            # The length first: a stranger's object of that name could be of any.
            if source.store.head(name).nbytes != payload.bytes:
                raise DigestMismatch(
                    f"{name} does not have the {payload.bytes} bytes that it should have"
                )
            target.put_payload(payload, kind, fetched())
            break
        except DigestMismatch:
            if not again:
                raise
    return whole is None, nbytes


def holds_whole(stream: Stream, payload: Payload, kind: str, threads: int | None) -> bool | None:
    """Whether the payload is in the store, whole: not so what a killed relay left, or somebody
    else's junk. None where nothing is."""
    name = stream.names.payload(payload.sha256, kind)
    try:
        if stream.store.head(name).nbytes != payload.bytes:
            return False
        running = sha256()
        for chunk in _chunks_of(stream.store, name, payload.bytes, threads):
            running.update(chunk)
    except NotFound:
        return None
    return running.hexdigest() == payload.sha256


def _chunks_of(store: Store, name: str, nbytes: int, threads: int | None) -> Iterator[bytes]:
    """The first ``nbytes`` of an object in order, read in several requests at a time, of at most 8
    MiB each."""
    starts = range(0, nbytes, _CHUNK_BYTES)
    with closing(
        ordered_map(lambda at: store.get(name, at, min(at + _CHUNK_BYTES, nbytes)), starts, threads)
    ) as chunks:
        yield from chunks
