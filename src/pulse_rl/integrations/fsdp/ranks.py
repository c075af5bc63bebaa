"""The ranks that publish together: small messages between them, and failing together."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ... import errors
from ..._util.serial import unstoppable
from ..._util.threads import checkpoint
from ...errors import PulseError, RankLost, StreamError

R = TypeVar("R")
Bytes = npt.NDArray[np.uint8]


class Group(Protocol):
    """What carries bytes between ``size`` ranks, of which this is number ``rank``. A rank that is gone, or stalls, is
    RankLost to all that wait for it."""

    size: int
    rank: int

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, which have one length, in the order of the ranks."""

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        """Sends arrays to other ranks, and fills those that other ranks send."""

    def close(self) -> None:
        """Gives the group up. Safe after a failure, and safe to repeat."""


class Ranks:
    """This rank's side of the ranks of a ``group``. Once one of them is lost, every call raises RankLost."""

    def __init__(self, group: Group) -> None:
        self.size, self.rank = group.size, group.rank
        self.common_error: BaseException | None = None
        """The last error that all ranks know of."""
        self._group = group
        self._step = 0
        self._given_up = ""

    def together(self, work: Callable[[], bytes]) -> list[bytes]:
        """What ``work()`` returns on each rank, in their order. Where it fails on one, all raise: the others the same
        error, of which they say where it came from. Raises RankLost."""
        failure: BaseException | None = None
        message = b""
        try:
            checkpoint()
            message = b"+" + work()
        except RankLost:
            raise  # the group is lost for all
        except BaseException as error:
            failure, message = error, b"-" + _told(error)
        messages = [message] if self.size == 1 else self._all_gather(message)
        if failure is not None:
            raise self.known_to_all(failure)
        for rank, said in enumerate(messages):
            if said[:1] == b"-":
                raise self.known_to_all(_retold(rank, said[1:]))
        return [said[1:] for said in messages]

    def known_to_all(self, error: BaseException) -> BaseException:
        """``error``, which is raised on all ranks alike: they stay together."""
        self.common_error = error
        return error

    def on_first(self, work: Callable[[], bytes]) -> bytes:
        """What ``work()`` returns on rank 0; the others do not call it, and cannot fail. Raises as `together` does."""
        if self.rank == 0:
            return self.together(work)[0]
        with unstoppable():
            return self.together(bytes)[0]

    def swap(self, sent: Mapping[int, Bytes], lengths: Mapping[int, int]) -> dict[int, Bytes]:
        """Sends arrays to other ranks and receives arrays of ``lengths`` from others; what is for this rank itself is
        passed on. A rank calls this in the same order as those with which it deals. Raises RankLost."""
        received = {rank: np.empty(length, np.uint8) for rank, length in lengths.items() if rank != self.rank}
        if self.rank in lengths:
            received[self.rank] = sent[self.rank]
        coming = {rank: array for rank, array in received.items() if rank != self.rank and len(array)}
        going = {rank: array for rank, array in sent.items() if rank != self.rank and len(array)}
        self._guard(lambda: self._group.exchange(going, coming))
        return received

    @contextmanager
    def alone_together(self) -> Iterator[None]:
        """Around steps in which the ranks wait for each other but cannot tell of an error: one parts them. No interrupt
        does."""
        try:
            with unstoppable():
                yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the group up. Safe after a failure."""
        if self.size > 1:
            self._given_up = "the ranks have parted: this one was closed"
        self._group.close()

    def _all_gather(self, message: bytes) -> list[bytes]:
        self._step += 1
        heads = [struct.unpack("<QQ", m) for m in self._equal(struct.pack("<QQ", self._step, len(message)))]
        if any(step != self._step for step, _ in heads):
            self._given_up = "the ranks have parted: they are at different steps"
            raise RankLost(self._given_up)
        lengths = [length for _, length in heads]
        padded = self._equal(message.ljust(max(lengths), b"\0"))
        return [m[:length] for m, length in zip(padded, lengths, strict=True)]

    def _equal(self, message: bytes) -> list[bytes]:
        return self._guard(lambda: self._group.all_gather(message))

    def _guard(self, call: Callable[[], R]) -> R:
        if self._given_up:
            raise RankLost(self._given_up)
        try:
            return call()
        except RankLost:
            self._given_up = "the ranks have parted: one was lost"
            raise


def _told(error: BaseException) -> bytes:
    kind = type(error).__name__ if isinstance(error, PulseError) else ""
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return json.dumps([kind, text[:2000], getattr(error, "hint", None)]).encode()


def _retold(rank: int, said: bytes) -> PulseError:
    """The error of another rank."""
    kind, text, hint = json.loads(said)
    known = getattr(errors, kind, None) if kind else None
    if isinstance(known, type) and issubclass(known, PulseError):
        return known(f"rank {rank}: {text}", hint=hint)
    return StreamError(f"rank {rank} failed: {text}", hint="See the log of that rank.")
