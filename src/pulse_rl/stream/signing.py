"""Ed25519 signatures, for stores that others can write to (extra ``[sign]``).

A manifest holds the root of its version, and a root covers every bit of the state, so weights need
no other signature. Claims and the links of folds are signed too. Otherwise a stranger could stop a
publisher, or send a worker along links that lead nowhere.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Iterable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .._util.files import disk_error, open_regular
from .._util.settings import checked_collection, checked_path
from ..errors import FormatError, InputError, Untrusted
from .manifest import MAX_PARTS, Manifest, Payload, Signature
from .names import FoldName

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

_KEY_FILE_BYTES = 1000
_INSTALL = "Install it: pip install 'pulse-rl[sign]'."

# Caps on what a reader fetches before it has checked a signature.
MAX_CLAIM_BYTES = 512
MAX_FOLD_BYTES = 512 + 81 * MAX_PARTS
_SIGNATURE = r"([0-9a-f]{64}) ([0-9a-f]{128})"
_CLAIM = re.compile(rf"([0-9a-f]{{16}}) ([0-9a-f]{{32}}) ([0-9a-f]{{16}})(?: {_SIGNATURE})?")
_SIGNED = re.compile(_SIGNATURE)
_PART = re.compile(r"([0-9a-f]{64}) (0|[1-9][0-9]{0,14})")
NOBODY = "0" * 16


class Signer:
    """Sign a publisher's manifests with an Ed25519 key.

    The attribute ``public_key`` has 64 hexadecimal digits; give it to subscribers as a trusted key.

    Args:
        seed: The private key, 32 bytes.
    Raises:
        InputError: ``seed`` is not a private key, or the package cryptography is missing.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = _private_key(seed)
        #: 64 hexadecimal digits, to be given to subscribers as a trusted key.
        self.public_key: str = self._key.public_key().public_bytes_raw().hex()

    def __repr__(self) -> str:
        return f"<Signer with the public key {self.public_key}>"

    @classmethod
    def generate(cls) -> Signer:
        """Make a new key from the system's random source."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def load(cls, path: str | Path) -> Signer:
        """Load a private key from a file that `save` wrote.

        Args:
            path: The file, with 64 hexadecimal digits.
        Raises:
            InputError: The file cannot be read, or holds no private key.
        """
        try:
            with open_regular(checked_path(path)) as file:
                return cls(bytes.fromhex(file.read(_KEY_FILE_BYTES).decode().strip()))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"{path} is not a private key: {reason}") from None

    def save(self, path: str | Path) -> None:
        """Write the private key to a new file that only its owner can read.

        Args:
            path: The file, which must not exist.
        Raises:
            InputError: The file cannot be created.
            StoreFull: The disk has no space left.
            StoreError: The file cannot be written.
        """
        file = checked_path(path)
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise InputError(
                f"cannot create {path}: {error.strerror}", hint="Choose a new file."
            ) from None
        try:
            with os.fdopen(handle, "w") as opened:
                opened.write(self._key.private_bytes_raw().hex() + "\n")
                opened.flush()
                os.fsync(opened.fileno())
        # An interrupt too: an empty key file would be refused for ever.
        except BaseException as error:
            file.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise disk_error(error, f"write {path}") from error
            raise

    def sign(self, manifest: Manifest) -> Manifest:
        """Return a manifest with this key's signature in place of any other.

        Args:
            manifest: The manifest, sealed with its digest.
        """
        return manifest.with_signature(self.signature(manifest.with_signature(None).to_bytes()))

    def signature(self, message: bytes) -> Signature:
        """Return this key's signature of a message.

        Args:
            message: The bytes to sign.
        """
        return Signature(self.public_key, self._key.sign(message).hex())


class TrustedKeys:
    """Accepts what one of these public keys, 64 hexadecimal digits each, has signed.

    Raises InputError.
    """

    def __init__(self, keys: Collection[str]) -> None:
        if not checked_collection("trusted_keys", keys, "[key]"):
            raise InputError(
                "trusted_keys must be at least one public key",
                hint="None trusts whoever can write.",
            )
        self._keys = {str(key).lower(): _public_key(str(key)) for key in keys}
        #: The keys in lower case.
        self.keys: Collection[str] = self._keys.keys()

    def check(self, manifest: Manifest) -> None:
        """Raise Untrusted unless one of the keys has signed ``manifest``."""
        what = f"the manifest of version {manifest.version} of {manifest.stream!r}"
        self.check_message(manifest.with_signature(None).to_bytes(), manifest.signature, what)

    def check_message(self, message: bytes, signature: Signature | None, what: str) -> None:
        """Raise Untrusted unless one of the keys has signed ``message``.

        ``what`` names the message in the error.
        """
        from cryptography.exceptions import InvalidSignature

        if signature is None:
            raise Untrusted(f"{what} is not signed")
        key = self._keys.get(signature.key)
        # Untrusted keys are refused before any arithmetic: a stranger chooses the key and the
        # signature.
        if key is None:
            raise Untrusted(f"{what} is signed by an untrusted key {signature.key[:16]!r}…")
        try:
            key.verify(bytes.fromhex(signature.value), message)
        except (InvalidSignature, ValueError):
            raise Untrusted(f"{what} has an invalid signature") from None


def keys_of(signer: Signer | None, trusted: Collection[str] | None) -> list[str] | None:
    """The public keys that a publisher believes: that of its ``signer`` first, then the trusted
    ones.

    None if there are none: then everyone who can write is trusted.
    """
    return [*([signer.public_key] if signer else ()), *(trusted or ())] or None


def trusted_by(keys: Collection[str] | None) -> TrustedKeys | None:
    """The trusted keys of a public function; None trusts everyone who can write to the store."""
    return None if keys is None else TrustedKeys(keys)


def _private_key(seed: bytes) -> Ed25519PrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise InputError("signing needs the package cryptography", hint=_INSTALL) from error
    try:
        return Ed25519PrivateKey.from_private_bytes(seed)
    except ValueError as error:
        raise InputError(f"not an Ed25519 private key: {error}") from None


def _public_key(text: str) -> Ed25519PublicKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise InputError(
            "checking signatures needs the package cryptography", hint=_INSTALL
        ) from error
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
    except ValueError as error:
        raise InputError(f"{text!r} is not an Ed25519 public key: {error}") from None


class Claim(NamedTuple):
    """A publisher's claim to an ``epoch`` of ``stream`` with this ``stream_id``.

    ``publisher`` is a random word of 16 hexadecimal digits. ``previous`` is the word of the claim
    before, `NOBODY` for the first claim.
    """

    stream: str
    stream_id: str
    epoch: int
    publisher: str
    previous: str = NOBODY

    def to_bytes(self, signer: Signer | None) -> bytes:
        signature = _signed(self._message, signer)
        return " ".join([self.publisher, self.stream_id, self.previous, *signature]).encode()

    @property
    def _message(self) -> bytes:
        # The signature covers the stream's name and ID, so a claim cannot be copied to another
        # stream.
        words = f"{self.stream} {self.stream_id} {self.epoch} {self.publisher} {self.previous}"
        return f"pulse.claim.1 {words}".encode()


def read_claim(data: bytes, stream: str, epoch: int, trusted: TrustedKeys | None) -> Claim:
    """Parse a claim. Raises FormatError, and Untrusted unless a trusted key, if any, has signed
    it."""
    what = f"the claim to epoch {epoch} of {stream!r}"
    found = _CLAIM.fullmatch(data[: MAX_CLAIM_BYTES + 1].decode("ascii", "replace"))
    if not found:
        raise FormatError(f"{what} is not one")
    claim = Claim(stream, found[2], epoch, found[1], found[3])
    if trusted:
        trusted.check_message(
            claim._message, Signature(found[4], found[5]) if found[4] else None, what
        )
    return claim


def fold_name(base: int, version: int, parts: Iterable[Payload]) -> FoldName:
    """The name of the link of a fold with these ``parts``.

    It has their bytes in all and the SHA-256 of their list.
    """
    found = tuple(parts)
    return FoldName(
        version, base, sum(part.bytes for part in found), sha256(_list_of(found)).hexdigest()
    )


def write_fold(
    stream: str, stream_id: str, fold: FoldName, parts: Iterable[Payload], signer: Signer | None
) -> bytes:
    """The content of a fold's link: the list of its parts, signed if there is a ``signer``."""
    return (
        _list_of(parts) + " ".join(_signed(_fold_message(stream, stream_id, fold), signer)).encode()
    )


def read_fold(
    data: bytes, stream: str, stream_id: str, fold: FoldName, trusted: TrustedKeys | None
) -> tuple[Payload, ...]:
    """The parts that a fold's link lists.

    Raises FormatError if the list is not that of the link's name, and Untrusted unless a trusted
    key, if any, has signed it.
    """
    # 1. The list, one line per part, and its signature on the last line.
    listed = data[: data.rfind(b"\n") + 1]
    lines = [_PART.fullmatch(line) for line in listed.decode("ascii", "replace").split("\n")[:-1]]
    parts = tuple(Payload(line[1], int(line[2])) for line in lines if line)
    # 2. The list must have the digest and the length in the link's name, and no part twice.
    right = (
        sha256(listed).hexdigest() == fold.sha256
        and sum(part.bytes for part in parts) == fold.nbytes
    )
    what = f"the link of the fold {fold.base}->{fold.version} of {stream!r}"
    if not right or len(parts) != len(lines) or not 1 <= len(set(parts)) == len(parts) <= MAX_PARTS:
        raise FormatError(f"{what} does not list its parts")
    # 3. The signature covers the name, and so the list.
    if trusted:
        found = _SIGNED.fullmatch(data[len(listed) :].decode("ascii", "replace"))
        signature = Signature(found[1], found[2]) if found else None
        trusted.check_message(_fold_message(stream, stream_id, fold), signature, what)
    return parts


def _list_of(parts: Iterable[Payload]) -> bytes:
    return b"".join(f"{part.sha256} {part.bytes}\n".encode() for part in parts)


def _fold_message(stream: str, stream_id: str, fold: FoldName) -> bytes:
    return (
        f"pulse.fold.1 {stream} {stream_id} {fold.base} {fold.version} {fold.nbytes} {fold.sha256}"
    ).encode()


def _signed(message: bytes, signer: Signer | None) -> list[str]:
    """The signing key and its signature; empty without a ``signer``."""
    if signer is None:
        return []
    signature = signer.signature(message)
    return [signature.key, signature.value]
