"""A group of trainers: its collectives over torch.distributed, what all must agree on, and who is
where when one is lost (docs/loco.md, sections 4 and 4.2)."""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from threading import Event, Thread
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from .._util.collective import Bytes, GlooTransport
from ..errors import CorruptMessage, Diverged, TrainerLost
from ..state.digest import StateDigest

T = TypeVar("T")
_log = logging.getLogger("pulse_rl")
_LOG_AFTER_SECONDS, _LOG_EVERY_SECONDS = 30.0, 60.0
_DIGEST_BYTES = 32
_MAX_BROADCAST_BYTES = 1 << 26
# A store may be on a machine that stands still.
_PATIENCE_SECONDS = 5.0
_CAUSES = "fewer batches, or steps that a GradScaler skipped"


class TrainerGroup:
    """One trainer's side of a group of trainers; a single trainer if torch.distributed is not
    initialized.

    No call takes longer than ``timeout_seconds``: a trainer that dies, or stalls for longer, raises
    TrainerLost on all others. ``sent_bytes`` counts what left this process: gathered messages
    travel around a ring, each process to the next rank, so each forwards all but one of them,
    padded. ``progress`` knows what the errors tell of the others.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 600.0
    ) -> None:
        self.sent_bytes = 0
        self.progress = TrainerNotes(None, 0, 1)
        self._transport = GlooTransport(
            group,
            timeout_seconds,
            owner="PulseLoCo",
            lost=lambda error: self.progress.lost(error, timeout_seconds),
        )
        self.size, self.rank = self._transport.size, self._transport.rank
        self.progress = TrainerNotes(self._transport.store, self.rank, self.size)

    def all_gather(self, message: bytes, *, max_bytes: int) -> list[bytes]:
        """Every trainer's message, in rank order. They may differ in length: headers first, then
        padded messages.

        Raises TrainerLost, and CorruptMessage for a message over ``max_bytes`` or other than it was
        sent.
        """
        if self.size == 1:
            return [message]
        # 1. Lengths and digests, of one size. Nobody allocates what a header announces before it is
        # bounded.
        header = np.frombuffer(struct.pack("<Q", len(message)) + sha256(message).digest(), np.uint8)
        headers = self._all_gather_array(header)
        lengths = [int.from_bytes(h[:8].tobytes(), "little") for h in headers]
        for rank, length in enumerate(lengths):
            if length > max_bytes:
                raise CorruptMessage(
                    f"trainer {rank} announces {length} bytes, more than {max_bytes}"
                )
        if max(lengths) == 0:
            return [b""] * self.size
        # 2. The messages: gloo gathers equal sizes, so all are padded to the longest.
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        arrived = [m[:n] for m, n in zip(self._all_gather_array(padded), lengths, strict=True)]
        return _intact(arrived, [h[8 : 8 + _DIGEST_BYTES] for h in headers])

    def all_to_all(self, messages: Sequence[bytes], *, max_bytes: Sequence[int]) -> list[bytes]:
        """What every trainer has for this one, in rank order.

        ``messages[r]`` goes to trainer r, which takes ``max_bytes[r]`` at most from each trainer.
        Lengths first, to all; then each message behind its SHA-256. Raises as `all_gather`, and for
        a length over the limit on all trainers alike.
        """
        if self.size == 1:
            return list(messages)
        form = f"<{self.size}Q"
        announced = self.all_gather_fixed(struct.pack(form, *map(len, messages)))
        lengths = [struct.unpack(form, row) for row in announced]
        for rank, row in enumerate(lengths):
            for length, most in zip(row, max_bytes, strict=True):
                if length > most:
                    raise CorruptMessage(
                        f"trainer {rank} announces {length} bytes, more than {most}"
                    )
        pieces = [np.frombuffer(sha256(m).digest() + m, np.uint8) for m in messages]
        arrived = self._all_to_all_arrays(
            pieces, [_DIGEST_BYTES + row[self.rank] for row in lengths]
        )
        digests = [piece[:_DIGEST_BYTES] for piece in arrived]
        return _intact([piece[_DIGEST_BYTES:] for piece in arrived], digests)

    def all_gather_fixed(self, message: bytes) -> list[bytes]:
        """As `all_gather`, in one step, for messages of one length that all trainers know. Raises
        TrainerLost."""
        if self.size == 1:
            return [message]
        return [m.tobytes() for m in self._all_gather_array(np.frombuffer(message, np.uint8))]

    def broadcast(self, array: npt.NDArray[Any], source: int) -> None:
        """Replaces ``array`` by that of trainer ``source``, in place. Raises TrainerLost."""
        if self.size == 1:
            return
        step = _MAX_BROADCAST_BYTES // array.itemsize
        for start in range(0, len(array), step):
            piece = array[start : start + step]
            self._transport.broadcast(piece, source)
            self.sent_bytes += piece.nbytes if self.rank == source else 0

    def all_reduce(self, array: npt.NDArray[np.float32]) -> None:
        """Replaces ``array`` by the sum over all trainers, in place; for the baselines. Raises
        TrainerLost."""
        if self.size == 1:
            return
        self._transport.all_reduce(array)
        self.sent_bytes += 2 * (self.size - 1) * array.nbytes // self.size

    def failures(self, problem: Exception | None) -> list[int]:
        """The trainers that have a ``problem``, in rank order: all call it, so that a round fails
        on all or on none."""
        reported = self.all_gather_fixed(b"\0" if problem else b"\1")
        return [rank for rank, flag in enumerate(reported) if flag != b"\1"]

    def require_same_root(
        self, number: int, tree: StateDigest, trees: Callable[[], Mapping[str, StateDigest]]
    ) -> None:
        """Raises Diverged on all trainers if ``tree`` after round ``number`` has not the same root
        on all of them, naming the first tensor that differs among ``trees``."""
        if len(set(self.all_gather_fixed(bytes.fromhex(tree.root)))) > 1:
            self.require_same_tensors(number, trees)
            raise Diverged(f"round {number}: the trainers disagree on a root, but on no tensor")

    def require_same_tensors(
        self, number: int, trees: Callable[[], Mapping[str, StateDigest]]
    ) -> None:
        """Raises Diverged on all trainers, naming the first tensor that differs among the ``trees``
        of round ``number``."""
        for what, tree in trees().items():
            digests = b"".join(tree.tensor(spec) for spec in tree.specs)
            name, others = self.first_difference([spec.name for spec in tree.specs], digests)
            if others:
                raise Diverged(
                    f"round {number}: {what} of {name!r} on trainers {others} is not trainer 0's"
                )

    def first_difference(self, names: Sequence[str], digests: bytes) -> tuple[str, list[int]]:
        """The first of the ``names`` whose digest, of 32 bytes each, is not the same on all
        trainers, and where it is not trainer 0's: nowhere if there is none."""
        by_rank = self.all_gather_fixed(digests)
        for number, name in enumerate(names):
            own = slice(_DIGEST_BYTES * number, _DIGEST_BYTES * (number + 1))
            others = [rank for rank, each in enumerate(by_rank) if each[own] != by_rank[0][own]]
            if others:
                return name, others
        return "", []

    def close(self) -> None:
        """Gives the group up. Safe after a failure."""
        self._transport.close()

    def _all_gather_array(self, data: Bytes) -> list[Bytes]:
        found = self._transport.gather_arrays(data)
        self.sent_bytes += (self.size - 1) * len(data)
        return found

    def _all_to_all_arrays(self, pieces: list[Bytes], lengths: list[int]) -> list[Bytes]:
        """The pieces for this trainer, of ``lengths`` bytes."""
        found = self._transport.all_to_all(pieces, lengths)
        self.sent_bytes += sum(map(len, pieces)) - len(pieces[self.rank])
        return found


def _intact(arrived: Sequence[Bytes], digests: Sequence[Bytes]) -> list[bytes]:
    """The messages of all trainers. Raises CorruptMessage where one has another SHA-256."""
    messages = [message.tobytes() for message in arrived]
    for rank, (message, digest) in enumerate(zip(messages, digests, strict=True)):
        if sha256(message).digest() != digest.tobytes():
            raise CorruptMessage(f"the message of trainer {rank} was damaged in transit")
    return messages


@dataclass(frozen=True, slots=True)
class TrainerNote:
    """A trainer has taken ``inner_step`` of the ``steps`` inner steps of a round, counted from 1.

    ``left`` is None while it is in the group, "" if it has left it on purpose, otherwise the error
    that made it leave.
    """

    round: int
    inner_step: int
    steps: int
    left: str | None = None

    def __str__(self) -> str:
        return f"{self.inner_step} of {self.steps} inner steps of round {self.round}"


@contextmanager
def logged_wait(what: str) -> Iterator[None]:
    """Within, a warning after 30 seconds, and each minute after that, says what it
    is that takes so long: "round 5: waiting for the other 3 trainers"."""
    ended, began = Event(), time.monotonic()

    def log() -> None:
        seconds = _LOG_AFTER_SECONDS
        while not ended.wait(seconds):
            _log.warning("%s since %.0f s", what, time.monotonic() - began)
            seconds = _LOG_EVERY_SECONDS

    Thread(target=log, name="PulseLoCo waits", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class TrainerNotes:
    """One trainer's notes and its view of the others', in the group's key-value ``store``. Without
    one, or where it fails, it knows nothing."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._met = False
        self._own = TrainerNote(0, 0, 0)

    def met(self) -> None:
        """All others have made a note in this group: until then theirs may be left over from an
        earlier one."""
        self._met = True

    def note(self, own: TrainerNote) -> None:
        """Replaces this trainer's note. Does not wait for the store."""
        self._own = own
        if self._store is not None:
            try:
                self._store.set(_key(self._rank), json.dumps(asdict(own)))
            except RuntimeError:
                self._store = None

    def leave(self, error: BaseException | None) -> None:
        """The last note, which the store has when this returns."""
        if self._store is None or self._own.left is not None or isinstance(error, TrainerLost):
            return
        left = "" if error is None else f"{type(error).__name__}: {error}"[:500]
        self.note(TrainerNote(self._own.round, self._own.inner_step, self._own.steps, left))
        self._wait_for(lambda store: store.check([_key(self._rank)]))

    def lost(self, error: Exception, timeout_seconds: float) -> TrainerLost:
        """What ``error``, a failed collective, is to this trainer."""
        # The best reason first: who left on purpose, who failed, who is behind; else only that
        # someone is gone.
        others = self._others()
        left = {rank: note for rank, note in others.items() if note.left is not None}
        if on_purpose := {rank: note for rank, note in left.items() if note.left == ""}:
            where = "; ".join(
                f"trainer {rank} left after {note}" for rank, note in on_purpose.items()
            )
            return TrainerLost(
                f"{where}; this one has taken {self._own.inner_step} of round {self._own.round}",
                hint="It had fewer batches, or a GradScaler that skipped steps: even them out, "
                "or call rejoin().",
            )
        if left:
            return TrainerLost(
                "; ".join(f"trainer {rank} left with {note.left}" for rank, note in left.items())
            )
        at = (self._own.round, self._own.inner_step)
        behind = {rank: note for rank, note in others.items() if (note.round, note.inner_step) < at}
        where = "; ".join(f"trainer {rank} had taken {note}" for rank, note in behind.items())
        ended = f"died, stalled for {timeout_seconds:g} s, or ended its loop ({_CAUSES}?)"
        said = f"{where}, and has {ended}" if behind else f"a trainer {ended}"
        here = f"; this one has taken {self._own}" if self._own.steps else ""
        return TrainerLost(f"{said}{here}: {error}")

    def _others(self) -> dict[int, TrainerNote]:
        """The notes of the other trainers, as far as they can be had."""
        if not self._met:
            return {}

        def read(store: Any) -> dict[int, TrainerNote]:
            keys = {rank: _key(rank) for rank in range(self._size) if rank != self._rank}
            return {
                rank: TrainerNote(**json.loads(store.get(key)))
                for rank, key in keys.items()
                if store.check([key])
            }

        return self._wait_for(read) or {}

    def _wait_for(self, work: Callable[[Any], T]) -> T | None:
        """``work(store)``, or None if it fails or takes too long; then the store is not asked
        again."""
        store, result = self._store, []

        def call() -> None:
            try:
                result.append(work(store))
            except (RuntimeError, ValueError, TypeError):
                self._store = None

        if store is None:
            return None
        thread = Thread(target=call, daemon=True)
        thread.start()
        thread.join(_PATIENCE_SECONDS)
        if not result:
            self._store = None
            return None
        return result[0]


def _key(rank: int) -> str:
    return f"pulse-loco/{rank}"
