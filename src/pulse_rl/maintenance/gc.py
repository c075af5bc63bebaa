"""Retention: what of a stream may be deleted while every kept version can still be restored."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ChainGap, EmptyStream, InputError, NotFound
from ..store import Store, open_store
from ..store.base import ObjectInfo
from ..stream.manifest import Manifest, Payload
from ..stream.stream import Stream

_LINK = re.compile(r"(?P<version>[0-9]{12})-(?P<base>[0-9]{12}|anchor)-[0-9]{15}(?:-(?P<sha256>[0-9a-f]{64}))?")
_VERSION = re.compile(r"([0-9]{12})\.json")
_DAMAGED_HINT = "Keep fewer versions, or publish one with an anchor first."
DEFAULT_GRACE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes. ``oldest`` is the first version that is left: the anchor from which the kept versions are restored."""

    oldest: int
    versions: tuple[int, ...]
    names: tuple[str, ...]
    nbytes: int


def plan(
    manifests: Iterable[Manifest],
    versions: list[int],
    objects: list[ObjectInfo],
    *,
    keep: int,
    before: float,
) -> Plan:
    """What may be deleted so that the last ``keep`` of ``versions`` stay restorable. Pure.

    ``manifests`` come from the newest down and are read only as far as needed: to the anchors from which the kept
    versions are restored. ``objects`` are the stream's, with times; of payloads that no manifest left names, those
    written after ``before`` (Unix seconds) stay, since their manifest may be on its way. Raises ChainGap where a kept
    version misses payloads already: what would have to stay instead is not for a deletion to guess.
    """
    if not versions:
        raise EmptyStream("the stream has no versions")
    there = {
        Payload(name.partition(".")[0], info.nbytes)
        for info in objects
        for folder, _, name in [info.name.rpartition("/")]
        if folder.endswith("/payloads")
    }
    needed = set(versions[-keep:])
    read: list[Manifest] = []
    for manifest in manifests:
        if manifest.version < min(needed):
            break
        read.append(manifest)
        if manifest.version in needed and not (manifest.anchor and there.issuperset(manifest.anchor.shards)):
            if not manifest.patch or not there.issuperset(manifest.patch.parts):
                raise ChainGap(
                    f"version {manifest.version} misses payloads, so nothing was deleted",
                    hint=_DAMAGED_HINT,
                )
            needed.add(manifest.patch.base)
    lost = needed - {manifest.version for manifest in read}
    if lost:
        raise ChainGap(f"version {max(lost)} is missing, so nothing was deleted", hint=_DAMAGED_HINT)
    oldest = min(needed)
    named = {p.sha256 for m in read for p in _payloads(m, oldest)}

    links, old, unnamed = [], [], []
    for info in objects:
        kind, _, name = info.name.rpartition("/")
        if kind.endswith("/links") and (match := _LINK.fullmatch(name)):
            if int(match["version"]) < oldest or (match["base"] != "anchor" and int(match["base"]) < oldest):
                links.append(info)
            else:
                named.add(match["sha256"] or "")
        elif kind.endswith("/versions") and (match := _VERSION.fullmatch(name)) and int(match[1]) < oldest:
            old.append(info)
    for info in objects:
        kind, _, name = info.name.rpartition("/")
        if kind.endswith("/payloads") and name.partition(".")[0] not in named and info.modified < before:
            unnamed.append(info)
    # Links before manifests before payloads: whoever stops in between leaves nothing that names what is gone. Manifests
    # from the newest down, so that those that are left still lead from their anchor on.
    doomed = [*links, *sorted(old, reverse=True), *unnamed]
    return Plan(
        oldest, tuple(v for v in versions if v < oldest), tuple(i.name for i in doomed), sum(i.nbytes for i in doomed)
    )


def _payloads(manifest: Manifest, oldest: int) -> list[Payload]:
    """What a kept manifest names and can still be used: not a patch whose base is gone."""
    anchor = list(manifest.anchor.shards) if manifest.anchor else []
    patch = list(manifest.patch.parts) if manifest.patch and manifest.patch.base >= oldest else []
    return anchor + patch


def collect(
    store: Store | str,
    stream: str,
    *,
    keep: int,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    dry_run: bool = False,
) -> Plan:
    """Deletes what no version from the last ``keep`` on needs; returns what went, or would go with ``dry_run``.

    The versions between the oldest anchor that is needed and the oldest kept one stay, since the kept ones are replayed
    from there. A reader in mid-restore finds another path or gets ChainGap. Publishing may go on: payloads written in
    the last ``grace_seconds`` stay. Raises EmptyStream, InputError, and ChainGap or CorruptManifest, with nothing
    deleted, where a kept version is damaged already.
    """
    if keep < 1:
        raise InputError(f"keep must be at least 1, not {keep}", hint="The newest version is always kept.")
    if not 0 <= grace_seconds < math.inf:
        raise InputError(f"grace_seconds must be a number from 0 on, not {grace_seconds}")
    where = Stream(open_store(store), stream)
    versions = where.versions()
    keep = min(keep, len(versions))
    objects = [info for kind in ("links", "versions", "payloads") for info in where.store.list(f"{stream}/{kind}")]
    # By the store's clock: one that runs behind this machine's must not make fresh payloads look old.
    newest = max((info.modified for info in objects), default=0.0) + 1
    found = plan(
        (where.manifest(v) for v in reversed(versions)),
        versions,
        objects,
        keep=keep,
        before=min(time.time(), newest) - grace_seconds,
    )
    if not dry_run:
        seen = {info.name: info.modified for info in objects}
        for name in found.names:
            # Written again since: a publisher has just stored the same bytes and is about to name them.
            if "/payloads/" in name and _modified(where.store, name) != seen[name]:
                continue
            where.store.delete(name)
    return found


def _modified(store: Store, name: str) -> float | None:
    try:
        return store.head(name).modified
    except NotFound:
        return None
