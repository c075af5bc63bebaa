"""Puts back what a stream's store has lost or damaged: by name and digest from another copy, or
around it with a checkpoint (docs/runbook.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ..errors import ChainGap, InputError, StateMismatch
from ..history import history_path, load_history
from ..patch.blocks import cut
from ..patch.history import History
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State
from ..store import Store, open_store
from ..store.base import UNREADABLE
from ..stream.anchor import DEFAULT_SHARD_BYTES
from ..stream.manifest import FileRef, Manifest, Payload
from ..stream.names import FILE, PATCH, SHARD
from ..stream.signing import Signer, keys_of, trusted_by
from ..stream.stream import Stream
from ..sync.commit import store_anchor, store_patch
from ..sync.host_state import HostState, catch_up
from ..sync.pending import PublishLayout, PublishState
from ..sync.planner import BROKEN_LINK
from .diff import build_patch
from .gc import payloads_of
from .relay import copy_payload, holds_whole


class Repair(NamedTuple):
    """An object that was damaged or missing, and why it still is; ``problem`` is "" once it is
    whole again."""

    name: str
    problem: str


class Checkpoint(NamedTuple):
    """The state of a version, and the file or folder that it was read from."""

    state: State
    path: Path

    def read(self, file: FileRef) -> bytes | None:
        """A file next to the weights, if it is the one that a version names."""
        path = (self.path if self.path.is_dir() else self.path.parent) / file.name
        with suppress(OSError):
            if path.is_file() and path.stat().st_size == file.bytes:
                data = path.read_bytes()
                return data if sha256(data).hexdigest() == file.sha256 else None
        return None


def repair_stream(
    store: Store | str,
    stream: str,
    source: Store | str | Checkpoint,
    *,
    signer: Signer | None = None,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
) -> Iterator[Repair]:
    """Restore the damaged and missing objects of a stream, and yield one result per object.

    All versions that the store lists are checked, and those between them that only ``source``
    lists. Every payload is read once. A publisher may go on meanwhile.

    Args:
        store: The store, or its address.
        stream: The stream's name.
        source: Another copy of the stream: a relay's target, a backup, the folder of a cache. Or a
            checkpoint, the state of one version: then its anchor and its files are stored again,
            and a fold leads to it around the damage.
        signer: Signs the fold's link, for a signed stream.
        trusted_keys: Ed25519 public keys, 64 hexadecimal digits each: manifests that none of them
            has signed are damaged.
        stream_id: The stream's ID. Default: that of the newest version.
        threads: The maximum number of threads. Default: one per core.
    Returns: What was damaged.
    Raises:
        EmptyStream: The store has no version that can be read.
        InputError: The checkpoint is of no version of the stream.
        StoreError: A store failed.
    """
    trusted = trusted_by(keys_of(signer, trusted_keys))
    target = Stream(open_store(store), stream, trusted, signer=signer, stream_id=stream_id)
    copy: Stream | None = None
    if not isinstance(source, Checkpoint):
        copy = Stream(open_store(source), stream, trusted)
    with target.limited():
        target.adopt(target.require_newest())
        if copy:
            copy.stream_id = target.stream_id
            yield from _restore_manifests(target, copy)
            yield from _restore_payloads(target, copy, threads)
        elif isinstance(source, Checkpoint):
            yield from _with_checkpoint(target, source, threads)


def _restore_manifests(target: Stream, copy: Stream) -> Iterator[Repair]:
    """Puts back the manifests from the oldest to the newest version of the target."""
    listed = target.versions()
    there = set[int]()
    with suppress(*UNREADABLE):
        there.update(copy.versions())
    for version in sorted({*listed, *(v for v in there if listed[0] < v < listed[-1])}):
        name = target.names.version(version)
        try:
            target.manifest(version)
            continue
        except UNREADABLE as error:
            problem = str(error)
        try:
            manifest = copy.manifest(version)
            if not target.commit(manifest):
                target.store.delete(name)
                target.commit(manifest)
            problem = ""
        except UNREADABLE:
            pass
        yield Repair(name, problem)


def _restore_payloads(target: Stream, copy: Stream, threads: int | None) -> Iterator[Repair]:
    """Puts back the payloads that manifests and the links of folds name, and the digests."""
    checked = set[str]()
    for manifest, payload, kind in _named(target):
        if payload.sha256 in checked:
            continue
        checked.add(payload.sha256)
        if holds_whole(target, payload, kind, threads):
            continue
        problem = ""
        try:
            copy_payload(copy, target, payload, kind, threads)
        except BROKEN_LINK as error:  # the copy has lost it, too
            problem = f"version {manifest.version} needs it: {error}"
        yield Repair(target.names.payload(payload.sha256, kind), problem)
    yield from _restore_digests(target, copy)


def _named(stream: Stream) -> Iterator[tuple[Manifest, Payload, str]]:
    """All payloads that can be used, with their kinds, and a version that names them."""
    versions = stream.versions()
    oldest = versions[0]
    for version in versions:
        with suppress(*UNREADABLE):
            manifest = stream.manifest(version)
            kinds = dict.fromkeys(manifest.anchor.shards if manifest.anchor else (), SHARD)
            kinds |= dict.fromkeys((file.payload for file in manifest.files), FILE)
            for payload in payloads_of(manifest, oldest):
                yield manifest, payload, kinds.get(payload, PATCH)
    for link in stream.links():
        if link.is_fold and link.base is not None and link.base >= oldest:
            with suppress(*UNREADABLE):
                for payload in stream.resolved(link).payloads or ():
                    yield stream.manifest(link.version), payload, PATCH


def _restore_digests(target: Stream, copy: Stream) -> Iterator[Repair]:
    """Puts back the digests of the versions, which only workers that select tensors need."""
    from ..follow.digest_trees import copy_digests, has_digests

    for version in target.versions():
        with suppress(*UNREADABLE):
            manifest = target.manifest(version)
            leaves = manifest.anchor is not None
            if has_digests(target, manifest, leaves=leaves):
                continue
            copy_digests(copy, target, manifest, leaves=leaves)
            problem = "" if has_digests(target, manifest, leaves=leaves) else "no copy has it"
            yield Repair(f"the digests of version {version}", problem)


def _with_checkpoint(
    target: Stream, checkpoint: Checkpoint, threads: int | None
) -> Iterator[Repair]:
    state, digest, manifest = version_of(target, checkpoint.state, threads)
    # 1. The files, by their digests.
    for file in manifest.files:
        if not holds_whole(target, file.payload, FILE, threads):
            name = target.names.payload(file.sha256, FILE)
            data = checkpoint.read(file)
            if data is not None:
                target.put_payload(file.payload, FILE, data)
            problem = f"the checkpoint has another {file.name}, or none" if data is None else ""
            yield Repair(name, problem)
    # 2. The anchor: the same shards, where one process has made them.
    shards = manifest.anchor.shards if manifest.anchor else ()
    lost = [each for each in shards if not holds_whole(target, each, SHARD, threads)]
    if lost:
        made = _stored_anchor(target, state, threads)
        for shard in lost:
            problem = "" if shard in made else "several processes have cut it in another way"
            yield Repair(target.names.payload(shard.sha256, SHARD), problem)
    # 3. A fold around patches that are lost, from where the chain breaks.
    host = HostState(threads=threads)
    try:
        catch_up(host, target, manifest.version)
        return
    except ChainGap as error:
        gap = f"{error}"
    name = f"the path to version {manifest.version}"
    advice = "Run `pulse anchor --from` with a checkpoint of the newest version"
    if host.version is None:
        yield Repair(name, f"{gap}. {advice}")
        return
    try:
        ahead = _at_start(target, manifest, state, digest, checkpoint.path, threads)
        assert ahead.version is not None
        built = build_patch(host.state, ahead.state, host.digest, threads=threads)
        payload = store_patch(target, built.chunks)
        patch = target.manifest(ahead.version).patch
        if patch and patch.parts == (payload,):  # the very bytes that were lost
            name = target.names.payload(payload.sha256, PATCH)
        else:
            name = f"the fold {host.version}->{ahead.version}"
            target.put_fold_link(host.version, ahead.version, [payload])
        catch_up(HostState(threads=threads), target, ahead.version)
    except (StateMismatch, ChainGap) as error:
        yield Repair(name, f"{error}. {advice}")
    else:
        yield Repair(name, "")


def _at_start(
    target: Stream,
    manifest: Manifest,
    state: State,
    digest: StateDigest,
    checkpoint: Path,
    threads: int | None,
) -> HostState:
    """The state of a version, moved on to the next one at which a history starts: a fold leads
    nowhere else. Raises ChainGap."""
    kept = load_history(history_path(checkpoint), cut(state.specs), manifest.root)
    ahead = HostState(threads=threads)
    ahead.adopt(manifest, state, digest, history=kept or History())
    for version in [v for v in target.versions() if v >= manifest.version]:
        with suppress(*UNREADABLE):
            if not target.manifest(version).remembers:
                catch_up(ahead, target, version)
                return ahead
    raise ChainGap(f"no history starts at version {manifest.version} or later")


def version_of(
    target: Stream, state: State, threads: int | None
) -> tuple[State, StateDigest, Manifest]:
    """The newest version that has this state, in its own tensors' names. Raises InputError."""
    digests: dict[frozenset[str], StateDigest] = {}
    for version in reversed(target.versions()):
        with suppress(*UNREADABLE):
            manifest = target.manifest(version)
            known = frozenset(manifest.aliases.values())
            stored = state.stored_as(known)
            if known not in digests:
                digests[known] = state_digest(stored, threads=threads)
            if digests[known].root == manifest.root:
                return stored, digests[known], manifest
    raise InputError(
        f"the checkpoint is of no version of {target.name!r}",
        hint="Give a checkpoint that `pulse follow` or `pulse checkout` wrote, or another store.",
    )


def _stored_anchor(target: Stream, state: State, threads: int | None) -> list[Payload]:
    """The shards of a state as one process stores them."""
    layout = PublishLayout(state.specs, state.aliases)
    segments = layout.segments(0)
    draft = PublishState(layout, segments, cut(layout.specs), state, None, "")
    return store_anchor(
        target,
        draft,
        [segments],
        shard_bytes=DEFAULT_SHARD_BYTES,
        threads=threads,
        listener=None,
    )
