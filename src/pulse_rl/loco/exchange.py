"""What trainers say to each other: all-gathers of unequal messages over torch.distributed (docs/loco.md, 4)."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..errors import CorruptMessage, InputError, TrainerLost

T = TypeVar("T")
_DIGEST = 32
_BROADCAST_BYTES = 1 << 26


class Exchange:
    """One trainer's side of a group of trainers; alone where torch.distributed is not initialised.

    A gloo group of its own, whatever the user's backend is: messages are small and made on the host, a peer that is
    gone is an error and not an abort, and nothing meets the user's collectives. ``timeout`` (seconds) ends every call:
    a trainer that has died or stalled for longer raises TrainerLost on all the others. ``sent`` counts the bytes that
    left this process: a message travels round a ring, so each process passes on all but one of the padded messages.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 600.0) -> None:
        if timeout <= 0:
            raise InputError(f"a timeout of {timeout} s cannot be kept")
        self.timeout = timeout
        self.sent = 0
        self._group: dist.ProcessGroup | None = None
        self.size, self.rank = 1, 0
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InputError(
                    "there are several trainers, but torch.distributed is not initialised",
                    hint="Call torch.distributed.init_process_group() first.",
                )
            return
        if group is not None and dist.get_rank(group) < 0:
            raise InputError("this process is not in the group", hint="Only the trainers of a group make a PulseLoCo.")
        ranks = None if group is None else dist.get_process_group_ranks(group)
        local = ranks is not None
        made = self._guard(
            lambda: dist.new_group(ranks, timedelta(seconds=timeout), "gloo", use_local_synchronization=local)
        )
        self._group, self.size, self.rank = made, dist.get_world_size(made), dist.get_rank(made)

    def gather(self, message: bytes, *, most: int) -> list[bytes]:
        """Every trainer's message, in rank order: sizes first, then one all-gather padded to the longest.

        Raises TrainerLost, and CorruptMessage for a message over ``most`` bytes or other than it was sent.
        """
        if self.size == 1:
            return [message]
        head = np.frombuffer(struct.pack("<Q", len(message)) + sha256(message).digest(), np.uint8)
        heads = self._all_gather(head)
        sizes = [int.from_bytes(h[:8].tobytes(), "little") for h in heads]
        for rank, size in enumerate(sizes):
            if size > most:
                raise CorruptMessage(f"trainer {rank} announces {size} bytes, more than {most}")
        if max(sizes) == 0:
            return [b""] * self.size
        padded = np.zeros(max(sizes), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        messages = [m[:size].tobytes() for m, size in zip(self._all_gather(padded), sizes, strict=True)]
        for rank, (m, h) in enumerate(zip(messages, heads, strict=True)):
            if sha256(m).digest() != h[8 : 8 + _DIGEST].tobytes():
                raise CorruptMessage(f"the message of trainer {rank} is not the one it sent")
        return messages

    def gather_short(self, message: bytes) -> list[bytes]:
        """As `gather`, in one step, for messages of one length that all trainers know."""
        if self.size == 1:
            return [message]
        return [m.tobytes() for m in self._all_gather(np.frombuffer(message, np.uint8))]

    def broadcast(self, array: npt.NDArray[np.float32], source: int) -> None:
        """Replaces ``array`` by that of trainer ``source``, in place."""
        if self.size == 1:
            return
        step = _BROADCAST_BYTES // array.itemsize
        for start in range(0, len(array), step):
            piece = torch.from_numpy(array[start : start + step])
            self._guard(partial(dist.broadcast, piece, self._global_rank(source), self._group))
            self.sent += piece.nbytes if self.rank == source else 0

    def all_reduce(self, array: npt.NDArray[np.float32]) -> None:
        """Replaces ``array`` by the sum over all trainers, in place; for dense baselines."""
        if self.size == 1:
            return
        self._guard(lambda: dist.all_reduce(torch.from_numpy(array), group=self._group))
        self.sent += 2 * (self.size - 1) * array.nbytes // self.size

    def close(self) -> None:
        """Gives the group up. Safe after a failure."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            # After a re-initialisation torch.distributed no longer knows the group, and says so by a ValueError.
            with suppress(ValueError, RuntimeError):
                dist.destroy_process_group(group)

    def _all_gather(self, data: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
        own = torch.from_numpy(data if data.flags.writeable else data.copy())
        out = [torch.empty_like(own) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(out, own, group=self._group))
        self.sent += (self.size - 1) * len(data)
        return [piece.numpy() for piece in out]

    def _global_rank(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)

    def _guard(self, call: Callable[[], T]) -> T:
        """torch.distributed raises RuntimeErrors of many kinds when a peer is gone; all of them mean one thing here."""
        try:
            return call()
        except RuntimeError as error:
            raise TrainerLost(f"a trainer died, or stalled for {self.timeout:g} s: {error}") from error
