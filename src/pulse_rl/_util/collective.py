"""Processes that work together: small messages between them, and failing together.

A *collective* is a call that all ranks make in the same order. An error of one rank in a collective
is raised on all of them, so they stay in step and the next collective goes on. A `Transport`
carries the bytes: `GlooTransport`, or another one in tests.
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
    """Carries bytes between ``size`` ranks, of which this is number ``rank``.

    If a rank dies or stalls, all ranks that wait for it get the group's ``lost`` error.
    """

    size: int
    rank: int

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks in their order. All have the same length."""

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        """Send arrays to other ranks, and fill those that other ranks send."""

    def close(self) -> None:
        """Give up the transport. Safe after a failure, and safe to repeat."""


class Alone:
    """The transport of a single process."""

    size, rank = 1, 0

    def all_gather(self, message: bytes) -> list[bytes]:
        """The message itself."""
        return [message]

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        """Nothing to send or receive."""

    def close(self) -> None:
        """Nothing to give up."""


class RankGroup:
    """This rank's side of the group that ``transport`` connects.

    Once a rank is lost, every call raises RankLost.
    """

    def __init__(self, transport: Transport) -> None:
        self.size, self.rank = transport.size, transport.rank
        #: The last error that was raised on all ranks.
        self.common_error: BaseException | None = None
        self._transport = transport
        self._step = 0
        self._given_up = ""

    def each(
        self, work: Callable[[], R], send: Callable[[R], bytes], read: Callable[[bytes], R]
    ) -> list[R]:
        """Call ``work()`` on each rank; return the results in the order of the ranks.

        A result travels as ``send`` serializes it and ``read`` parses it. If one rank fails, all
        raise: the others raise its error, with its rank in the message. Raises RankLost.
        """
        own, messages = self._together(work, send)
        return [own if k == self.rank else read(message) for k, message in enumerate(messages)]

    def together(self, work: Callable[[], R]) -> R:
        """Call ``work()`` on each rank; return this rank's result once all have one. Raises as
        `each`."""
        return self._together(work, lambda _: b"")[0]

    def from_first(
        self, work: Callable[[], R], send: Callable[[R], bytes], read: Callable[[bytes], R]
    ) -> R:
        """Call ``work()`` on rank 0; return its result on all ranks. Raises as `each`.

        The other ranks do nothing that can fail.
        """
        if self.rank == 0:
            return self._together(work, send)[0]
        with shield():
            messages = self._together(bytes, bytes)[1]
        return read(messages[0])

    def _together(self, work: Callable[[], R], send: Callable[[R], bytes]) -> tuple[R, list[bytes]]:
        """The result of ``work()`` here, and the serialized results of all ranks."""
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
            raise  # all ranks lost the group: nobody is left to report to
        except BaseException as error:  # interrupts too: the other ranks wait for a report
            kind = type(error).__name__ if isinstance(error, PulseError) else ""
            text = str(error) if kind else f"{type(error).__name__}: {error}"
            said = [kind, text[:_MAX_ERROR_CHARACTERS], getattr(error, "hint", None)]
            failure, message = error, b"-" + json.dumps(said).encode()
        # The message is sent in any case, since the other ranks wait for it.
        try:
            messages = self._all_gather(message)
            if failure is not None:
                raise self.mark_collective(failure)
        finally:
            # Without this the traceback would refer to itself, and keep what the work held until a
            # collection.
            del failure
        for rank, answer in enumerate(messages):
            if answer[:1] == b"-":
                raise self.mark_collective(_error_from_bytes(rank, answer[1:]))
        return own, [answer[1:] for answer in messages]

    def mark_collective(self, error: BaseException) -> BaseException:
        """Mark ``error`` as raised on all ranks, so that the group stays open; return it."""
        self.common_error = error
        return error

    def exchange(self, sent: Mapping[int, Bytes], lengths: Mapping[int, int]) -> dict[int, Bytes]:
        """Send arrays to other ranks and receive arrays of ``lengths`` bytes.

        An array for this rank itself is passed on. Ranks that exchange with each other call this in
        the same order. Raises RankLost.
        """
        received = {rank: np.empty(length, np.uint8) for rank, length in lengths.items()}
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
        """Around steps in which the ranks wait for each other but cannot report an error to each
        other.

        An error closes the group. No interrupt stops the steps.
        """
        try:
            with shield():
                yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up the group. Safe after a failure."""
        if self.size > 1:
            self._given_up = "the ranks have parted: this one was closed"
        self._transport.close()

    def _all_gather(self, message: bytes) -> list[bytes]:
        self._step += 1
        # A rank that missed a call is at another step. Without this check its next message would be
        # taken for another call's.
        announced = self._equal(struct.pack("<QQ", self._step, len(message)))
        heads = [struct.unpack("<QQ", head) for head in announced]
        if any(step != self._step for step, _ in heads):
            self._given_up = "the ranks have parted: they are at different steps"
            raise RankLost(self._given_up)
        # gloo gathers arrays of equal length only, so messages are padded to the longest one.
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


def _error_from_bytes(rank: int, message: bytes) -> PulseError:
    """The error of another rank, with its class if that is one of this library's."""
    kind, text, hint = json.loads(message)
    known = getattr(errors, kind, None) if kind else None
    if isinstance(known, type) and issubclass(known, PulseError):
        return known(f"rank {rank}: {text}", hint=hint)
    return StreamError(f"rank {rank} failed: {text}", hint="See the log of that rank.")


class GlooTransport:
    """A `Transport` over torch.distributed with the backend gloo.

    ``group`` is a ProcessGroup, a sequence of ranks, or None for all ranks. Without an initialized
    torch.distributed it is this process alone. Whatever the caller's backend is: messages are in
    host memory, a lost peer is an error and not an abort, and nothing mixes with the caller's
    collectives. No call waits longer than ``timeout_seconds`` for another rank. ``lost`` converts
    torch's error for a dead or stalled rank (None: RankLost). ``owner`` names the object in
    messages. Making a transport is a collective of the group. Raises InputError.
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
        # 1. A single process has no group.
        self._dist: Any = getattr(self._torch, "distributed", None)
        dist = self._dist
        if dist is None or not (dist.is_available() and dist.is_initialized()):
            if group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InputError(
                    "there are several processes, but torch.distributed is not initialized",
                    hint="Call torch.distributed.init_process_group() first.",
                )
            return
        # 2. A gloo group of the same ranks. All of them must come here, and none else.
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
        """The group's key-value store; None if it has none."""
        if self._group is None:
            return None
        try:
            return self._group.get_group_store()
        except (AttributeError, RuntimeError):  # an older torch, or a backend without a store
            known: Any = getattr(self._dist.distributed_c10d, "_get_process_group_store", None)
            return None if known is None else known(self._group)

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks. All have the same length."""
        if self.size == 1:
            return [message]
        return [array.tobytes() for array in self.gather_arrays(np.frombuffer(message, np.uint8))]

    def gather_arrays(self, data: Bytes) -> list[Bytes]:
        """The arrays of all ranks. All have the same length."""
        own = self._tensor(data)
        out = [self._torch.empty_like(own) for _ in range(self.size)]
        self._guard(lambda: self._dist.all_gather(out, own, group=self._group))
        return [piece.numpy() for piece in out]

    def all_to_all(self, sent: Sequence[Bytes], lengths: Sequence[int]) -> list[Bytes]:
        """Send an array to each rank; return the arrays for this rank, of ``lengths`` bytes."""
        own = self._tensor(np.concatenate(sent))
        out = self._torch.empty(sum(lengths), dtype=self._torch.uint8, device="cpu")
        sizes = [len(array) for array in sent]
        self._guard(
            lambda: self._dist.all_to_all_single(out, own, [*lengths], sizes, group=self._group)
        )
        return np.split(out.numpy(), np.cumsum(lengths[:-1]))

    def broadcast(self, array: npt.NDArray[Any], source: int) -> None:
        """Replace ``array`` by that of rank ``source``, in place."""
        data = self._torch.from_numpy(array)
        self._guard(lambda: self._dist.broadcast(data, self._global(source), self._group))

    def all_reduce(self, array: npt.NDArray[np.float32]) -> None:
        """Replace ``array`` by the sum over all ranks, in place."""
        self._guard(lambda: self._dist.all_reduce(self._torch.from_numpy(array), group=self._group))

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        """Send arrays to other ranks, and fill those that other ranks send."""
        dist = self._dist

        def run() -> None:
            # All sends start before the first wait: two ranks that both wait first would wait for
            # ever.
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
        """Give up the group. Safe after a failure, and safe to repeat."""
        group, self._group = self._group, None
        if group is not None and self._dist.is_initialized():
            # After a re-initialization torch.distributed does not know the group and raises
            # ValueError.
            with suppress(ValueError, RuntimeError):
                self._dist.destroy_process_group(group)

    def _global(self, rank: int) -> int:
        assert self._group is not None
        return int(self._dist.get_global_rank(self._group, rank))

    def _tensor(self, array: Bytes) -> Any:
        return self._torch.from_numpy(array if array.flags.writeable else array.copy())

    def _rank_lost(self, error: Exception) -> PulseError:
        return RankLost(f"a rank died or stalled for {self._timeout_seconds:g} s: {error}")

    def _guard(self, call: Callable[[], R]) -> R:
        """Call ``call``; a RuntimeError of torch.distributed, of whatever kind, means a lost
        peer."""
        try:
            return call()
        except RuntimeError as error:
            raise self._lost(error) from error
