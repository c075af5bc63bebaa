"""The manifest: the small object whose creation commits a version (docs/format.md, section 5), and
the links that it names: an anchor reaches its version from nothing, a patch from the version
before, a fold from an earlier one.

Canonical JSON: keys in the order of the structs below, no white space, UTF-8. The same manifest has
the same bytes, so that a lost reply to its creation can be resolved by reading it back. This is the
only module that imports msgspec.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import NamedTuple

import msgspec
import numpy as np

from ..errors import ChainGap, CorruptManifest, InputError
from ..events import Metadata
from ..patch.history import MAX_WINDOWS
from .names import flaw_of

FORMAT = "pulse.manifest.1"
MAX_PARTS = 1 << 16
MAX_BYTES = 16 << 20
MAX_NUMBER = (1 << 63) - 1

_HEX64 = re.compile(r"[0-9a-f]{64}")
_HEX128 = re.compile(r"[0-9a-f]{128}")
_STREAM_ID = re.compile(r"[0-9a-f]{32}")

# Above the length of a stream that is kept in order, so that looking for a way around a gap reads
# each manifest once.
_MOST = 1 << 14
_MAX_BYTES = 32 << 20
Key = tuple[int | None, int, str]
"""What tells two links apart: base, version, and the digest of a fold's list, or of the first
payload ("" while it is not known)."""


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored object: the ``sha256`` of its bytes (64 hexadecimal digits), which is also its name,
    and its length in ``bytes``."""

    sha256: str
    bytes: int


class FileRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file beside the weights: its ``name``, and the payload that holds it."""

    name: str
    sha256: str
    bytes: int

    @property
    def payload(self) -> Payload:
        """Where its bytes are."""
        return Payload(self.sha256, self.bytes)


class PatchRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A patch from version ``base``, whose root is ``base_root``, with ``changed`` elements.
    ``parts`` lists its files, one for each trainer rank that has written some."""

    base: int
    base_root: str
    changed: int
    parts: tuple[Payload, ...]


class AnchorRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The full state as safetensors files, its ``shards``; each element is in exactly one of
    them."""

    shards: tuple[Payload, ...]


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ed25519 over the manifest's bytes with ``signature`` null: the public ``key`` (32 bytes) and
    the signature's ``value`` (64 bytes), in hexadecimal digits."""

    key: str
    value: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One committed ``version`` of ``stream``, in ``format`` "pulse.manifest.1".

    ``stream_id`` is the stream's: 32 random hexadecimal digits, chosen at its birth, which tell it
    from every other stream of this name. ``remembers`` is the number of versions by whose changes a
    patch from this version may be coded: the last ones up to it, 0 at an anchor. ``root`` is the
    root of the state, which has ``elements`` elements in ``dense_bytes`` bytes; ``aliases`` maps
    the other names of tied tensors to the stored ones; ``metadata`` is the publisher's own data,
    and ``files`` are those next to the weights, such as a config and a tokenizer. ``epoch`` is the
    publisher's claim to the stream, ``publisher`` a random identifier of the process that wrote the
    manifest: two publishers never write equal manifests. ``digest`` is the SHA-256 of the bytes
    with an empty digest and no ``signature``. ``created`` is in Unix seconds and informational
    only. At least one of ``patch`` and ``anchor`` is present.
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
    """The manifest of ``version``; raises CorruptManifest unless it is canonical, complete and
    where it belongs."""
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
    if manifest.to_bytes() != data:
        raise CorruptManifest(f"{what} is not in canonical form")
    for flaw in _flaws(manifest):
        raise CorruptManifest(f"{what} {flaw}")
    return manifest


def _flaws(manifest: Manifest) -> Iterator[str]:
    """What is wrong with the values of a manifest that is well-formed."""
    patch, anchor = manifest.patch, manifest.anchor
    if not is_stream_id(manifest.stream_id):
        yield f"has the stream_id {manifest.stream_id!r}"
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
    digests = [manifest.root, *([patch.base_root] if patch else ()), *(p.sha256 for p in payloads)]
    digests += [file.sha256 for file in manifest.files]
    if not all(_HEX64.fullmatch(digest) for digest in digests):
        yield "has a digest that is not 64 lower-case hexadecimal digits"
    signature = manifest.signature
    if signature and not (_HEX64.fullmatch(signature.key) and _HEX128.fullmatch(signature.value)):
        yield "has a signature that is not lower-case hexadecimal digits"
    if manifest.digest != manifest.own_digest():
        yield "does not match its own digest"


def is_digest(text: str) -> bool:
    """Whether ``text`` is a SHA-256 in hexadecimal digits."""
    return _HEX64.fullmatch(text) is not None


def is_stream_id(text: object) -> bool:
    """Whether ``text`` can be a stream ID."""
    return isinstance(text, str) and _STREAM_ID.fullmatch(text) is not None


def checked_metadata(metadata: Mapping[str, object]) -> Metadata:
    """A copy with plain values; numpy scalars become Python's. Raises InputError for what JSON
    cannot hold exactly."""
    if not isinstance(metadata, Mapping):
        raise InputError(f"metadata must be a mapping, not a {type(metadata).__name__}")
    return {
        _checked_text(key, f"a key of the metadata, {key!r},"): _checked_fact(key, metadata[key])
        for key in metadata
    }


def _checked_fact(key: str, given: object) -> str | int | float | bool:
    value = given.item() if isinstance(given, np.generic) else given
    if isinstance(value, str):
        return _checked_text(value, f"metadata {key!r}")
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= MAX_NUMBER):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise InputError(
        f"metadata {key!r} is {given!r}: only strings, finite numbers and booleans are allowed"
    )


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{what} is not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} is not valid Unicode") from None
    return text


class ManifestCache:
    """The manifests read last. Aliases equal to those of the manifest before are held once: a model
    with hundreds of tied names has the same ones in each version. May be used from several
    threads."""

    def __init__(self, most: int = _MOST, max_bytes: int = _MAX_BYTES) -> None:
        self._most = most
        self._most_bytes = max_bytes
        self._kept: dict[int, tuple[Manifest, int]] = {}
        self._nbytes = 0
        self._aliases: dict[str, str] = {}
        self._lock = threading.Lock()

    def get(self, version: int) -> Manifest | None:
        kept = self._kept.get(version)
        return kept[0] if kept else None

    def keep(self, manifest: Manifest) -> None:
        """Keeps ``manifest`` in place of the oldest where there is no more room, and by itself
        however large it is."""
        with self._lock:
            if manifest.version in self._kept:
                return
            if list(manifest.aliases.items()) == list(self._aliases.items()):
                nbytes = len(with_aliases(manifest, {}).to_bytes())
                manifest = with_aliases(manifest, self._aliases)
            else:
                nbytes = len(manifest.to_bytes())
                self._aliases = manifest.aliases
            while self._kept and (
                len(self._kept) >= self._most or self._nbytes + nbytes > self._most_bytes
            ):
                self._nbytes -= self._kept.pop(next(iter(self._kept)))[1]
            self._kept[manifest.version] = manifest, nbytes
            self._nbytes += nbytes


class Link(NamedTuple):
    """``base`` is None for an anchor. ``payloads`` are the objects to fetch, None while only their
    size is known or guessed: the manifest of ``version`` lists them; or, of a fold, its link, where
    the list has the SHA-256 ``parts``. ``is_fold``: it is not the version's own patch or anchor."""

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

    @property
    def is_patch(self) -> bool:
        """Whether it leads from a version to the next that there is."""
        return self.base is not None and not self.is_fold

    def __str__(self) -> str:
        if self.base is None:
            return f"the anchor of version {self.version}"
        return f"the {'patch' if self.is_patch else 'fold'} {self.base}->{self.version}"


def links_of(manifest: Manifest) -> list[Link]:
    """The ways to reach a manifest's version that the manifest itself names."""
    links = []
    if manifest.patch:
        links.append(_link(manifest.patch.base, manifest.version, manifest.patch.parts))
    if manifest.anchor:
        links.append(_link(None, manifest.version, manifest.anchor.shards))
    return links


def with_payloads(link: Link, manifest: Manifest) -> Link:
    """``link`` with its payloads; raises ChainGap where the manifest has no such link."""
    for found in links_of(manifest):
        if (found.base, found.version) == (link.base, link.version):
            return found
    raise ChainGap(f"{link} is not in the manifest of version {manifest.version}")


def patch_bytes(manifest: Manifest) -> int:
    """Of all parts of its patch, 0 without one."""
    return sum(part.bytes for part in manifest.patch.parts) if manifest.patch else 0


def anchor_bytes(manifest: Manifest) -> int:
    """Of all shards of its anchor, 0 without one."""
    return sum(shard.bytes for shard in manifest.anchor.shards) if manifest.anchor else 0


def _link(base: int | None, version: int, payloads: tuple[Payload, ...]) -> Link:
    return Link(base, version, sum(p.bytes for p in payloads), payloads)
