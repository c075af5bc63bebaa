"""Theta less what all trainers hold back: the mean of what their next inner steps start from (docs/loco.md, 1.2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..errors import CorruptMessage
from .exchange import Exchange
from .gate import Floats
from .parameters import FlatBlock


def consensus(
    exchange: Exchange, blocks: Sequence[FlatBlock], theta: Floats, residual: Floats, lookahead: np.float32
) -> Floats:
    """``theta - lookahead * (sum of all residuals in rank order / trainers)``, FP32, each operation rounded. All
    trainers call it; each sums a share of every block. Raises TrainerLost and CorruptMessage."""
    mean = np.empty_like(theta)
    for block in blocks:
        mean[block.start : block.stop] = _mean(exchange, block.of(residual))
    np.multiply(lookahead, mean, out=mean)
    return np.subtract(theta, mean, out=mean)


def _mean(exchange: Exchange, residual: Floats) -> Floats:
    size = exchange.size
    bounds = [len(residual) * rank // size for rank in range(size + 1)]
    expected = [residual.itemsize * (stop - start) for start, stop in pairwise(bounds)]
    parts = [residual[start:stop].tobytes() for start, stop in pairwise(bounds)]
    arrived, _ = exchange.all_to_all(parts, max_bytes=[expected] * size)
    own = expected[exchange.rank]
    total = np.zeros(own // residual.itemsize, np.float32)
    for rank, message in enumerate(arrived):
        _require(rank, message, own)
        total += np.frombuffer(message, np.float32)
    total /= np.float32(size)
    shares = exchange.all_gather(total.tobytes(), max_bytes=max(expected))
    for rank, message in enumerate(shares):
        _require(rank, message, expected[rank])
    return np.frombuffer(b"".join(shares), np.float32)


def _require(rank: int, message: bytes, nbytes: int) -> None:
    if len(message) != nbytes:
        raise CorruptMessage(f"trainer {rank} sent {len(message)} bytes of its residual, not {nbytes}")
