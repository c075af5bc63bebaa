"""What rounding predicts for the chance that a weight changes, by its exponent (PULSE, arXiv 2602.03839, section 3).

In a format with ``m`` mantissa bits the weights 2^e <= |w| < 2^(e+1) are 2^(e-m) apart. Kept in that format, a weight
absorbs an update below half of it, 2^(e-m-1): in BF16 |w| / 256 or less. Behind FP32 masters updates add up instead,
and a master lies anywhere between two rounding edges, so an update u crosses one with chance u / 2^(e-m), at most 1.
Adam's updates are about lr, and at most 10 lr with betas (.9, .999).
"""

from __future__ import annotations

from typing import Any

from ..state.tensors import DType
from .entropy import ClassCounts

_OTHER_BIAS = {"F8_E5M2FNUZ": 16, "F8_E4M3FNUZ": 8, "F8_E8M0": 127}


def exponent_of(field: int, dtype: DType) -> int:
    """e of an exponent field; subnormals and zero have that of the smallest normal number."""
    return max(field, 1) - _bias(dtype)


def ulp_of(exponent: int, dtype: DType) -> float:
    """The unit in the last place, which is the distance of two neighbours among the values 2^e <= |w| < 2^(e+1)."""
    assert dtype.exponent is not None
    return 2.0 ** (exponent - dtype.exponent[0])


def exponent_rows(counts: ClassCounts, lr: float | None) -> list[dict[str, Any]]:
    """The rows ``exponents`` of a study; none for dtypes without an exponent."""
    dtype = counts.dtype
    if dtype.exponent is None:
        return []
    found: dict[int, tuple[int, int]] = {}
    for field, (elements, changed) in enumerate(zip(counts.elements.tolist(), counts.changed.tolist(), strict=True)):
        exponent = exponent_of(field, dtype)
        before = found.get(exponent, (0, 0))
        found[exponent] = before[0] + elements, before[1] + changed
    rows = []
    for exponent, (elements, changed) in sorted(found.items()):
        if elements:
            ulp = ulp_of(exponent, dtype)
            rows.append(
                {
                    "exponent": exponent,
                    "elements": elements,
                    "changed": changed,
                    "density": changed / elements,
                    "threshold": ulp / 2,
                    "predicted_lr": None if lr is None else min(1.0, lr / ulp),
                    "predicted_10lr": None if lr is None else min(1.0, 10 * lr / ulp),
                }
            )
    return rows


def _bias(dtype: DType) -> int:
    assert dtype.exponent is not None
    return _OTHER_BIAS.get(dtype.name, (1 << (dtype.exponent[1] - 1)) - 1)
