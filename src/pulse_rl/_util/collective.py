"""Processes that work together: small messages between them, and failing together.

A *collective* is a call that all ranks make in the same order. What fails on one rank in a
collective is raised on all of them, so that they stay together and the next collective goes on.
What carries the bytes is a `Transport`: `GlooTransport`, or whatever a test puts in its place.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .. import errors
from ..errors import InputError, PulseError, RankLost, StreamError
from .serial import shield
from .threads import checkpoint

R = TypeVar("R")
Bytes = npt.NDArray[np.uint8]
_MAX_ERROR_CHARACTERS = 2000


class Transport(Protocol):
    """What carries bytes between ``size`` ranks, of which this is number ``rank``. A rank that is
    gone, or stalls, is the group's ``lost`` error to all that wait for it."""

    size: int
    rank: int

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, which have one length, in the order of the ranks."""

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        """Sends arrays to other ranks, and fills those that other ranks send."""

    def close(self) -> None:
        """Gives the transport up. Safe after a failure, and safe to repeat."""


class Alone:
    """The transport of a single process: there is nobody to talk to."""

    size, rank = 1, 0

    def all_gather(self, message: bytes) -> list[bytes]:
        """The message itself."""
        return [message]

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        """Nothing comes or goes."""

    def close(self) -> None:
        """Nothing to give up."""


class RankGroup:
    """This rank's side of the ranks that ``transport`` connects. Once one is lost, every call
    raises RankLost."""

    def __init__(self, transport: Transport) -> None:
        self.size, self.rank = transport.size, transport.rank
        self.common_error: BaseException | None = None
        """The last error that was raised on all ranks alike."""
        self._transport = transport
        self._step = 0
        self._given_up = ""

    def each(
        self, work: Callable[[], R], send: Callable[[R], bytes], read: Callable[[bytes], R]
    ) -> list[R]:
        """What ``work()`` returns on each rank, in their order; that of another rank as ``read``
        makes it of what ``send`` has made of it there. Where it fails on one, all raise: the others
        the same error, of which they say where it came from. Raises RankLost."""
        own, messages = self._together(work, send)
        return [own if k == self.rank else read(message) for k, message in enumerate(messages)]

    def together(self, work: Callable[[], R]) -> R:
        """What ``work()`` returns here, once it has returned on all ranks. Raises as `each`."""
        return self._together(work, lambda _: b"")[0]

    def from_first(
        self, work: Callable[[], R], send: Callable[[R], bytes], read: Callable[[bytes], R]
    ) -> R:
        """What ``work()`` returns on rank 0; the others do not call it, and cannot fail. Raises as
        `each`."""
        if self.rank == 0:
            return self._together(work, send)[0]
        with shield():
            messages = self._together(bytes, bytes)[1]
        return read(messages[0])

    def _together(self, work: Callable[[], R], send: Callable[[R], bytes]) -> tuple[R, list[bytes]]:
        """What ``work()`` returns here, and what ``send`` makes of it on each rank."""
        if self.size == 1:
            checkpoint()
            return work(), [b""]
        failure: BaseException | None = None
        message = b""
        try:
            checkpoint()
            own = work()
            message = b"+" + send(own)
        except RankLost:
            raise  # the group is lost for all: there is nobody left to be told
        except BaseException as error:  # an interrupt, too, must reach the others, which wait
            failure, message = error, b"-" + _error_to_bytes(error)
        # Sent in any case: the others wait for this rank's word, good or bad.
        try:
            messages = self._all_gather(message)
            if failure is not None:
                raise self.mark_collective(failure)
        finally:
            # Or its traceback would hold itself, and all that the work held, until a collection.
            del failure
        for rank, said in enumerate(messages):
            if said[:1] == b"-":
                raise self.mark_collective(_error_from_bytes(rank, said[1:]))
        return own, [said[1:] for said in messages]

    def mark_collective(self, error: BaseException) -> BaseException:
        """``error`` itself, as one that is raised on all ranks alike, so that they stay
        together."""
        self.common_error = error
        return error

    def exchange(self, sent: Mapping[int, Bytes], lengths: Mapping[int, int]) -> dict[int, Bytes]:
        """Sends arrays to other ranks and receives arrays of ``lengths`` bytes from others; what is
        for this rank itself is passed on. A rank calls this in the same order as those with which
        it deals. Raises RankLost."""
        received = {
            rank: np.empty(length, np.uint8)
            for rank, length in lengths.items()
            if rank != self.rank
        }
        if self.rank in lengths:
            received[self.rank] = sent[self.rank]
        coming = {
            rank: array for rank, array in received.items() if rank != self.rank and len(array)
        }
        going = {rank: array for rank, array in sent.items() if rank != self.rank and len(array)}
        self._guard(lambda: self._transport.exchange(going, coming))
        return received

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Around steps in which the ranks wait for each other but cannot tell each other of an
        error: one closes the group. No interrupt stops them."""
        try:
            with shield():
                yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the group up. Safe after a failure."""
        if self.size > 1:
            self._given_up = "the ranks have parted: this one was closed"
        self._transport.close()

    def _all_gather(self, message: bytes) -> list[bytes]:
        self._step += 1
        # The step tells ranks apart that have missed a call of each other: their next messages
        # would be mistaken.
        heads = [
            struct.unpack("<QQ", m)
            for m in self._equal(struct.pack("<QQ", self._step, len(message)))
        ]
        if any(step != self._step for step, _ in heads):
            self._given_up = "the ranks have parted: they are at different steps"
            raise RankLost(self._given_up)
        lengths = [length for _, length in heads]
        padded = self._equal(message.ljust(max(lengths), b"\0"))
        return [m[:length] for m, length in zip(padded, lengths, strict=True)]

    def _equal(self, message: bytes) -> list[bytes]:
        return self._guard(lambda: self._transport.all_gather(message))

    def _guard(self, call: Callable[[], R]) -> R:
        if self._given_up:
            raise RankLost(self._given_up)
        try:
            return call()
        except RankLost:
            self._given_up = "the ranks have parted: one was lost"
            raise


def _error_to_bytes(error: BaseException) -> bytes:
    kind = type(error).__name__ if isinstance(error, PulseError) else ""
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return json.dumps([kind, text[:_MAX_ERROR_CHARACTERS], getattr(error, "hint", None)]).encode()


def _error_from_bytes(rank: int, message: bytes) -> PulseError:
    """The error of another rank."""
    kind, text, hint = json.loads(message)
    known = getattr(errors, kind, None) if kind else None
    if isinstance(known, type) and issubclass(known, PulseError):
        return known(f"rank {rank}: {text}", hint=hint)
    return StreamError(f"rank {rank} failed: {text}", hint="See the log of that rank.")


class GlooTransport:
    """A `Transport` between the ranks of ``group``, a torch.distributed.ProcessGroup or the ranks
    themselves (None: all ranks); of this process alone if torch.distributed is not initialized.
    ``owner``: words for messages.

    Whatever the caller's backend is: what is sent is in host memory, a lost peer is an error and
    not an abort, and nothing mixes with the caller's collectives. No call waits for another rank
    for longer than ``timeout_seconds``: one that died, or stalls, is an error on the others, which
    ``lost`` makes of torch's (None: RankLost). Making it is a collective of the group. Raises
    InputError.
    """

    def __init__(
        self,
        group: Any,
        timeout_seconds: float,
        *,
        owner: str,
        lost: Callable[[Exception], PulseError] | None = None,
    ) -> None:
        self.size, self.rank = 1, 0
        self._timeout_seconds = timeout_seconds
        self._lost = lost or self._rank_lost
        self._group: Any = None
        self._torch: Any = sys.modules.get("torch")
        dist = self._dist
        if dist is None or not (dist.is_available() and dist.is_initialized()):
            if group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InputError(
                    "there are several processes, but torch.distributed is not initialized",
                    hint="Call torch.distributed.init_process_group() first.",
                )
            return
        named = isinstance(group, Sequence)
        if group is not None and (
            dist.get_rank() not in group if named else dist.get_rank(group) < 0
        ):
            raise InputError(
                "this process is not in the group", hint=f"Make a {owner} on its ranks only."
            )
        members = group if group is None or named else dist.get_process_group_ranks(group)
        timeout = timedelta(seconds=timeout_seconds)
        local = members is not None
        self._group = self._guard(
            lambda: dist.new_group(members, timeout, "gloo", use_local_synchronization=local)
        )
        self.size, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)

    @property
    def store(self) -> Any:
        """The group's key-value store, None where there is none."""
        if self._group is None:
            return None
        try:
            return self._group.get_group_store()
        except (AttributeError, RuntimeError):  # an older torch, or a backend without a store
            known: Any = getattr(self._dist.distributed_c10d, "_get_process_group_store", None)
            return None if known is None else known(self._group)

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, which have one length."""
        if self.size == 1:
            return [message]
        return [array.tobytes() for array in self.gather_arrays(np.frombuffer(message, np.uint8))]

    def gather_arrays(self, data: Bytes) -> list[Bytes]:
        """The arrays of all ranks, which have one length."""
        own = self._tensor(data)
        out = [self._torch.empty_like(own) for _ in range(self.size)]
        self._guard(lambda: self._dist.all_gather(out, own, group=self._group))
        return [piece.numpy() for piece in out]

    def all_to_all(self, sent: Sequence[Bytes], lengths: Sequence[int]) -> list[Bytes]:
        """Sends an array to each rank, and returns those of the ranks for this one, of ``lengths``
        bytes."""
        own = self._tensor(np.concatenate(sent))
        out = self._torch.empty(sum(lengths), dtype=self._torch.uint8, device="cpu")
        sizes = [len(array) for array in sent]
        self._guard(
            lambda: self._dist.all_to_all_single(out, own, [*lengths], sizes, group=self._group)
        )
        return np.split(out.numpy(), np.cumsum(lengths[:-1]))

    def broadcast(self, array: npt.NDArray[Any], source: int) -> None:
        """Replaces ``array`` by that of rank ``source``, in place."""
        data = self._torch.from_numpy(array)
        self._guard(lambda: self._dist.broadcast(data, self._global(source), self._group))

    def all_reduce(self, array: npt.NDArray[np.float32]) -> None:
        """Replaces ``array`` by the sum over all ranks, in place."""
        self._guard(lambda: self._dist.all_reduce(self._torch.from_numpy(array), group=self._group))

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        """Sends arrays to other ranks, and fills those that other ranks send."""
        dist = self._dist

        def run() -> None:
            works: list[Any] = []
            for rank, array in sent.items():
                works.append(dist.isend(self._tensor(array), self._global(rank), self._group))
            for rank, array in received.items():
                works.append(
                    dist.irecv(self._torch.from_numpy(array), self._global(rank), self._group)
                )
            for work in works:
                work.wait()

        self._guard(run)

    def close(self) -> None:
        """Gives the group up. Safe after a failure, and safe to repeat."""
        group, self._group = self._group, None
        if group is not None and self._dist.is_initialized():
            # After a re-initialization torch.distributed no longer knows the group, and says so by
            # a ValueError.
            with suppress(ValueError, RuntimeError):
                self._dist.destroy_process_group(group)

    @property
    def _dist(self) -> Any:
        return getattr(self._torch, "distributed", None)

    def _global(self, rank: int) -> int:
        assert self._group is not None
        return int(self._dist.get_global_rank(self._group, rank))

    def _tensor(self, array: Bytes) -> Any:
        return self._torch.from_numpy(array if array.flags.writeable else array.copy())

    def _rank_lost(self, error: Exception) -> PulseError:
        return RankLost(f"a rank died or stalled for {self._timeout_seconds:g} s: {error}")

    def _guard(self, call: Callable[[], R]) -> R:
        """torch.distributed raises RuntimeErrors of many kinds when a peer is gone; all of them
        mean one thing here."""
        try:
            return call()
        except RuntimeError as error:
            raise self._lost(error) from error
