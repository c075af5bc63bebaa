"""What is said about a stream outside of its manifests: claims, and folds' links (docs/format.md, section 6).

One line of words. The last two, if they are there, are an Ed25519 public key and its signature of the rest together
with the object's place, so that a statement is worth nothing under another name or in another stream. The link of a
fold in parts has a line for each part in front.
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

MAX_BYTES = 512
_SIGNATURE = r"(?: ([0-9a-f]{64}) ([0-9a-f]{128}))?"
_CLAIM = re.compile(r"([0-9a-f]{16})(?: ([0-9a-f]{32}) ([0-9a-f]{16}))?" + _SIGNATURE)
NOBODY = "0" * 16
_FOLD = re.compile(r"([0-9a-f]{64}) ([0-9a-f]{128})")
_PART = re.compile(r"([0-9a-f]{64}) (0|[1-9][0-9]{0,14})")
_PART_BYTES = 81


class Claim(NamedTuple):
    """A publisher's claim to an ``epoch`` of the stream ``stream`` with this ``identity`` ("" in claims of earlier
    releases). ``publisher`` is a random word, 16 hexadecimal digits, ``previous`` that of the claim before, `NOBODY`
    for the first."""

    stream: str
    identity: str
    epoch: int
    publisher: str
    previous: str = NOBODY

    def to_bytes(self, signer: Signer | None) -> bytes:
        text = f"{self.publisher} {self.identity} {self.previous}"
        return f"{text}{_signed(self._message, signer)}".encode()

    @property
    def _message(self) -> bytes:
        words = f"{self.stream} {self.identity} {self.epoch} {self.publisher} {self.previous}"
        return f"pulse.claim.1 {words}".encode()


def read_claim(data: bytes, stream: str, epoch: int, trusted: TrustedKeys | None) -> Claim:
    """The claim that an object holds. Raises FormatError, and Untrusted unless one of the keys, if any, signed it."""
    what = f"the claim to epoch {epoch} of {stream!r}"
    found = _CLAIM.fullmatch(data[: MAX_BYTES + 1].decode("ascii", "replace"))
    if not found:
        raise FormatError(f"{what} is not one")
    claim = Claim(stream, found[2] or "", epoch, found[1], found[3] or NOBODY)
    if trusted:
        trusted.check_message(claim._message, Signature(found[4], found[5]) if found[4] else None, what)
    return claim


def most_bytes(fold: FoldName) -> int:
    """The most bytes that the fold's link may have."""
    return MAX_BYTES + (_PART_BYTES * MAX_PARTS if fold.in_parts else 0)


def list_of_parts(parts: Iterable[Payload]) -> bytes:
    """The list of the payloads of a fold in parts, whose SHA-256 is in the link's name."""
    return b"".join(f"{part.sha256} {part.bytes}\n".encode() for part in parts)


def parts_of(data: bytes, fold: FoldName) -> tuple[Payload, ...]:
    """The payloads that the link of a fold in parts lists. Raises FormatError where it is not the list that the link's
    name promises."""
    listed = data[: data.rfind(b"\n") + 1]
    lines = [_PART.fullmatch(line) for line in listed.decode("ascii", "replace").split("\n")[:-1]]
    parts = tuple(Payload(line[1], int(line[2])) for line in lines if line)
    right = sha256(listed).hexdigest() == fold.sha256 and sum(part.bytes for part in parts) == fold.nbytes
    if not right or len(parts) != len(lines) or not 2 <= len(set(parts)) == len(parts) <= MAX_PARTS:
        raise FormatError(f"the link of the fold {fold.base}->{fold.version} does not list its parts")
    return parts


def fold_statement(stream: str, identity: str, fold: FoldName, signer: Signer | None) -> bytes:
    """What a fold's link says: nothing unless it is signed."""
    return _signed(_fold_message(stream, identity, fold), signer).encode().lstrip()


def check_fold(data: bytes, stream: str, identity: str, fold: FoldName, trusted: TrustedKeys) -> None:
    """Raises Untrusted unless one of the keys has signed the fold's link, whose content is ``data``."""
    said = data[data.rfind(b"\n") + 1 :] if fold.in_parts else data
    found = _FOLD.fullmatch(said[: MAX_BYTES + 1].decode("ascii", "replace"))
    what = f"the link of the fold {fold.base}->{fold.version} of {stream!r}"
    signature = Signature(found[1], found[2]) if found else None
    trusted.check_message(_fold_message(stream, identity, fold), signature, what)


def _fold_message(stream: str, identity: str, fold: FoldName) -> bytes:
    kind = "pulse.fold-in-parts.1" if fold.in_parts else "pulse.fold.1"
    return f"{kind} {stream} {identity} {fold.base} {fold.version} {fold.nbytes} {fold.sha256}".encode()


def _signed(message: bytes, signer: Signer | None) -> str:
    if signer is None:
        return ""
    signature = signer.signature(message)
    return f" {signature.key} {signature.value}"
