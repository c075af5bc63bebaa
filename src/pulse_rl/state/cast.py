"""Compute dtypes, and states as the forward pass sees them.

A compute dtype is the dtype in which a forward pass multiplies. Casts round to nearest, ties to
even, and equal those of ``torch.Tensor.to`` bit for bit except for NaN payloads. FP8 is cast
without a scale; the package `quantize` makes FP8 with the scales of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Union

import numpy as np
import numpy.typing as npt

from .._native import round_values
from ..errors import InputError, UnsupportedTensor
from .bits import UIntArray
from .tensors import DTYPES, DType, State, TensorSpec

if TYPE_CHECKING:
    import torch

#: A compute dtype as callers give it; see `compute_dtype_named`.
DTypeLike = Union[str, "torch.dtype"]

_FLOATS = ("F64", "F32", "BF16", "F16")
_CHUNK = 1 << 16  # elements whose temporaries stay in the cache


class Rounding(NamedTuple):
    """How FP32 rounds to a narrower float, as the native kernels take it.

    ``mantissa`` is the number of explicit mantissa bits. ``least`` is the FP32 exponent field of
    the smallest normal number. ``most`` has the FP32 bits of the largest finite number. ``beyond``
    has the FP32 bits that replace a larger number: infinity, or ``most``.
    """

    mantissa: int
    least: int
    most: int
    beyond: int


# (mantissa bits, smallest normal exponent, largest finite number, overflow), see `Rounding`.
#: The compute dtypes by their safetensors names. E4M3 has no infinity: it saturates at 448, as in
#: inference engines.
ROUNDINGS: Mapping[str, Rounding] = MappingProxyType(
    {
        "BF16": Rounding(7, 1, 0x7F7F0000, 0x7F800000),
        "F16": Rounding(10, 113, 0x477FE000, 0x7F800000),
        "F8_E4M3": Rounding(3, 121, 0x43E00000, 0x43E00000),
        "F8_E5M2": Rounding(2, 113, 0x47600000, 0x7F800000),
    }
)

_NAN = {"BF16": 0x7FC0, "F16": 0x7E00, "F8_E4M3": 0x7F, "F8_E5M2": 0x7F}

COMPUTE_DTYPES: Mapping[str, DType] = MappingProxyType({name: DTYPES[name] for name in ROUNDINGS})


# Safetensors names by the names that NumPy's extensions and torch use.
_SAFETENSORS_NAMES = {dtype.library: name for name, dtype in COMPUTE_DTYPES.items()}


def compute_dtype_named(name: DTypeLike) -> DType:
    """Return the compute dtype with the given name.

    Args:
        name: A torch.dtype such as torch.bfloat16, or a name in any letter case: safetensors'
            ("BF16", "F16", "F8_E4M3", "F8_E5M2"), or NumPy's and torch's ("bfloat16", "float16",
            "float8_e4m3fn", "float8_e5m2").

    Raises:
        InputError: ``name`` is not a compute dtype.
    """
    # str(torch.bfloat16) is "torch.bfloat16", so torch need not be imported here.
    text = str(name).lower().removeprefix("torch.")
    found = COMPUTE_DTYPES.get(_SAFETENSORS_NAMES.get(text, text.upper()))
    if found is None:
        raise InputError(
            f"unknown compute dtype {name!r}",
            hint=f"Choose one of: {', '.join(COMPUTE_DTYPES)}, "
            f"{', '.join(_SAFETENSORS_NAMES)}, or torch's dtype of one of these names.",
        )
    return found


def round_bits(bits: npt.NDArray[np.uint32], dtype: DType) -> UIntArray:
    """Round FP32 numbers [n], given as bits, to a compute dtype: uint16 [n], or uint8 [n] for FP8.

    A number beyond the range becomes infinity; for E4M3 it becomes the largest number. NaN stays
    NaN and keeps its sign. BF16 and F16 keep the top bits of its payload and make it quiet; FP8 has
    the one payload 0x7F. Releases the GIL.
    """
    result = np.empty(bits.size, dtype.uint)
    round_values(bits, ROUNDINGS[dtype.name], _NAN[dtype.name], dtype.width, result.view(np.uint8))
    return result


def is_float(dtype: DType) -> bool:
    """Whether ``dtype`` is a float that can be cast to a compute dtype."""
    return dtype.name in _FLOATS


def compute_dtype(spec: TensorSpec, dtype: DType) -> DType:
    """The dtype of a tensor after the cast: ``dtype`` if the tensor is a wider float, else its
    own."""
    return dtype if spec.dtype.name in _FLOATS and spec.dtype.width > dtype.width else spec.dtype


@dataclass(frozen=True, slots=True)
class CastTensor:
    """The tensor ``name`` of ``state``, cast to ``dtype`` on each read."""

    state: State
    name: str
    dtype: DType

    def read(self, start: int, stop: int) -> UIntArray:
        elements = self.state.read(self.name, start, stop)
        return cast(elements, self.state.spec(self.name).dtype, self.dtype)


class CastState(State):
    """``state`` cast to the compute dtype ``dtype`` on each read, without the tensors ``uncast``.

    It needs no memory of its own. Tied tensors stay tied.
    """

    def __init__(self, state: State, dtype: DType, uncast: Collection[str] = ()) -> None:
        specs = tuple(
            s if s.name in uncast else TensorSpec(s.name, compute_dtype(s, dtype), s.shape)
            for s in state.specs
        )
        data = {s.name: CastTensor(state, s.name, s.dtype) for s in specs}
        super().__init__(specs, data, state.aliases)


def cast(bits: UIntArray, source: DType, target: DType) -> UIntArray:
    """Cast flat bits of ``source`` to ``target``; return the same array if the two are equal.

    Raises UnsupportedTensor for a pair without a cast.
    """
    if source == target:
        return bits
    if source.name not in _FLOATS or target not in COMPUTE_DTYPES.values():
        raise UnsupportedTensor(f"no cast from {source.name} to {target.name}")
    if source.name == "F32":
        return round_bits(bits, target)
    # In chunks, so that the FP32 temporaries stay in the cache.
    result = np.empty(bits.size, target.uint)
    for start in range(0, bits.size, _CHUNK):
        wide = to_f32(bits[start : start + _CHUNK], source)
        result[start : start + _CHUNK] = round_bits(wide.view(np.uint32), target)
    return result


def to_f32(bits: UIntArray, source: DType) -> npt.NDArray[np.float32]:
    """Flat bits of the float ``source`` as FP32 numbers; numbers beyond its range become
    infinity."""
    if source.name == "BF16":
        wide: npt.NDArray[np.float32] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    with np.errstate(over="ignore", invalid="ignore"):
        values = bits.view({"F64": np.float64, "F16": np.float16}[source.name])
        narrow: npt.NDArray[np.float32] = values.astype(np.float32)
    return narrow
