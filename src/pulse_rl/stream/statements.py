"""What is said about a stream outside of its manifests: claims, and folds' links (docs/format.md, section 6).

One line of words. The last two, if they are there, are an Ed25519 public key and its signature of the rest together
with the object's place, so that a statement is worth nothing under another name or in another stream.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import FormatError
from .manifest import Signature
from .names import FoldName
from .signing import Signer, TrustedKeys

MAX_BYTES = 512
_SIGNATURE = r"(?: ([0-9a-f]{64}) ([0-9a-f]{128}))?"
_CLAIM = re.compile(r"([0-9a-f]{16})(?: ([0-9a-f]{32}) ([0-9a-f]{16}))?" + _SIGNATURE)
NOBODY = "0" * 16
_FOLD = re.compile(r"([0-9a-f]{64}) ([0-9a-f]{128})")


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


def fold_statement(stream: str, identity: str, fold: FoldName, signer: Signer | None) -> bytes:
    """The content of a fold's link: empty unless it is signed."""
    return _signed(_fold_message(stream, identity, fold), signer).encode().lstrip()


def check_fold(data: bytes, stream: str, identity: str, fold: FoldName, trusted: TrustedKeys) -> None:
    """Raises Untrusted unless one of the keys has signed the fold's link, whose content is ``data``."""
    found = _FOLD.fullmatch(data[: MAX_BYTES + 1].decode("ascii", "replace"))
    what = f"the link of the fold {fold.base}->{fold.version} of {stream!r}"
    signature = Signature(found[1], found[2]) if found else None
    trusted.check_message(_fold_message(stream, identity, fold), signature, what)


def _fold_message(stream: str, identity: str, fold: FoldName) -> bytes:
    return f"pulse.fold.1 {stream} {identity} {fold.base} {fold.version} {fold.nbytes} {fold.sha256}".encode()


def _signed(message: bytes, signer: Signer | None) -> str:
    if signer is None:
        return ""
    signature = signer.signature(message)
    return f" {signature.key} {signature.value}"
