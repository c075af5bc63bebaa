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
    trainers call it; each sums a share of every block. Raises TrainerLost, and CorruptMessage on all alike."""
    mean = np.empty_like(theta)
    problem: CorruptMessage | None = None
    for block in blocks:  # to the last one, whatever arrives: the others go on as well
        try:
            mean[block.start : block.stop] = _mean(exchange, block.of(residual))
        except CorruptMessage as error:
            problem = error
    read = exchange.all_gather_fixed(b"\0" if problem else b"\1")
    if problem is not None:
        raise problem
    if b"\0" in read:
        raise CorruptMessage(f"trainer {read.index(bytes(1))} could not read what it was sent for the consensus")
    np.multiply(lookahead, mean, out=mean)
    return np.subtract(theta, mean, out=mean)


def _mean(exchange: Exchange, residual: Floats) -> Floats:
    """Both collectives are made in any case."""
    size = exchange.size
    bounds = [len(residual) * rank // size for rank in range(size + 1)]
    lengths = [residual.itemsize * (stop - start) for start, stop in pairwise(bounds)]
    parts = [residual[start:stop].tobytes() for start, stop in pairwise(bounds)]
    problem: CorruptMessage | None = None
    own = b""
    try:
        arrived, _ = exchange.all_to_all(parts, max_bytes=[lengths] * size)
        own = _added(arrived, lengths[exchange.rank], size).tobytes()
    except CorruptMessage as error:
        problem = error
    shares = exchange.all_gather(own, max_bytes=max(lengths))
    if problem is not None:
        raise problem
    for rank, share in enumerate(shares):
        if len(share) != lengths[rank]:
            raise CorruptMessage(f"trainer {rank} could not add its share of the residuals: it sent {len(share)} bytes")
    return np.frombuffer(b"".join(shares), np.float32)


def _added(messages: Sequence[bytes], nbytes: int, trainers: int) -> Floats:
    total = np.zeros(nbytes // 4, np.float32)
    for rank, message in enumerate(messages):
        if len(message) != nbytes:
            raise CorruptMessage(f"trainer {rank} sent {len(message)} bytes of its residual, not {nbytes}")
        total += np.frombuffer(message, np.float32)
    return np.divide(total, np.float32(trainers), out=total)
