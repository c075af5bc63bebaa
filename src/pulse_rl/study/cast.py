"""States as the forward pass sees them: bits after the cast into the compute dtype, rounded to nearest even.

The casts are those of ``torch.Tensor.to``, bit for bit but for NaN payloads. FP8 is cast without a scale: an engine
that scales its weights per tensor or block sees other roundings.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedTensor
from ..state.tensors import DTYPES, DType, State, TensorSpec, UIntArray, round_to_bf16

COMPUTE_DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        "bf16": DTYPES["BF16"],
        "fp16": DTYPES["F16"],
        "fp8_e4m3": DTYPES["F8_E4M3"],
        "fp8_e5m2": DTYPES["F8_E5M2"],
    }
)

_FLOATS = ("F64", "F32", "BF16", "F16")
_CHUNK = 1 << 16  # elements whose temporaries stay in the cache


def compute_dtype(spec: TensorSpec, dtype: DType) -> DType:
    """What a tensor is compared as: floats wider than ``dtype`` are cast to it; all else stays as it is."""
    return dtype if spec.dtype.name in _FLOATS and spec.dtype.width > dtype.width else spec.dtype


def cast_specs(specs: tuple[TensorSpec, ...], dtype: DType) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(s.name, compute_dtype(s, dtype), s.shape) for s in specs)


class CastState(State):
    """``state`` after the cast, made anew with each read: it takes no memory of its own."""

    def __init__(self, state: State, dtype: DType) -> None:
        super().__init__(cast_specs(state.specs, dtype), {}, state.aliases)
        self._state = state

    def read(self, name: str, start: int = 0, stop: int | None = None) -> UIntArray:
        return cast(self._state.read(name, start, stop), self._state.spec(name).dtype, self.spec(name).dtype)


def cast(bits: UIntArray, source: DType, target: DType) -> UIntArray:
    """Flat bits of ``source`` as those of ``target``; the same array where both are one. Raises UnsupportedTensor."""
    if source == target:
        return bits
    if source.name not in _FLOATS or target not in COMPUTE_DTYPES.values():
        raise UnsupportedTensor(f"there is no cast from {source.name} to {target.name}")
    result = np.empty(bits.size, target.uint)
    for start in range(0, bits.size, _CHUNK):
        result[start : start + _CHUNK] = _round(_to_f32(bits[start : start + _CHUNK], source), target)
    return result


def _to_f32(bits: UIntArray, source: DType) -> npt.NDArray[np.float32]:
    if source.name == "BF16":
        wide: npt.NDArray[np.float32] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    with np.errstate(over="ignore", invalid="ignore"):
        values = bits.view({"F64": np.float64, "F32": np.float32, "F16": np.float16}[source.name])
        narrow: npt.NDArray[np.float32] = values.astype(np.float32, copy=False)
    return narrow


def _round(values: npt.NDArray[np.float32], target: DType) -> UIntArray:
    if target.name == "BF16":
        return round_to_bf16(values)
    if target.name == "F16":
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return _round_to_fp8(values, target)


def _round_to_fp8(values: npt.NDArray[np.float32], target: DType) -> UIntArray:
    assert target.exponent is not None
    mantissa, exponent_bits = target.exponent
    bias = (1 << (exponent_bits - 1)) - 1
    wide = values.view(np.uint32)
    magnitude = wide & np.uint32(0x7FFFFFFF)
    shift = np.uint32(23 - mantissa)
    half = np.uint32((1 << (22 - mantissa)) - 1)
    with np.errstate(over="ignore", invalid="ignore"):
        normal = (magnitude - np.uint32((127 - bias) << 23) + half + ((magnitude >> shift) & np.uint32(1))) >> shift
        small = np.rint(magnitude.view(np.float32) * np.float32(2.0 ** (bias - 1 + mantissa))).astype(np.uint32)
    # E4M3 has no Inf and saturates at 448, as engines do; E5M2 overflows to Inf.
    overflow, nan = (0x7E, 0x7F) if target.name == "F8_E4M3" else (0x7C, 0x7F)
    result = np.where(magnitude < np.uint32((128 - bias) << 23), small, normal)
    result = np.where(magnitude >= np.uint32((129 + bias) << 23), overflow, np.minimum(result, overflow))
    result = np.where(magnitude > np.uint32(0x7F800000), nan, result)
    signed: UIntArray = (result | (wide >> np.uint32(24) & np.uint32(0x80))).astype(np.uint8)
    return signed
