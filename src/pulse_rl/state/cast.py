"""The compute dtypes, and states as the forward pass sees them: bits after the cast, rounded to
nearest, ties to even.

A compute dtype is what a forward pass multiplies in. The casts are those of ``torch.Tensor.to``,
bit for bit but for NaN payloads. FP8 is cast without a scale; with the scales of a checkpoint it is
made by `quantize`.
"""

from __future__ import annotations

from collections.abc import Mapping
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

DTypeLike = Union[str, "torch.dtype"]
"""What callers give as a compute dtype; see `compute_dtype_named`."""

_FLOATS = ("F64", "F32", "BF16", "F16")
_CHUNK = 1 << 16  # elements whose temporaries stay in the cache


class Rounding(NamedTuple):
    """How FP32 rounds to a narrower float, as the native kernels take it.

    ``mantissa``: explicit mantissa bits. ``least``: FP32 exponent field of the smallest normal
    number. ``most``: FP32 bits of the largest finite number. ``beyond``: FP32 bits of what a larger
    one becomes: infinity, or ``most``.
    """

    mantissa: int
    least: int
    most: int
    beyond: int


ROUNDINGS: Mapping[str, Rounding] = MappingProxyType(
    {
        "BF16": Rounding(7, 1, 0x7F7F0000, 0x7F800000),
        "F16": Rounding(10, 113, 0x477FE000, 0x7F800000),
        "F8_E4M3": Rounding(3, 121, 0x43E00000, 0x43E00000),
        "F8_E5M2": Rounding(2, 113, 0x47600000, 0x7F800000),
    }
)
"""The compute dtypes by their safetensors names. E4M3 has no infinity and saturates at 448, as
engines do."""

_NAN = {"BF16": 0x7FC0, "F16": 0x7E00, "F8_E4M3": 0x7F, "F8_E5M2": 0x7F}

COMPUTE_DTYPES: Mapping[str, DType] = MappingProxyType({name: DTYPES[name] for name in ROUNDINGS})


_SAFETENSORS_NAMES = {dtype.library: name for name, dtype in COMPUTE_DTYPES.items()}
"""By the names that NumPy's extensions and torch use."""


def compute_dtype_named(name: DTypeLike) -> DType:
    """Return the compute dtype of this name.

    Args:
        name: A torch.dtype such as torch.bfloat16, or a name in any letter case: safetensors'
            ("BF16", "F16", "F8_E4M3", "F8_E5M2"), or NumPy's and torch's ("bfloat16", "float16",
            "float8_e4m3fn", "float8_e5m2").

    Raises:
        InputError: It is no compute dtype.
    """
    # The name of a torch.dtype is its string, so that torch need not be imported.
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
    """FP32 numbers [n], given by their bits, as the bits of a compute dtype [n]: uint16, or uint8
    of FP8.

    What exceeds the range becomes Inf (E4M3: the largest number). NaN stays NaN with its sign;
    those of BF16 and F16 keep the top bits of their payload and are quiet, those of FP8 are 0x7F.
    Releases the GIL.
    """
    result = np.empty(bits.size, dtype.uint)
    round_values(bits, ROUNDINGS[dtype.name], _NAN[dtype.name], dtype.width, result.view(np.uint8))
    return result


def is_float(dtype: DType) -> bool:
    """Whether it is a float that can be cast to a compute dtype."""
    return dtype.name in _FLOATS


def compute_dtype(spec: TensorSpec, dtype: DType) -> DType:
    """What becomes of a tensor: floats wider than ``dtype`` are cast to it; all else stays as it
    is."""
    return dtype if spec.dtype.name in _FLOATS and spec.dtype.width > dtype.width else spec.dtype


def cast_specs(specs: tuple[TensorSpec, ...], dtype: DType) -> tuple[TensorSpec, ...]:
    """The specs of a state after the cast."""
    return tuple(TensorSpec(s.name, compute_dtype(s, dtype), s.shape) for s in specs)


@dataclass(frozen=True, slots=True)
class CastTensor:
    """The tensor ``name`` of ``state`` in another dtype, cast on each read."""

    state: State
    name: str
    dtype: DType

    def read(self, start: int, stop: int) -> UIntArray:
        return cast(
            self.state.read(self.name, start, stop), self.state.spec(self.name).dtype, self.dtype
        )


class CastState(State):
    """``state`` cast to the compute dtype ``dtype``, computed on each read, so it needs no memory
    of its own. Tied tensors stay tied."""

    def __init__(self, state: State, dtype: DType) -> None:
        specs = cast_specs(state.specs, dtype)
        super().__init__(
            specs, {s.name: CastTensor(state, s.name, s.dtype) for s in specs}, state.aliases
        )


def cast(bits: UIntArray, source: DType, target: DType) -> UIntArray:
    """Flat bits of ``source`` as those of ``target``; the same array where both are one. Raises
    UnsupportedTensor."""
    if source == target:
        return bits
    if source.name not in _FLOATS or target not in COMPUTE_DTYPES.values():
        raise UnsupportedTensor(f"no cast from {source.name} to {target.name}")
    if source.name == "F32":
        return round_bits(bits, target)
    result = np.empty(bits.size, target.uint)
    for start in range(0, bits.size, _CHUNK):
        wide = to_f32(bits[start : start + _CHUNK], source)
        result[start : start + _CHUNK] = round_bits(wide.view(np.uint32), target)
    return result


def to_f32(bits: UIntArray, source: DType) -> npt.NDArray[np.float32]:
    """Flat bits of the float ``source`` as FP32; what lies beyond its range becomes Inf."""
    if source.name == "BF16":
        wide: npt.NDArray[np.float32] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    with np.errstate(over="ignore", invalid="ignore"):
        values = bits.view({"F64": np.float64, "F16": np.float16}[source.name])
        narrow: npt.NDArray[np.float32] = values.astype(np.float32)
    return narrow
