"""What the trainers of a run have put into its store (docs/loco.md, section 7): its beginning,
posts, closes and snapshots, read with their digests and signatures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from typing import Any

import numpy as np

from .._util.faults import hit
from .._util.threads import checkpoint
from ..errors import CorruptMessage, NotFound, StoreError, StoreUnavailable, Untrusted
from ..store import Store
from ..store.base import create_or_confirm, is_name, whole
from ..stream.signing import Signer, TrustedKeys
from .outer import OuterState
from .parameters import Floats
from .store_format import (
    MAX_CLOSE_BYTES,
    POST,
    Close,
    RoundKey,
    ShareSums,
    Upload,
    sealed,
    unsealed,
)

_RUN = "loco/run.json"
_POSTS, _CLOSED, _SUMS = "loco/posts", "loco/closed", "loco/sums"
_SNAPSHOTS, _PIECES = "loco/snapshots", "loco/pieces"
_MAX_RUN_BYTES = 1 << 20
_MAX_LEFT = 100_000
_MAX_SNAPSHOTS = 100
"""So many of the newest are looked at for one that is good."""
_PIECE = 16 << 20
"""Elements of theta or momentum in one object of a snapshot."""


_POLL_SECONDS = (0.05, 5.0)


def pause(began: float, now: float) -> None:
    """Before another look at what was not there ``now``: a tenth of the time since ``began``, as a
    look costs requests."""
    hit("round.waits")
    shortest, longest = _POLL_SECONDS
    wake = now + min(max((now - began) / 10, shortest), longest)
    while (left := wake - time.monotonic()) > 0:
        checkpoint()
        time.sleep(min(left, 0.2))


def pieces_of(snapshot: Any) -> set[str]:
    """The names of the pieces that a snapshot's ``fields`` tell of, as far as they are of this
    format."""
    try:
        return {
            name
            for what in ("theta", "momentum")
            for name in snapshot[what]["pieces"]
            if is_name(name)
        }
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
        self._first_pieces: set[str] = set()
        self._store, self._state, self._signer, self._trusted = store, state, signer, trusted

    def beginning(self) -> dict[str, Any]:
        """What the run began with."""
        fields = self._json("run", _RUN)
        self._first_pieces = pieces_of(fields.get("snapshot"))
        return fields

    def begin(self, fields: dict[str, Any]) -> None:
        """Begins a run with these fields, unless another trainer has begun it; ``state`` is its
        first snapshot."""
        self._create(_RUN, sealed("run", {**fields, "snapshot": self._put_state(0)}, self._signer))

    # -- rounds

    def closed(self, number: int) -> Close | None:
        """What has closed the round after ``number`` others."""
        try:
            data = self._bytes(name := f"{_CLOSED}/{number:012d}.json", MAX_CLOSE_BYTES)
            return Close.parse(data, name, self.run, number, self._trusted)
        except NotFound:
            return None

    def members_before(self, number: int) -> frozenset[str]:
        """Who was in the round before the one after ``number`` others."""
        close = self.closed(number - 1) if number else None
        return frozenset(post.trainer for post in close.posts) if close else frozenset()

    def close(self, close: Close) -> None:
        """Closes a round, unless it is closed."""
        self._create(f"{_CLOSED}/{close.round:012d}.json", close.to_bytes(self._signer))

    def posts(self, number: int) -> Iterator[Upload]:
        """Those of a round, by their names; members' alone where members have keys."""
        for info in islice(self._store.list(f"{_POSTS}/{number:012d}"), _MAX_LEFT):
            match = POST.fullmatch(info.name.rpartition("/")[2])
            if match and (self._trusted is None or match[1] in self._trusted.keys):
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
            if (
                stem.isascii()
                and stem.isdecimal()
                and info.name == self._sums_name(number, int(stem))
            ):
                found[int(stem)] = info.nbytes
        return found

    def share_sums(self, place: RoundKey, share: int, nbytes: int) -> ShareSums:
        name = self._sums_name(place.round, share)
        return ShareSums.parse(whole(self._store, name, nbytes), name, place, share, self._trusted)

    def put_sums(self, sums: ShareSums) -> bool:
        """Stores the sums of a share, unless it has some; whether these are in the store."""
        return self._create(self._sums_name(sums.round, sums.share), sums.to_bytes(self._signer))

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
        self._create(f"{_SNAPSHOTS}/{number:012d}.json", sealed("snapshot", fields, self._signer))
        # Of the rounds up to the snapshot before that one nobody needs a message any more, nor
        # sums. What closed them stays: a round is never closed a second time.
        for folder in (_POSTS, _SUMS):
            for info in islice(self._store.list(folder), _MAX_LEFT):
                of = info.name.split("/")[2]
                if of.isdecimal() and int(of) < before:
                    self._store.delete(info.name)
        # Nor the snapshots before it, but the run's first. Pieces may be of several.
        needed = pieces_of(fields) | pieces_of(kept) | self._first_pieces
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
        for number in sorted((n for n in numbers if below is None or n < below), reverse=True)[
            :_MAX_SNAPSHOTS
        ]:
            try:
                fields = self._json("snapshot", f"{_SNAPSHOTS}/{number:012d}.json")
            except (CorruptMessage, Untrusted, NotFound):
                continue
            if (fields.get("run"), fields.get("round")) == (self.run, number):
                yield number, fields

    def snapshot(
        self, fields: Any, number: int, *, unless: str = ""
    ) -> tuple[str, Floats, Floats] | None:
        """The root of theta, theta and momentum of the snapshot after ``number`` rounds that
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
        return unsealed(self._bytes(name, _MAX_RUN_BYTES), kind, name, self._trusted)

    def _bytes(self, name: str, most: int) -> bytes:
        nbytes = self._store.head(name).nbytes
        if nbytes > most:
            raise CorruptMessage(f"{name} has {nbytes} bytes, more than {most}")
        return whole(self._store, name, nbytes)
