"""Retention: what of a stream may be deleted while every kept version can still be restored."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import EmptyStream, InputError, NotFound
from .manifest import Manifest
from .store import Store, open_store
from .store.base import ObjectInfo
from .stream import Stream

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

    ``manifests`` are read from the newest down, only as far as needed: to the newest anchor at or below the oldest kept
    version. ``objects`` are the stream's, with times; of payloads that no manifest left names, those written after
    ``before`` (Unix seconds) stay, since their manifest may be on its way.
    """
    if not versions:
        raise EmptyStream("the stream has no versions")
    wanted = versions[-keep]
    named: set[str] = set()
    oldest = versions[0]
    for manifest in manifests:
        payloads = [*(manifest.anchor.shards if manifest.anchor else ())]
        if manifest.version <= wanted and manifest.anchor:
            oldest = manifest.version
            named |= {p.sha256 for p in payloads}
            break
        payloads += manifest.patch.parts if manifest.patch else ()
        named |= {p.sha256 for p in payloads}
    gone = [v for v in versions if v < oldest]
    first, second, third = [], [], []
    for info in objects:
        folder, _, name = info.name.rpartition("/")
        kind = folder.rpartition("/")[2]
        if kind == "links":
            version, base = name.split("-")[:2]
            kept = int(version) >= oldest and (base == "anchor" or int(base) >= oldest)
            if not kept:
                first.append(info)
            elif base != "anchor":
                named.add(name.rpartition("-")[2])
        elif kind == "versions" and int(name.partition(".")[0]) < oldest:
            second.append(info)
    for info in objects:
        folder, _, name = info.name.rpartition("/")
        if folder.endswith("/payloads") and name.partition(".")[0] not in named and info.modified < before:
            third.append(info)
    # Links before manifests before payloads: whoever stops in between leaves nothing that names what is gone.
    doomed = [*first, *sorted(second), *third]
    return Plan(oldest, tuple(gone), tuple(i.name for i in doomed), sum(i.nbytes for i in doomed))


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
    the last ``grace_seconds`` stay. Raises EmptyStream, InputError, and CorruptManifest for one that is needed.
    """
    if keep < 1:
        raise InputError(f"keep must be at least 1, not {keep}", hint="The newest version is always kept.")
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
