"""SparseLoCo, the baseline with local momentum (Sarfi et al., arXiv 2508.15706)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._native import add_entries
from ..errors import CorruptMessage, InputError, NonFinite
from .exchange import Exchange
from .feedback import ErrorFeedbackLoop
from .gate import Floats, is_finite
from .parameters import FlatBlock
from .rounds import Received
from .wire import Entries, digest_of

CHUNK = 4096
_PLACE_BITS, _LEVELS = 12, 4
_NONCE = 8
_SIGMAS = 6.0

Bits = npt.NDArray[np.uint8]


class SparseLoCo(ErrorFeedbackLoop):
    """Of each chunk of 4096 parameters the entries of largest magnitude, with two bits for a value, and error feedback
    that decays, which takes the place of outer momentum (arXiv 2508.15706, Algorithm 1).

    ``residual = decay * residual + (theta - w)``; what is sent leaves it; theta goes by ``outer_lr`` along the mean of
    what all have sent. ``fraction``: entries sent / parameters, above 0 and at most 1. ``decay``: at least 0, below 1.
    An entry takes 14 bits: its place in the chunk, and which of four means its value is near to (a block's values by
    four equal ranges of six standard deviations). The other arguments are those of `OuterLoop`; there is no outer
    momentum. Raises as `PulseLoCo`.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer,
        *,
        fraction: float,
        decay: float = 0.95,
        outer_lr: float = 1.0,
        **settings: Any,
    ) -> None:
        if not 0 < fraction <= 1:
            raise InputError(f"fraction is {fraction}, it must be above 0 and at most 1")
        if not 0 <= decay < 1:
            raise InputError(f"decay is {decay}, it must be at least 0 and below 1")
        self.fraction, self.decay = fraction, np.float32(decay)
        super().__init__(model, inner_optimizer, outer_lr=outer_lr, outer_momentum=0.0, **settings)

    def _outer_round(self, exchange: Exchange) -> Received:
        problem: NonFinite | None = None
        self._forget_message()
        with self._phase("gate"):
            try:
                message = os.urandom(_NONCE) + b"".join(self._each_block(self._select_block))
                self._pending_message = digest_of(message)
            except NonFinite as error:
                message, problem = b"", error
        try:
            messages, entries = self._gather(exchange, message)
        except CorruptMessage:
            self._forget_message()
            raise
        if not all(messages):
            self._forget_message()
            raise problem or NonFinite(f"the pseudo-gradient of trainer {messages.index(b'')} is not finite")

        def update(block: FlatBlock) -> int:
            total = np.zeros(block.stop - block.start, np.float32)
            for blocks in entries:
                add_entries(total, *blocks[block.number])
            self._update(block, total, exchange.size)
            return int(np.count_nonzero(total))

        def apply() -> int:
            summed = int(sum(self._each_block(update)))
            self._take_next_residual()
            self._messages = [digest_of(m) for m in messages]
            self._start_steps()
            return summed

        return Received(sum(self._count(block) for block in self.parameters.blocks), len(message), apply)

    def _gather(self, exchange: Exchange, message: bytes) -> tuple[list[bytes], list[list[Entries]]]:
        """All messages, and the entries of each by block. Raises CorruptMessage on all trainers if one cannot read."""
        problem: CorruptMessage | None = None
        messages: list[bytes] = []
        entries: list[list[Entries]] = []
        try:
            with self._phase("exchange"):
                messages = exchange.all_gather(message, max_bytes=4 * self.parameters.count + 4096)
            with self._phase("decode"):
                entries = [list(self._decode(m[_NONCE:])) for m in messages if m]
        except CorruptMessage as error:
            problem = error
        with self._phase("exchange"):
            read = exchange.all_gather_fixed(b"\0" if problem else b"\1")
        failed = [rank for rank, flag in enumerate(read) if flag != b"\1"]
        if failed:
            raise problem or CorruptMessage(f"trainers {failed} could not read a message: their own errors say why")
        return messages, entries

    def _accumulated(self, block: FlatBlock) -> Floats:
        now = np.empty(block.stop - block.start, np.float32)
        self.parameters.read_block(block, now)
        start = self.parameters.as_written(block, block.of(self.theta_flat))
        found: Floats = self.decay * block.of(self.residual_flat) + (start - now)
        return found

    def _select_block(self, block: FlatBlock) -> bytes:
        """The block's part of the message; fills its next residual. Raises NonFinite with the parameter's name."""
        s = block.of(self._next_residual)
        s[:] = self._accumulated(block)
        if not is_finite(s).all():
            raise NonFinite(self.parameters.name_at(block.start + int(np.argmin(is_finite(s)))))
        places = np.concatenate([first + self._largest(s[first : first + CHUNK]) for first in range(0, len(s), CHUNK)])
        levels, means = quantize(s[places])
        s[places] -= means[levels]
        return _pack(places % CHUNK, _PLACE_BITS) + _pack(levels, 2) + means.tobytes()

    def _largest(self, chunk: Floats) -> npt.NDArray[np.int64]:
        kept = self._kept(len(chunk))
        return np.sort(np.argpartition(np.abs(chunk), len(chunk) - kept)[len(chunk) - kept :])

    def _kept(self, elements: int) -> int:
        return max(1, round(self.fraction * elements))

    def _count(self, block: FlatBlock) -> int:
        whole, rest = divmod(block.stop - block.start, CHUNK)
        return whole * self._kept(CHUNK) + (self._kept(rest) if rest else 0)

    def _decode(self, message: bytes) -> Iterator[Entries]:
        """The entries of each block. Raises CorruptMessage."""
        data, at = np.frombuffer(message, np.uint8), 0
        for block in self.parameters.blocks:
            count, elements = self._count(block), block.stop - block.start
            sizes = [-(-count * bits // 8) for bits in (_PLACE_BITS, 2)] + [4 * _LEVELS]
            parts = [data[at + sum(sizes[:i]) : at + sum(sizes[: i + 1])] for i in range(3)]
            at += sum(sizes)
            if len(data) < at:
                raise CorruptMessage(f"a message of {len(data)} bytes is too short for its blocks")
            whole, rest = divmod(elements, CHUNK)
            chunk_of = np.repeat(np.arange(whole), self._kept(CHUNK))
            if rest:
                chunk_of = np.append(chunk_of, np.full(self._kept(rest), whole))
            places = chunk_of * CHUNK + _unpack(parts[0], _PLACE_BITS, count)
            values = np.frombuffer(parts[2].tobytes(), np.float32)[_unpack(parts[1], 2, count)]
            if not (np.diff(places) > 0).all() or places[-1] >= elements or not is_finite(values).all():
                raise CorruptMessage("a message's places do not ascend in its block, or its values are not finite")
            yield places.astype(np.uint32), values
        if at != len(data):
            raise CorruptMessage(f"a message of {len(data)} bytes is too long for its blocks")

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "fraction": self.fraction, "decay": float(self.decay)}


def quantize(values: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """(the range of each value, the mean of each range): four equal ranges of six standard deviations about the mean,
    the outer ones open."""
    exact = values.astype(np.float64)
    width = _SIGMAS / _LEVELS * max(exact.std(), 1e-300)
    levels = np.clip(np.floor((exact - exact.mean()) / width) + _LEVELS // 2, 0, _LEVELS - 1).astype(np.int64)
    sums, counts = np.bincount(levels, exact, _LEVELS), np.bincount(levels, minlength=_LEVELS)
    return levels, (sums / np.maximum(counts, 1)).astype(np.float32)


def _pack(numbers: npt.NDArray[np.int64], bits: int) -> bytes:
    return np.packbits((numbers[:, None] >> np.arange(bits)) & 1).tobytes()


def _unpack(data: Bits, bits: int, count: int) -> npt.NDArray[np.int64]:
    plane = np.unpackbits(data, count=count * bits).reshape(count, bits).astype(np.int64)
    found: npt.NDArray[np.int64] = (plane << np.arange(bits)).sum(axis=1)
    return found
