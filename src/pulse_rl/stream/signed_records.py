"""The small records that a stream has beside its manifests: claims, and the links of folds (docs/format.md, section 6).

Text of words in lines. Where publishers sign, the last two words are an Ed25519 public key and its signature of the
rest together with the object's place, so that a record is worth nothing under another name or in another stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from ..errors import FormatError
from .manifest import MAX_PARTS, Payload, Signature
from .names import FoldName
from .signing import Signer, TrustedKeys

MAX_CLAIM_BYTES = 512
MAX_FOLD_BYTES = 512 + 81 * MAX_PARTS
_SIGNATURE = r"([0-9a-f]{64}) ([0-9a-f]{128})"
_CLAIM = re.compile(rf"([0-9a-f]{{16}}) ([0-9a-f]{{32}}) ([0-9a-f]{{16}})(?: {_SIGNATURE})?")
_SIGNED = re.compile(_SIGNATURE)
_PART = re.compile(r"([0-9a-f]{64}) (0|[1-9][0-9]{0,14})")
NOBODY = "0" * 16


class Claim(NamedTuple):
    """A publisher's claim to an ``epoch`` of the stream ``stream`` with this ``stream_id``. ``publisher`` is a random
    word, 16 hexadecimal digits, ``previous`` that of the claim before, `NOBODY` for the first."""

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
        words = f"{self.stream} {self.stream_id} {self.epoch} {self.publisher} {self.previous}"
        return f"pulse.claim.1 {words}".encode()


def read_claim(data: bytes, stream: str, epoch: int, trusted: TrustedKeys | None) -> Claim:
    """The claim that an object holds. Raises FormatError, and Untrusted unless one of the keys, if any, signed it."""
    what = f"the claim to epoch {epoch} of {stream!r}"
    found = _CLAIM.fullmatch(data[: MAX_CLAIM_BYTES + 1].decode("ascii", "replace"))
    if not found:
        raise FormatError(f"{what} is not one")
    claim = Claim(stream, found[2], epoch, found[1], found[3])
    if trusted:
        trusted.check_message(claim._message, Signature(found[4], found[5]) if found[4] else None, what)
    return claim


def fold_name(base: int, version: int, parts: Iterable[Payload]) -> FoldName:
    """The name of the link of a fold of these ``parts``: with their bytes in all, and the SHA-256 of their list."""
    found = tuple(parts)
    return FoldName(version, base, sum(part.bytes for part in found), sha256(_list_of(found)).hexdigest())


def write_fold(stream: str, stream_id: str, fold: FoldName, parts: Iterable[Payload], signer: Signer | None) -> bytes:
    """What a fold's link holds: the list of its parts and, if there is a ``signer``, a signature."""
    return _list_of(parts) + " ".join(_signed(_fold_message(stream, stream_id, fold), signer)).encode()


def read_fold(
    data: bytes, stream: str, stream_id: str, fold: FoldName, trusted: TrustedKeys | None
) -> tuple[Payload, ...]:
    """The parts that a fold's link lists. Raises FormatError where it is not the list that the link's name promises,
    and Untrusted unless one of the keys, if any, signed it."""
    listed = data[: data.rfind(b"\n") + 1]
    lines = [_PART.fullmatch(line) for line in listed.decode("ascii", "replace").split("\n")[:-1]]
    parts = tuple(Payload(line[1], int(line[2])) for line in lines if line)
    right = sha256(listed).hexdigest() == fold.sha256 and sum(part.bytes for part in parts) == fold.nbytes
    what = f"the link of the fold {fold.base}->{fold.version} of {stream!r}"
    if not right or len(parts) != len(lines) or not 1 <= len(set(parts)) == len(parts) <= MAX_PARTS:
        raise FormatError(f"{what} does not list its parts")
    if trusted:
        found = _SIGNED.fullmatch(data[len(listed) :].decode("ascii", "replace"))
        signature = Signature(found[1], found[2]) if found else None
        trusted.check_message(_fold_message(stream, stream_id, fold), signature, what)
    return parts


def _list_of(parts: Iterable[Payload]) -> bytes:
    return b"".join(f"{part.sha256} {part.bytes}\n".encode() for part in parts)


def _fold_message(stream: str, stream_id: str, fold: FoldName) -> bytes:
    return f"pulse.fold.1 {stream} {stream_id} {fold.base} {fold.version} {fold.nbytes} {fold.sha256}".encode()


def _signed(message: bytes, signer: Signer | None) -> list[str]:
    """The signing key and its signature; nothing without a ``signer``."""
    if signer is None:
        return []
    signature = signer.signature(message)
    return [signature.key, signature.value]
