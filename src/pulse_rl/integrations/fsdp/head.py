"""What rank 0 does for all: it claims the stream, finds its head, and commits (docs/protocol.md, section 3)."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

from ..._util.serial import shield
from ...errors import ChainGap, InputError, PublisherConflict
from ...events import Metadata
from ...stream import manifest as manifests
from ...stream.chain import Link
from ...stream.manifest import Manifest, Payload
from ...stream.signing import Signer
from ...stream.stream import Stream
from ...stream.unreadable import UNREADABLE
from ...sync.commit import Committer, Content
from ...sync.planner import Planner
from ...sync.resume import bytes_since_anchor
from ...sync.upload import Uploaded


class Found(NamedTuple):
    """What rank 0 has found: ``keep``, the baseline is the head; ``lost``, the version of one that the store no longer
    holds; or the ``version``, ``root`` and the stored ``names`` of tied tensors of another head. Nothing of these where
    the stream is empty."""

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


def links_of_message(message: bytes) -> list[Link]:
    """The links that `Head.path_to` told of."""
    found = []
    for base, version, said in json.loads(message):
        payloads = tuple(Payload(*payload) for payload in said)
        found.append(Link(base, version, sum(payload.bytes for payload in payloads), payloads))
    return found


class Head:
    """The stream's head, on rank 0; ``pending`` is a version whose commit is not confirmed, with the time (Unix
    seconds) at which its payloads were stored."""

    def __init__(self, stream: Stream, signer: Signer | None, anchor_ratio: float) -> None:
        self._stream = stream
        self._signer = signer
        self._anchor_ratio = anchor_ratio
        self._committer = Committer(stream)
        self._pending: tuple[Manifest, float] | None = None
        self._since_anchor = 0
        self._anchor_due = False
        self._seen_together = False

    def settle(self) -> bytes:
        """Commits what an earlier call has left pending, unless its payloads may have been collected since. The
        manifest, if it is committed, else nothing."""
        self._committer.check()
        if self._pending is None:
            return b""
        manifest, stored = self._pending
        if self._committer.settles(manifest, stored):
            return self._confirm(manifest)
        self._pending = None
        return b""

    def find(self, version: int | None) -> Found:
        """What the head is to ranks whose baseline is ``version``. Claims the stream where that is to be done."""
        committer = self._committer
        if version is not None and version == committer.version:
            if self._stream.lists(version):
                return Found(keep=True)
            committer.reclaim()
            return Found(lost=version)
        committer.take()
        head = committer.head
        if head is None:
            return Found()
        try:
            self._since_anchor = bytes_since_anchor(self._stream, head.version, self._anchor_ratio)
        except (ChainGap, *UNREADABLE):  # newcomers cannot come here from the last anchor
            self._anchor_due = True
        if self._signer and head.signature and head.signature.key != self._signer.public_key:
            self._anchor_due = True  # for those who trust the new key only
        return Found(version=head.version, root=head.root, names=tuple(sorted(set(head.aliases.values()))))

    def path_to(self, version: int) -> bytes:
        """The links from an anchor to ``version``, as `links_of_message` reads them. Raises ChainGap, and what reading
        manifests raises."""
        path = []
        for planned in Planner(self._stream, version).plan(None):
            path.append(self._stream.resolved(planned))
        return json.dumps(
            [[link.base, link.version, [[p.sha256, p.bytes] for p in link.payloads or ()]] for link in path]
        ).encode()

    def needs_anchor(self, patch_bytes: int, state_bytes: int) -> bool:
        """Whether a version with a patch of so many bytes is to have an anchor beside it."""
        return self._anchor_due or self._since_anchor + patch_bytes > self._anchor_ratio * state_bytes

    def commit(self, content: Content, uploaded: Uploaded, metadata: Metadata) -> bytes:
        """The manifest of the next version, if it was committed; nothing if its number is taken."""
        manifest = self._committer.manifest(content, uploaded, metadata)
        if self._signer:
            manifest = self._signer.sign(manifest)
        # Before it is created for good: what no reader could parse must not be committed.
        manifests.parse(manifest.to_bytes(), stream=manifest.stream, version=manifest.version)
        if not self._seen_together or manifest.anchor:
            if not self._stream.stores(manifest):
                raise InputError(
                    "rank 0 does not find in its store what the ranks have stored",
                    hint="Give all ranks the same store, by an address that means the same everywhere.",
                )
            self._seen_together = True
        self._pending = manifest, time.time()
        return self._confirm(manifest)

    def _confirm(self, manifest: Manifest) -> bytes:
        with shield():
            try:
                committed = self._committer.commit(manifest)
            except PublisherConflict:
                self._pending = None
                raise
            self._pending = None
            if not committed:
                return b""
            if manifest.anchor:
                self._since_anchor, self._anchor_due = 0, False
            else:
                self._since_anchor += sum(p.bytes for p in manifest.patch.parts) if manifest.patch else 0
            return manifest.to_bytes()
