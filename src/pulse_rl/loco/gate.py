"""The gate: which entries of a pseudo-gradient would change the next forward pass (docs/loco.md, section 2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .._native import gate as _gate
from ..errors import InputError
from ..state.rounding import ROUNDINGS as BY_NAME
from ..state.rounding import Rounding

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.uint32]

_OPENS = np.float32(2.0**63)
"""Finite for the gate, and as much as any parameter that is."""

ROUNDINGS: dict[torch.dtype, Rounding] = {
    torch.bfloat16: BY_NAME["BF16"],
    torch.float16: BY_NAME["F16"],
    torch.float8_e4m3fn: BY_NAME["F8_E4M3"],
    torch.float8_e5m2: BY_NAME["F8_E5M2"],
}
"""How FP32 rounds to each gate dtype."""


def rounding_of(dtype: torch.dtype) -> Rounding:
    """How FP32 rounds to a gate dtype. Raises InputError for a dtype that is not a compute dtype."""
    if dtype not in ROUNDINGS:
        known = ", ".join(str(d).removeprefix("torch.") for d in ROUNDINGS)
        raise InputError(f"gate_dtype {dtype} is not supported", hint=f"Use one of: {known}.")
    return ROUNDINGS[dtype]


def is_finite(values: Floats) -> npt.NDArray[np.bool_]:
    """Which values count as finite: not NaN and below 2^64 in magnitude (a few larger ones make theta infinite)."""
    return np.abs(values) < 2.0**64


def open_entries(
    theta: Floats,
    now: Floats,
    residual: Floats,
    s: Floats,
    rounding: Rounding,
    *,
    lookahead: float = 0.0,
    bf16_start: bool = False,
    base: int = 0,
) -> Positions | None:
    """Fills ``s = (start - now) + residual`` and returns the positions where ``cast(theta) != cast(theta - s)``, plus
    ``base``.

    ``start`` is ``theta - lookahead * residual``, with ``bf16_start`` as a BF16 model holds it. All arrays are flat
    FP32 of one length. Compared as bits, so that -0 and 0 differ (PULSE, Algorithm 2, line "M_r"). None if an entry of
    ``s`` is not finite (`is_finite`).
    """
    return _gate(theta, now, residual, lookahead, bf16_start, s, rounding, base)


def scaled_open_entries(theta: Floats, s: Floats, scale: np.float32, rounding: Rounding) -> Positions:
    """The positions where ``cast(theta) != cast(theta - scale * s)``, of finite ``s``."""
    scaled = np.clip(scale * s, -_OPENS, _OPENS)
    positions = open_entries(theta, theta, scaled, np.empty_like(s), rounding)
    assert positions is not None
    return positions
