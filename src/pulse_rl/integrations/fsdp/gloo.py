"""A gloo group of the publisher's own, over which its ranks send each other bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import InputError, RankLost
from .ranks import Bytes

R = TypeVar("R")


class GlooGroup:
    """A `Group` of the ranks of ``group`` (None: all); of a single one if torch.distributed is not initialised.

    Whatever the caller's backend is: what is sent is in host memory, and does not mix with the caller's collectives. No
    call waits for another rank for longer than ``timeout_seconds``: one that died, or stalls, raises RankLost on the
    others. Making it is a collective of the group. Raises InputError.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        self.size, self.rank = 1, 0
        self._timeout_seconds = timeout_seconds
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

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, which have one length."""
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        out = [torch.empty_like(own) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(out, own, group=self._group))
        return [piece.numpy().tobytes() for piece in out]

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        """Sends arrays to other ranks, and fills those that other ranks send."""

        def exchange() -> None:
            works: list[Any] = []
            for rank, array in sent.items():
                data = torch.from_numpy(array if array.flags.writeable else array.copy())
                works.append(dist.isend(data, self._global(rank), self._group))
            for rank, array in received.items():
                works.append(dist.irecv(torch.from_numpy(array), self._global(rank), self._group))
            for work in works:
                work.wait()

        self._guard(exchange)

    def close(self) -> None:
        """Safe after a failure."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError, RuntimeError):
                dist.destroy_process_group(group)

    def _global(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)

    def _guard(self, call: Callable[[], R]) -> R:
        """torch.distributed raises RuntimeErrors of many kinds when a peer is gone; all of them mean one thing here."""
        try:
            return call()
        except RuntimeError as error:
            raise RankLost(f"a rank died or stalled for {self._timeout_seconds:g} s: {error}") from error
