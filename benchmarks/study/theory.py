"""What theory says of a step: how few bytes its changes need, and how often rounding lets a weight
change.

**Entropy.** Per tensor and old exponent, ``k`` of ``n`` elements changed: their positions cost ``n
H(k / n)`` bits, and the signed bit-pattern steps cost their empirical entropy in that class (order
0). Frequencies are taken as known, so the figure is a floor for codecs without other context, not
something a real stream can reach on small tensors.

**Rounding** (PULSE, arXiv 2602.03839, section 3). In a format with ``m`` mantissa bits the weights
2^e <= |w| < 2^(e+1) are 2^(e-m) apart. Kept in that format, a weight absorbs an update below half
of it, 2^(e-m-1): in BF16 |w| / 256 or less. Behind FP32 masters updates add up instead, and a
master lies anywhere between two rounding edges, so an update u crosses one with chance u / 2^(e-m),
at most 1. Adam's updates are about lr, and at most 10 lr with betas (.9, .999).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DType, State

_CHUNK = 1 << 22
_EMPTY = np.empty(0, np.int64)


@dataclass(frozen=True)
class EntropyBound:
    """``position_bits`` and ``step_bits`` for ``changed`` of ``elements`` elements, given tensor
    and old exponent; ``unconditional_bits`` is for both, given neither."""

    elements: int
    changed: int
    position_bits: float
    step_bits: float
    unconditional_bits: float

    @property
    def bytes_per_changed(self) -> float:
        """Given tensor and old exponent."""
        return (self.position_bits + self.step_bits) / 8 / max(1, self.changed)

    @property
    def unconditional_bytes_per_changed(self) -> float:
        """Given neither."""
        return self.unconditional_bits / 8 / max(1, self.changed)


class ClassCounts:
    """How often each class (exponent of the old element) occurs in one tensor, and each (class,
    step) of a change."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        # Of eight-byte elements the step alone fills a key: all of them are of one class.
        self._shift = 8 * dtype.width if dtype.width < 8 else 0
        width = dtype.exponent[1] if dtype.exponent and self._shift else 0
        self.elements: npt.NDArray[np.int64] = np.zeros(1 << width, np.int64)
        self._keys, self._counts = _EMPTY, _EMPTY

    def add(self, old: UIntArray, new: UIntArray) -> None:
        """Counts some more elements of the tensor, before and after."""
        for start in range(0, old.size, _CHUNK):
            self._add(old[start : start + _CHUNK], new[start : start + _CHUNK])

    def merge(self, other: ClassCounts) -> None:
        self.elements += other.elements
        self._add_keys(other._keys, other._counts)

    @property
    def steps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(class, step modulo 2^bits, count), one entry a kind of change."""
        if not self._shift:
            return np.zeros_like(self._keys), self._keys, self._counts
        return self._keys >> self._shift, self._keys & ((1 << self._shift) - 1), self._counts

    @property
    def changed(self) -> npt.NDArray[np.int64]:
        """Changed elements by class."""
        classes, _, counts = self.steps
        return np.bincount(classes, weights=counts, minlength=self.elements.size).astype(np.int64)

    def bits(self) -> tuple[float, float]:
        """(bits for the positions, bits for the steps)."""
        classes, _, counts = self.steps
        steps = sum(symbol_bits(counts[classes == c]) for c in np.unique(classes))
        return flag_bits(self.elements, self.changed), float(steps)

    def _add(self, old: UIntArray, new: UIntArray) -> None:
        classes = self._class_of(old)
        self.elements += np.bincount(classes, minlength=self.elements.size)
        at = np.flatnonzero(old != new)
        keys = (classes[at].astype(np.int64) << self._shift) | (new[at] - old[at]).astype(np.int64)
        self._add_keys(*np.unique(keys, return_counts=True))

    def _class_of(self, old: UIntArray) -> npt.NDArray[np.uint16]:
        return exponents_of(old, self.dtype) if self._shift else np.zeros(old.size, np.uint16)

    def _add_keys(self, keys: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
        self._keys, self._counts = summed(self._keys, self._counts, keys, counts)


def entropy_bound(old: State, new: State) -> EntropyBound:
    """The bound for a patch from ``old`` to ``new``, two states of the same tensors."""
    position_bits = step_bits = 0.0
    steps: dict[int, int] = {}
    total = changed = 0
    for spec in old.specs:
        counts = ClassCounts(spec.dtype)
        counts.add(old.read(spec.name), new.read(spec.name))
        positions, values = counts.bits()
        position_bits, step_bits = position_bits + positions, step_bits + values
        _, kinds, times = counts.steps
        for kind, n in zip(kinds.tolist(), times.tolist(), strict=True):
            steps[kind] = steps.get(kind, 0) + n
        total += spec.elements
        changed += int(times.sum())
    unconditional_bits = flag_bits(np.array([total]), np.array([changed]))
    unconditional_bits += symbol_bits(np.array(list(steps.values())))
    return EntropyBound(total, changed, position_bits, step_bits, unconditional_bits)


def summed(
    keys: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    more_keys: npt.NDArray[np.int64],
    more_counts: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Both histograms as one: (ascending keys, their counts)."""
    found, where = np.unique(np.concatenate([keys, more_keys]), return_inverse=True)
    weights = np.concatenate([counts, more_counts])
    return found, np.bincount(where, weights=weights, minlength=found.size).astype(np.int64)


def exponents_of(elements: UIntArray, dtype: DType) -> npt.NDArray[np.uint16]:
    """The exponent field of each of the elements [n]; 0 for dtypes without one."""
    if dtype.exponent is None:
        return np.zeros(elements.size, np.uint16)
    low, width = dtype.exponent
    mask = np.uint16((1 << width) - 1)
    fields: npt.NDArray[np.uint16] = (elements >> elements.dtype.type(low)).astype(np.uint16) & mask
    return fields


def symbol_bits(counts: npt.NDArray[np.int64]) -> float:
    """Total bits of a sequence with these symbol counts under its own frequencies."""
    some = counts[counts > 0].astype(np.float64)
    return float(np.sum(some * np.log2(some.sum() / some)))


def flag_bits(n: npt.NDArray[np.int64], k: npt.NDArray[np.int64]) -> float:
    """Sum of n H(k / n) in bits over classes."""
    return sum(
        symbol_bits(np.array([hit, whole - hit])) for whole, hit in zip(n, k, strict=True) if whole
    )


_OTHER_BIAS = {"F8_E5M2FNUZ": 16, "F8_E4M3FNUZ": 8, "F8_E8M0": 127}


def exponent_of(field: int, dtype: DType) -> int:
    """e of an exponent field; subnormals and zero have that of the smallest normal number."""
    return max(field, 1) - _bias(dtype)


def ulp_of(exponent: int, dtype: DType) -> float:
    """The unit in the last place, which is the distance of two neighbors among the values 2^e <=
    |w| < 2^(e+1)."""
    assert dtype.exponent is not None
    return 2.0 ** (exponent - dtype.exponent[0])


def exponent_rows(counts: ClassCounts, lr: float | None) -> list[dict[str, Any]]:
    """The rows ``exponents`` of a study; none for dtypes without an exponent."""
    dtype = counts.dtype
    if dtype.exponent is None:
        return []
    found: dict[int, tuple[int, int]] = {}
    for field, (elements, changed) in enumerate(
        zip(counts.elements.tolist(), counts.changed.tolist(), strict=True)
    ):
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
