"""A version is stored and committed (docs/protocol.md, section 3): each rank stores its payloads,
and rank 0 claims the stream, finds its head, and commits for all ranks."""

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
from ..errors import ChainGap, InputError, PublisherConflict, StoreError
from ..events import Listener, Metadata, PhaseTimer, Published, progress_to
from ..history import Note
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

_LATEST_COMMIT_SECONDS = 600.0
_AT_ONCE = 2
"""So many shards are stored at once: one is on its way while the other is hashed."""


class Content(NamedTuple):
    """What a manifest says of its state: ``root``, ``elements``, ``nbytes`` and ``aliases``; of its
    payloads, of which at least one is there; ``remembers``: how many of the last versions
    the next patch may be coded by; ``files``: those beside the weights."""

    root: str
    elements: int
    nbytes: int
    aliases: dict[str, str]
    patch: PatchRef | None
    anchor: AnchorRef | None
    remembers: int
    files: tuple[FileRef, ...]


class HeadState(NamedTuple):
    """What rank 0 has found: ``keep``, the baseline is the head; ``lost``, the version of one that
    the store no longer holds; or the ``version``, ``root`` and the stored ``names`` of tied tensors
    of another head. Nothing of these where the stream is empty."""

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

    ``epoch`` is 0 until the stream is claimed; ``head`` is the newest version known to be committed
    (None: none), ``next`` the number of the one after it. ``publisher`` is a random word that tells
    this publisher's manifests from another's. Once another publisher has claimed the stream, every
    call raises PublisherConflict. ``together``: other ranks store payloads, too.
    """

    def __init__(
        self, stream: Stream, signer: Signer | None, anchor_ratio: float, *, together: bool
    ) -> None:
        self.publisher = secrets.token_hex(8)
        self.epoch = 0
        self.head: Manifest | None = None
        self.next = 0
        self._stream = stream
        self._signer = signer
        self._anchor_ratio = anchor_ratio
        self._minted = secrets.token_hex(16)
        self._claimed_as = ""
        self._refused: str | None = None
        self._pending: tuple[Manifest, float] | None = None
        """A version whose commit is not confirmed, with the time (Unix seconds) at which its
        payloads were stored."""
        self._since_anchor = 0
        self._anchor_due = False
        self._together = self._looks_for_payloads = together
        self._files = FileStore(stream)

    @property
    def version(self) -> int | None:
        """The head's version."""
        return self.head.version if self.head else None

    @property
    def stream_id(self) -> str:
        """The stream's ID, chosen here where the stream has none."""
        return self._stream.stream_id or self._minted

    # -- in the order of a publish

    def settle(self) -> Manifest | None:
        """Commits what an earlier call has left pending, unless its payloads may have been
        collected since: then it is given up. Its commit may have succeeded all the same, and is
        found as the head. The manifest, if it is committed."""
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
        """What the head is to ranks whose baseline is ``version``. Claims the stream where that is
        to be done."""
        # 1. In a steady state one look is enough, which finds a head that the store has lost.
        if version is not None and version == self.version:
            if self._stream.has_version(version):
                return HeadState(keep=True)
            self._reclaim()
            self._files.forget()
            return HeadState(lost=version)
        # 2. A publisher that begins, or whose number was taken: what is there, and a claim that
        # stops the older ones. The head first: the claim names the stream's ID, and its epoch is
        # above the head's.
        if self.head and not self._claimed_as:
            # The claim has failed, and the stream may have been recreated since.
            self.head = None
            self._stream.forget()
        self._find_head()
        if self._claimed_as != self.stream_id:
            self._claim()
        head = self.head
        if head is None:
            return HeadState()
        # 3. Whether the next version owes new workers an anchor.
        try:
            self._since_anchor = bytes_since_anchor(self._stream, head.version, self._anchor_ratio)
        except (ChainGap, *UNREADABLE):  # new workers cannot come here from the last anchor
            self._anchor_due = True
        if self._signer and head.signature and head.signature.key != self._signer.public_key:
            self._anchor_due = True  # for those who trust the new key only
        return HeadState(
            version=head.version, root=head.root, names=tuple(sorted(set(head.aliases.values())))
        )

    def needs_anchor(self, patch_bytes: int, state_bytes: int) -> bool:
        """Whether a version with a patch of ``patch_bytes`` is to have an anchor as well."""
        return (
            self._anchor_due or self._since_anchor + patch_bytes > self._anchor_ratio * state_bytes
        )

    def store_files(
        self, files: Mapping[str, bytes] | None
    ) -> tuple[tuple[FileRef, ...], tuple[FileRef, ...]]:
        """(the files of the next version, all of them stored, those that are lost): ``files``, or,
        for None, what the store has of the head's. Raises StoreError."""
        named = self.head.files if self.head else ()
        if files is not None:
            return self._files.store(files, named), ()
        kept = self._files.held(named)
        return kept, tuple(ref for ref in named if ref not in kept)

    def commit(self, content: Content, metadata: Metadata) -> Manifest | None:
        """The manifest of the next version, if it was committed; None if its number is taken."""
        manifest = self._manifest(content, metadata)
        if self._signer:
            manifest = self._signer.sign(manifest)
        # Before it is created for good: what no reader could parse must not be committed.
        manifests.parse(manifest.to_bytes(), stream=manifest.stream, version=manifest.version)
        # Ranks may have been given stores that only look the same: rank 0 looks, at the first
        # version and at each anchor, before a manifest names what readers would not find.
        if self._looks_for_payloads or (manifest.anchor and self._together):
            if not self._stream.has_payloads(manifest, files=False):
                raise InputError(
                    "rank 0 does not find in its store what the ranks have stored",
                    hint="Give all ranks the same store, by an address that means the same "
                    "everywhere.",
                )
            self._looks_for_payloads = False
        self._pending = manifest, time.time()
        return self._confirm(manifest)

    # -- its parts

    def _can_settle(self, manifest: Manifest, uploaded: float) -> bool:
        """Whether a commit that an earlier call left unconfirmed is to be repeated: it may have
        succeeded, or can still do so, because the payloads, stored at ``uploaded`` (Unix seconds),
        cannot have been collected since."""
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
                self._since_anchor, self._anchor_due = 0, False
            else:
                self._since_anchor += manifests.patch_bytes(manifest)
            return manifest

    def _create(self, manifest: Manifest) -> bool:
        """Creates the manifest of the version after the head, which commits it. Repeating this
        after StoreUnavailable writes the same bytes, so that a commit whose reply was lost is
        found.

        False if the version is taken: by an older publisher that did not know yet that it was
        superseded, which is the head then, or by what is no version of this stream, which is passed
        over.
        """
        # The last look before the manifest: whoever claimed the stream later goes on from the head,
        # and this one stops.
        self._require_newest()
        # Creation decides between two publishers that both came here.
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
            # Listed for new workers. The manifest names it too, so failing to list it does not fail
            # the publish.
            with suppress(StoreError):
                self._stream.put_anchor_link(manifest.version, manifests.anchor_bytes(manifest))
        return True

    def _reclaim(self) -> None:
        """The store no longer holds the head: claims the stream again, and goes on from there.
        Raises PublisherConflict if another publisher has taken over, or has begun another stream
        under its name."""
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
        """Raises PublisherConflict if another publisher has claimed the stream since."""
        newer = self._stream.claims.after(self.epoch, self.publisher, self._stream.stream_id or "")
        if newer:
            self._refuse(
                f"another publisher has taken over {self._stream.name!r} with epoch {newer}"
            )

    def _find_head(self, *, lost: bool = False) -> None:
        """``lost``: the store no longer holds the one that was known."""
        begins = self.head is None
        found = self._stream.newest(self.version)
        if (
            found.listed and not found.manifest and begins
        ):  # before a stream is recreated, a second look
            found = self._stream.newest()
        if found.manifest:
            self.head = found.manifest
            self._stream.adopt(found.manifest)
        elif found.listed and begins:  # all are damaged, or a stranger's
            self._minted = self._stream.claims.stream_id() or self._minted
        last = -1 if self.version is None else self.version
        if (
            begins or lost
        ):  # what cannot be read may have been versions, and no number is used again
            last = max(
                plausible((version for version in found.listed if version > last), last),
                default=last,
            )
        self.next = next_unused(found.listed, last)

    def _claim(self) -> None:
        above = max(self.head.epoch if self.head else 0, self.epoch)
        self.epoch = self._stream.claims.take(
            self.publisher, self.stream_id, above, born=bool(self._stream.stream_id)
        )
        self._claimed_as = self.stream_id

    def _refuse(self, reason: str) -> NoReturn:
        self._refused = f"{reason}; the chain is intact"
        raise PublisherConflict(self._refused)


class FileStore:
    """Stores the files beside the weights, each once while it does not change. What the head names
    is looked for once, and not again: garbage collection keeps it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._seen: set[str] = set()
        self._last: tuple[Mapping[str, bytes], tuple[FileRef, ...]] = ({}, ())

    def store(self, files: Mapping[str, bytes], named: Collection[FileRef]) -> tuple[FileRef, ...]:
        """What a manifest says of ``files``, all of them stored then; ``named`` are the head's.
        Raises StoreError."""
        kept = {file.payload for file in named}
        if files != self._last[0]:
            made = (
                FileRef(name, sha256(data).hexdigest(), len(data))
                for name, data in sorted(files.items())
            )
            self._last = files, tuple(made)
        refs = self._last[1]
        for ref in refs:
            if ref.payload not in kept or not self._holds(ref):
                self._stream.put_payload(ref.payload, FILE, files[ref.name])
            self._seen.add(ref.sha256)
        return refs

    def held(self, named: Collection[FileRef]) -> tuple[FileRef, ...]:
        """Those of the head's files that the store holds."""
        return tuple(ref for ref in named if self._holds(ref))

    def _holds(self, ref: FileRef) -> bool:
        if ref.sha256 not in self._seen and self._stream.has_payload(ref.payload, FILE):
            self._seen.add(ref.sha256)
        return ref.sha256 in self._seen

    def forget(self) -> None:
        """The store may have lost what was there."""
        self._seen.clear()


def bytes_since_anchor(stream: Stream, version: int, anchor_ratio: float) -> int:
    """Bytes of the patches that a new worker replays to ``version`` after its last anchor.

    Counted no further than past ``anchor_ratio`` times the state's bytes, which makes the next
    anchor due.
    """
    total = 0
    while True:
        manifest = stream.manifest(version)
        if manifest.anchor or not manifest.patch or total > anchor_ratio * manifest.dense_bytes:
            return total
        total += manifests.patch_bytes(manifest)
        version = manifest.patch.base


def published_as(
    manifest: Manifest, timer: PhaseTimer, reason: str, blocked_seconds: float | None = None
) -> Published:
    """What the version of ``manifest`` cost; the caller was held up for ``blocked_seconds`` of it
    (None: for all)."""
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
    """What one rank has stored: its file of the patch and its shards; and what it says of a
    history."""

    parts: list[Payload]
    shards: list[Payload]
    changed: int
    note: Note

    def to_message(self) -> bytes:
        payloads = [[[p.sha256, p.bytes] for p in some] for some in (self.parts, self.shards)]
        return json.dumps([*payloads, self.changed, self.note]).encode()

    @classmethod
    def from_message(cls, message: bytes) -> Stored:
        parts, shards, changed, note = json.loads(message)
        return cls(
            [Payload(*p) for p in parts], [Payload(*p) for p in shards], changed, Note(*note)
        )


def store_patch(stream: Stream, chunks: Sequence[bytes]) -> Payload:
    """Stores a file of a patch, given in chunks. Raises StoreError."""
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
    """Stores this rank's shards of an anchor, of about ``shard_bytes`` each. ``filled`` gives what
    of the state is there: each shard is hashed and stored as soon as all of its elements are, while
    others are being filled. Raises StoreError, and what ``filled`` raises."""
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

    def put(number: int) -> tuple[int, Payload]:
        payload = _hashed(_chunks(draft, groups[number]))
        stream.put_payload(payload, SHARD, _chunks(draft, groups[number]))
        return number, payload

    payloads: dict[int, Payload] = {}
    with closing(
        ordered_map(put, complete(), min(_AT_ONCE, threads or default_threads()))
    ) as stored:
        for number, payload in stored:
            payloads[number] = payload
            if progress:
                progress(sum(segment.nbytes for segment in groups[number]))
    return [payloads[number] for number in range(len(groups))]


def uploaded(
    stored: Sequence[Stored], base: tuple[int, str] | None
) -> tuple[PatchRef | None, AnchorRef | None]:
    """What a manifest says of the payloads of all ranks, of a patch from ``base``, (version, root),
    if there is one."""
    parts = tuple(payload for of in stored for payload in of.parts)
    shards = tuple(payload for of in stored for payload in of.shards)
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
    """The segments of each shard: about ``shard_bytes`` of them; a larger segment has a shard to
    itself. One without tensors, where there are none."""
    groups: list[list[Segment]] = [[]]
    room = shard_bytes
    for segment in segments:
        if segment.nbytes > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        groups[-1].append(segment)
        room -= segment.nbytes
    return [tuple(group) for group in groups]


def _chunks(draft: PublishState, group: tuple[Segment, ...]) -> Iterator[bytes | memoryview]:
    ordered = in_file_order(group)
    yield sliced_header(ordered)
    for segment in ordered:
        if segment.elements:
            for run in runs_of(segment):
                yield draft.elements(run).view(np.uint8).data
