"""The gate: which entries of a pseudo-gradient would change the next forward pass (docs/loco.md, section 2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .._native import gate as _gate
from ..errors import InputError

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.uint32]
Rounding = tuple[int, int, int, int]

ROUNDINGS: dict[torch.dtype, Rounding] = {
    torch.bfloat16: (7, 1, 0x7F7F0000, 0x7F800000),
    torch.float16: (10, 113, 0x477FE000, 0x7F800000),
    torch.float8_e4m3fn: (3, 121, 0x43E00000, 0x43E00000),
    torch.float8_e5m2: (2, 113, 0x47600000, 0x7F800000),
}
"""Explicit mantissa bits, FP32 exponent field of the smallest normal number, FP32 bits of the largest finite one, and
of what a larger one becomes (float8_e4m3fn has no infinity and saturates)."""


def rounding_of(dtype: torch.dtype) -> Rounding:
    """How FP32 rounds to a gate dtype. Raises InputError for a dtype that is no compute dtype."""
    if dtype not in ROUNDINGS:
        known = ", ".join(str(d).removeprefix("torch.") for d in ROUNDINGS)
        raise InputError(f"gate_dtype {dtype} is not supported", hint=f"Use one of: {known}.")
    return ROUNDINGS[dtype]


def is_finite(values: Floats) -> npt.NDArray[np.bool_]:
    """Which values count as finite: not NaN and below 2^64 in magnitude (a few larger ones make theta infinite)."""
    return np.abs(values) < 2.0**64


def open_entries(
    theta: Floats, start: Floats, now: Floats, residual: Floats, s: Floats, rounding: Rounding
) -> Positions | None:
    """Fills ``s = (start - now) + residual`` and returns the positions where ``cast(theta) != cast(theta - s)``.

    All arrays are flat FP32 of one length. Compared as bits, so that -0 and 0 differ (PULSE, Algorithm 2, line "M_r").
    None if an entry of ``s`` is not finite (`is_finite`).
    """
    return _gate(theta, start, now, residual, s, rounding, 0)
