"""The objects of a run in a store (docs/loco.md, section 7): posts, sums, and JSON with a seal;
signed where members have keys, so that who can write to the store, and has none, changes
nothing."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
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
from .messages import Sent
from .outer import OuterState
from .parameters import Floats

_log = logging.getLogger("pulse_rl")
FORMAT = 1
MAX_TRAINERS = 1024
MAX_CLOSE_BYTES = 512 * MAX_TRAINERS
MAX_REFUSED = 256
TRAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
POST = re.compile(rf"({TRAINER.pattern})\.([0-9a-f]{{64}})")
_MAGIC = b"PLSP"
_ROOT_AT, _SIGNATURE_AT, _DIGEST_AT = len(_MAGIC), len(_MAGIC) + 32, len(_MAGIC) + 96
HEAD_BYTES = _DIGEST_AT + 32
_UNSIGNED = bytes(64)
# Characters of a reason that a close has room for.
_REASON = 200


class RoundKey(NamedTuple):
    """Where a post belongs: the ``run``, its ``round``, the ``trainer``, and the ``root`` of the
    global weights before the round."""

    run: str
    round: int
    trainer: str
    root: str

    def signed(self, digest: bytes) -> bytes:
        """What a signature is of; ``digest`` is the message's SHA-256."""
        words = f"{self.run} {self.round} {self.trainer} {self.root} {digest.hex()}"
        return f"pulse.loco.post.1 {words}".encode()


def norm_of(sent: Sent) -> float:
    """The L2 norm of all values, the same number on every machine: in FP64, where a square is
    exact, added up in order."""
    total = 0.0
    for _, values in sent.entries:
        if len(values):
            squares = np.square(values, dtype=np.float64)
            squares[0] += total
            total = float(np.add.accumulate(squares)[-1])
    return math.sqrt(total)


def write_head(place: RoundKey, digest: bytes, signer: Signer | None) -> bytes:
    """The first bytes of a post, before the message with this ``digest``."""
    signed = signer.signature(place.signed(digest)).value if signer else ""
    return _MAGIC + bytes.fromhex(place.root) + (bytes.fromhex(signed) or _UNSIGNED) + digest


def read_head(data: bytes, place: RoundKey, trusted: TrustedKeys | None) -> bytes:
    """The digest of the message of a post that begins with ``data``. Raises CorruptMessage where it
    belongs elsewhere, and Untrusted unless the trainer, which is named by its key, is one of the
    ``trusted`` and has signed it."""
    if len(data) < HEAD_BYTES or data[:_ROOT_AT] != _MAGIC:
        raise CorruptMessage("it is no post")
    if data[_ROOT_AT:_SIGNATURE_AT].hex() != place.root:
        raise CorruptMessage("it is of other global weights")
    digest = data[_DIGEST_AT:HEAD_BYTES]
    if trusted:
        found = data[_SIGNATURE_AT:_DIGEST_AT]
        signature = None if found == _UNSIGNED else Signature(place.trainer, found.hex())
        trusted.check_message(place.signed(digest), signature, "it")
    return digest


class Upload(NamedTuple):
    """The message that a trainer has put for a round; ``sha256`` is that of its head, which has
    the message's."""

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
    in which they are added up, and which were ``refused``. ``root`` is that of the global weights
    before it."""

    run: str
    round: int
    root: str
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
_POSTS, _CLOSED, _LEFT = "loco/posts", "loco/closed", "loco/left"
_SNAPSHOTS, _PIECES = "loco/snapshots", "loco/pieces"
_MAX_RUN_BYTES = 1 << 20
_MAX_LEFT = 100_000
# So many of the newest are looked at for one that is good.
_MAX_SNAPSHOTS = 100
# Elements of the global weights or momentum in one object of a snapshot.
_PIECE = 16 << 20


#: The root of the global weights, these, and the momentum.
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
        named = [*snapshot["global"]["pieces"], *snapshot["momentum"]["pieces"]]
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

    # -- who has left

    def leave(self, number: int, trainer: str) -> None:
        """Notes that a trainer leaves before the round after ``number`` others."""
        fields = {"run": self.run, "round": number, "trainer": trainer}
        self._store.put(self._left_name(number, trainer), sealed("left", fields, self.signer))

    def come_back(self, number: int, trainer: str) -> None:
        self._store.delete(self._left_name(number, trainer))

    def left(self, number: int, members: Collection[str]) -> set[str]:
        """Those of the ``members`` that have left before the round after ``number`` others."""
        found = set()
        for info in islice(self._store.list(f"{_LEFT}/{number:012d}"), _MAX_LEFT):
            trainer = info.name.rpartition("/")[2]
            fields = {"run": self.run, "round": number, "trainer": trainer}
            if trainer in members:
                with suppress(CorruptMessage, Untrusted, NotFound):
                    if fields.items() <= self._json("left", info.name, by="trainer").items():
                        found.add(trainer)
        return found

    @staticmethod
    def _left_name(number: int, trainer: str) -> str:
        return f"{_LEFT}/{number:012d}/{trainer}"

    # -- snapshots

    def keep_snapshot(self, number: int) -> None:
        """Stores the global weights and momentum after so many rounds: who is new or far behind
        reads less, and older posts go."""
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
        """Deletes the posts and snapshots that are older than the snapshot of ``before`` rounds,
        but for the ``needed`` pieces."""
        # Nobody needs a message of those rounds any more. What closed them stays: a round is never
        # closed a second time.
        for folder in (_POSTS, _LEFT):
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
            roots = [fields[what]["root"] for what in ("global", "momentum")]
            pieces = [list(fields[what]["pieces"]) for what in ("global", "momentum")]
            good = fields["round"] == number
        except (KeyError, TypeError):
            good = False
        if not good:
            raise CorruptMessage(f"the snapshot of round {number} is not of this format")
        if roots[0] == unless:
            return None
        weights, momentum = (self._flat(*each) for each in zip(roots, pieces, strict=True))
        return roots[0], weights, momentum

    def _put_state(self, number: int) -> dict[str, Any]:
        """Stores the global weights and momentum as they are; returns what tells others of them."""
        fields: dict[str, Any] = {"round": number}
        for what, flat in (("global", self._state.weights), ("momentum", self._state.momentum)):
            pieces = []
            for start in range(0, len(flat), _PIECE):
                data = flat[start : start + _PIECE].tobytes()
                pieces.append(sha256(data).hexdigest())
                self._store.put(f"{_PIECES}/{pieces[-1]}", data)
                self.sent_bytes += len(data)
            fields[what] = {"root": self._state.digest(flat).root, "pieces": pieces}
        return fields

    def _flat(self, root: str, pieces: list[Any]) -> Floats:
        flat = np.empty_like(self._state.weights)
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

    def _json(self, kind: str, name: str, *, by: str | None = None) -> dict[str, Any]:
        return unsealed(self._bytes(name, _MAX_RUN_BYTES), kind, name, self.trusted, by=by)

    def _bytes(self, name: str, most: int) -> bytes:
        nbytes = self._store.head(name).nbytes
        if nbytes > most:
            raise CorruptMessage(f"{name} has {nbytes} bytes, more than {most}")
        return whole(self._store, name, nbytes)
