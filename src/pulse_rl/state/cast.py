"""States as the forward pass sees them: bits after the cast into the compute dtype, rounded to nearest even.

The casts are those of ``torch.Tensor.to``, bit for bit but for NaN payloads. FP8 is cast without a scale: an engine
that scales its weights per tensor or block sees other roundings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedTensor
from .rounding import COMPUTE_DTYPES, round_bits
from .tensors import DType, State, TensorSpec, UIntArray

_FLOATS = ("F64", "F32", "BF16", "F16")
_CHUNK = 1 << 16  # elements whose temporaries stay in the cache


def is_wide(dtype: DType) -> bool:
    """Whether it is a float of more than two bytes, wider than what models compute in."""
    return dtype.name in _FLOATS and dtype.width > 2


def compute_dtype(spec: TensorSpec, dtype: DType) -> DType:
    """What becomes of a tensor: floats wider than ``dtype`` are cast to it; all else stays as it is."""
    return dtype if spec.dtype.name in _FLOATS and spec.dtype.width > dtype.width else spec.dtype


def cast_specs(specs: tuple[TensorSpec, ...], dtype: DType) -> tuple[TensorSpec, ...]:
    """The specs of a state after the cast."""
    return tuple(TensorSpec(s.name, compute_dtype(s, dtype), s.shape) for s in specs)


@dataclass(frozen=True, slots=True)
class _CastTensor:
    """The tensor ``name`` of ``state`` in another dtype, cast on each read."""

    state: State
    name: str
    dtype: DType

    def read(self, start: int, stop: int) -> UIntArray:
        return cast(self.state.read(self.name, start, stop), self.state.spec(self.name).dtype, self.dtype)


class CastState(State):
    """``state`` cast to the compute dtype ``dtype``, computed on each read, so it needs no memory of its own. Tied
    tensors stay tied."""

    def __init__(self, state: State, dtype: DType) -> None:
        specs = cast_specs(state.specs, dtype)
        super().__init__(specs, {s.name: _CastTensor(state, s.name, s.dtype) for s in specs}, state.aliases)


def cast(bits: UIntArray, source: DType, target: DType) -> UIntArray:
    """Flat bits of ``source`` as those of ``target``; the same array where both are one. Raises UnsupportedTensor."""
    if source == target:
        return bits
    if source.name not in _FLOATS or target not in COMPUTE_DTYPES.values():
        raise UnsupportedTensor(f"no cast from {source.name} to {target.name}")
    if source.name == "F32":
        return round_bits(bits, target)
    result = np.empty(bits.size, target.uint)
    for start in range(0, bits.size, _CHUNK):
        wide = _to_f32(bits[start : start + _CHUNK], source)
        result[start : start + _CHUNK] = round_bits(wide.view(np.uint32), target)
    return result


def _to_f32(bits: UIntArray, source: DType) -> npt.NDArray[np.float32]:
    if source.name == "BF16":
        wide: npt.NDArray[np.float32] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    with np.errstate(over="ignore", invalid="ignore"):
        values = bits.view({"F64": np.float64, "F16": np.float16}[source.name])
        narrow: npt.NDArray[np.float32] = values.astype(np.float32)
    return narrow
