"""The objects of a run in a store (docs/loco.md, section 7): posts, sums, and JSON with a seal;
signed where members have keys, so that who can write to the store, and has none, changes
nothing."""

from __future__ import annotations

import json
import logging
import math
import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from .._util.threads import checkpoint
from ..errors import CorruptMessage, NotFound, StoreError, StoreUnavailable, Untrusted
from ..store import Store
from ..store.base import create_or_confirm, is_name, whole
from ..stream.manifest import Signature
from ..stream.signing import Signer, TrustedKeys
from .outer import OuterState
from .parameters import Floats
from .wire import Entries

_log = logging.getLogger("pulse_rl")
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
# Characters of a reason that a close has room for.
_REASON = 200


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
class ShardedMessage:
    """The parts of a post, by share, as its head has them: of many trainers they are many."""

    table: bytes

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Self:
        return cls(b"".join(_PART.pack(*part) for part in parts))

    def __len__(self) -> int:
        return len(self.table) // _PART.size

    def __iter__(self) -> Iterator[Part]:
        return map(Part._make, _PART.iter_unpack(self.table))

    def __getitem__(self, share: int) -> Part:
        return Part._make(_PART.unpack_from(self.table, _PART.size * share))


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


def write_head(place: RoundKey, parts: Iterable[Part], signer: Signer | None) -> bytes:
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
    """A post that the trainer that closed the round has read and not named, and why."""

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
        named = self.refused[:MAX_REFUSED]
        refused = tuple(each._replace(reason=each.reason[:_REASON]) for each in named)
        while True:
            data = sealed("close", asdict(replace(self, refused=refused)), signer)
            if len(data) <= MAX_CLOSE_BYTES or not refused:
                return data
            refused = refused[: len(refused) // 2]  # letters that take six bytes each

    @classmethod
    def parse(
        cls, data: bytes, name: str, run: str, number: int, trusted: TrustedKeys | None
    ) -> Self:
        """Raises CorruptMessage unless ``data`` closes round ``number`` of the run, and
        Untrusted."""
        try:
            found = msgspec.convert(unsealed(data, "close", name, trusted), cls)
        except msgspec.ValidationError as error:
            raise CorruptMessage(f"{name} cannot be read: {error}") from None
        names, uploads = [post.trainer for post in found.posts], (*found.posts, *found.refused)
        good = (
            (found.run, found.round) == (run, number)
            and 0 < len(names) <= MAX_TRAINERS
            and names == sorted(set(names))
            and all(POST.fullmatch(f"{each[0]}.{each[1]}") for each in uploads)
            and all(post.nbytes >= 0 for post in found.posts)
        )
        if not good:
            raise CorruptMessage(f"{name} does not close round {number} of this run")
        return found

    def reason(self, trainer: str, digest: str | None) -> str:
        """Why the trainer's message with this digest, None where none was put, is not in the
        round."""
        if digest is None:
            return "it was closed before this trainer had put its message"
        why = next((each.reason for each in self.refused if each[:2] == (trainer, digest)), None)
        if why is None:
            return "this trainer's message came too late"
        return f"this trainer's message was refused: {why}"


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
        fields = self._asdict() | {
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
            where, trainer = (place.run, place.round, share, place.root), str(fields["trainer"])
            found = cls(*where, trainer, left_out, message)
            said = (fields["run"], fields["round"], fields["share"], fields["theta"])
            good = said == where and fields["message"] == sha256(message).hexdigest()
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
        seal, key = fields.pop("sha256"), fields.pop("key", None)
        value = fields.pop("signature", None)
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
                hint=f"The owner of the store should delete {name}, and let only members write; "
                "then rejoin().",
            ) from None
    return dict(fields)


def _seal(fields: dict[str, Any]) -> str:
    return sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _signed(seal: str) -> bytes:
    return f"pulse.loco.1 {seal}".encode()


# -- what is in a run's store


_RUN = "loco/run.json"
_POSTS, _CLOSED, _SUMS = "loco/posts", "loco/closed", "loco/sums"
_SNAPSHOTS, _PIECES = "loco/snapshots", "loco/pieces"
_MAX_RUN_BYTES = 1 << 20
_MAX_LEFT = 100_000
# So many of the newest are looked at for one that is good.
_MAX_SNAPSHOTS = 100
# Elements of theta or momentum in one object of a snapshot.
_PIECE = 16 << 20


#: The root of theta, theta and momentum.
Snapshot = tuple[str, Floats, Floats]

_POLL_SECONDS = (0.05, 5.0)


def pause(began: float, now: float) -> None:
    """Before another look at what was not there ``now``: a tenth of the time since ``began``, as a
    look costs requests."""
    shortest, longest = _POLL_SECONDS
    wake = now + min(max((now - began) / 10, shortest), longest)
    while (left := wake - time.monotonic()) > 0:
        checkpoint()
        time.sleep(min(left, 0.2))


def pieces_of(snapshot: Any) -> set[str]:
    """The names of the pieces that a snapshot's ``fields`` tell of, as far as they are of this
    format."""
    try:
        named = [*snapshot["theta"]["pieces"], *snapshot["momentum"]["pieces"]]
        return set(filter(is_name, named))
    except (KeyError, TypeError):
        return set()


class RunStore:
    """One trainer's view of a run in a ``store``; it signs with ``signer`` and believes the
    ``trusted`` keys, if any.

    ``run``: the run's id, "" until it is known. ``sent_bytes``: what this trainer has put so far.
    Reads raise NotFound, CorruptMessage, Untrusted and StoreError."""

    def __init__(
        self, store: Store, state: OuterState, signer: Signer | None, trusted: TrustedKeys | None
    ) -> None:
        self.run = ""
        self.sent_bytes = 0
        self.signer, self.trusted = signer, trusted
        self._store, self._state = store, state
        self._first_pieces: set[str] = set()
        self._left_objects = False

    def beginning(self) -> dict[str, Any]:
        """What the run began with."""
        fields = self._json("run", _RUN)
        self._first_pieces = pieces_of(fields.get("snapshot"))
        return fields

    def begin(self, fields: dict[str, Any]) -> None:
        """Begins a run with these fields, unless another trainer has begun it; ``state`` is its
        first snapshot."""
        self._create(_RUN, sealed("run", {**fields, "snapshot": self._put_state(0)}, self.signer))

    # -- rounds

    def closed(self, number: int) -> Close | None:
        """What has closed the round after ``number`` others."""
        try:
            data = self._bytes(name := f"{_CLOSED}/{number:012d}.json", MAX_CLOSE_BYTES)
            return Close.parse(data, name, self.run, number, self.trusted)
        except NotFound:
            return None

    def members_before(self, number: int) -> frozenset[str]:
        """Who was in the round before the one after ``number`` others."""
        close = self.closed(number - 1) if number else None
        return frozenset(post.trainer for post in close.posts) if close else frozenset()

    def close(self, close: Close) -> None:
        """Closes a round, unless it is closed."""
        self._create(f"{_CLOSED}/{close.round:012d}.json", close.to_bytes(self.signer))

    def posts(self, number: int) -> Iterator[Upload]:
        """Those of a round, by their names; members' alone where members have keys."""
        for info in islice(self._store.list(f"{_POSTS}/{number:012d}"), _MAX_LEFT):
            match = POST.fullmatch(info.name.rpartition("/")[2])
            if match and (self.trusted is None or match[1] in self.trusted.keys):
                yield Upload(match[1], match[2], info.nbytes)

    def has_post(self, number: int, trainer: str, digest: str) -> bool:
        try:
            self._store.head(self._post_name(number, Upload(trainer, digest, 0)))
        except NotFound:
            return False
        return True

    def put_post(self, number: int, post: Upload, data: bytes) -> None:
        self._store.put(self._post_name(number, post), data)
        self.sent_bytes += len(data)

    def post(self, number: int, post: Upload, start: int, stop: int) -> bytes:
        """Bytes [``start``, ``stop``) of it; fewer, where there are fewer than there were."""
        name = self._post_name(number, post)
        try:
            return self._store.get(name, start, stop)
        except (NotFound, StoreUnavailable):
            raise
        except StoreError:
            if self._store.head(name).nbytes >= stop:
                raise
            return b""

    @staticmethod
    def _post_name(number: int, post: Upload) -> str:
        return f"{_POSTS}/{number:012d}/{post.trainer}.{post.sha256}"

    # -- sums

    def sums(self, number: int) -> dict[int, int]:
        """The shares of a round whose sums there are, and how long these are."""
        found = {}
        for info in islice(self._store.list(f"{_SUMS}/{number:012d}"), _MAX_LEFT):
            stem = info.name.rpartition("/")[2]
            is_share = stem.isascii() and stem.isdecimal()
            if is_share and info.name == self._sums_name(number, int(stem)):
                found[int(stem)] = info.nbytes
        return found

    def share_sums(self, place: RoundKey, share: int, nbytes: int) -> ShareSums:
        name = self._sums_name(place.round, share)
        return ShareSums.parse(whole(self._store, name, nbytes), name, place, share, self.trusted)

    def put_sums(self, sums: ShareSums) -> bool:
        """Stores the sums of a share, unless it has some; whether these are in the store."""
        return self._create(self._sums_name(sums.round, sums.share), sums.to_bytes(self.signer))

    @staticmethod
    def _sums_name(number: int, share: int) -> str:
        return f"{_SUMS}/{number:012d}/{share:04d}"

    # -- snapshots

    def keep_snapshot(self, number: int) -> None:
        """Stores theta and momentum after so many rounds: who is new or far behind reads less, and
        older posts go."""
        before, kept = next(self.snapshots(), (0, {}))
        if before >= number:
            return
        fields = {"run": self.run, **self._put_state(number)}
        self._create(f"{_SNAPSHOTS}/{number:012d}.json", sealed("snapshot", fields, self.signer))
        # A member that may not delete, or finds the store away, trains on: others clean up.
        try:
            self._clean(before, pieces_of(fields) | pieces_of(kept) | self._first_pieces)
        except StoreError as error:
            if not self._left_objects:
                _log.warning("old objects of the run are left: %s (%s)", error, error.hint)
            self._left_objects = True

    def _clean(self, before: int, needed: set[str]) -> None:
        """Deletes the posts, sums and snapshots that are older than the snapshot of ``before``
        rounds, but for the ``needed`` pieces."""
        # Nobody needs a message of those rounds any more, nor sums. What closed them stays: a round
        # is never closed a second time.
        for folder in (_POSTS, _SUMS):
            for info in islice(self._store.list(folder), _MAX_LEFT):
                of = info.name.split("/")[2]
                if of.isdecimal() and int(of) < before:
                    self._store.delete(info.name)
        # Nor the snapshots before it, but the run's first. Pieces may be of several.
        for older, its in self.snapshots(before):
            for piece in sorted(pieces_of(its) - needed):
                self._store.delete(f"{_PIECES}/{piece}")
            self._store.delete(f"{_SNAPSHOTS}/{older:012d}.json")

    def snapshots(self, below: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Those that can be read, but for the run's first, by their rounds, the newest first; of
        fewer rounds than ``below``."""
        numbers = []
        for info in islice(self._store.list(_SNAPSHOTS), _MAX_LEFT):
            stem = info.name.rpartition("/")[2].removesuffix(".json")
            numbers += [int(stem)] if stem.isdecimal() and len(stem) == 12 else []
        earlier = sorted(number for number in numbers if below is None or number < below)
        for number in earlier[::-1][:_MAX_SNAPSHOTS]:
            try:
                fields = self._json("snapshot", f"{_SNAPSHOTS}/{number:012d}.json")
            except (CorruptMessage, Untrusted, NotFound):
                continue
            if (fields.get("run"), fields.get("round")) == (self.run, number):
                yield number, fields

    def snapshot(self, fields: Any, number: int, *, unless: str = "") -> Snapshot | None:
        """The snapshot after ``number`` rounds that
        ``fields`` tell of; None where the root is ``unless``."""
        try:
            roots = [fields[what]["root"] for what in ("theta", "momentum")]
            pieces = [list(fields[what]["pieces"]) for what in ("theta", "momentum")]
            good = fields["round"] == number
        except (KeyError, TypeError):
            good = False
        if not good:
            raise CorruptMessage(f"the snapshot of round {number} is not of this format")
        if roots[0] == unless:
            return None
        theta, momentum = (self._flat(*each) for each in zip(roots, pieces, strict=True))
        return roots[0], theta, momentum

    def _put_state(self, number: int) -> dict[str, Any]:
        """Stores theta and momentum as they are; returns what tells others of them."""
        fields: dict[str, Any] = {"round": number}
        for what, flat in (("theta", self._state.theta), ("momentum", self._state.momentum)):
            pieces = []
            for start in range(0, len(flat), _PIECE):
                data = flat[start : start + _PIECE].tobytes()
                pieces.append(sha256(data).hexdigest())
                self._store.put(f"{_PIECES}/{pieces[-1]}", data)
                self.sent_bytes += len(data)
            fields[what] = {"root": self._state.digest(flat).root, "pieces": pieces}
        return fields

    def _flat(self, root: str, pieces: list[Any]) -> Floats:
        flat = np.empty_like(self._state.theta)
        starts = range(0, len(flat), _PIECE)
        if len(pieces) != len(starts):
            raise CorruptMessage(f"a snapshot has {len(pieces)} pieces, not {len(starts)}")
        for start, digest in zip(starts, pieces, strict=True):
            name, piece = f"{_PIECES}/{digest}", flat[start : start + _PIECE]
            data = whole(self._store, name, piece.nbytes) if is_name(name) else b""
            if sha256(data).hexdigest() != digest:
                raise CorruptMessage(f"{name[:80]} is damaged in the store")
            piece[:] = np.frombuffer(data, "<f4")
        if self._state.digest(flat).root != root:
            raise CorruptMessage("a snapshot has not the root that it says")
        return flat

    # -- objects

    def _create(self, name: str, data: bytes) -> bool:
        self.sent_bytes += len(data)
        return create_or_confirm(self._store, name, data)

    def _json(self, kind: str, name: str) -> dict[str, Any]:
        return unsealed(self._bytes(name, _MAX_RUN_BYTES), kind, name, self.trusted)

    def _bytes(self, name: str, most: int) -> bytes:
        nbytes = self._store.head(name).nbytes
        if nbytes > most:
            raise CorruptMessage(f"{name} has {nbytes} bytes, more than {most}")
        return whole(self._store, name, nbytes)
