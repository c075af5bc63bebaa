"""What PULSELoCo is compared with: DDP, DiLoCo with few bits, SparseLoCo and two ablations, in the
library's loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from pulse_rl.errors import CorruptMessage, NonFinite
from pulse_rl.loco import PulseLoCo
from pulse_rl.loco.exchange import GroupExchange, Phase
from pulse_rl.loco.gate import Gate
from pulse_rl.loco.group import TrainerGroup
from pulse_rl.loco.group_rounds import GroupRounds, PendingRound, Reduction
from pulse_rl.loco.loop import OuterLoop
from pulse_rl.loco.messages import Entries
from pulse_rl.loco.outer import MessageOutcome, OuterState, Residual, Trainer
from pulse_rl.loco.parameters import FlatBlock, Floats, Parameters, Positions, is_finite

CHUNK = 4096
_PLACE_BITS, _LEVELS, _NONCE, _SIGMAS = 12, 4, 8, 6.0
_POWERS = 7

Bits = npt.NDArray[np.uint8]


class NoFeedbackGate(Gate):
    """An ablation: what the gate holds back is dropped, not carried over to the next round."""

    def select(
        self,
        state: OuterState,
        block: FlatBlock,
        residual: Floats,
        s: Floats,
        lookahead: np.float32,
    ) -> Positions | None:
        return super().select(state, block, np.zeros_like(residual), s, lookahead)


class CastDifferenceGate(Gate):
    """An ablation that failed in the paper: sends ``cast(theta) - cast(theta - s)`` instead of
    ``s``."""

    def values(self, theta: Floats, s: Floats) -> Floats:
        before, after = (torch.from_numpy(x).to(self.dtype).float() for x in (theta, theta - s))
        return (before - after).numpy()

    def remainder(self, s: Floats, sent: Floats) -> Floats:
        return np.zeros_like(s)


def gated(gate: Gate, model: Any, optimizer: Any, **settings: Any) -> PulseLoCo:
    """A PulseLoCo with another gate; without a lookahead, unless one is given."""
    loop = PulseLoCo(model, optimizer, **{"lookahead": 0.0, "compression": "fp32", **settings})
    loop.reduction.gate = gate  # type: ignore[attr-defined]
    return loop


class SparseReduction:
    """SparseLoCo (arXiv 2508.15706, Algorithm 1): of each chunk of 4096 parameters the entries of
    largest magnitude, with two bits for a value, and a residual that decays, which takes the place
    of outer momentum.

    ``residual = decay * residual + (theta - w)``; what is sent leaves it. An entry takes 14 bits:
    its place in the chunk, and which of four means its value is near to (a block's values by four
    equal ranges of six deviations)."""

    def __init__(self, state: OuterState, fraction: float, decay: float) -> None:
        self.fraction, self.decay = fraction, np.float32(decay)
        self.residual = Residual(state, 0.0)
        self._state = state

    def settings(self) -> dict[str, object]:
        return {"fraction": self.fraction, "decay": float(self.decay)}

    def forget(self) -> None:
        """Nothing is known of past rounds."""

    def run(self, group: TrainerGroup, number: int, phase: Phase, *, closing: bool) -> PendingRound:
        state, blocks = self._state, self._state.parameters.blocks
        with phase("gate"):
            try:
                message = os.urandom(_NONCE) + b"".join(state.each_block(self._select))
            except NonFinite:
                message = b""
        with phase("exchange"):
            messages = group.all_gather(message, max_bytes=4 * state.parameters.count + 4096)
        if not all(messages):
            raise NonFinite(f"the pseudo-gradient of trainer {messages.index(b'')} is not finite")
        with phase("decode"):
            entries = [list(self._decode(m[_NONCE:])) for m in messages]

        def apply(_: np.float32) -> int:
            total = np.zeros_like(state.weights)
            for block in blocks:
                for of_trainer in entries:
                    places, values = of_trainer[block.number]
                    block.of(total)[places] += values
            state.dense_step(total, group.size)
            self.residual.settle(MessageOutcome.COUNTED)
            state.parameters.write(state.weights)
            return int(np.count_nonzero(total))

        return PendingRound(sum(map(self._count, blocks)), len(message), apply, [])

    def _select(self, block: FlatBlock) -> bytes:
        """The block's part of the message; fills its next residual."""
        parameters, s = self._state.parameters, block.of(self.residual.next)
        parameters.read_block(block, s)
        start = parameters.as_written(block, block.of(self._state.weights))
        s[:] = self.decay * block.of(self.residual.flat) + (start - s)
        if not is_finite(s).all():
            raise NonFinite("the pseudo-gradient is not finite")
        places = np.concatenate(
            [first + self._largest(s[first : first + CHUNK]) for first in range(0, len(s), CHUNK)]
        )
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
        for block in self._state.parameters.blocks:
            count, elements = self._count(block), block.stop - block.start
            sizes = [-(-count * bits // 8) for bits in (_PLACE_BITS, 2)] + [4 * _LEVELS]
            pieces = [data[at + sum(sizes[:i]) : at + sum(sizes[: i + 1])] for i in range(3)]
            at += sum(sizes)
            if len(data) < at:
                raise CorruptMessage(f"a message of {len(data)} bytes is too short for its blocks")
            whole, rest = divmod(elements, CHUNK)
            chunk_of = np.repeat(np.arange(whole), self._kept(CHUNK))
            if rest:
                chunk_of = np.append(chunk_of, np.full(self._kept(rest), whole))
            places = chunk_of * CHUNK + _unpack(pieces[0], _PLACE_BITS, count)
            values = np.frombuffer(pieces[2].tobytes(), np.float32)[_unpack(pieces[1], 2, count)]
            yield places.astype(np.uint32), values


def sparse_loco(
    model: Any,
    optimizer: Any,
    *,
    fraction: float,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    **settings: Any,
) -> OuterLoop:
    state = OuterState(Parameters(model, optimizer), outer_lr, 0.0)
    return _loop(state, SparseReduction(state, fraction, decay), **settings)


def _loop(
    state: OuterState,
    reduction: Reduction,
    *,
    exchange: GroupExchange | None = None,
    **settings: Any,
) -> OuterLoop:
    trainer = Trainer(state, reduction.residual)
    meeting = GroupRounds(exchange or GroupExchange(), reduction, trainer)
    return OuterLoop(trainer, reduction, meeting, **{"on_round": None, **settings})


class QuantizedReduction:
    """DiLoCo whose outer gradients travel in few bits, and are added in FP32: each trainer sends
    every other one a part of its pseudo-gradient, which that one adds, and sends all the sums of in
    as many bits. What rounding loses is lost.

    "int8": 255 equal steps of a tensor's largest magnitude in each 4096 values. "FP4": a sign and
    one of seven powers of two below it, or 0 (E3M0, as in Streaming DiLoCo, arXiv 2501.18512)."""

    def __init__(self, state: OuterState, code: Literal["int8", "FP4"]) -> None:
        self.code, self.residual, self._state = code, None, state

    def settings(self) -> dict[str, object]:
        return {"code": self.code}

    def forget(self) -> None:
        """Nothing is known of past rounds."""

    def run(self, group: TrainerGroup, number: int, phase: Phase, *, closing: bool) -> PendingRound:
        state, parameters = self._state, self._state.parameters
        own = np.empty_like(state.weights)
        with phase("gate"):
            for block in parameters.blocks:
                now = np.empty_like(block.of(own))
                parameters.read_block(block, now)
                np.subtract(
                    parameters.as_written(block, block.of(state.weights)), now, out=block.of(own)
                )
            cuts = [
                CHUNK * (parameters.count // CHUNK * rank // group.size)
                for rank in range(group.size)
            ]
            shares = list(pairwise([*cuts, parameters.count]))
            messages = [to_few_bits(own[start:stop], self.code) for start, stop in shares]
        most = 4 * parameters.count + 4096
        with phase("exchange"):
            arrived = group.all_to_all(messages, max_bytes=[most] * group.size)
            start, stop = shares[group.rank]
            total = np.zeros(stop - start, np.float32)
            for message in arrived:
                total += from_few_bits(message, stop - start, self.code)
            sums = group.all_gather(to_few_bits(total, self.code), max_bytes=most)
        summed = np.concatenate(
            [
                from_few_bits(m, stop - start, self.code)
                for m, (start, stop) in zip(sums, shares, strict=True)
            ]
        )
        if name := parameters.first_non_finite(summed):
            raise NonFinite(f"the sum of the pseudo-gradients of {name!r} is not finite")

        def apply(_: np.float32) -> int:
            state.dense_step(summed, group.size)
            parameters.write(state.weights)
            return parameters.count

        return PendingRound(parameters.count, sum(map(len, messages)), apply, [])


def quantized_diloco(
    model: Any, optimizer: Any, *, code: Literal["int8", "FP4"], **settings: Any
) -> OuterLoop:
    state = OuterState(
        Parameters(model, optimizer), settings.pop("outer_lr"), settings.pop("outer_momentum")
    )
    return _loop(state, QuantizedReduction(state, code), **settings)


def to_few_bits(values: Floats, code: Literal["int8", "FP4"]) -> bytes:
    """Each `CHUNK` of values: the largest magnitude, FP32, then the codes. An empty chunk has
    none."""
    chunks = np.zeros((-(-len(values) // CHUNK), CHUNK), np.float32)
    chunks.ravel()[: len(values)] = values
    most = np.abs(chunks).max(axis=1, initial=0.0)
    scaled = chunks / np.where(most > 0, most, 1)[:, None]
    if code == "int8":
        codes = np.rint(127 * scaled).astype(np.int8).ravel()[: len(values)].tobytes()
        return most.tobytes() + codes
    magnitude = np.abs(scaled)
    with np.errstate(divide="ignore"):
        exponent = np.rint(np.log2(magnitude))  # nearest in the logarithm: 0 is 2^0, 6 is 2^-6
    level = np.where(exponent < -_POWERS + 1, 0, exponent + _POWERS).astype(np.uint8)
    codes = (level | (scaled < 0).astype(np.uint8) << 3).ravel()[: len(values)]
    padded = np.append(codes, np.zeros(len(codes) % 2, np.uint8))
    return most.tobytes() + (padded[::2] | padded[1::2] << 4).tobytes()


def from_few_bits(message: bytes, count: int, code: Literal["int8", "FP4"]) -> Floats:
    """Raises CorruptMessage."""
    scales, nbytes = -(-count // CHUNK), count if code == "int8" else -(-count // 2)
    if len(message) != 4 * scales + nbytes:
        raise CorruptMessage(f"a message of {len(message)} bytes does not hold {count} values")
    most = np.repeat(np.frombuffer(message, np.float32, scales), CHUNK)[:count]
    if code == "int8":
        return most * (
            np.frombuffer(message, np.int8, offset=4 * scales).astype(np.float32) / np.float32(127)
        )
    packed = np.frombuffer(message, np.uint8, offset=4 * scales)
    codes = np.stack([packed & 15, packed >> 4], axis=1).ravel()[:count]
    level = (codes & 7).astype(np.int32)
    magnitude = np.where(level > 0, np.ldexp(np.float32(1), level - _POWERS), np.float32(0))
    return most * np.where(codes & 8, -magnitude, magnitude).astype(np.float32)


def quantize(values: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """(the range of each value, the mean of each range): four equal ranges of six standard
    deviations about the mean, the outer ones open."""
    exact = values.astype(np.float64)
    width = _SIGMAS / _LEVELS * max(exact.std(), 1e-300)
    levels = np.clip(
        np.floor((exact - exact.mean()) / width) + _LEVELS // 2, 0, _LEVELS - 1
    ).astype(np.int64)
    sums, counts = np.bincount(levels, exact, _LEVELS), np.bincount(levels, minlength=_LEVELS)
    return levels, (sums / np.maximum(counts, 1)).astype(np.float32)


def _pack(numbers: npt.NDArray[np.int64], bits: int) -> bytes:
    return np.packbits((numbers[:, None] >> np.arange(bits)) & 1).tobytes()


def _unpack(data: Bits, bits: int, count: int) -> npt.NDArray[np.int64]:
    plane = np.unpackbits(data, count=count * bits).reshape(count, bits).astype(np.int64)
    found: npt.NDArray[np.int64] = (plane << np.arange(bits)).sum(axis=1)
    return found


class Ddp:
    """Data parallelism: the mean of the FP32 gradients before every step of ``inner_optimizer``,
    which trains ``model``.

    A context manager like `PulseLoCo`, among all of torch.distributed.

    A parameter without a gradient on a trainer counts as having a zero gradient there.
    ``payload_bytes`` counts the gradients so far, ``sent_bytes`` everything that left this process.
    Raises TrainerLost and InputError.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer,
        *,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.parameters = Parameters(model, inner_optimizer)
        self.sent_bytes = 0
        self.payload_bytes = 0
        self._optimizer, self._timeout_seconds = inner_optimizer, timeout_seconds
        self._group: TrainerGroup | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        if self._hook is None:
            group = TrainerGroup(timeout_seconds=self._timeout_seconds)
            try:
                weights = self.parameters.read()
                group.broadcast(weights, 0)
                self.parameters.write(weights)
            except BaseException:
                group.close()
                raise
            self._group = group
            self._hook = self._optimizer.register_step_pre_hook(lambda *_: self._average())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hook and leaves the group; the model stays as it is."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._group is not None:
            self._group.close()
            self._group = None

    @torch.no_grad()
    def _average(self) -> None:
        group = self._group
        assert group is not None
        gradients = np.zeros(self.parameters.count, np.float32)
        views = self.parameters.views(gradients)
        for name, p in self.parameters.tensors.items():
            if p.grad is not None:
                torch.from_numpy(views[name]).copy_(p.grad)
        before = group.sent_bytes
        group.all_reduce(gradients)
        self.sent_bytes += group.sent_bytes - before
        self.payload_bytes += gradients.nbytes
        gradients /= np.float32(group.size)
        for name, p in self.parameters.tensors.items():
            mean = torch.from_numpy(views[name]).to(p.dtype).to(p.device)
            p.grad = mean.reshape(p.shape).clone()
