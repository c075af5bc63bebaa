"""Dense torch tensors as bits: read, written, told apart, averaged. On the host, unless said otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256

import torch

from ..errors import UnsupportedTensor
from ..state.tensors import State

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20
_ODD = 0x1E3779B97F4A7C15


def require_dense(tensor: torch.Tensor, what: str) -> None:
    """Raises UnsupportedTensor, with the words ``what``, for a tensor without dense memory that can be written: meta,
    sparse, sharded, quantized, uninitialised, wrapped, of a dtype without a plain bit view, or expanded."""
    try:
        State.of({what: tensor})
    except (UnsupportedTensor, ValueError) as error:  # a ValueError of torch: not initialised
        raise UnsupportedTensor(f"trainers cannot keep {what} equal: {error}") from None
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UnsupportedTensor(
            f"trainers cannot keep {what} equal: its elements share memory",
            hint="Give the tensor memory of its own: clone() an expanded one.",
        )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's bytes, 1-D uint8."""
    return _bytes(tensor).to("cpu", copy=True)


def digest_of(tensor: torch.Tensor) -> bytes:
    """SHA-256 of the tensor's bytes."""
    return sha256(_bytes(tensor).cpu().numpy().data).digest()


def tensor_of(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    """The elements that the bytes ``bits`` are, 1-D; ``dtype`` as torch writes it."""
    found = getattr(torch, dtype.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return bits.view(found)


@torch.no_grad()
def write_bits(tensor: torch.Tensor, bits: torch.Tensor) -> None:
    """Gives the tensor, in place and on its device, the bytes that `bits_of` has read."""
    tensor.copy_(bits.view(tensor.dtype).reshape(tensor.shape))


def fingerprint(tensor: torch.Tensor) -> object:
    """What compares unequal in this process for other bits of the tensor, but for a chance of 2^-60. It is computed on
    the tensor's device and takes one reading of its memory."""
    return digest_of(tensor) if tensor.device.type == "cpu" else fingerprint_on_device(tensor)


@torch.no_grad()
def fingerprint_on_device(tensor: torch.Tensor) -> int:
    """The elements as integers, multiplied by numbers at random and added up, modulo 2^64."""
    words = _bytes(tensor).view(_INTS[tensor.element_size()])
    weights, found = _weights(tensor.device), torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE]
        found = found * _ODD + (piece * weights[: len(piece)]).sum()
    return int(found)


def mean(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """(mean, whether it is finite) of floating-point tensors of one dtype and shape.

    Elements with the same bits everywhere stay as they are, and may be NaN or infinite. Of others the sum in FP64, in
    this order, is divided by their number and rounded to FP32 (an FP64 mean is not), then to the dtype.
    """
    first, dtype = values[0], values[0].dtype
    total, same = torch.zeros_like(first, dtype=torch.float64), torch.ones_like(first, dtype=torch.bool)
    for value in values:
        total += value.double()
        same &= value.view(_INTS[value.element_size()]) == first.view(_INTS[first.element_size()])
    result = total / len(values)
    if dtype != torch.float64:
        result = result.float().to(dtype)
    return torch.where(same, first, result), bool((same | result.isfinite()).all())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes where they are, 1-D uint8; a copy if they do not lie in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """`_PIECE` odd numbers at random, INT64."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randint(-(1 << 62), 1 << 62, (_PIECE,), generator=generator, device="cpu")
    return (2 * drawn + 1).to(device)
