"""A gloo group of the library's own, over which ranks send each other bytes.

This module imports no torch: whoever has a process group has imported it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import InputError, PulseError, RankLost
from .collective import Bytes

R = TypeVar("R")


class GlooTransport:
    """A `Transport` between the ranks of ``group``, a torch.distributed.ProcessGroup or the ranks themselves (None: all
    ranks); of this process alone if torch.distributed is not initialised. ``owner``: words for messages.

    Whatever the caller's backend is: what is sent is in host memory, and does not mix with the caller's collectives. No
    call waits for another rank for longer than ``timeout_seconds``: one that died, or stalls, raises ``lost`` on the
    others. Making it is a collective of the group. Raises InputError.
    """

    def __init__(self, group: Any, timeout_seconds: float, *, owner: str, lost: type[PulseError] = RankLost) -> None:
        self.size, self.rank = 1, 0
        self._timeout_seconds = timeout_seconds
        self._lost = lost
        self._group: Any = None
        self._torch: Any = sys.modules.get("torch")
        dist = self._dist
        if dist is None or not (dist.is_available() and dist.is_initialized()):
            if group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InputError(
                    "there are several ranks, but torch.distributed is not initialised",
                    hint="Call torch.distributed.init_process_group() first.",
                )
            return
        named = isinstance(group, Sequence)
        if group is not None and (dist.get_rank() not in group if named else dist.get_rank(group) < 0):
            raise InputError("this process is not in the group", hint=f"Make a {owner} on its ranks only.")
        members = group if group is None or named else dist.get_process_group_ranks(group)
        timeout = timedelta(seconds=timeout_seconds)
        local = members is not None
        self._group = self._guard(lambda: dist.new_group(members, timeout, "gloo", use_local_synchronization=local))
        self.size, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, which have one length."""
        if self.size == 1:
            return [message]
        torch = self._torch
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        out = [torch.empty_like(own) for _ in range(self.size)]
        self._guard(lambda: self._dist.all_gather(out, own, group=self._group))
        return [piece.numpy().tobytes() for piece in out]

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        """Sends arrays to other ranks, and fills those that other ranks send."""
        dist = self._dist

        def run() -> None:
            works: list[Any] = []
            for rank, array in sent.items():
                data = self._torch.from_numpy(array if array.flags.writeable else array.copy())
                works.append(dist.isend(data, self._global(rank), self._group))
            for rank, array in received.items():
                works.append(dist.irecv(self._torch.from_numpy(array), self._global(rank), self._group))
            for work in works:
                work.wait()

        self._guard(run)

    def close(self) -> None:
        """Gives the group up. Safe after a failure, and safe to repeat."""
        group, self._group = self._group, None
        if group is not None and self._dist.is_initialized():
            with suppress(ValueError, RuntimeError):
                self._dist.destroy_process_group(group)

    @property
    def _dist(self) -> Any:
        return getattr(self._torch, "distributed", None)

    def _global(self, rank: int) -> int:
        assert self._group is not None
        return int(self._dist.get_global_rank(self._group, rank))

    def _guard(self, call: Callable[[], R]) -> R:
        """torch.distributed raises RuntimeErrors of many kinds when a peer is gone; all of them mean one thing here."""
        try:
            return call()
        except RuntimeError as error:
            raise self._lost(f"a rank died or stalled for {self._timeout_seconds:g} s: {error}") from error
