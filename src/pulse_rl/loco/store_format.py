"""The objects of a run in a store (docs/loco.md, section 7): posts, sums, and JSON with a seal;
signed where members have keys, so that who can write to the store, and has none, changes
nothing."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, Self, overload

import numpy as np

from ..errors import CorruptMessage, Untrusted
from ..stream.manifest import Signature
from ..stream.signing import Signer, TrustedKeys
from .wire import Entries

FORMAT = 1
MAX_TRAINERS = 1024
MAX_CLOSE_BYTES = 512 * MAX_TRAINERS
MAX_REFUSED = 256
TRAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
POST = re.compile(rf"({TRAINER.pattern})\.([0-9a-f]{{64}})")
_MAGIC = b"PLSP"
_ROOT_AT, _SIGNATURE_AT, _PARTS_AT = len(_MAGIC), len(_MAGIC) + 32, len(_MAGIC) + 96
_PART = struct.Struct("<QQd32s")
_UNSIGNED = bytes(64)
MAX_SUMS_HEAD = 1 << 20
_REASON = 200
"""Characters of a reason that a close has room for."""


class RoundKey(NamedTuple):
    """Where a post belongs: the ``run``, its ``round``, the ``trainer``, and theta's ``root``
    before the round."""

    run: str
    round: int
    trainer: str
    root: str

    def signed(self, parts: bytes) -> bytes:
        """What a signature is of."""
        words = f"{self.run} {self.round} {self.trainer} {self.root} {sha256(parts).hexdigest()}"
        return f"pulse.loco.post.1 {words}".encode()


class Part(NamedTuple):
    """What a post has for one share: a message of so many ``nbytes`` and ``entries``, the sum of
    whose ``squares`` is this, and its ``digest``."""

    nbytes: int
    entries: int
    squares: float
    digest: bytes

    @classmethod
    def of(cls, message: bytes, entries: Sequence[Entries]) -> Self:
        count = sum(len(places) for places, _ in entries)
        return cls(len(message), count, squares_of(entries), sha256(message).digest())


@dataclass(frozen=True, slots=True)
class ShardedMessage(Sequence[Part]):
    """Those of a post, by share, as its head has them: of many trainers they are many."""

    table: bytes

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Self:
        return cls(b"".join(_PART.pack(*part) for part in parts))

    def __len__(self) -> int:
        return len(self.table) // _PART.size

    @overload
    def __getitem__(self, share: int) -> Part: ...
    @overload
    def __getitem__(self, share: slice) -> list[Part]: ...
    def __getitem__(self, share: int | slice) -> Part | list[Part]:
        if isinstance(share, slice):
            return [self[number] for number in range(*share.indices(len(self)))]
        if not 0 <= share < len(self):
            raise IndexError(share)
        return Part(*_PART.unpack_from(self.table, _PART.size * share))


def squares_of(entries: Sequence[Entries]) -> float:
    """The sum of the squares of all values, the same number on every machine: in FP64, where a
    square is exact, added up in order."""
    total = 0.0
    for _, values in entries:
        if len(values):
            squares = np.square(values, dtype=np.float64)
            squares[0] += total
            total = float(np.add.accumulate(squares)[-1])
    return total


def norm_of(parts: Sequence[Part]) -> float:
    """The L2 norm of a post."""
    return norm(part.squares for part in parts)


def norm(squares: Iterable[float]) -> float:
    """The root of the sum, the same number on every machine and by every Python: `sum` may
    compensate."""
    total = 0.0
    for each in squares:
        total += each
    return math.sqrt(total)


def head_bytes(shares: int) -> int:
    """How long the head of a post with so many shares is."""
    return _PARTS_AT + _PART.size * shares


def write_head(place: RoundKey, parts: Sequence[Part], signer: Signer | None) -> bytes:
    table = ShardedMessage.of(parts).table
    signature = bytes.fromhex(signer.signature(place.signed(table)).value) if signer else _UNSIGNED
    return _MAGIC + bytes.fromhex(place.root) + signature + table


def read_head(
    data: bytes, nbytes: int, place: RoundKey, trusted: TrustedKeys | None, shares: int
) -> ShardedMessage:
    """The parts of a post of ``nbytes`` that begins with ``data``. Raises CorruptMessage where it
    belongs elsewhere, and Untrusted unless the trainer, which is named by its key, is one of the
    ``trusted`` and has signed it."""
    if len(data) < head_bytes(shares) or data[:_ROOT_AT] != _MAGIC:
        raise CorruptMessage("it is no post")
    if data[_ROOT_AT:_SIGNATURE_AT].hex() != place.root:
        raise CorruptMessage("it is of another theta")
    table = data[_PARTS_AT : head_bytes(shares)]
    if trusted:
        found = data[_SIGNATURE_AT:_PARTS_AT]
        signature = None if found == _UNSIGNED else Signature(place.trainer, found.hex())
        trusted.check_message(place.signed(table), signature, "it")
    parts = ShardedMessage(table)
    if head_bytes(shares) + sum(part.nbytes for part in parts) != nbytes:
        raise CorruptMessage("its parts do not add up to it")
    if not all(0 <= part.squares < math.inf for part in parts):
        raise CorruptMessage("its head has a norm that is none")
    return parts


class Upload(NamedTuple):
    """The message that a trainer has put for a round; ``sha256`` is that of its head, which has
    those of its parts."""

    trainer: str
    sha256: str
    nbytes: int


class Refused(NamedTuple):
    """A post that whoever closed the round has read, and did not name, and why."""

    trainer: str
    sha256: str
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """The end of the round after ``round`` others of a ``run``: whose messages count, in the order
    in which they are added up, and which were ``refused``. ``theta`` is the root of theta before
    it."""

    run: str
    round: int
    theta: str
    posts: tuple[Upload, ...]
    refused: tuple[Refused, ...] = ()

    def to_bytes(self, signer: Signer | None) -> bytes:
        fields = {
            "run": self.run,
            "round": self.round,
            "theta": self.theta,
            "posts": [list(post) for post in self.posts],
        }
        refused = [
            [each.trainer, each.sha256, each.reason[:_REASON]]
            for each in self.refused[:MAX_REFUSED]
        ]
        while (
            len(data := sealed("close", {**fields, "refused": refused}, signer)) > MAX_CLOSE_BYTES
            and refused
        ):
            refused = refused[: len(refused) // 2]  # letters that take six bytes each
        return data

    @classmethod
    def parse(
        cls, data: bytes, name: str, run: str, number: int, trusted: TrustedKeys | None
    ) -> Self:
        """Raises CorruptMessage unless ``data`` closes round ``number`` of the run, and
        Untrusted."""
        fields = unsealed(data, "close", name, trusted)
        try:
            posts = tuple(Upload(*post) for post in fields["posts"])
            refused = tuple(Refused(*each) for each in fields["refused"])
            found = cls(fields["run"], fields["round"], fields["theta"], posts, refused)
            names = [post.trainer for post in posts]
            good = (
                (found.run, found.round) == (run, number)
                and isinstance(found.theta, str)
                and 0 < len(names) <= MAX_TRAINERS
                and names == sorted(set(names))
                and all(POST.fullmatch(f"{each[0]}.{each[1]}") for each in (*posts, *refused))
                and all(type(post.nbytes) is int and post.nbytes >= 0 for post in posts)
                and all(isinstance(each.reason, str) for each in refused)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptMessage(f"{name} cannot be read: {error}") from None
        if not good:
            raise CorruptMessage(f"{name} does not close round {number} of this run")
        return found

    def reason(self, trainer: str, digest: str | None) -> str:
        """Why the trainer's message with this digest, None where none was put, is not in the
        round."""
        if digest is None:
            return "it was closed before this trainer had put its message"
        why = next((each.reason for each in self.refused if each[:2] == (trainer, digest)), None)
        return (
            "this trainer's message came too late"
            if why is None
            else f"this trainer's message was refused: {why}"
        )


class ShareSums(NamedTuple):
    """The sums of a ``share`` in a round, as its ``trainer`` has made them: a ``message``, or
    nothing where a sum is more than one takes. ``left_out``: whose part could not be read, and why.
    ``theta``: its root before the round."""

    run: str
    round: int
    share: int
    theta: str
    trainer: str
    left_out: tuple[tuple[str, str], ...]
    message: bytes

    def to_bytes(self, signer: Signer | None) -> bytes:
        fields = {
            "run": self.run,
            "round": self.round,
            "share": self.share,
            "theta": self.theta,
            "trainer": self.trainer,
            "left_out": [[name, reason[:_REASON]] for name, reason in self.left_out],
            "message": sha256(self.message).hexdigest(),
        }
        return sealed("sums", fields, signer) + b"\n" + self.message

    @classmethod
    def parse(
        cls, data: bytes, name: str, place: RoundKey, share: int, trusted: TrustedKeys | None
    ) -> Self:
        """Raises CorruptMessage unless ``data`` has the sums of the share in the round of
        ``place``, and Untrusted."""
        end = data.find(b"\n", 0, MAX_SUMS_HEAD)
        head, message = data[: max(end, 0)], data[end + 1 :]
        fields = unsealed(head, "sums", name, trusted, by="trainer")
        try:
            left_out = tuple((str(who), str(reason)) for who, reason in fields["left_out"])
            found = cls(
                place.run, place.round, share, place.root, str(fields["trainer"]), left_out, message
            )
            good = (fields["run"], fields["round"], fields["share"], fields["theta"]) == found[
                :4
            ] and fields["message"] == sha256(message).hexdigest()
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptMessage(f"{name} cannot be read: {error}") from None
        if not good:
            raise CorruptMessage(
                f"{name} has not the sums of share {share} in round {place.round} of this run"
            )
        return found


def sealed(kind: str, fields: dict[str, Any], signer: Signer | None) -> bytes:
    """A JSON object with its format, its kind and the SHA-256 of all of it but that; and a
    signature, if there is a ``signer``."""
    fields = {"format": FORMAT, "kind": kind, **fields}
    seal = _seal(fields)
    signature = signer.signature(_signed(seal)) if signer else None
    signed = {"key": signature.key, "signature": signature.value} if signature else {}
    return json.dumps({**fields, "sha256": seal, **signed}).encode()


def unsealed(
    data: bytes, kind: str, name: str, trusted: TrustedKeys | None, *, by: str | None = None
) -> dict[str, Any]:
    """Raises CorruptMessage for what `sealed` has not made, and Untrusted unless one of the keys,
    if any, signed it: the one that the field ``by`` names, if that is given."""
    try:
        fields = json.loads(data)
        seal, key, value = (
            fields.pop("sha256"),
            fields.pop("key", None),
            fields.pop("signature", None),
        )
        good = seal == _seal(fields) and fields["format"] == FORMAT and fields["kind"] == kind
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise CorruptMessage(f"{name} is damaged, or of another format")
    if trusted:
        signature = (
            Signature(key, value) if isinstance(key, str) and isinstance(value, str) else None
        )
        if by is not None and fields.get(by) != key:
            signature = None
        try:
            trusted.check_message(_signed(seal), signature, name)
        except Untrusted as error:
            raise Untrusted(
                str(error),
                hint=f"Whoever owns the store should delete {name}, and let only members write; "
                "then rejoin().",
            ) from None
    return dict(fields)


def _seal(fields: dict[str, Any]) -> str:
    return sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _signed(seal: str) -> bytes:
    return f"pulse.loco.1 {seal}".encode()
