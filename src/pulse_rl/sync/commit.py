"""A publisher's claim to a stream, and the commit of a version under it (docs/protocol.md, section 3)."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import NoReturn

from ..errors import FormatError, NotFound, PublisherConflict, StoreError, Untrusted
from ..events import Metadata
from ..stream import manifest as manifests
from ..stream.manifest import Manifest
from ..stream.stream import Stream
from .draft import Draft
from .upload import Uploaded


class Claim:
    """``epoch`` is 0 until the stream is claimed; ``head`` is the newest version known to be committed (None: none).

    ``publisher`` is a random word that tells this publisher's manifests from another's. Once another publisher has
    claimed the stream, every call raises PublisherConflict.
    """

    def __init__(self, stream: Stream) -> None:
        self.publisher = secrets.token_hex(8)
        self.epoch = 0
        self.head: int | None = None
        self._stream = stream
        self._refused: str | None = None

    def check(self) -> None:
        """Raises PublisherConflict if this publisher has been superseded."""
        if self._refused:
            raise PublisherConflict(self._refused)

    def take(self) -> None:
        """Claims the stream, if that is still to be done, and finds its head."""
        if self.epoch == 0:
            self.epoch = self._stream.claim(self.publisher)
        self.head = newest(self._stream, self.head)

    def manifest(self, draft: Draft, uploaded: Uploaded, metadata: Metadata) -> Manifest:
        """The manifest of the version after the head, sealed but not signed."""
        return Manifest(
            format=manifests.FORMAT,
            stream=self._stream.name,
            version=0 if self.head is None else self.head + 1,
            epoch=self.epoch,
            root=draft.target.root,
            elements=draft.state.elements,
            dense_bytes=draft.state.nbytes,
            publisher=self.publisher,
            created=round(time.time(), 3),
            aliases=draft.state.aliases,
            metadata=metadata,
            patch=uploaded.patch,
            anchor=uploaded.anchor,
        ).sealed()

    def commit(self, manifest: Manifest) -> bool:
        """Creates the manifest of the version after the head, which commits it. Repeating this after StoreUnavailable
        writes the same bytes, so that a commit whose reply was lost is found.

        False if an older publisher, which did not know yet that it was superseded, has taken the version.
        """
        newer = self._stream.epochs(self.epoch)
        if newer:
            self._refuse(f"another publisher has taken over {self._stream.name!r} with epoch {newer[-1]}")
        if not self._stream.commit(manifest):
            epoch = self._epoch_of(manifest.version)
            if epoch > self.epoch:
                self._refuse(f"version {manifest.version} was committed by a publisher with epoch {epoch}")
            return False
        self.head = manifest.version
        if manifest.anchor:
            # Listed for new workers. The manifest names it too, so failing to list it does not fail the publish.
            with suppress(StoreError):
                self._stream.put_anchor_link(manifest.version, sum(p.bytes for p in manifest.anchor.shards))
        return True

    def _epoch_of(self, version: int) -> int:
        """The epoch of a version that already exists; 0 if its manifest is damaged or gone: no publisher to yield
        to."""
        try:
            return self._stream.manifest(version).epoch
        except (FormatError, NotFound, Untrusted):
            return 0

    def _refuse(self, reason: str) -> NoReturn:
        self._refused = f"{reason}; this one (epoch {self.epoch}) has stopped, and the chain is intact"
        raise PublisherConflict(self._refused)


def newest(stream: Stream, known: int | None) -> int | None:
    """The newest version that the store lists, ``known`` where it lists none above that one."""
    above = stream.versions(known)
    return above[-1] if above else known
