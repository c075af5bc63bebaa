"""Garbage collection: deletes what no kept version needs, while every kept version can still be
restored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from .._util.serial import shield
from .._util.settings import checked_count, checked_number
from ..errors import ChainGap, EmptyStream, NotFound
from ..events import CallFailed, Hint, Listener, hint_to, kind_of
from ..store import Store, open_store
from ..store.base import UNREADABLE, ObjectInfo
from ..stream.manifest import Manifest, Payload
from ..stream.names import (
    AnchorName,
    DigestsName,
    FoldName,
    ObjectName,
    PayloadName,
    StreamNames,
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
    now, since they were written lately.
    """

    oldest: int
    versions: tuple[int, ...] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    nbytes: int
    wanted: int
    young: int


def plan_gc(
    names: StreamNames,
    manifests: Iterable[Manifest],
    objects: list[ObjectInfo],
    *,
    keep: int,
    before: float,
    parts_of: Callable[[FoldName], Collection[Payload] | None] = lambda fold: None,
) -> GcPlan:
    """What may be deleted so that the last ``keep`` versions stay restorable. Pure.

    ``manifests`` are those that can be read and trusted, from the newest down; they are read only
    as far as needed: to the anchors from which the kept versions are restored. ``objects`` are the
    stream's, with times; of payloads that no manifest left names, those written after ``before``
    (Unix seconds) stay, since their manifest may be on its way. ``parts_of`` tells the payloads of
    a listed fold, None where its link cannot be read. Objects that are not spelled as the stream's
    names are stay. Raises EmptyStream, and ChainGap where a kept version misses payloads already:
    what would have to stay instead is not for a deletion to guess.
    """
    found = [(info, names.parse(info.name)) for info in objects]
    kept = _kept(manifests, keep, _stored(found, parts_of))
    if not kept:
        raise EmptyStream("the stream has no version that can be read")
    oldest = min(manifest.version for manifest in kept)
    folds = [
        name
        for _, name in found
        if isinstance(name, FoldName) and min(name.version, name.base) >= oldest
    ]
    parts = [parts_of(fold) for fold in folds]
    before = min(
        before, _before_unread(found, {manifest.version for manifest in kept}, None in parts)
    )
    named = {payload.sha256 for manifest in kept for payload in _payloads(manifest, oldest)}
    named |= {payload.sha256 for of in parts for payload in of or ()}
    roots = {manifest.root for manifest in kept}

    links, old, payloads, digests, beats = [], [], [], [], []
    for info, name in found:
        match name:
            case FoldName(version, base) if min(version, base) < oldest:
                links.append(info)
            case AnchorName(version) if version < oldest:
                links.append(info)
            case VersionName(version) if version < oldest:
                old.append(info)
            case PayloadName(digest):
                payloads.append((info, digest))
            case DigestsName(root) if root not in roots and info.modified < before:
                digests.append(info)
            case WorkerName(_, version) if version < oldest:
                beats.append(info)
    unnamed = [info for info, digest in payloads if digest not in named and info.modified < before]
    young = sum(
        info.nbytes for info, digest in payloads if digest not in named and info.modified >= before
    )
    # Links before manifests before payloads: whoever stops in between leaves nothing that names
    # what is gone. Manifests from the newest down, so that those that are left still lead from
    # their anchor on.
    doomed = [*links, *sorted(old, reverse=True), *unnamed, *digests, *beats]
    gone = sorted(
        name.version for _, name in found if isinstance(name, VersionName) and name.version < oldest
    )
    wanted = kept[min(keep, len(kept)) - 1].version
    nbytes = sum(info.nbytes for info in doomed)
    return GcPlan(oldest, tuple(gone), tuple(info.name for info in doomed), nbytes, wanted, young)


class _Stored(NamedTuple):
    """The payloads and manifests that are there, readable or not, and the folds to each version,
    from the nearest base on, of which ``parts_of`` tells the payloads."""

    payloads: set[Payload]
    versions: set[int]
    folds: dict[int, list[FoldName]]
    parts_of: Callable[[FoldName], Collection[Payload] | None]

    def holds(self, fold: FoldName) -> bool:
        """Whether the payloads of a fold are there."""
        parts = self.parts_of(fold)
        return parts is not None and self.payloads.issuperset(parts)


def _stored(
    found: list[tuple[ObjectInfo, ObjectName | None]],
    parts_of: Callable[[FoldName], Collection[Payload] | None],
) -> _Stored:
    stored = _Stored(set(), set(), {}, parts_of)
    for info, name in found:
        match name:
            case PayloadName(digest):
                stored.payloads.add(Payload(digest, info.nbytes))
            case VersionName(version):
                stored.versions.add(version)
            case FoldName(version, base) as fold if base < version:
                stored.folds.setdefault(version, []).append(fold)
    for folds in stored.folds.values():
        folds.sort(key=lambda fold: -fold.base)
    return stored


def _kept(manifests: Iterable[Manifest], keep: int, stored: _Stored) -> list[Manifest]:
    """The last ``keep`` manifests, with those down to the anchors from which their versions are
    restored.
    """
    needed: set[int] = set()
    kept: list[Manifest] = []
    for manifest in manifests:
        if len(kept) >= keep and manifest.version < min(needed):
            break
        kept.append(manifest)
        if len(kept) <= keep or manifest.version in needed:
            needed |= {manifest.version} | _bases(manifest, stored)
    lost = needed - {manifest.version for manifest in kept}
    if lost:
        raise ChainGap(
            f"version {max(lost)} is missing or damaged, so nothing was deleted", hint=_DAMAGED_HINT
        )
    return kept


def _before_unread(
    found: list[tuple[ObjectInfo, ObjectName | None]], kept: set[int], unread_folds: bool
) -> float:
    """The time before which no payload was written that a version among the kept ones, or above
    them, or a fold there, may name though its manifest or link could not be read this time: that of
    the oldest kept commit. No limit where all were read."""
    commits = {name.version: info.modified for info, name in found if isinstance(name, VersionName)}
    oldest = min(kept)
    unread = [version for version in commits if version > oldest and version not in kept]
    return commits.get(oldest, 0.0) if unread or unread_folds else math.inf


def _bases(manifest: Manifest, stored: _Stored) -> set[int]:
    """The versions from which this one is restored: none where its anchor is stored, else its
    patch's base; and that of a fold where the patch or its base is not stored, as in a relay's
    target."""
    if manifest.anchor and stored.payloads.issuperset(manifest.anchor.shards):
        return set()
    bases = []
    if manifest.patch and stored.payloads.issuperset(manifest.patch.parts):
        bases = [manifest.patch.base]
        if manifest.patch.base in stored.versions:
            return set(bases)
    bases += [fold.base for fold in stored.folds.get(manifest.version, ()) if stored.holds(fold)]
    if not bases:
        raise ChainGap(
            f"version {manifest.version} lacks payloads, so nothing was deleted", hint=_DAMAGED_HINT
        )
    return {next((base for base in bases if base in stored.versions), bases[0])}


def _payloads(manifest: Manifest, oldest: int) -> list[Payload]:
    """What a kept manifest names and can still be used: all but a patch whose base is gone."""
    anchor = list(manifest.anchor.shards) if manifest.anchor else []
    patch = list(manifest.patch.parts) if manifest.patch and manifest.patch.base >= oldest else []
    return anchor + patch + [file.payload for file in manifest.files]


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
    """Deletes what the last ``keep`` versions of ``stream`` in ``store`` do not need; returns what
    was deleted, or with ``dry_run`` what would be.

    The versions from the oldest anchor needed up to the oldest kept one stay, since the kept ones
    are replayed from there. A reader in the middle of a restore finds another path
    or gets ChainGap. Publishing may continue: payloads written in the last ``grace_seconds`` stay.
    Manifests that cannot be read do not count, and with ``trusted_keys`` (Ed25519, 64 hexadecimal
    digits each) neither do those that none of them has signed; nor do those of another stream than
    ``stream_id``, or than the newest one where that is not given. Raises EmptyStream, InputError,
    and ChainGap, with nothing deleted, if a kept version is already damaged.
    """
    checked_count("keep", keep)
    checked_number("grace_seconds", grace_seconds, maximum=_LONGEST_GRACE)
    where = Stream(open_store(store), stream, trusted_by(trusted_keys), stream_id=stream_id)
    with where.limited():
        return _gc(where, keep, grace_seconds, dry_run=dry_run)


def _gc(where: Stream, keep: int, grace_seconds: float, *, dry_run: bool) -> GcPlan:
    names = where.names
    folders = (names.links, names.versions, names.payloads, names.digests, names.workers)
    objects = [info for folder in folders for info in where.store.list(folder)]
    # By the store's clock: one that runs behind this machine's must not make fresh payloads look
    # old.
    newest = max((info.modified for info in objects), default=0.0) + 1
    now = min(time.time(), newest)
    found = plan_gc(
        where.names,
        _readable(where),
        objects,
        keep=keep,
        before=now - grace_seconds,
        parts_of=_reading_links(where),
    )
    if not dry_run:
        seen = {info.name: info.modified for info in objects}
        for name in found.names:
            # A payload that was written again since: a publisher has stored the same bytes and is
            # about to name them.
            payload = isinstance(where.names.parse(name), PayloadName | DigestsName)
            if not payload or _modified(where.store, name) == seen[name]:
                where.store.delete(name)
    return found


def _readable(stream: Stream) -> Iterator[Manifest]:
    """The manifests that can be read, of the stream that the newest of them belongs to, from the
    newest down."""
    for version in reversed(stream.versions()):
        with suppress(*UNREADABLE):
            manifest = stream.manifest(version)
            stream.adopt(manifest)
            yield manifest


def _reading_links(stream: Stream) -> Callable[[FoldName], Collection[Payload] | None]:
    """The payloads of a fold, of which the link is read once at most; None where it cannot be."""
    known: dict[FoldName, Collection[Payload] | None] = {}

    def parts_of(fold: FoldName) -> Collection[Payload] | None:
        if fold not in known:
            try:
                known[fold] = stream.fold(fold)[0]
            except UNREADABLE:
                known[fold] = None
        return known[fold]

    return parts_of


def _modified(store: Store, name: str) -> float | None:
    try:
        return store.head(name).modified
    except NotFound:
        return None


class Retention:
    """Deletes what the newest ``keep`` versions of a stream do not need, as its publisher commits
    them: at first, and whenever an anchor has become the one to restore them from. ``keys`` are
    those that are trusted. What fails is said, and tried again with the next anchor."""

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
