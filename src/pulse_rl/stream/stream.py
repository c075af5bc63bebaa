"""A stream's objects in a store: their names, the listing, manifests and payloads, and the commit.

Names are zero-padded numbers or SHA-256 digests and nothing else, so that no name that was read can lead elsewhere.
"""

from __future__ import annotations

import re
from hashlib import sha256

from ..errors import CorruptManifest, DigestMismatch, InvalidName, PublisherConflict
from ..store.base import Data, Store, create_or_confirm
from . import manifest as manifests
from .chain import Link
from .manifest import Manifest, Payload
from .signing import TrustedKeys

_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"([0-9]{12})\.json")
_FOLD = re.compile(r"([0-9]{12})-([0-9]{12})-([0-9]{15})-([0-9a-f]{64})")
_ANCHOR = re.compile(r"([0-9]{12})-anchor-([0-9]{15})")
PATCH, SHARD = "patch", "safetensors"
_EPOCH = re.compile(r"[0-9]{12}")
# Above the length of a stream that is kept in order, so that looking for a way around a gap reads each manifest once.
_KEPT_MANIFESTS = 1 << 14
_CLAIM_TRIES = 100


class Stream:
    """Versions, payloads, and links: empty objects whose names say all that planning needs (docs/format.md, 6)."""

    def __init__(self, store: Store, name: str, trusted: TrustedKeys | None = None) -> None:
        if not isinstance(name, str) or not _STREAM.fullmatch(name):
            raise InvalidName(f"{name!r} is not a name for a stream")
        self.store = store
        self.name = name
        self._trusted = trusted
        self._manifests: dict[int, Manifest] = {}
        self._listed_bytes: dict[int, int] = {}

    def versions(self, after: int | None = None) -> list[int]:
        """The committed versions greater than ``after``, ascending."""
        start_after = None if after is None else self._version_name(after)
        found = []
        for info in self.store.list(f"{self.name}/versions", start_after):
            match = _VERSION.fullmatch(info.name.removeprefix(f"{self.name}/versions/"))
            if match:
                found.append(int(match[1]))
                if len(self._listed_bytes) < _KEPT_MANIFESTS:
                    self._listed_bytes[found[-1]] = info.nbytes
        return found

    def manifest(self, version: int) -> Manifest:
        """Raises NotFound, CorruptManifest and Untrusted. Manifests never change, so they are kept once read."""
        if version not in self._manifests:
            name = self._version_name(version)
            nbytes = self._listed_bytes.pop(version, None) or self.store.head(name).nbytes
            if nbytes > manifests.MAX_BYTES:
                raise CorruptManifest(f"{name} has {nbytes} bytes, more than {manifests.MAX_BYTES}")
            while len(self._manifests) >= _KEPT_MANIFESTS:
                del self._manifests[next(iter(self._manifests))]
            try:
                manifest = manifests.parse(self.store.get(name), stream=self.name, version=version)
            except CorruptManifest:  # as with payloads: once more, before it is believed
                manifest = manifests.parse(self.store.get(name), stream=self.name, version=version)
            if self._trusted:
                self._trusted.check(manifest)
            self._manifests[version] = manifest
        return self._manifests[version]

    def commit(self, manifest: Manifest) -> bool:
        """Creates the manifest, which commits its version. False when another publisher has taken the version."""
        return create_or_confirm(self.store, self._version_name(manifest.version), manifest.to_bytes())

    def claim(self, publisher: str) -> int:
        """Creates the next epoch of the stream for this publisher and returns it; older publishers then stop."""
        epoch = max(self.epochs(0), default=0)
        for _ in range(_CLAIM_TRIES):
            epoch += 1
            if create_or_confirm(self.store, self._epoch_name(epoch), publisher.encode()):
                return epoch
        raise PublisherConflict(f"{_CLAIM_TRIES} other publishers claimed {self.name!r} at the same time")

    def epochs(self, after: int) -> list[int]:
        """The claimed epochs greater than ``after``, ascending."""
        listed = self.store.list(f"{self.name}/epochs", self._epoch_name(after))
        names = [info.name.rpartition("/")[2] for info in listed]
        return [int(name) for name in names if _EPOCH.fullmatch(name)]

    def links(self, after: int | None = None) -> list[Link]:
        """The folds and anchors that are listed as such, of versions greater than ``after``. One listing, no reads."""
        start_after = None if after is None else f"{self.name}/links/{after + 1:012d}"
        found = []
        for info in self.store.list(f"{self.name}/links", start_after):
            name = info.name.removeprefix(f"{self.name}/links/")
            if match := _FOLD.fullmatch(name):
                version, base, nbytes = int(match[1]), int(match[2]), int(match[3])
                if version - base > 1 and nbytes > 0:
                    found.append(Link(base, version, nbytes, (Payload(match[4], nbytes),)))
            elif match := _ANCHOR.fullmatch(name):
                found.append(Link(None, int(match[1]), int(match[2])))
        return found

    def put_fold_link(self, base: int, version: int, payload: Payload) -> None:
        self.store.put(f"{self.name}/links/{version:012d}-{base:012d}-{payload.bytes:015d}-{payload.sha256}", b"")

    def put_anchor_link(self, version: int, nbytes: int) -> None:
        self.store.put(f"{self.name}/links/{version:012d}-anchor-{nbytes:015d}", b"")

    def put_payload(self, payload: Payload, kind: str, data: Data) -> None:
        """Stores a payload under its digest. Repeating it is harmless."""
        self.store.put(self.payload_name(payload, kind), data)

    def fetch(self, payload: Payload, kind: str) -> bytes:
        """A payload's verified bytes. Raises NotFound and DigestMismatch.

        A damaged answer is asked for once more, since a network breaks bytes more often than a disk does.
        """
        name = self.payload_name(payload, kind)
        for _ in range(2):
            stored = self.store.head(name).nbytes
            if stored == payload.bytes:
                data = self.store.get(name)
                if sha256(data).hexdigest() == payload.sha256:
                    return data
        raise DigestMismatch(f"{name} does not hold the {payload.bytes} bytes that its name promises")

    def payload_name(self, payload: Payload, kind: str) -> str:
        return f"{self.name}/payloads/{payload.sha256}.{kind}"

    def _epoch_name(self, epoch: int) -> str:
        return f"{self.name}/epochs/{epoch:012d}"

    def _version_name(self, version: int) -> str:
        return f"{self.name}/versions/{version:012d}.json"
