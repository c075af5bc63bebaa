"""A version is committed (docs/protocol.md, section 3): rank 0 claims the stream, finds its head,
and commits for all ranks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from .._util.serial import shield
from ..errors import ChainGap, InputError, PublisherConflict, StoreError
from ..events import Metadata, PhaseTimer, Published
from ..stream import manifest as manifests
from ..stream.manifest import AnchorRef, FileRef, Manifest, PatchRef
from ..stream.names import next_unused, plausible
from ..stream.signing import Signer
from ..stream.stream import Stream
from ..stream.unreadable import UNREADABLE
from .attested import WholeState, store_attestation
from .payloads import FileStore

_LATEST_COMMIT_SECONDS = 600.0


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


class Committer:
    """``epoch`` is 0 until the stream is claimed; ``head`` is the newest version known to be
    committed (None: none), ``next`` the number of the one after it.

    ``publisher`` is a random word that tells this publisher's manifests from another's. Once
    another publisher has claimed the stream, every call raises PublisherConflict.
    """

    def __init__(self, stream: Stream) -> None:
        self.publisher = secrets.token_hex(8)
        self.epoch = 0
        self.head: Manifest | None = None
        self.next = 0
        self._stream = stream
        self._minted = secrets.token_hex(16)
        self._claimed_as = ""
        self._refused: str | None = None

    @property
    def version(self) -> int | None:
        """The head's."""
        return self.head.version if self.head else None

    @property
    def files(self) -> tuple[FileRef, ...]:
        """The head's."""
        return self.head.files if self.head else ()

    @property
    def stream_id(self) -> str:
        """The stream's ID, chosen here where the stream has none."""
        return self._stream.stream_id or self._minted

    def check(self) -> None:
        """Raises PublisherConflict if this publisher has been superseded."""
        if self._refused:
            raise PublisherConflict(self._refused)

    def take(self) -> None:
        """Finds the head, and claims the stream if that is still to be done."""
        if (
            self.head and not self._claimed_as
        ):  # the claim failed, and the stream may have been recreated since
            self.head = None
            self._stream.forget()
        # The head first: the claim names the stream's ID, and its epoch is above the head's.
        self._find_head()
        if self._claimed_as != self.stream_id:
            self._claim()

    def reclaim(self) -> None:
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

    def manifest(self, content: Content, metadata: Metadata) -> Manifest:
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

    def settles(self, manifest: Manifest, uploaded: float) -> bool:
        """Whether a commit that an earlier call left unconfirmed is to be repeated: it may have
        succeeded, or can still do so, because the payloads, stored at ``uploaded`` (Unix seconds),
        cannot have been collected since."""
        if self._stream.has_manifest(manifest):
            return True
        fresh = 0 <= time.time() - uploaded < _LATEST_COMMIT_SECONDS
        newer = self._stream.versions(manifest.version)
        return fresh and not newer and self._stream.has_payloads(manifest)

    def commit(self, manifest: Manifest) -> bool:
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


class Found(NamedTuple):
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
    def from_message(cls, message: bytes) -> Found:
        said: dict[str, Any] = json.loads(message)
        return cls(**said | {"names": tuple(said["names"])})


class StreamHead:
    """The stream's head, as its publisher moves it on; ``pending`` is a version whose commit is not
    confirmed, with the time (Unix seconds) at which its payloads were stored. ``together``: other
    ranks store payloads, too."""

    def __init__(
        self,
        stream: Stream,
        signer: Signer | None,
        anchor_ratio: float,
        *,
        attest: bool,
        together: bool,
    ) -> None:
        self.committer = Committer(stream)
        self._stream = stream
        self._signer = signer
        self._attest = attest
        self._anchor_ratio = anchor_ratio
        self._pending: tuple[Manifest, float] | None = None
        self._since_anchor = 0
        self._anchor_due = False
        self._together = self._looks_for_payloads = together
        self._files = FileStore(stream)

    @property
    def next(self) -> int:
        """The number of the next version."""
        return self.committer.next

    def settle(self) -> Manifest | None:
        """Commits what an earlier call has left pending, unless its payloads may have been
        collected since: then it is given up. Its commit may have succeeded all the same, and is
        found as the head. The manifest, if it is committed."""
        self.committer.check()
        if self._pending is None:
            return None
        manifest, stored = self._pending
        if self.committer.settles(manifest, stored):
            return self._confirm(manifest)
        self._pending = None
        return None

    def find(self, version: int | None) -> Found:
        """What the head is to ranks whose baseline is ``version``. Claims the stream where that is
        to be done."""
        committer = self.committer
        # 1. In a steady state one look is enough, which finds a head that the store has lost.
        if version is not None and version == committer.version:
            if self._stream.has_version(version):
                return Found(keep=True)
            committer.reclaim()
            self._files.forget()
            return Found(lost=version)
        # 2. A publisher that begins, or whose number was taken: what is there, and a claim that
        # stops the older ones.
        committer.take()
        head = committer.head
        if head is None:
            return Found()
        # 3. Whether the next version owes newcomers an anchor.
        try:
            self._since_anchor = bytes_since_anchor(self._stream, head.version, self._anchor_ratio)
        except (ChainGap, *UNREADABLE):  # newcomers cannot come here from the last anchor
            self._anchor_due = True
        if self._signer and head.signature and head.signature.key != self._signer.public_key:
            self._anchor_due = True  # for those who trust the new key only
        return Found(
            version=head.version, root=head.root, names=tuple(sorted(set(head.aliases.values())))
        )

    def needs_anchor(self, patch_bytes: int, state_bytes: int) -> bool:
        """Whether a version with a patch of so many bytes is to have an anchor beside it."""
        return (
            self._anchor_due or self._since_anchor + patch_bytes > self._anchor_ratio * state_bytes
        )

    def store_files(
        self, files: Mapping[str, bytes] | None
    ) -> tuple[tuple[FileRef, ...], tuple[FileRef, ...]]:
        """(the files of the next version, all of them stored, those that are lost): ``files``, or,
        for None, what the store has of the head's. Raises StoreError."""
        named = self.committer.files
        if files is not None:
            return self._files.store(files, named), ()
        kept = self._files.held(named)
        return kept, tuple(ref for ref in named if ref not in kept)

    def commit(
        self, content: Content, metadata: Metadata, whole: WholeState | None = None
    ) -> Manifest | None:
        """The manifest of the next version, if it was committed; None if its number is taken.
        ``whole``: its state, wherever an attestation may be made of it."""
        manifest = self.committer.manifest(content, metadata)
        # As all payloads before the manifest, which names it: whoever is stopped in between leaves
        # no anchor without.
        if self._attest and manifest.anchor and self._signer and whole:
            manifest = manifest.with_attestation(
                store_attestation(self._stream, self._signer, manifest, whole)
            )
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

    def _confirm(self, manifest: Manifest) -> Manifest | None:
        with shield():
            try:
                committed = self.committer.commit(manifest)
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
