"""Garbage collection: deletes what no kept version needs, while every kept version can still be restored."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from ..errors import ChainGap, EmptyStream, FormatError, InputError, IntegrityError, NotFound, StreamError
from ..store import Store, open_store
from ..store.base import ObjectInfo
from ..stream.manifest import Manifest, Payload
from ..stream.names import AnchorName, FoldName, PayloadName, StreamNames, VersionName
from ..stream.stream import Stream
from ..sync.notes import DEFAULT_TIMEOUT_SECONDS, versions_of_groups

_DAMAGED_HINT = "Keep fewer versions, or first publish one with an anchor."
DEFAULT_GRACE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What is deleted: ``versions``, and the objects ``names`` in order of deletion, ``nbytes`` bytes in total.

    ``oldest`` is the first version that remains: the anchor from which the kept versions are restored.
    """

    oldest: int
    versions: tuple[int, ...]
    names: tuple[str, ...]
    nbytes: int


def plan_gc(
    names: StreamNames,
    manifests: Iterable[Manifest],
    versions: list[int],
    objects: list[ObjectInfo],
    *,
    keep: int,
    before: float,
    also: Collection[int] = (),
) -> GcPlan:
    """What may be deleted so that the last ``keep`` of ``versions`` stay restorable, and those in ``also``. Pure.

    ``manifests`` come from the newest down and are read only as far as needed: to the anchors from which the kept
    versions are restored. ``objects`` are the stream's, with times; of payloads that no manifest left names, those
    written after ``before`` (Unix seconds) stay, since their manifest may be on its way. Objects that are not spelled
    as the stream's names are stay. Raises EmptyStream, and ChainGap where a kept version misses payloads already: what
    would have to stay instead is not for a deletion to guess.
    """
    if not versions:
        raise EmptyStream("the stream has no versions")
    found = [(info, names.parse(info.name)) for info in objects]
    stored = {Payload(name.sha256, info.nbytes) for info, name in found if isinstance(name, PayloadName)}
    kept = _kept(manifests, {*versions[-keep:], *also}, stored)
    oldest = min(manifest.version for manifest in kept)
    named = {payload.sha256 for manifest in kept for payload in _payloads(manifest, oldest)}

    links, old, payloads = [], [], []
    for info, name in found:
        match name:
            case FoldName(version, base) if min(version, base) < oldest:
                links.append(info)
            case FoldName(_, _, _, digest):
                named.add(digest)
            case AnchorName(version) if version < oldest:
                links.append(info)
            case VersionName(version) if version < oldest:
                old.append(info)
            case PayloadName(digest):
                payloads.append((info, digest))
    unnamed = [info for info, digest in payloads if digest not in named and info.modified < before]
    # Links before manifests before payloads: whoever stops in between leaves nothing that names what is gone. Manifests
    # from the newest down, so that those that are left still lead from their anchor on.
    doomed = [*links, *sorted(old, reverse=True), *unnamed]
    gone = tuple(version for version in versions if version < oldest)
    return GcPlan(oldest, gone, tuple(info.name for info in doomed), sum(info.nbytes for info in doomed))


def _kept(manifests: Iterable[Manifest], wanted: Collection[int], stored: set[Payload]) -> list[Manifest]:
    """The manifests from the newest down to the anchors from which the ``wanted`` versions are restored."""
    needed = set(wanted)
    kept: list[Manifest] = []
    for manifest in manifests:
        if manifest.version < min(needed):
            break
        kept.append(manifest)
        if manifest.version in needed:
            needed |= _bases(manifest, stored)
    lost = needed - {manifest.version for manifest in kept}
    if lost:
        raise ChainGap(f"version {max(lost)} is missing, so nothing was deleted", hint=_DAMAGED_HINT)
    return kept


def _bases(manifest: Manifest, stored: set[Payload]) -> set[int]:
    """The versions from which this one is restored: none where its anchor is stored, else its patch's base."""
    if manifest.anchor and stored.issuperset(manifest.anchor.shards):
        return set()
    if manifest.patch and stored.issuperset(manifest.patch.parts):
        return {manifest.patch.base}
    raise ChainGap(f"version {manifest.version} lacks payloads, so nothing was deleted", hint=_DAMAGED_HINT)


def _payloads(manifest: Manifest, oldest: int) -> list[Payload]:
    """What a kept manifest names and can still be used: not a patch whose base is gone."""
    anchor = list(manifest.anchor.shards) if manifest.anchor else []
    patch = list(manifest.patch.parts) if manifest.patch and manifest.patch.base >= oldest else []
    return anchor + patch


def gc_stream(
    store: Store | str,
    stream: str,
    *,
    keep: int,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    dry_run: bool = False,
) -> GcPlan:
    """Deletes what the last ``keep`` versions of ``stream`` in ``store`` do not need; returns what was deleted, or with
    ``dry_run`` what would be.

    The versions from the oldest anchor needed up to the oldest kept one stay, since the kept ones are replayed from
    there; so does the version at which a group is whose members have polled in the last ``grace_seconds`` (or minute).
    A reader in the middle of a restore finds another path or gets ChainGap. Publishing may continue: payloads written
    in the last ``grace_seconds`` stay. Raises EmptyStream, InputError, and ChainGap or CorruptManifest, with nothing
    deleted, if a kept version is already damaged.
    """
    if keep < 1:
        raise InputError(f"keep must be at least 1, not {keep}", hint="The newest version is always kept.")
    if not 0 <= grace_seconds < math.inf:
        raise InputError(f"grace_seconds must be 0 or more, not {grace_seconds}")
    where = Stream(open_store(store), stream)
    versions = where.versions()
    keep = min(keep, len(versions))
    folders = (where.names.links, where.names.versions, where.names.payloads)
    objects = [info for folder in folders for info in where.store.list(folder)]
    # By the store's clock: one that runs behind this machine's must not make fresh payloads look old.
    newest = max((info.modified for info in objects), default=0.0) + 1
    now = min(time.time(), newest)
    found = plan_gc(
        where.names,
        (where.manifest(v) for v in reversed(versions)),
        versions,
        objects,
        keep=keep,
        before=now - grace_seconds,
        also=_versions_of_groups(where, versions, objects, now - max(grace_seconds, DEFAULT_TIMEOUT_SECONDS)),
    )
    if not dry_run:
        seen = {info.name: info.modified for info in objects}
        for name in found.names:
            # A payload that was written again since: a publisher has stored the same bytes and is about to name them.
            payload = isinstance(where.names.parse(name), PayloadName)
            if not payload or _modified(where.store, name) == seen[name]:
                where.store.delete(name)
    return found


def _versions_of_groups(where: Stream, versions: list[int], objects: list[ObjectInfo], since: float) -> list[int]:
    """The versions on which groups stand whose members wrote notes from ``since`` on. One that cannot be restored any
    more is of no use to its group, which moves on."""
    found = [(info, where.names.parse(info.name)) for info in objects]
    stored = {Payload(name.sha256, info.nbytes) for info, name in found if isinstance(name, PayloadName)}
    restorable = []
    for version in sorted(versions_of_groups(where.store, where.names, versions, since=since)):
        with suppress(StreamError, FormatError, IntegrityError, NotFound):
            _kept((where.manifest(v) for v in reversed(versions) if v <= version), [version], stored)
            restorable.append(version)
    return restorable


def _modified(store: Store, name: str) -> float | None:
    try:
        return store.head(name).modified
    except NotFound:
        return None
