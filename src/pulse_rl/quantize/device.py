"""Largest magnitudes and codes of weights that are on a device, made there by torch, which is never
imported here.

What the native kernels of the same names make of host memory, with the same arguments but for the
elements: a flat torch tensor of their bits, as int32 (FP32) or int16 (BF16). One FP32 division an
element, and integers otherwise, so that a device that divides as IEEE 754 says has the same bits.
Work is done in pieces; only results are copied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..state.tensors import DeviceTensor

Blocks = tuple[int, int, int]  # columns of the matrix, rows and columns of a block
#: The types of devices that may quantize, as torch calls them: ROCm's are "cuda", too.
DEVICES = ("cuda",)
_PIECE = 1 << 20  # elements: a piece needs some 40 bytes for each
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


def ints_there(tensor: DeviceTensor, start: int, stop: int) -> Any | None:
    """Elements [``start``, ``stop``) as the functions below take them; None where the host is to
    quantize."""
    device = tensor.flat.device
    try:
        return (
            tensor.ints(start, stop) if device.type in DEVICES and divides_exactly(device) else None
        )
    except RuntimeError:  # no memory for the trial
        return None


@cache
def divides_exactly(device: Any) -> bool:
    """Whether random FP32 numbers, subnormal ones too, have the quotients on ``device`` that they
    have on the host."""
    torch: Any = sys.modules["torch"]
    bits = np.random.default_rng(0).integers(0, 1 << 32, (2, 1 << 16), np.uint32)
    with np.errstate(all="ignore"):
        expected = np.divide(*bits.view(np.float32))
    one, other = torch.from_numpy(bits.view(np.float32)).to(device)
    found = (one / other).cpu().numpy()
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (
        np.isnan(found) & np.isnan(expected)
    )
    return bool(same.all())


def block_maxima(ints: Any, blocks: Blocks) -> npt.NDArray[np.float32]:
    torch: Any = sys.modules["torch"]
    columns, block_rows, block_columns = blocks
    pieces = ints.view(-1, columns).split(max(_PIECE // columns, 1))
    rows = torch.cat(
        [_largest(piece & torch.iinfo(ints.dtype).max, block_columns) for piece in pieces]
    )
    found: npt.NDArray[np.uint32] = (
        _largest(rows.T, block_rows).T.reshape(-1).cpu().numpy().astype(np.uint32)
    )
    return (found << np.uint32(32 - 8 * ints.itemsize)).view(np.float32)


def _largest(matrix: Any, size: int) -> Any:
    """Of each ``size`` columns, the last of which may be fewer, in each row."""
    torch: Any = sys.modules["torch"]
    short = -matrix.shape[1] % size
    filled = torch.nn.functional.pad(matrix, (0, short)) if short else matrix
    return filled.unflatten(1, (-1, size)).amax(2)


def to_e4m3(
    ints: Any,
    start: int,
    blocks: Blocks,
    scales: npt.NDArray[np.float32],
    out: npt.NDArray[np.uint8],
) -> None:
    edges = _there(_E4M3_EDGES, ints)
    for at, _, bits in _quotients(ints, start, blocks, scales, _PIECE):
        codes = _above(bits & _MAGNITUDE, edges) | (bits >> 24) & 0x80
        _copy(codes.masked_fill((bits & _MAGNITUDE) > _INFINITY, 0x7F), out[at:])


def to_e2m1(
    ints: Any, blocks: Blocks, scales: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]
) -> None:
    edges = _there(_E2M1_EDGES, ints)
    of_columns = blocks[2] == 1
    apart = blocks[0] if of_columns else 1  # of two codes in a byte
    each = max(_PIECE // (2 * apart), 1) * 2 * apart
    for at, given, quotients in _quotients(ints, 0, blocks, scales, each):
        bits = quotients.masked_fill((quotients & _MAGNITUDE) > _INFINITY, 0)
        negative = given < 0 if of_columns else (bits < 0) & (bits & _MAGNITUDE > 0)
        pairs = (_above(bits & _MAGNITUDE, edges) | negative.int() << 3).view(-1, 2, apart)
        _copy((pairs[:, 0] | pairs[:, 1] << 4).reshape(-1), out[at // 2 :])


def _quotients(
    ints: Any, start: int, blocks: Blocks, scales: npt.NDArray[np.float32], each: int
) -> Iterator[tuple[int, Any, Any]]:
    """By pieces of ``each`` elements: the first one's place, FP32 bits of the elements, and those
    divided by scales."""
    torch: Any = sys.modules["torch"]
    columns, block_rows, block_columns = blocks
    across = -(-columns // block_columns)
    divisors = _there(scales, ints)
    for at in range(0, len(ints), each):
        piece = ints[at : at + each]
        bits = piece if piece.itemsize == 4 else piece.int() << 16
        places = torch.arange(start + at, start + at + len(piece), device=ints.device)
        of = places // columns // block_rows * across + places % columns // block_columns
        # By a tensor of the device: by a number torch multiplies with its reciprocal.
        yield at, bits, (bits.view(torch.float32) / divisors[of]).view(torch.int32)


def _there(array: npt.NDArray[Any], ints: Any) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.from_numpy(array).to(ints.device)


def _copy(codes: Any, out: npt.NDArray[np.uint8]) -> None:
    out[: len(codes)] = codes.byte().cpu().numpy()


def _above(magnitudes: Any, edges: Any) -> Any:
    """How many of ``edges`` each number exceeds, which is its code. Magnitudes ascend with their
    bits."""
    torch: Any = sys.modules["torch"]
    return torch.bucketize(magnitudes, edges, out_int32=True)


def _edges(mantissa: int, step: float, count: int) -> npt.NDArray[np.int32]:
    """FP32 bits of the largest numbers that have the codes 0, 1, … of a float with so many
    ``mantissa`` bits, whose subnormal numbers are a ``step`` apart: halfway to the next, or just
    below if that one's code is even."""
    codes, unit = np.arange(count), 1 << mantissa
    normal = np.ldexp(unit + codes % unit, np.maximum(codes // unit - 1, 0))
    numbers = np.where(codes < unit, codes, normal) * step
    halfway = ((numbers[:-1] + numbers[1:]) / 2).astype(np.float32).view(np.int32)
    return halfway - (codes[:-1] % 2).astype(np.int32)


_E4M3_EDGES, _E2M1_EDGES = _edges(3, 2**-9, 127), _edges(1, 0.5, 8)
