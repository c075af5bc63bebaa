"""Garbage collection: deletes what no kept version needs, while every kept version can still be
restored."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from .._util.serial import shield
from .._util.settings import checked_count, checked_number
from ..errors import ChainGap, EmptyStream, NotFound, kind_of
from ..events import CallFailed, Hint, Listener, hint_to
from ..store import LocalStore, Store, open_store
from ..store.base import UNREADABLE, ObjectInfo
from ..stream.manifest import Manifest, Payload
from ..stream.names import (
    AnchorName,
    DigestsName,
    FoldName,
    PayloadName,
    VersionName,
    WorkerName,
)
from ..stream.signing import trusted_by
from ..stream.stream import Stream

_DAMAGED_HINT = "Keep fewer versions, or first publish one with an anchor."
DEFAULT_GRACE_SECONDS = 3600.0
_LONGEST_GRACE = 1e9


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What is deleted: ``versions``, and the objects ``names`` in order of deletion, ``nbytes``
    bytes in total.

    ``oldest`` is the first version that remains: the anchor from which the ``wanted`` one, the
    oldest that is to be kept, is restored. ``young`` bytes of payloads that nothing names stay for
    now, since they were written lately. ``unfinished`` bytes of files that a writer left unfinished
    in a folder were removed, too.
    """

    oldest: int
    versions: tuple[int, ...] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    nbytes: int
    wanted: int
    young: int
    unfinished: int = 0


class _Listing:
    """What the store lists of a stream, and the links of its folds, as far as they were read."""

    def __init__(self, stream: Stream) -> None:
        names = stream.names
        folders = (names.links, names.versions, names.payloads, names.digests, names.workers)
        self.objects = [
            (info, names.parse(info.name))
            for folder in folders
            for info in stream.store.list(folder)
        ]
        self.payloads: set[Payload] = set()
        self.commits: dict[int, ObjectInfo] = {}
        self.folds: list[FoldName] = []
        for info, name in self.objects:
            match name:
                case PayloadName(digest):
                    self.payloads.add(Payload(digest, info.nbytes))
                case VersionName(version):
                    self.commits[version] = info
                case FoldName():
                    self.folds.append(name)
        self._stream = stream
        self._parts: dict[FoldName, Collection[Payload] | None] = {}

    def parts_of(self, fold: FoldName) -> Collection[Payload] | None:
        """The payloads of a fold; None where its link cannot be read."""
        if fold not in self._parts:
            try:
                self._parts[fold] = self._stream.fold(fold)[0]
            except UNREADABLE:
                self._parts[fold] = None
        return self._parts[fold]

    def bases(self, version: int) -> list[int]:
        """Those of the folds to ``version`` whose payloads are there, from the nearest on."""
        folds = [fold for fold in self.folds if fold.base < fold.version == version]
        parts = [(fold.base, self.parts_of(fold)) for fold in folds]
        there = {base for base, of in parts if of is not None and self.payloads.issuperset(of)}
        return sorted(there, reverse=True)


def gc_stream(
    store: Store | str,
    stream: str,
    *,
    keep: int,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    dry_run: bool = False,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
) -> GcPlan:
    """Delete what the newest versions of a stream do not need.

    The versions from the oldest anchor needed up to the oldest kept one stay, since the kept ones
    are replayed from there. A reader in the middle of a restore finds another path
    or gets ChainGap. Publishing may continue. Objects that are not spelled as the stream's names
    are stay.

    Args:
        store: The store, or its address.
        stream: The stream's name.
        keep: How many of the newest versions stay restorable. Manifests that cannot be read do not
            count.
        grace_seconds: Payloads that no manifest names, and unfinished files, stay for so long after
            they were written, since their manifest may be on its way.
        dry_run: Delete nothing.
        trusted_keys: Ed25519 public keys, 64 hexadecimal digits each: manifests that none of them
            has signed do not count.
        stream_id: Manifests of another stream do not count. Default: that of the newest one.
    Returns: What was deleted, or would be.
    Raises:
        EmptyStream: There is no version that can be read.
        ChainGap: A kept version is damaged already; nothing was deleted.
        InputError: An argument makes no sense.
    """
    checked_count("keep", keep)
    checked_number("grace_seconds", grace_seconds, maximum=_LONGEST_GRACE)
    opened = open_store(store)
    where = Stream(opened, stream, trusted_by(trusted_keys), stream_id=stream_id)
    # On a full disk these may be the only files that can go; nothing is written.
    unfinished = 0
    if isinstance(opened, LocalStore) and not dry_run:
        unfinished = opened.sweep(grace_seconds)
    with where.limited():
        listing = _Listing(where)
        plan = _planned(where, listing, keep, grace_seconds)
        seen = {info.name: (info.modified, name) for info, name in listing.objects}
        for doomed in () if dry_run else plan.names:
            modified, name = seen[doomed]
            # A payload that was written again since: a publisher has stored the same bytes and is
            # about to name them.
            payload = isinstance(name, PayloadName | DigestsName)
            if not payload or _modified(where.store, doomed) == modified:
                where.store.delete(doomed)
    return replace(plan, unfinished=unfinished)


def _planned(where: Stream, listing: _Listing, keep: int, grace_seconds: float) -> GcPlan:
    """What may be deleted so that the last ``keep`` versions stay restorable. Raises EmptyStream,
    and ChainGap where a kept version misses payloads already: what would have to stay instead is
    not for a deletion to guess."""
    # 1. The manifests that stay, and what they and the folds between them name.
    kept = _kept(_readable(where), keep, listing)
    if not kept:
        raise EmptyStream("the stream has no version that can be read")
    oldest = min(manifest.version for manifest in kept)
    folds = [fold for fold in listing.folds if min(fold.version, fold.base) >= oldest]
    parts = [listing.parts_of(fold) for fold in folds]
    named = {payload.sha256 for manifest in kept for payload in payloads_of(manifest, oldest)}
    named |= {payload.sha256 for of in parts for payload in of or ()}
    roots = {manifest.root for manifest in kept}
    # 2. The time before which what nothing names may go. By the store's clock: one that runs behind
    # this machine's must not make fresh payloads look old.
    newest = max((info.modified for info, _ in listing.objects), default=0.0) + 1
    before = min(time.time(), newest) - grace_seconds
    # A version among the kept ones, or above them, or a fold there, may name payloads though its
    # manifest or link could not be read this time: none was written before the oldest kept commit.
    unread = listing.commits.keys() - {manifest.version for manifest in kept}
    if None in parts or any(version > oldest for version in unread):
        commit = listing.commits.get(oldest)  # None: it was committed since
        before = min(before, commit.modified if commit else 0.0)
    # 3. What goes. Links before manifests before payloads: a process that stops in between
    # leaves nothing that names what is gone. Manifests from the newest down, so that those that are
    # left still lead from their anchor on.
    links, payloads, digests, beats, young = [], [], [], [], 0
    for info, name in listing.objects:
        match name:
            case FoldName(version, base) if min(version, base) < oldest:
                links.append(info)
            case AnchorName(version) if version < oldest:
                links.append(info)
            case PayloadName(digest) if digest not in named and info.modified < before:
                payloads.append(info)
            case PayloadName(digest) if digest not in named:
                young += info.nbytes
            case DigestsName(root) if root not in roots and info.modified < before:
                digests.append(info)
            case WorkerName(_, None) if info.modified < before:
                beats.append(info)
            case WorkerName(_, int(version)) if version < oldest:
                beats.append(info)
    gone = sorted(version for version in listing.commits if version < oldest)
    old = [listing.commits[version] for version in reversed(gone)]
    doomed = [*links, *old, *payloads, *digests, *beats]
    wanted = kept[min(keep, len(kept)) - 1].version
    nbytes = sum(info.nbytes for info in doomed)
    return GcPlan(oldest, tuple(gone), tuple(info.name for info in doomed), nbytes, wanted, young)


def _kept(manifests: Iterable[Manifest], keep: int, listing: _Listing) -> list[Manifest]:
    """The last ``keep`` of the ``manifests``, which are read from the newest down, and those down
    to the anchors from which their versions are restored."""
    needed: set[int] = set()
    kept: list[Manifest] = []
    for manifest in manifests:
        if len(kept) >= keep and manifest.version < min(needed):
            break
        kept.append(manifest)
        if len(kept) <= keep or manifest.version in needed:
            needed |= {manifest.version} | _base(manifest, listing)
    lost = needed - {manifest.version for manifest in kept}
    if lost:
        raise ChainGap(
            f"version {max(lost)} is missing or damaged, so nothing was deleted", hint=_DAMAGED_HINT
        )
    return kept


def _base(manifest: Manifest, listing: _Listing) -> set[int]:
    """The version from which this one is restored: none where its anchor is stored, else its
    patch's base; or that of a fold where the patch or its base is not stored, as in a relay's
    target."""
    if manifest.anchor and listing.payloads.issuperset(manifest.anchor.shards):
        return set()
    bases = []
    if manifest.patch and listing.payloads.issuperset(manifest.patch.parts):
        bases = [manifest.patch.base]
        if manifest.patch.base in listing.commits:
            return set(bases)
    bases += listing.bases(manifest.version)
    if not bases:
        raise ChainGap(
            f"version {manifest.version} lacks payloads, so nothing was deleted", hint=_DAMAGED_HINT
        )
    return {next((base for base in bases if base in listing.commits), bases[0])}


def payloads_of(manifest: Manifest, oldest: int) -> list[Payload]:
    """What a manifest names that can be used while ``oldest`` is the first version: all but a patch
    whose base is gone."""
    anchor = list(manifest.anchor.shards) if manifest.anchor else []
    patch = list(manifest.patch.parts) if manifest.patch and manifest.patch.base >= oldest else []
    return anchor + patch + [file.payload for file in manifest.files]


def _readable(stream: Stream) -> Iterator[Manifest]:
    """The manifests that can be read, of the stream that the newest of them belongs to, from the
    newest down."""
    for version in reversed(stream.versions()):
        with suppress(*UNREADABLE):
            manifest = stream.manifest(version)
            stream.adopt(manifest)
            yield manifest


def _modified(store: Store, name: str) -> float | None:
    try:
        return store.head(name).modified
    except NotFound:
        return None


class Retention:
    """Deletes what the newest ``keep`` versions of a stream do not need, as its publisher commits
    them: at first, and whenever an anchor has become the one to restore them from. ``keys`` are
    those that are trusted. Failures are reported, and tried again with the next anchor."""

    def __init__(
        self, stream: Stream, keep: int, keys: Collection[str], listener: Listener | None
    ) -> None:
        self._keep = keep
        self._stream = stream
        self._keys = keys or None
        self._listener = listener
        self._anchors: list[int] = [0]
        self._newest = 0

    def committed(self, manifest: Manifest) -> None:
        """A version was committed."""
        self._newest = manifest.version
        if manifest.anchor:
            self._anchors.append(manifest.version)

    def collect(self) -> None:
        """Deletes, where something is due. Raises nothing of the store's, and ends what it begins:
        other ranks wait."""
        oldest = -1 if self._newest == 0 else self._newest - self._keep
        if min(self._anchors, default=self._newest) > oldest:
            return
        self._anchors = [version for version in self._anchors if version > oldest]
        store, name = self._stream.store, self._stream.name
        try:
            with shield():
                gc_stream(
                    store,
                    name,
                    keep=self._keep,
                    trusted_keys=self._keys,
                    stream_id=self._stream.stream_id,
                )
        except Exception as error:  # whatever it is: the version is there
            hint = getattr(error, "hint", "It is tried again later.")
            if self._listener:
                self._listener(CallFailed(name, "gc", kind_of(error), str(error)))
            else:
                hint_to(
                    None, Hint(name, self._newest, "retention", f"old versions stay: {error}", hint)
                )
