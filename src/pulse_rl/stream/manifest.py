"""The manifest: the small object whose creation commits a version (docs/format.md, section 5).

It names links: an anchor reaches its version from nothing, a patch from the version before, a fold
from an earlier one. Manifests are canonical JSON: keys in the order of the structs below, no white
space, UTF-8. Equal manifests have equal bytes, so a client whose reply was lost can read the object
back and compare. This is the only module that imports msgspec.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import msgspec

from .._util.settings import MAX_NUMBER
from ..errors import ChainGap, CorruptManifest
from ..events import Metadata
from ..patch.history import MAX_WINDOWS
from ..store.base import ObjectInfo
from .names import flaw_of

FORMAT = "pulse.manifest.1"
MAX_PARTS = 1 << 16
MAX_BYTES = 16 << 20

_HEX64 = re.compile(r"[0-9a-f]{64}")
_HEX128 = re.compile(r"[0-9a-f]{128}")
_STREAM_ID = re.compile(r"[0-9a-f]{32}")

# More manifests than a pruned stream has, so that a search for a way around a gap reads each
# manifest once.
_MOST = 1 << 14
_MAX_BYTES = 32 << 20
#: Identifies a link: base, version, and the digest of a fold's list or of the first payload (""
#: while it is unknown).
Key = tuple[int | None, int, str]


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored object: the ``sha256`` of its bytes (64 hexadecimal digits) and its length in
    ``bytes``.

    The digest is also its name.
    """

    sha256: str
    bytes: int


class FileRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file next to the weights: its ``name``, and the payload that holds it."""

    name: str
    sha256: str
    bytes: int

    @property
    def payload(self) -> Payload:
        """The payload with the file's bytes."""
        return Payload(self.sha256, self.bytes)


class PatchRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A patch from version ``base``, whose root is ``base_root``, with ``changed`` elements.

    ``parts`` lists its files, one for each trainer rank that wrote one.
    """

    base: int
    base_root: str
    changed: int
    parts: tuple[Payload, ...]


class AnchorRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A full state as safetensors files, its ``shards``. Each element is in exactly one of them."""

    shards: tuple[Payload, ...]


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An Ed25519 signature of the manifest's bytes with ``signature`` null.

    ``key`` is the public key (32 bytes) and ``value`` the signature (64 bytes), in hexadecimal
    digits.
    """

    key: str
    value: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One committed version of a stream.

    Args:
        format: "pulse.manifest.1".
        stream: The stream's name.
        stream_id: 32 random hexadecimal digits, chosen for the first version. They distinguish the
            stream from every other of its name.
        version: The number of the version.
        epoch: The publisher's claim to the stream.
        root: The root of the state, 64 hexadecimal digits.
        elements: Elements of the state.
        dense_bytes: Bytes of the state.
        publisher: A random identifier of the process that wrote the manifest. Two publishers never
            write equal manifests.
        created: Unix seconds, for information only.
        remembers: How many of the last versions the next patch may be coded by; 0 at an anchor.
        aliases: The other names of tied tensors, each with its stored name.
        metadata: The publisher's own data.
        files: Files next to the weights, such as a config and a tokenizer.
        patch: The patch to this version; None if there is none, then there is an ``anchor``.
        anchor: The full state; None if there is none, then there is a ``patch``.
        digest: The SHA-256 of the bytes with an empty digest and no ``signature``.
        signature: The publisher's signature; None if it does not sign.
    """

    format: str
    stream: str
    stream_id: str
    version: int
    epoch: int
    root: str
    elements: int
    dense_bytes: int
    publisher: str
    created: float
    remembers: int
    aliases: dict[str, str]
    metadata: Metadata
    files: tuple[FileRef, ...]
    patch: PatchRef | None
    anchor: AnchorRef | None
    digest: str
    signature: Signature | None

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return msgspec.json.encode(self)

    def own_digest(self) -> str:
        """The correct value of ``digest``, 64 hexadecimal digits."""
        return sha256(
            msgspec.structs.replace(self, digest="", signature=None).to_bytes()
        ).hexdigest()

    def sealed(self) -> Manifest:
        """The manifest with its digest, not yet signed."""
        return msgspec.structs.replace(self, digest=self.own_digest(), signature=None)

    def with_signature(self, signature: Signature | None) -> Manifest:
        """The same manifest with ``signature``."""
        return msgspec.structs.replace(self, signature=signature)


def with_aliases(manifest: Manifest, aliases: dict[str, str]) -> Manifest:
    """``manifest`` with ``aliases`` in place of its own."""
    return msgspec.structs.replace(manifest, aliases=aliases)


_DECODER = msgspec.json.Decoder(Manifest, strict=True)


def parse(data: bytes, *, stream: str, version: int) -> Manifest:
    """Parse the manifest of ``version`` of ``stream``.

    Raises CorruptManifest unless it is canonical, complete, and named as it says.
    """
    what = f"the manifest of version {version} of {stream!r}"
    if len(data) > MAX_BYTES:
        raise CorruptManifest(f"{what} has {len(data)} bytes, more than {MAX_BYTES}")
    try:
        manifest = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptManifest(f"{what} does not decode: {error}") from error
    if manifest.format != FORMAT:
        raise CorruptManifest(
            f"{what} has format {manifest.format!r}", hint="Upgrade pulse-rl to read it."
        )
    if (manifest.stream, manifest.version) != (stream, version):
        raise CorruptManifest(
            f"{what} claims to be version {manifest.version} of {manifest.stream!r}"
        )
    # Other bytes with the same meaning would break the comparison after a lost reply, and
    # signatures.
    if manifest.to_bytes() != data:
        raise CorruptManifest(f"{what} is not in canonical form")
    for flaw in _flaws(manifest):
        raise CorruptManifest(f"{what} {flaw}")
    return manifest


def _flaws(manifest: Manifest) -> Iterator[str]:
    """Describe each invalid value of a well-formed manifest."""
    patch, anchor = manifest.patch, manifest.anchor
    if not is_stream_id(manifest.stream_id):
        yield f"has the stream_id {manifest.stream_id!r}"
    # The fields of the patch and of the anchor.
    payloads = [*(patch.parts if patch else ()), *(anchor.shards if anchor else ())]
    if patch and (not 0 <= patch.base < manifest.version or not patch.parts):
        yield f"has a patch from version {patch.base}"
    if patch and len(patch.parts) > MAX_PARTS:
        yield f"has a patch in {len(patch.parts)} parts"
    if anchor and manifest.remembers:
        yield "remembers changes that a reader of its anchor cannot know"
    if not 0 <= manifest.remembers <= MAX_WINDOWS:
        yield f"remembers {manifest.remembers} versions"
    if patch and len({part.sha256 for part in patch.parts}) < len(patch.parts):
        yield "lists a part twice"
    if manifest.files and (flaw := flaw_of((file.name, file.bytes) for file in manifest.files)):
        yield flaw
    # Numbers: other implementations hold them in 64 signed bits.
    counts = [manifest.elements, manifest.dense_bytes, patch.changed if patch else 0]
    facts = [value for value in manifest.metadata.values() if isinstance(value, int)]
    if min(counts) < 0 or any(
        abs(n) > MAX_NUMBER for n in [*counts, *(p.bytes for p in payloads), *facts]
    ):
        yield "has a count that is negative or beyond 63 bits"
    if patch and patch.changed > manifest.elements:
        yield f"counts {patch.changed} changes of {manifest.elements} elements"
    if not 1 <= manifest.epoch < 10**12:
        yield f"has epoch {manifest.epoch}"
    if not payloads or any(p.bytes <= 0 for p in payloads):
        yield "lists nothing to restore the version from"
    # Digests: they become names of objects, so their form keeps a reader in the stream's folder.
    digests = [manifest.root, *([patch.base_root] if patch else ()), *(p.sha256 for p in payloads)]
    digests += [file.sha256 for file in manifest.files]
    if not all(_HEX64.fullmatch(digest) for digest in digests):
        yield "has a digest that is not 64 lower-case hexadecimal digits"
    signature = manifest.signature
    if signature and not (_HEX64.fullmatch(signature.key) and _HEX128.fullmatch(signature.value)):
        yield "has a signature that is not lower-case hexadecimal digits"
    # Last, and the strongest: a bit that flipped in the store shows here even without a signature.
    if manifest.digest != manifest.own_digest():
        yield "does not match its own digest"


def is_digest(text: str) -> bool:
    """Whether ``text`` is a SHA-256 in hexadecimal digits."""
    return _HEX64.fullmatch(text) is not None


def is_stream_id(text: object) -> bool:
    """Whether ``text`` can be a stream ID."""
    return isinstance(text, str) and _STREAM_ID.fullmatch(text) is not None


class ManifestCache:
    """The manifests that were read last. Several threads may use it.

    A model with hundreds of tied names has the same aliases in each version, so equal aliases of
    consecutive manifests are stored once.
    """

    def __init__(self, most: int = _MOST, max_bytes: int = _MAX_BYTES) -> None:
        self._most = most
        self._most_bytes = max_bytes
        self._kept: dict[int, tuple[Manifest, int, ObjectInfo | None]] = {}
        self._nbytes = 0
        self._aliases: dict[str, str] = {}
        self._lock = threading.Lock()

    def get(self, version: int, listed: ObjectInfo | None = None) -> Manifest | None:
        """The manifest of ``version``; None also if its object is ``listed`` as another one than
        when it was read."""
        kept = self._kept.get(version)
        return kept[0] if kept and listed in (None, kept[2]) else None

    def keep(self, manifest: Manifest, listed: ObjectInfo | None = None) -> None:
        """Add ``manifest``, and drop the oldest ones if there is no room. One manifest always
        fits."""
        with self._lock:
            kept, nbytes, _ = self._kept.pop(manifest.version, (None, 0, None))
            if kept == manifest:
                self._kept[manifest.version] = kept, nbytes, listed
                return
            self._nbytes -= nbytes
            # Equal aliases in equal order: the manifest's bytes must not change by sharing them.
            if list(manifest.aliases.items()) == list(self._aliases.items()):
                nbytes = len(with_aliases(manifest, {}).to_bytes())
                manifest = with_aliases(manifest, self._aliases)
            else:
                nbytes = len(manifest.to_bytes())
                self._aliases = manifest.aliases
            # A dictionary keeps the order of insertion: its first key was read longest ago.
            while self._kept and (
                len(self._kept) >= self._most or self._nbytes + nbytes > self._most_bytes
            ):
                self._nbytes -= self._kept.pop(next(iter(self._kept)))[1]
            self._kept[manifest.version] = manifest, nbytes, listed
            self._nbytes += nbytes


class Link(NamedTuple):
    """A way to a version: an anchor (``base`` is None), a patch, or a fold.

    ``payloads`` are the objects to fetch. They are None while only their size is known or guessed:
    the manifest of ``version`` lists them, or the link of a fold, whose list has the SHA-256
    ``parts``. ``is_fold``: the link is not the version's own patch or anchor.
    """

    base: int | None
    version: int
    nbytes: int
    payloads: tuple[Payload, ...] | None = None
    parts: str = ""
    is_fold: bool = False

    @property
    def key(self) -> Key:
        return (
            self.base,
            self.version,
            self.parts or (self.payloads[0].sha256 if self.payloads else ""),
        )

    def __str__(self) -> str:
        if self.base is None:
            return f"the anchor of version {self.version}"
        return f"the {'fold' if self.is_fold else 'patch'} {self.base}->{self.version}"


def links_of(manifest: Manifest) -> list[Link]:
    """The links that a manifest itself names: its patch and its anchor."""
    links = []
    if manifest.patch:
        links.append(_link(manifest.patch.base, manifest.version, manifest.patch.parts))
    if manifest.anchor:
        links.append(_link(None, manifest.version, manifest.anchor.shards))
    return links


def with_payloads(link: Link, manifest: Manifest) -> Link:
    """``link`` with its payloads; raises ChainGap if the manifest has no such link."""
    for found in links_of(manifest):
        if (found.base, found.version) == (link.base, link.version):
            return found
    raise ChainGap(f"{link} is not in the manifest of version {manifest.version}")


def patch_bytes(manifest: Manifest) -> int:
    """Bytes of all parts of the manifest's patch; 0 without one."""
    return sum(part.bytes for part in manifest.patch.parts) if manifest.patch else 0


def anchor_bytes(manifest: Manifest) -> int:
    """Bytes of all shards of the manifest's anchor; 0 without one."""
    return sum(shard.bytes for shard in manifest.anchor.shards) if manifest.anchor else 0


def _link(base: int | None, version: int, payloads: tuple[Payload, ...]) -> Link:
    return Link(base, version, sum(p.bytes for p in payloads), payloads)
