"""A stream in a store: its listings, manifests, payloads and claims, and the commit."""

from __future__ import annotations

from functools import partial
from hashlib import sha256

from ..errors import CorruptCheckpoint, CorruptManifest, DigestMismatch, PublisherConflict
from ..store.base import Data, Store, create_or_confirm
from . import manifest as manifests
from .anchor import RangeReader
from .chain import Link
from .kept import KeptManifests
from .manifest import Manifest, Payload
from .names import SHARD, AnchorName, EpochName, FoldName, StreamNames, VersionName
from .signing import TrustedKeys

_KEPT_SIZES = 1 << 14
_CLAIM_TRIES = 100


class Stream:
    """Versions, payloads, epochs, and links: empty objects whose names say all that planning needs (docs/format.md, 6).

    Raises InvalidName. With ``trusted`` keys only manifests that one of them has signed are read.
    """

    def __init__(self, store: Store, name: str, trusted: TrustedKeys | None = None) -> None:
        self.store = store
        self.name = name
        self.names = StreamNames(name)
        self._trusted = trusted
        self._manifests = KeptManifests()
        self._listed_bytes: dict[int, int] = {}

    def versions(self, after: int | None = None) -> list[int]:
        """The committed versions greater than ``after``, ascending."""
        start_after = None if after is None else self.names.version(after)
        found = []
        for info in self.store.list(self.names.versions, start_after):
            if isinstance(name := self.names.parse(info.name), VersionName):
                found.append(name.version)
                if len(self._listed_bytes) < _KEPT_SIZES:
                    self._listed_bytes[name.version] = info.nbytes
        return found

    def manifest(self, version: int) -> Manifest:
        """Raises NotFound, CorruptManifest and Untrusted. Manifests never change, so they are cached."""
        manifest = self._manifests.get(version)
        if manifest is None:
            name = self.names.version(version)
            nbytes = self._listed_bytes.pop(version, None) or self.store.head(name).nbytes
            if nbytes > manifests.MAX_BYTES:
                raise CorruptManifest(f"{name} has {nbytes} bytes, more than {manifests.MAX_BYTES}")
            try:
                manifest = manifests.parse(self.store.get(name), stream=self.name, version=version)
            except CorruptManifest:  # as with payloads: retry once before reporting it
                manifest = manifests.parse(self.store.get(name), stream=self.name, version=version)
            if self._trusted:
                self._trusted.check(manifest)
            self._manifests.keep(manifest)
        return manifest

    def commit(self, manifest: Manifest) -> bool:
        """Creates the manifest, which commits its version. False when another publisher has taken the version."""
        return create_or_confirm(self.store, self.names.version(manifest.version), manifest.to_bytes())

    def claim(self, publisher: str) -> int:
        """Creates the next epoch of the stream for this publisher and returns it; older publishers then stop."""
        epoch = max(self.epochs(0), default=0)
        for _ in range(_CLAIM_TRIES):
            epoch += 1
            if create_or_confirm(self.store, self.names.epoch(epoch), publisher.encode()):
                return epoch
        raise PublisherConflict(f"{_CLAIM_TRIES} other publishers claimed {self.name!r} at the same time")

    def epochs(self, after: int) -> list[int]:
        """The claimed epochs greater than ``after``, ascending."""
        listed = self.store.list(self.names.epochs, self.names.epoch(after))
        names = [self.names.parse(info.name) for info in listed]
        return [name.epoch for name in names if isinstance(name, EpochName)]

    def links(self, after: int | None = None) -> list[Link]:
        """The listed folds and anchors of versions greater than ``after``. One listing, no reads."""
        start_after = None if after is None else self.names.links_from(after + 1)
        found = []
        for info in self.store.list(self.names.links, start_after):
            match self.names.parse(info.name):
                case FoldName(version, base, nbytes, digest) if version - base > 1 and nbytes > 0:
                    found.append(Link(base, version, nbytes, (Payload(digest, nbytes),)))
                case AnchorName(version, nbytes):
                    found.append(Link(None, version, nbytes))
        return found

    def put_fold_link(self, base: int, version: int, payload: Payload) -> None:
        self.store.put(self.names.fold(base, version, payload.bytes, payload.sha256), b"")

    def put_anchor_link(self, version: int, nbytes: int) -> None:
        self.store.put(self.names.anchor(version, nbytes), b"")

    def put_payload(self, payload: Payload, kind: str, data: Data) -> None:
        """Stores a payload under its digest. Repeating it is harmless."""
        self.store.put(self.names.payload(payload.sha256, kind), data)

    def fetch(self, payload: Payload, kind: str) -> bytes:
        """A payload's verified bytes. Raises NotFound and DigestMismatch.

        A damaged reply is fetched once more: networks corrupt bytes more often than disks do.
        """
        name = self.names.payload(payload.sha256, kind)
        for _ in range(2):
            stored = self.store.head(name).nbytes
            if stored == payload.bytes:
                data = self.store.get(name)
                if sha256(data).hexdigest() == payload.sha256:
                    return data
        raise DigestMismatch(f"{name} does not hold the {payload.bytes} bytes that its name promises")

    def shard_reader(self, payload: Payload) -> RangeReader:
        """Reads ranges of an anchor's shard. Raises NotFound, and CorruptCheckpoint where it has another length."""
        name = self.names.payload(payload.sha256, SHARD)
        stored = self.store.head(name).nbytes
        if stored != payload.bytes:
            raise CorruptCheckpoint(
                f"the anchor's shard {name} has {stored} bytes, but its manifest says {payload.bytes}"
            )
        return partial(self.store.get, name)
