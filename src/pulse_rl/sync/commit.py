"""Store and commit a version (docs/protocol.md, section 3).

Each rank stores its payloads. Rank 0 claims the stream, finds its head, and commits for all ranks.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from hashlib import sha256
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .._util.serial import shield
from .._util.threads import default_threads, ordered_map
from ..errors import ChainGap, InputError, PublisherConflict, StoreError, StoreFull
from ..events import Listener, Metadata, PhaseTimer, Published, progress_to
from ..history import RankReport
from ..patch.blocks import runs_of
from ..state.tensors import Segment
from ..store.base import UNREADABLE
from ..stream import manifest as manifests
from ..stream.anchor import in_file_order, sliced_header
from ..stream.manifest import AnchorRef, FileRef, Manifest, PatchRef, Payload
from ..stream.names import FILE, PATCH, SHARD, next_unused, plausible
from ..stream.signing import Signer
from ..stream.stream import Stream
from .pending import PublishState

# A commit of unknown outcome is repeated within this time only. Garbage collection spares younger
# payloads: its grace period is an hour by default.
_LATEST_COMMIT_SECONDS = 600.0
# Shards that are stored in parallel: one is uploaded while the other is hashed.
_AT_ONCE = 2
# With `keep`, an anchor is stored every `keep` versions, at least this many, so that older ones can
# go. It costs the upload of a state, so it waits until the patches since the last anchor add up to
# an eighth of one; a state of this size in bytes at most is always worth it.
_KEPT_LEAST = 4
_KEPT_SHARE = 1 / 8
_CHEAP_ANCHOR = 64 << 20
# Versions until an anchor that found no room in the store is tried again.
_NO_ROOM_PAUSE = 16


class Content(NamedTuple):
    """The part of a manifest that describes the state and its payloads.

    At least one of ``patch`` and ``anchor`` is set. ``remembers`` is how many of the last versions
    the next patch may be coded by. ``files`` are those next to the weights.
    """

    root: str
    elements: int
    nbytes: int
    aliases: dict[str, str]
    patch: PatchRef | None
    anchor: AnchorRef | None
    remembers: int
    files: tuple[FileRef, ...]


class HeadState(NamedTuple):
    """The head as rank 0 found it, for all ranks.

    ``keep``: the baseline is the head. ``lost``: the version of a head that the store no longer
    holds. Otherwise ``version`` and ``root`` are those of another head, and ``names`` the stored
    names of its tied tensors. In an empty stream nothing is set.
    """

    keep: bool = False
    lost: int | None = None
    version: int | None = None
    root: str = ""
    names: tuple[str, ...] = ()

    def to_message(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_message(cls, message: bytes) -> HeadState:
        said: dict[str, Any] = json.loads(message)
        return cls(**said | {"names": tuple(said["names"])})


class Committer:
    """Commits the versions of a stream, on rank 0 for all ranks.

    ``epoch`` is 0 until the stream is claimed. ``head`` is the newest version known to be
    committed, and ``next`` the number after it. ``publisher`` is a random word that distinguishes
    this publisher's manifests from another's. Once another publisher has claimed the stream, every
    call raises PublisherConflict. ``anchor_due``: new workers cannot reach the next version
    without an anchor. ``keep`` is how many versions stay. ``together``: other ranks store payloads
    too.
    """

    def __init__(
        self,
        stream: Stream,
        signer: Signer | None,
        anchor_ratio: float,
        keep: int | None,
        *,
        together: bool,
    ) -> None:
        self.publisher = secrets.token_hex(8)
        self.epoch = 0
        self.head: Manifest | None = None
        self.next = 0
        self.anchor_due = False
        self._stream = stream
        self._signer = signer
        self._anchor_ratio = anchor_ratio
        self._keep = keep
        self._minted = secrets.token_hex(16)
        self._claimed_as = ""
        self._given_id: str | None = None
        self._refused: str | None = None
        # A version whose commit is not confirmed, with the time (Unix seconds) at which its
        # payloads were stored.
        self._pending: tuple[Manifest, float] | None = None
        self._since_anchor = 0  # bytes of patches
        self._last_anchor = 0  # a version
        self._no_room_until = 0
        self._together = self._looks_for_payloads = together
        self._files = FileStore(stream)

    @property
    def version(self) -> int | None:
        """The head's version; None without a head."""
        return self.head.version if self.head else None

    @property
    def stream_id(self) -> str:
        """The stream's ID; a new one for a stream that has none."""
        return self._stream.stream_id or self._minted

    # -- in the order of a publish

    def settle(self) -> Manifest | None:
        """Commit the version that an earlier call left unconfirmed; return its manifest if it is
        committed.

        The version is given up if its payloads may have been collected since. If its commit
        succeeded all the same, `find` finds it as the head.
        """
        if self._refused:
            raise PublisherConflict(self._refused)
        if self._pending is None:
            return None
        manifest, stored = self._pending
        if self._can_settle(manifest, stored):
            return self._confirm(manifest)
        self._pending = None
        return None

    def find(self, version: int | None) -> HeadState:
        """Find the head, for ranks whose baseline is ``version``. Claim the stream if it is not
        claimed."""
        # 1. In a steady state one request is enough; it also shows a head that the store has lost.
        if version is not None and version == self.version:
            if self._stream.has_version(version):
                return HeadState(keep=True)
            self._reclaim()
            self._files.forget()
            return HeadState(lost=version)
        # 2. A publisher that starts, or whose number was taken: find the head, then make a claim
        # that stops older publishers. The head comes first, since the claim names the stream's ID
        # and its epoch must exceed the head's.
        if not self._claimed_as:
            if self.head:  # the claim has failed, and the stream may have been recreated since
                self.head = None
                self._stream.forget()
                self._stream.stream_id = self._given_id
            self._given_id = self._stream.stream_id
        self._find_head()
        if self._claimed_as != self.stream_id:
            self._claim()
        head = self.head
        if head is None:
            return HeadState()
        # 3. Decide whether the next version needs an anchor for new workers.
        try:
            self._since_anchor, self._last_anchor = since_anchor(
                self._stream, head.version, self._anchor_ratio
            )
        except (ChainGap, *UNREADABLE):  # the patches since the last anchor are broken
            self.anchor_due = True
        if self._signer and head.signature and head.signature.key != self._signer.public_key:
            self.anchor_due = True  # for workers that trust the new key only
        return HeadState(
            version=head.version, root=head.root, names=tuple(sorted(set(head.aliases.values())))
        )

    def wants_anchor(self, patch_bytes: int, state_bytes: int) -> bool:
        """Whether a version with a patch of ``patch_bytes`` should have an anchor as well.

        It should if the patches since the last anchor became too long a way for new workers, or if
        versions that need not stay can be deleted only above a newer anchor.
        """
        if self.next < self._no_room_until:
            return False
        since = self._since_anchor + patch_bytes
        if since > self._anchor_ratio * state_bytes:
            return True
        if self._keep is None or self.next - self._last_anchor < max(self._keep, _KEPT_LEAST):
            return False
        return state_bytes <= _CHEAP_ANCHOR or since >= _KEPT_SHARE * state_bytes

    def found_no_room(self) -> None:
        """Try no anchor for some versions: the store had no room for one."""
        self._no_room_until = self.next + max(self._keep or 0, _NO_ROOM_PAUSE)

    def store_files(
        self, files: Mapping[str, bytes] | None
    ) -> tuple[tuple[FileRef, ...], tuple[FileRef, ...]]:
        """(the files of the next version, all stored; the files that the store has lost).

        ``files`` None keeps those of the head that the store still has. Raises StoreError.
        """
        named = self.head.files if self.head else ()
        if files is not None:
            return self._files.store(files, named), ()
        kept = self._files.held(named)
        return kept, tuple(ref for ref in named if ref not in kept)

    def commit(self, content: Content, metadata: Metadata) -> Manifest | None:
        """Commit the next version and return its manifest; None if its number is taken."""
        manifest = self._manifest(content, metadata)
        if self._signer:
            manifest = self._signer.sign(manifest)
        # Parsed before it is created: a manifest that no reader can parse would block the stream.
        manifests.parse(manifest.to_bytes(), stream=manifest.stream, version=manifest.version)
        # Ranks may have different stores under equal-looking addresses. At the first version and at
        # each anchor rank 0 checks that it sees all payloads, before a manifest names what readers
        # would not find.
        if self._looks_for_payloads or (manifest.anchor and self._together):
            if not self._stream.has_payloads(manifest, files=False):
                raise InputError(
                    "rank 0 does not find in its store what the ranks have stored",
                    hint="Give all ranks the same store, by an address that means the same "
                    "everywhere.",
                )
            self._looks_for_payloads = False
        # Kept until the outcome is known: after a lost reply `settle` repeats exactly this commit.
        self._pending = manifest, time.time()
        return self._confirm(manifest)

    # -- its parts

    def _can_settle(self, manifest: Manifest, uploaded: float) -> bool:
        """Whether to repeat a commit that an earlier call left unconfirmed.

        It is repeated if it has succeeded, or if it can still succeed: the payloads, stored at
        ``uploaded`` (Unix seconds), cannot have been collected, and there is no newer version.
        """
        if self._stream.has_manifest(manifest):
            return True
        fresh = 0 <= time.time() - uploaded < _LATEST_COMMIT_SECONDS
        newer = self._stream.versions(manifest.version)
        return fresh and not newer and self._stream.has_payloads(manifest)

    def _confirm(self, manifest: Manifest) -> Manifest | None:
        with shield():
            try:
                committed = self._create(manifest)
            except PublisherConflict:
                self._pending = None
                raise
            self._pending = None
            if not committed:
                return None
            if manifest.anchor:
                self._since_anchor, self.anchor_due = 0, False
                self._last_anchor = manifest.version
            else:
                self._since_anchor += manifests.patch_bytes(manifest)
            return manifest

    def _create(self, manifest: Manifest) -> bool:
        """Create the manifest of the version after the head, which commits it.

        Repeating this after StoreUnavailable writes the same bytes, so a commit whose reply was
        lost is found. Returns False if the number is taken. An older publisher may have taken it
        before it knew of its successor; its version is the head then. Anything else that has the
        number is skipped.
        """
        # The last check before the manifest. A publisher that claimed the stream since continues
        # from the head, so this one must stop.
        self._require_newest()
        # Creation decides between two publishers that both passed the check.
        if not self._stream.commit(manifest):
            with suppress(*UNREADABLE):
                there = self._stream.manifest(manifest.version)
                if there.epoch > self.epoch:
                    self._refuse(
                        f"version {there.version} was committed by a publisher with epoch "
                        f"{there.epoch}"
                    )
            self._find_head()
            return False
        self.head, self.next = manifest, manifest.version + 1
        self._stream.stream_id = manifest.stream_id
        if manifest.anchor:
            # Listed for new workers. The manifest names the anchor too, so a failure here does not
            # fail the publish.
            with suppress(StoreError):
                self._stream.put_anchor_link(manifest.version, manifests.anchor_bytes(manifest))
        return True

    def _reclaim(self) -> None:
        """Claim the stream again after the store has lost the head, and continue from there.

        Raises PublisherConflict if another publisher has taken over, or has started another stream
        of the name.
        """
        self._require_newest()
        other = self._stream.newest(anybody=True).manifest
        if other and other.stream_id != self.stream_id:
            self._refuse(
                f"the stream {self._stream.name!r} was deleted and recreated by another publisher"
            )
        self._find_head(lost=True)
        self._claim()

    def _manifest(self, content: Content, metadata: Metadata) -> Manifest:
        """The manifest of the version after the head, sealed but not signed."""
        return Manifest(
            format=manifests.FORMAT,
            stream=self._stream.name,
            stream_id=self.stream_id,
            version=self.next,
            epoch=self.epoch,
            root=content.root,
            elements=content.elements,
            dense_bytes=content.nbytes,
            publisher=self.publisher,
            created=round(time.time(), 3),
            remembers=content.remembers,
            aliases=content.aliases,
            metadata=metadata,
            files=content.files,
            patch=content.patch,
            anchor=content.anchor,
            digest="",
            signature=None,
        ).sealed()

    def _require_newest(self) -> None:
        """Raise PublisherConflict if another publisher has claimed the stream since."""
        newer = self._stream.claims.superseded_by(
            self.epoch, self.publisher, self._stream.stream_id or ""
        )
        if newer:
            self._refuse(
                f"another publisher has taken over {self._stream.name!r} with epoch {newer}"
            )

    def _find_head(self, *, lost: bool = False) -> None:
        """Find the newest version and the next free number. ``lost``: the store lost the known
        head."""
        # 1. The newest version that can be read.
        begins = self.head is None
        found = self._stream.newest(self.version)
        if (
            found.listed and not found.manifest and begins
        ):  # poll twice before a stream is recreated
            found = self._stream.newest()
        # 2. The stream's ID: that of the head, or of the newest claim if no manifest can be read.
        if found.manifest:
            self.head = found.manifest
            self._stream.adopt(found.manifest)
        elif found.listed and begins:  # all manifests are damaged or another stream's
            self._minted = self._stream.claims.stream_id() or self._minted
        # 3. The next number. Numbers of unreadable objects may have been versions, so none is used
        # again.
        last = -1 if self.version is None else self.version
        if begins or lost:  # an unreadable object may have been a version
            last = max(
                plausible((version for version in found.listed if version > last), last),
                default=last,
            )
        self.next = next_unused(found.listed, last)

    def _claim(self) -> None:
        above = max(self.head.epoch if self.head else 0, self.epoch)
        self.epoch = self._stream.claims.acquire(
            self.publisher, self.stream_id, above, born=bool(self._stream.stream_id)
        )
        self._claimed_as = self.stream_id

    def _refuse(self, reason: str) -> NoReturn:
        self._refused = f"{reason}; the chain is intact"
        raise PublisherConflict(self._refused)


class FileStore:
    """Stores the files next to the weights, each once while it does not change.

    Files that the head names are looked up once only, since garbage collection keeps them.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._seen: set[str] = set()
        self._last: tuple[Mapping[str, bytes], tuple[FileRef, ...]] = ({}, ())

    def store(self, files: Mapping[str, bytes], named: Collection[FileRef]) -> tuple[FileRef, ...]:
        """Store ``files`` and return their references; ``named`` are the head's files. Raises
        StoreError."""
        kept = {file.payload for file in named}
        if files != self._last[0]:
            made = (
                FileRef(name, sha256(data).hexdigest(), len(data))
                for name, data in sorted(files.items())
            )
            self._last = files, tuple(made)
        refs = self._last[1]
        # A file that the head names and this process has seen needs no request.
        for ref in refs:
            if ref.payload not in kept or not self._holds(ref):
                self._stream.put_payload(ref.payload, FILE, files[ref.name])
            self._seen.add(ref.sha256)
        return refs

    def held(self, named: Collection[FileRef]) -> tuple[FileRef, ...]:
        """The files of the head that the store has."""
        return tuple(ref for ref in named if self._holds(ref))

    def _holds(self, ref: FileRef) -> bool:
        if ref.sha256 not in self._seen and self._stream.has_payload(ref.payload, FILE):
            self._seen.add(ref.sha256)
        return ref.sha256 in self._seen

    def forget(self) -> None:
        """Forget which files the store has, since it may have lost them."""
        self._seen.clear()


def since_anchor(stream: Stream, version: int, anchor_ratio: float) -> tuple[int, int]:
    """(bytes of the patches from the last anchor to ``version``, that anchor's version).

    The count stops above ``anchor_ratio`` times the state's bytes: then an anchor is due anyway.
    """
    total = 0
    # Back along the bases of patches to the last anchor.
    while True:
        manifest = stream.manifest(version)
        if manifest.anchor or not manifest.patch or total > anchor_ratio * manifest.dense_bytes:
            return total, version
        total += manifests.patch_bytes(manifest)
        version = manifest.patch.base


def published_as(
    manifest: Manifest, timer: PhaseTimer, reason: str, blocked_seconds: float | None = None
) -> Published:
    """The cost of the version of ``manifest``.

    The caller waited for ``blocked_seconds`` of it (None: for all).
    """
    seconds = sum(timer.seconds.values())
    return Published(
        stream=manifest.stream,
        version=manifest.version,
        root=manifest.root,
        elements=manifest.elements,
        changed=manifest.patch.changed if manifest.patch else None,
        dense_bytes=manifest.dense_bytes,
        patch_bytes=manifests.patch_bytes(manifest),
        anchor_bytes=manifests.anchor_bytes(manifest),
        seconds=seconds,
        phases=timer.seconds,
        metadata=manifest.metadata,
        reason=reason,
        stream_id=manifest.stream_id,
        blocked_seconds=seconds if blocked_seconds is None else blocked_seconds,
    )


# -- what a version is stored as, before a manifest names it


class Stored(NamedTuple):
    """The payloads that one rank has stored, and its report on the history.

    ``parts`` has its file of the patch, ``shards`` those of an anchor; None if there was no room
    for an anchor.
    """

    parts: list[Payload]
    shards: list[Payload] | None
    changed: int
    note: RankReport

    def to_message(self) -> bytes:
        payloads = [
            None if some is None else [[p.sha256, p.bytes] for p in some]
            for some in (self.parts, self.shards)
        ]
        return json.dumps([*payloads, self.changed, self.note]).encode()

    @classmethod
    def from_message(cls, message: bytes) -> Stored:
        parts, shards, changed, note = json.loads(message)
        found = None if shards is None else [Payload(*p) for p in shards]
        return cls([Payload(*p) for p in parts], found, changed, RankReport(*note))


def store_patch(stream: Stream, chunks: Sequence[bytes]) -> Payload:
    """Store one file of a patch, given in chunks. Raises StoreError."""
    payload = _hashed(chunks)
    stream.put_payload(payload, PATCH, chunks)
    return payload


def store_anchor(
    stream: Stream,
    draft: PublishState,
    filled: Iterable[Sequence[Segment]],
    *,
    shard_bytes: int,
    threads: int | None,
    listener: Listener | None,
) -> list[Payload]:
    """Store this rank's shards of an anchor, of about ``shard_bytes`` each.

    ``filled`` yields the segments of the state as they become available. A shard is hashed and
    stored as soon as all of its segments are there, while others are being filled. Raises
    StoreError, and what ``filled`` raises.
    """
    # `missing` counts, for each shard, the elements that are not there yet.
    groups = _groups(draft.segments, shard_bytes)
    progress = progress_to(listener, "upload", sum(segment.nbytes for segment in draft.segments))
    of = {segment.spec.name: number for number, group in enumerate(groups) for segment in group}
    missing = [sum(segment.elements for segment in group) for group in groups]

    def complete() -> Iterator[int]:
        yield from (number for number, count in enumerate(missing) if not count)
        for segments in filled:
            for segment in segments:
                number = of[segment.spec.name]
                missing[number] -= segment.elements
                if not missing[number]:
                    yield number

    # The chunks are computed twice, once to hash and once to upload: they are views of the state,
    # and a copy would need the memory of a shard.
    new: list[Payload] = []

    def put(number: int) -> tuple[int, Payload]:
        shard = _Shard(draft, groups[number])
        payload = _hashed(shard)
        if not stream.has_payload(payload, SHARD):
            new.append(payload)
        stream.put_payload(payload, SHARD, shard)
        return number, payload

    payloads: dict[int, Payload] = {}
    try:
        with closing(
            ordered_map(put, complete(), min(_AT_ONCE, threads or default_threads()))
        ) as stored:
            for number, payload in stored:
                payloads[number] = payload
                if progress:
                    progress(sum(segment.nbytes for segment in groups[number]))
    except StoreFull:
        # No version names these shards, and patches may still fit.
        with suppress(StoreError):
            for payload in new:
                stream.store.delete(stream.names.payload(payload.sha256, SHARD))
        raise
    return [payloads[number] for number in range(len(groups))]


def uploaded(
    stored: Sequence[Stored], base: tuple[int, str] | None
) -> tuple[PatchRef | None, AnchorRef | None]:
    """The patch and the anchor that a manifest names, from the payloads of all ranks.

    ``base`` is (version, root) of the patch's base; None without a patch.
    """
    parts = tuple(payload for of in stored for payload in of.parts)
    lacks = any(of.shards is None for of in stored)
    shards = () if lacks else tuple(payload for of in stored for payload in of.shards or ())
    changed = sum(of.changed for of in stored)
    patch = PatchRef(base[0], base[1], changed, parts) if base else None
    return patch, AnchorRef(shards) if shards else None


def _hashed(chunks: Iterable[bytes | memoryview]) -> Payload:
    running, length = sha256(), 0
    for chunk in chunks:
        running.update(chunk)
        length += len(chunk)
    return Payload(running.hexdigest(), length)


def _groups(segments: Sequence[Segment], shard_bytes: int) -> list[tuple[Segment, ...]]:
    """The segments of each shard: about ``shard_bytes``; a larger segment has its own shard.

    Without tensors there is one empty shard.
    """
    groups: list[list[Segment]] = [[]]
    room = shard_bytes
    for segment in segments:
        if segment.nbytes > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        groups[-1].append(segment)
        room -= segment.nbytes
    return [tuple(group) for group in groups]


class _Shard:
    """The bytes of an anchor's shard in chunks. A store that fails may read them again."""

    def __init__(self, draft: PublishState, group: tuple[Segment, ...]) -> None:
        self._draft, self._group = draft, group

    def __iter__(self) -> Iterator[bytes | memoryview]:
        ordered = in_file_order(self._group)
        yield sliced_header(ordered)
        for segment in ordered:
            if segment.elements:
                for run in runs_of(segment):
                    yield self._draft.elements(run).view(np.uint8).data
