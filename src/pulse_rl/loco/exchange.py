"""Collectives of variable-length messages over torch.distributed (docs/loco.md, section 4)."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..errors import CorruptMessage, InputError
from .progress import Progress

T = TypeVar("T")
_DIGEST_BYTES = 32
_MAX_BROADCAST_BYTES = 1 << 26


class Exchange:
    """One trainer's side of a group of trainers; a single trainer if torch.distributed is not initialised.

    It creates its own gloo group, whatever the user's backend is: messages are small and made on the host, a lost peer
    is an error and not an abort, and collectives do not mix with the user's. No call takes longer than
    ``timeout_seconds``: a trainer that dies, or stalls for longer, raises TrainerLost on all others. ``sent_bytes``
    counts what left this process: gathered messages travel around a ring, each process to the next rank, so each
    forwards all but one of them, padded. ``between_bytes`` counts those of them that went to a trainer of another one
    of the ``sites``, names by rank, "" of all trainers until they have met; broadcasts, which are in no round, it does
    not count.
    ``progress`` knows what the errors tell of the others.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 600.0) -> None:
        if timeout_seconds <= 0:
            raise InputError(f"timeout_seconds is {timeout_seconds}", hint="Give a number of seconds above 0.")
        self.timeout_seconds = timeout_seconds
        self.sent_bytes = self.between_bytes = 0
        self._group: dist.ProcessGroup | None = None
        self.size, self.rank = 1, 0
        self.sites = [""]
        self.progress = Progress(None, 0, 1)
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InputError(
                    "there are several trainers, but torch.distributed is not initialised",
                    hint="Call torch.distributed.init_process_group() first.",
                )
            return
        if group is not None and dist.get_rank(group) < 0:
            raise InputError(
                "this process is not in the group", hint="Create a PulseLoCo only on the trainers of its group."
            )
        ranks = None if group is None else dist.get_process_group_ranks(group)
        local = ranks is not None
        self._group = self._guard(
            lambda: dist.new_group(ranks, timedelta(seconds=timeout_seconds), "gloo", use_local_synchronization=local)
        )
        self.size, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self.sites = [""] * self.size
        self.progress = Progress(self._group, self.rank, self.size)

    def all_gather(self, message: bytes, *, max_bytes: int) -> list[bytes]:
        """Every trainer's message, in rank order. They may differ in length: headers first, then padded messages.

        Raises TrainerLost, and CorruptMessage for a message over ``max_bytes`` or other than it was sent.
        """
        if self.size == 1:
            return [message]
        header = np.frombuffer(struct.pack("<Q", len(message)) + sha256(message).digest(), np.uint8)
        headers = self._all_gather_array(header)
        lengths = [int.from_bytes(h[:8].tobytes(), "little") for h in headers]
        for rank, length in enumerate(lengths):
            if length > max_bytes:
                raise CorruptMessage(f"trainer {rank} announces {length} bytes, more than {max_bytes}")
        if max(lengths) == 0:
            return [b""] * self.size
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        messages = [m[:n].tobytes() for m, n in zip(self._all_gather_array(padded), lengths, strict=True)]
        for rank, (m, h) in enumerate(zip(messages, headers, strict=True)):
            if sha256(m).digest() != h[8 : 8 + _DIGEST_BYTES].tobytes():
                raise CorruptMessage(f"the message of trainer {rank} was damaged in transit")
        return messages

    def all_to_all(
        self, messages: Sequence[bytes], *, max_bytes: Sequence[Sequence[int]]
    ) -> tuple[list[bytes], list[int]]:
        """(what every trainer has for this one, in rank order; the bytes that each trainer sends in all).

        ``messages[r]`` goes to trainer r, which takes ``max_bytes[s][r]`` at most from trainer s. Lengths first, to
        all; then each message behind its SHA-256. Raises as `all_gather`, and for a length over the limit on all
        trainers alike.
        """
        if self.size == 1:
            return list(messages), [len(messages[0])]
        form = f"<{self.size}Q"
        announced = self.all_gather_fixed(struct.pack(form, *map(len, messages)))
        lengths = [struct.unpack(form, row) for row in announced]
        for rank, row in enumerate(lengths):
            for length, most in zip(row, max_bytes[rank], strict=True):
                if length > most:
                    raise CorruptMessage(f"trainer {rank} announces {length} bytes, more than {most}")
        pieces = [np.frombuffer(sha256(m).digest() + m, np.uint8) for m in messages]
        arrived = self._all_to_all_arrays(pieces, [_DIGEST_BYTES + row[self.rank] for row in lengths])
        found = [piece[_DIGEST_BYTES:].tobytes() for piece in arrived]
        for rank, (m, piece) in enumerate(zip(found, arrived, strict=True)):
            if sha256(m).digest() != piece[:_DIGEST_BYTES].tobytes():
                raise CorruptMessage(f"the message of trainer {rank} was damaged in transit")
        return found, [sum(row) for row in lengths]

    def all_gather_fixed(self, message: bytes) -> list[bytes]:
        """As `all_gather`, in one step, for messages of one length that all trainers know. Raises TrainerLost."""
        if self.size == 1:
            return [message]
        return [m.tobytes() for m in self._all_gather_array(np.frombuffer(message, np.uint8))]

    def broadcast(self, array: npt.NDArray[Any], source: int) -> None:
        """Replaces ``array`` by that of trainer ``source``, in place. Raises TrainerLost."""
        if self.size == 1:
            return
        step = _MAX_BROADCAST_BYTES // array.itemsize
        for start in range(0, len(array), step):
            piece = torch.from_numpy(array[start : start + step])
            self._guard(partial(dist.broadcast, piece, self._global_rank(source), self._group))
            self.sent_bytes += piece.nbytes if self.rank == source else 0

    def all_reduce(self, array: npt.NDArray[np.float32]) -> None:
        """Replaces ``array`` by the sum over all trainers, in place; for the baselines. Raises TrainerLost."""
        if self.size == 1:
            return
        self._guard(lambda: dist.all_reduce(torch.from_numpy(array), group=self._group))
        self._count_ring(2 * (self.size - 1) * array.nbytes // self.size)

    def close(self) -> None:
        """Gives the group up. Safe after a failure."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            # After a re-initialisation torch.distributed no longer knows the group, and says so by a ValueError.
            with suppress(ValueError, RuntimeError):
                dist.destroy_process_group(group)

    def _all_gather_array(self, data: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
        own = torch.from_numpy(data if data.flags.writeable else data.copy())
        out = [torch.empty_like(own) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(out, own, group=self._group))
        self._count_ring((self.size - 1) * len(data))
        return [piece.numpy() for piece in out]

    def _all_to_all_arrays(
        self, pieces: list[npt.NDArray[np.uint8]], lengths: list[int]
    ) -> list[npt.NDArray[np.uint8]]:
        """The pieces for this trainer, of ``lengths`` bytes."""
        own = torch.from_numpy(np.concatenate(pieces))
        out = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        sizes = [len(piece) for piece in pieces]
        self._guard(lambda: dist.all_to_all_single(out, own, lengths, sizes, group=self._group))
        self._count_each(sizes)
        return np.split(out.numpy(), np.cumsum(lengths[:-1]))

    def _count_ring(self, count: int) -> None:
        """So many bytes went to the next rank."""
        self._count(count, (self.rank + 1) % self.size)

    def _count_each(self, counts: Sequence[int]) -> None:
        """So many bytes went to each trainer; its own stay here."""
        for rank, count in enumerate(counts):
            if rank != self.rank:
                self._count(count, rank)

    def _count(self, count: int, to: int) -> None:
        self.sent_bytes += count
        self.between_bytes += count if self.sites[to] != self.sites[self.rank] else 0

    def _global_rank(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)

    def _guard(self, call: Callable[[], T]) -> T:
        """torch.distributed raises RuntimeErrors of many kinds when a peer is gone; all of them mean one thing here."""
        try:
            return call()
        except RuntimeError as error:
            raise self.progress.lost(error, self.timeout_seconds) from error
