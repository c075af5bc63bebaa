"""The ranks that publish together: small messages between them, and failing together."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ... import errors
from ..._util.serial import unstoppable
from ..._util.threads import checkpoint
from ...errors import InputError, PulseError, RankLost, StreamError

R = TypeVar("R")
Bytes = npt.NDArray[np.uint8]


class Ranks:
    """This rank's side of the ``size`` ranks of ``group`` (None: all); a single one if torch.distributed is not
    initialised.

    It makes a gloo group of its own, whatever the caller's backend is: what is sent is in host memory, and does not mix
    with the caller's collectives. No call waits for another rank for longer than ``timeout_seconds``: one that died, or
    stalls, raises RankLost on the others. Making it is a collective of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        self.size, self.rank = 1, 0
        self.common_error: BaseException | None = None
        """The last error that all ranks know of."""
        self._step = 0
        self._timeout_seconds = timeout_seconds
        self._given_up = ""
        self._group: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InputError(
                    "there are several ranks, but torch.distributed is not initialised",
                    hint="Call torch.distributed.init_process_group() first.",
                )
            return
        if group is not None and dist.get_rank(group) < 0:
            raise InputError("this process is not in the group", hint="Make a ShardedPublisher on its ranks only.")
        members = None if group is None else dist.get_process_group_ranks(group)
        self._group = self._guard(
            lambda: dist.new_group(
                members, timedelta(seconds=timeout_seconds), "gloo", use_local_synchronization=members is not None
            )
        )
        self.size, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)

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

        def exchange() -> None:
            works: list[Any] = []
            for rank, array in sent.items():
                if rank != self.rank and len(array):
                    data = torch.from_numpy(array if array.flags.writeable else array.copy())
                    works.append(dist.isend(data, self._global(rank), self._group))
            for rank, array in received.items():
                if rank != self.rank and len(array):
                    works.append(dist.irecv(torch.from_numpy(array), self._global(rank), self._group))
            for work in works:
                work.wait()

        self._guard(exchange)
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
        group, self._group = self._group, None
        if self.size > 1:
            self._given_up = "the ranks have parted: this one was closed"
        if group is not None and dist.is_initialized():
            with suppress(ValueError, RuntimeError):
                dist.destroy_process_group(group)

    def _all_gather(self, message: bytes) -> list[bytes]:
        self._step += 1
        heads = [struct.unpack("<QQ", m) for m in self._all_gather_equal(struct.pack("<QQ", self._step, len(message)))]
        if any(step != self._step for step, _ in heads):
            self._given_up = "the ranks have parted: they are at different steps"
            raise RankLost(self._given_up)
        lengths = [length for _, length in heads]
        padded = self._all_gather_equal(message.ljust(max(lengths), b"\0"))
        return [m[:length] for m, length in zip(padded, lengths, strict=True)]

    def _all_gather_equal(self, message: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        out = [torch.empty_like(own) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(out, own, group=self._group))
        return [piece.numpy().tobytes() for piece in out]

    def _global(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)

    def _guard(self, call: Callable[[], R]) -> R:
        """torch.distributed raises RuntimeErrors of many kinds when a peer is gone; all of them mean one thing here."""
        if self._given_up:
            raise RankLost(self._given_up)
        try:
            return call()
        except RuntimeError as error:
            self._given_up = "the ranks have parted: one was lost"
            raise RankLost(f"a rank died or stalled for {self._timeout_seconds:g} s: {error}") from error


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
