"""The order-0 entropy of a patch given tensor and old exponent: what a perfect static model of that kind needs.

Per tensor and old exponent, `k` of `n` elements changed: their positions cost n * H(k / n) bits, and the signed
bit-pattern steps cost their empirical entropy in that class. Frequencies are taken as known, so the figure is a
floor for codecs without other context, not something a real stream can reach on small tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

CHUNK = 1 << 22
U16 = np.ndarray


@dataclass(frozen=True)
class Bound:
    """Bits for positions and steps of `changed` elements; `blind_bits` is the same without tensor or exponent."""

    elements: int
    changed: int
    position_bits: float
    step_bits: float
    blind_bits: float

    @property
    def bytes_per_changed(self) -> float:
        return (self.position_bits + self.step_bits) / 8 / max(1, self.changed)

    @property
    def blind_bytes_per_changed(self) -> float:
        return self.blind_bits / 8 / max(1, self.changed)


def _entropy_bits(counts: np.ndarray) -> float:
    """Total bits of a sequence with these symbol counts under its own frequencies."""
    counts = counts[counts > 0].astype(np.float64)
    return float(np.sum(counts * np.log2(counts.sum() / counts)))


def _choose_bits(n: np.ndarray, k: np.ndarray) -> float:
    """sum n * H(k / n) in bits over classes."""
    rest = n - k
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where(k > 0, k * np.log2(n / k), 0) + np.where(rest > 0, rest * np.log2(n / rest), 0)
    return float(np.nansum(bits))


def bound(old: Mapping[str, U16], new: Mapping[str, U16]) -> Bound:
    """The bound over a state of BF16 bit patterns (name -> uint16 array, any shape)."""
    position_bits = step_bits = 0.0
    all_steps = np.zeros(1 << 16, np.int64)
    total = changed = 0
    for name, before in old.items():
        a, b = before.reshape(-1), new[name].reshape(-1)
        elements = np.zeros(256, np.int64)
        keys = []
        for start in range(0, a.size, CHUNK):
            x, y = a[start : start + CHUNK], b[start : start + CHUNK]
            exponent = (x >> 7).astype(np.uint8)
            elements += np.bincount(exponent, minlength=256)
            at = np.flatnonzero(x != y)
            keys.append(exponent[at].astype(np.int64) << 16 | (y[at] - x[at]))
        symbols, counts = np.unique(np.concatenate(keys or [np.zeros(0, np.int64)]), return_counts=True)
        np.add.at(all_steps, symbols & 0xFFFF, counts)
        hits = np.bincount(symbols >> 16, weights=counts, minlength=256)
        position_bits += _choose_bits(elements.astype(np.float64), hits)
        for exponent_class in np.unique(symbols >> 16):
            step_bits += _entropy_bits(counts[symbols >> 16 == exponent_class])
        total += a.size
        changed += int(counts.sum())
    blind = _choose_bits(np.array([float(total)]), np.array([float(changed)])) + _entropy_bits(all_steps)
    return Bound(total, changed, position_bits, step_bits, blind)
