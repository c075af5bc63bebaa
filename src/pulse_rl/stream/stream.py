"""A stream in a store: its listings, manifests and payloads, the commit, and the claims to it.

Each publisher claims the next epoch, and stops when it sees a later one (docs/protocol.md, 3).
Anyone who can write to a store can write a claim. If publishers sign, only signed claims to this
very stream count. Otherwise a claim must be well-formed, and its epoch must not be farther from the
others than any number of publishers could explain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from hashlib import sha256
from typing import NamedTuple

from .._util.files import RangeReader
from .._util.threads import hit, ordered_map
from ..errors import (
    ChainGap,
    CorruptManifest,
    DigestMismatch,
    EmptyStream,
    FormatError,
    InputError,
    NotFound,
    PublisherConflict,
    PulseError,
    Untrusted,
)
from ..state.digest import StateDigest
from ..state.header import header_bytes
from ..store.base import (
    DEFAULT_LATE_SECONDS,
    UNREADABLE,
    BoundedStore,
    Data,
    ObjectInfo,
    Store,
    UnreadableObjects,
    create_or_confirm,
    holds,
    read_again,
    whole,
)
from . import manifest as manifests
from .manifest import Link, Manifest, ManifestCache, Payload, is_stream_id, with_payloads
from .names import (
    FILE,
    LEAVES,
    PATCH,
    SHARD,
    TENSORS,
    AnchorName,
    EpochName,
    FoldName,
    StreamNames,
    VersionName,
    next_unused,
    plausible,
)
from .signing import (
    MAX_CLAIM_BYTES,
    MAX_FOLD_BYTES,
    NOBODY,
    Claim,
    Signer,
    TrustedKeys,
    fold_name,
    read_claim,
    read_fold,
    write_fold,
)

# Parallel requests for lengths.
_AT_ONCE = 8
# Attempts to claim a stream while other publishers claim it too.
_TRIES = 100


class Head(NamedTuple):
    """The result of a poll for the newest version.

    ``listed`` are the versions in the store, ascending, readable or not. ``error`` is set if there
    is no ``manifest``: why the newest listed version was refused.
    """

    manifest: Manifest | None
    listed: list[int]
    error: PulseError | None = None


def checked_stream_id(stream_id: str) -> str:
    """Return ``stream_id``; raise InputError if it is not a stream ID."""
    if not is_stream_id(stream_id):
        raise InputError(f"{stream_id!r} is not a stream ID", hint="It has 32 hexadecimal digits.")
    return stream_id


class Claims:
    """The claims to a stream, one for each epoch. With ``trusted`` keys only signed claims
    count."""

    def __init__(
        self, store: Store, names: StreamNames, signer: Signer | None, trusted: TrustedKeys | None
    ) -> None:
        self._store = store
        self._names = names
        self._signer = signer
        self._trusted = trusted
        self._unreadable = UnreadableObjects()

    def acquire(self, publisher: str, stream_id: str, above: int, *, born: bool) -> int:
        """Claim the first free epoch after ``above`` and after all claims that count; return it.

        Older publishers then stop. Until the stream is ``born`` its ID is not settled, so claims to
        any stream of the name count. Raises PublisherConflict if other publishers are faster every
        time.
        """
        for _ in range(_TRIES):
            listed = self._listed(0)
            newest = self._first(sorted(listed, reverse=True), listed, stream_id if born else "")
            # Unreadable claims keep their numbers: an epoch is never used twice.
            epoch = next_unused(listed, max(newest.epoch if newest else 0, above))
            before = newest.publisher if newest else NOBODY
            claim = Claim(self._names.stream, stream_id, epoch, publisher, before)
            hit("claim.before")
            # Creation decides between publishers that saw the same list. The slower one lists
            # again.
            if create_or_confirm(
                self._store, self._names.epoch(epoch), claim.to_bytes(self._signer)
            ):
                return epoch
        raise PublisherConflict(
            f"{_TRIES} other publishers claimed {self._names.stream!r} at the same time"
        )

    def stream_id(self) -> str:
        """The ID that the newest claim gives to a stream whose manifests are all damaged; "" if
        unknown.

        With signed claims none is believed: they may be those of an earlier stream of the name.
        """
        listed = {} if self._trusted else self._listed(0)
        newest = self._first(sorted(listed, reverse=True), listed, "")
        return newest.stream_id if newest else ""

    def superseded_by(self, epoch: int, publisher: str, stream_id: str) -> int | None:
        """An epoch after ``epoch`` that another publisher has claimed; None if there is none.

        It costs one listing if there is no such claim. Claims of ``publisher`` itself do not count:
        the reply to one was lost. A claim to another stream of the name counts only if it names
        ``publisher`` as its predecessor. Without that it may be an old claim of that stream; with
        it, a publisher that could not read this one's manifests has followed.
        """
        listed = self._listed(epoch)
        found = self._first(sorted(listed), listed, stream_id, publisher)
        return found.epoch if found else None

    def _listed(self, after: int) -> dict[int, ObjectInfo]:
        """The claims after an epoch.

        Claims far beyond the others are left out, since they would use up the numbers.
        """
        infos = self._store.list(self._names.epochs, self._names.epoch(after))
        named = {
            name.epoch: i for i in infos if isinstance(name := self._names.parse(i.name), EpochName)
        }
        return {epoch: named[epoch] for epoch in plausible(named, after)}

    def _first(
        self,
        epochs: list[int],
        listed: dict[int, ObjectInfo],
        stream_id: str,
        publisher: str | None = None,
    ) -> Claim | None:
        """The first claim that counts and is not ``publisher``'s own."""

        def read(epoch: int) -> Claim:
            if listed[epoch].nbytes > MAX_CLAIM_BYTES:
                raise FormatError(f"the claim to epoch {epoch} has {listed[epoch].nbytes} bytes")
            claim = read_again(
                lambda: whole(self._store, self._names.epoch(epoch), listed[epoch].nbytes),
                lambda data: read_claim(data, self._names.stream, epoch, self._trusted),
            )
            is_other = claim.stream_id != stream_id and claim.previous != publisher
            if self._trusted and stream_id and is_other:
                raise Untrusted(f"the claim to epoch {epoch} is one to another stream of this name")
            if publisher and claim.publisher == publisher:
                raise Untrusted(f"the claim to epoch {epoch} is the publisher's own")
            return claim

        return self._unreadable.first(epochs, listed, read, bounded=False)


class Stream:
    """A stream: versions, payloads, claims and links (docs/format.md, 6).

    The names of links hold all that planning needs. With ``trusted`` keys only signed objects are
    believed; ``signer`` signs claims and the links of folds. With a ``stream_id`` only versions of
    this very stream are read; with None those of any stream of the name. ``on_refused`` is called
    once for each version that `newest` skips. Raises InputError.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        trusted: TrustedKeys | None = None,
        *,
        signer: Signer | None = None,
        stream_id: str | None = None,
        on_refused: Callable[[int, PulseError], None] | None = None,
    ) -> None:
        if stream_id is not None:
            checked_stream_id(stream_id)
        # A store that is bounded already, such as a cache, keeps its own bounds.
        self.store = store if isinstance(store, BoundedStore) else BoundedStore(store)
        self.name = name
        self.names = StreamNames(name)
        self.stream_id = stream_id
        self.claims = Claims(self.store, self.names, signer, trusted)
        self._signer = signer
        self._trusted = trusted
        self._on_refused = on_refused
        self._unreadable = UnreadableObjects(on_refused)
        self._unreadable_by_anybody = UnreadableObjects()
        self._manifests = ManifestCache()
        self._listed: dict[int, ObjectInfo] = {}
        self._held: ObjectInfo | None = None
        self._newest_read: ObjectInfo | None = None

    def adopt(self, manifest: Manifest) -> None:
        """Read only versions of the stream of ``manifest`` from now on, unless an ID is set
        already."""
        self.stream_id = self.stream_id or manifest.stream_id

    def limited(self, seconds: float = DEFAULT_LATE_SECONDS) -> AbstractContextManager[None]:
        """The span of one call: reads raise StoreUnavailable after ``seconds`` of lateness in
        all."""
        return self.store.limited(seconds)

    def versions(self, after: int | None = None) -> list[int]:
        """The committed versions greater than ``after``, ascending."""
        start_after = None if after is None else self.names.version(after)
        self._listed = {}
        for info in self.store.list(self.names.versions, start_after):
            if isinstance(name := self.names.parse(info.name), VersionName):
                self._listed[name.version] = info
        return list(self._listed)

    def newest(self, after: int | None = None, *, anybody: bool = False) -> Head:
        """The newest version above ``after`` that can be read and trusted.

        If a manifest above ``after`` is known, the poll is bounded; a later poll may find newer
        versions above it. If none is known, every listed version is tried before the answer is that
        there is none. Raises StoreUnavailable if that takes too long; the next call continues. With
        ``anybody``, versions of any stream of the name count.
        """
        listed = self.versions(after)
        # Manifests never change, so versions below the highest one that was read before need no
        # read.
        kept = (self.kept(version, self._listed[version]) for version in reversed(listed))
        known = None if anybody else next(filter(None, kept), None)
        # Newest first. Unreadable ones are skipped: a damaged version must not stop its readers.
        above = [
            version for version in reversed(listed) if known is None or version > known.version
        ]
        unreadable = self._unreadable_by_anybody if anybody else self._unreadable
        read = self._read if anybody else self.manifest
        found = unreadable.first(above, self._listed, read, bounded=known is not None) or known
        if found is None:
            error = unreadable.error
            if listed and error is None:
                error = CorruptManifest(f"no version of {self.name!r} can be read and trusted")
            return Head(None, listed, error)
        name = self.names.version(found.version)
        if not anybody and (self._held is None or self._held.name != name):
            # As it was read: the listing may show another object by now.
            self._held = self._newest_read
            if self._held is None or self._held.name != name:
                self._held = self._listed[found.version]
        return Head(found, listed)

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version, from the cache if it was read before, unless its object is
        listed as another one since.

        Raises NotFound, CorruptManifest and Untrusted.
        """
        listed = self._listed.get(version)
        manifest = self._manifests.get(version, listed)
        if manifest is None:
            shown = listed or self.store.head(self.names.version(version))
            manifest = self._read_anew(version, shown)
            self._manifests.keep(manifest, listed)
            if self._newest_read is None or shown.name >= self._newest_read.name:
                self._newest_read = shown
        # Checked each time: the stream's ID may be settled after the manifest was read.
        if not self._is_ours(manifest):
            raise Untrusted(
                f"the manifest of version {version} of {self.name!r} is of another stream of "
                "this name, "
                f"{manifest.stream_id}, not {self.stream_id}",
                hint="The stream was recreated, or someone else writes to the store.",
            )
        return manifest

    def still_has_manifest(self, manifest: Manifest) -> bool:
        """`has_manifest` without a read, if the object is listed as it was when it was the
        newest."""
        shown = self._listed.get(manifest.version)
        if shown is None or (shown != self._held and not self.has_manifest(manifest)):
            return False
        self._held = shown
        return True

    def has_manifest(self, manifest: Manifest) -> bool:
        """Whether the store has exactly this manifest."""
        name = self.names.version(manifest.version)
        try:
            return holds(self.store, name, manifest.to_bytes())
        except NotFound:
            return False

    def was_listed(self, version: int) -> bool:
        """Whether the last listing of versions contained this one."""
        return version in self._listed

    def has_version(self, version: int) -> bool:
        """Whether the store has a manifest of this version."""
        return self._has(self.names.version(version))

    def has_payloads(self, manifest: Manifest, *, files: bool = True) -> bool:
        """Whether the store has all payloads of a manifest, by default with its ``files``."""
        patch = manifest.patch.parts if manifest.patch else ()
        shards = manifest.anchor.shards if manifest.anchor else ()
        named = [
            *((payload, PATCH) for payload in patch),
            *((payload, SHARD) for payload in shards),
        ]
        named += [(file.payload, FILE) for file in manifest.files if files]
        return all(self._has(self.names.payload(payload.sha256, kind)) for payload, kind in named)

    def forget_manifests(self) -> None:
        """Drop the cached manifests."""
        self._manifests, self._newest_read = ManifestCache(), None

    def require_newest(self) -> Manifest:
        """The newest version; raises EmptyStream, or the error of a version that was refused."""
        found = self.newest()
        if found.manifest is None:
            raise found.error or EmptyStream(f"stream {self.name!r} has no versions")
        return found.manifest

    def forget(self) -> None:
        """Drop the cached manifests, what was listed, and the stream's ID."""
        self.forget_manifests()
        self._unreadable = UnreadableObjects(self._on_refused)
        self._listed = {}
        self.stream_id = None

    def commit(self, manifest: Manifest) -> bool:
        """Create the manifest, which commits its version; False if the version is taken."""
        hit("commit.before")
        # Creation is the commit. If its reply is lost, the object in the store shows whether it was
        # this manifest.
        committed = create_or_confirm(
            self.store, self.names.version(manifest.version), manifest.to_bytes()
        )
        hit("commit.after")
        return committed

    def links(self, after: int | None = None) -> list[Link]:
        """The listed folds and anchors of versions greater than ``after``, from one listing.

        The payloads of folds are not known yet (`resolved`).
        """
        # A name that sorts before the links to the next version and after those to earlier ones.
        start_after = None if after is None else f"{self.names.links}/{after + 1:012d}"
        # A name has base, length and digest, so a plan needs no reads. Names are unverified until
        # the link is resolved.
        found = []
        for info in self.store.list(self.names.links, start_after):
            match self.names.parse(info.name):
                case FoldName(version, base, nbytes, digest) if version - base > 1 and nbytes > 0:
                    if 0 < info.nbytes <= MAX_FOLD_BYTES:
                        found.append(Link(base, version, nbytes, None, digest, is_fold=True))
                case AnchorName(version, nbytes):
                    found.append(Link(None, version, nbytes))
        return found

    def resolved(self, link: Link) -> Link:
        """``link`` with its payloads, from the manifest of its version or from the link of a fold.

        Raises ChainGap if the manifest has no such link, or if a fold does not end at the start of
        a history. Raises also what `manifest` and `fold` raise.
        """
        if link.payloads is not None:
            return link
        manifest = self.manifest(link.version)
        if not link.is_fold:
            return with_payloads(link, manifest)
        # A fold has only the differences between its ends. Its reader could not decode the patches
        # that follow, so a path over it would end there.
        if manifest.remembers:
            raise ChainGap(
                f"{link} does not show the changes that version {link.version} remembers"
            )
        return link._replace(payloads=self.fold(name_of(link))[0])

    def fold(self, fold: FoldName) -> tuple[tuple[Payload, ...], bytes]:
        """The payloads that the link of a fold lists, and the link's content.

        Raises NotFound, FormatError for a link that is too long or does not match its name, and
        Untrusted for a link without a trusted signature.
        """
        name = self.names.fold(fold)
        nbytes = self.store.head(name).nbytes
        if nbytes > MAX_FOLD_BYTES:
            raise FormatError(f"{name} has more than {MAX_FOLD_BYTES} bytes")

        def parse(data: bytes) -> tuple[tuple[Payload, ...], bytes]:
            return read_fold(data, self.name, self.stream_id or "", fold, self._trusted), data

        return read_again(lambda: whole(self.store, name, nbytes), parse)

    def put_digests(self, tree: StateDigest, *, leaves: bool) -> None:
        """Store the tensors' digests of a version; with ``leaves`` also its leaves, as for an
        anchor."""
        self.store.put(self.names.digests_of(tree.root, TENSORS), tree.tensor_digests)
        if leaves:
            data = [tree.leaves[spec.name] for spec in tree.specs]
            whole = header_bytes(tree.specs) + b"".join(data)
            self.store.put(self.names.digests_of(tree.root, LEAVES), whole)

    def put_fold_link(self, base: int, version: int, parts: Sequence[Payload]) -> None:
        """List a fold of one part or several."""
        fold = fold_name(base, version, parts)
        hit("fold.before")
        self.store.put(
            self.names.fold(fold),
            write_fold(self.name, self.stream_id or "", fold, parts, self._signer),
        )

    def put_anchor_link(self, version: int, nbytes: int) -> None:
        self.store.put(self.names.anchor(version, nbytes), b"")

    def put_payload(self, payload: Payload, kind: str, data: Data) -> None:
        """Store a payload under its digest. Repeating this is harmless."""
        hit("payload.before")
        self.store.put(self.names.payload(payload.sha256, kind), data)
        hit("payload.after")

    def has_payload(self, payload: Payload, kind: str) -> bool:
        """Whether the store has a payload, judged by name and length."""
        try:
            return self.store.head(self.names.payload(payload.sha256, kind)).nbytes == payload.bytes
        except NotFound:
            return False

    def fetch(self, payload: Payload, kind: str) -> bytes:
        """The verified bytes of a payload. Raises NotFound and DigestMismatch.

        A damaged reply is fetched once more, since networks corrupt bytes more often than disks do.
        """
        name = self.names.payload(payload.sha256, kind)
        for _ in range(2):
            # The length is checked first: an object that is too long is not worth its memory.
            stored = self.store.head(name).nbytes
            if stored == payload.bytes:
                self.store.expect(name, payload.bytes)
                # Some stores refuse an empty range.
                data = self.store.get(name, 0, payload.bytes) if payload.bytes else b""
                if sha256(data).hexdigest() == payload.sha256:
                    return data
        raise DigestMismatch(
            f"{name} does not hold the {payload.bytes} bytes that its name promises"
        )

    def _is_ours(self, manifest: Manifest) -> bool:
        return not self.stream_id or manifest.stream_id == self.stream_id

    def kept(self, version: int, listed: ObjectInfo | None = None) -> Manifest | None:
        """The cached manifest of a version of this stream; None if it was not read before, or if
        another object than the ``listed`` one was."""
        manifest = self._manifests.get(version, listed)
        return manifest if manifest and self._is_ours(manifest) else None

    def _has(self, name: str) -> bool:
        try:
            self.store.head(name)
        except NotFound:
            return False
        return True

    def _read_anew(self, version: int, shown: ObjectInfo) -> Manifest:
        """The manifest in the store; the cached one where that was damaged or replaced since.

        A store that lost versions may have new ones of this stream under their numbers.
        """
        known = self._manifests.get(version)
        try:
            manifest = self._read(version, shown)
        except UNREADABLE:
            if known is None:
                raise
            return known
        return known if known and self._is_ours(known) > self._is_ours(manifest) else manifest

    def _read(self, version: int, listed: ObjectInfo | None = None) -> Manifest:
        name = self.names.version(version)
        listed = listed or self._listed.get(version)
        nbytes = (listed and listed.nbytes) or self.store.head(name).nbytes
        if nbytes > manifests.MAX_BYTES:
            raise CorruptManifest(f"{name} has {nbytes} bytes, more than {manifests.MAX_BYTES}")

        def parse(data: bytes) -> Manifest:
            manifest = manifests.parse(data, stream=self.name, version=version)
            if self._trusted:
                self._trusted.check(manifest)
            return manifest

        return read_again(lambda: whole(self.store, name, nbytes), parse)

    def reader(self, payload: Payload, kind: str) -> RangeReader:
        """A reader of ranges of a payload.

        Raises NotFound, and DigestMismatch if the payload has another length.
        """
        name = self.names.payload(payload.sha256, kind)
        stored = self.store.head(name).nbytes
        if stored != payload.bytes:
            raise DigestMismatch(
                f"{name} has {stored} bytes, but its manifest says {payload.bytes}"
            )
        self.store.expect(name, payload.bytes)
        return partial(self.store.get, name)

    def shards(
        self, payloads: Sequence[Payload], threads: int | None = None
    ) -> list[tuple[Payload, RangeReader]]:
        """The shards of an anchor with readers of their ranges. Raises as `reader`."""
        return list(
            ordered_map(lambda payload: (payload, self.reader(payload, SHARD)), payloads, threads)
        )

    def parts(self, link: Link) -> list[tuple[RangeReader, int]]:
        """Readers of the files of a link's patch, with their lengths. Raises as `reader`."""
        payloads = link.payloads or ()
        return list(
            ordered_map(
                lambda payload: (self.reader(payload, PATCH), payload.bytes), payloads, _AT_ONCE
            )
        )


def name_of(link: Link) -> FoldName:
    """The name of the link that lists a fold."""
    assert link.base is not None
    return FoldName(link.version, link.base, link.nbytes, link.parts)
