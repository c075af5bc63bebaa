"""The order-0 entropy of a patch given tensor and old exponent: what a perfect static model of that kind needs.

Per tensor and old exponent, ``k`` of ``n`` elements changed: their positions cost ``n H(k / n)`` bits, and the signed
bit-pattern steps cost their empirical entropy in that class. Frequencies are taken as known, so the figure is a floor
for codecs without other context, not something a real stream can reach on small tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..state.tensors import DType, State, UIntArray

_CHUNK = 1 << 22
_EMPTY = np.empty(0, np.int64)


@dataclass(frozen=True)
class EntropyBound:
    """``position_bits`` and ``step_bits`` for ``changed`` of ``elements`` elements, given tensor and old exponent;
    ``unconditional_bits`` is for both, given neither."""

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
    """How often each class (exponent of the old element) occurs in one tensor, and each (class, step) of a change."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        # Of eight-byte elements the step alone fills a key: all of them are of one class.
        self._shift = 8 * dtype.width if dtype.width < 8 else 0
        low, width = dtype.exponent if dtype.exponent and self._shift else (0, 0)
        self._low, self._mask = low, (1 << width) - 1
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
        steps = sum(_entropy_bits(counts[classes == c]) for c in np.unique(classes))
        return _position_bits(self.elements, self.changed), float(steps)

    def _add(self, old: UIntArray, new: UIntArray) -> None:
        classes = self._class_of(old)
        self.elements += np.bincount(classes, minlength=self.elements.size)
        at = np.flatnonzero(old != new)
        keys = (classes[at].astype(np.int64) << self._shift) | (new[at] - old[at]).astype(np.int64)
        self._add_keys(*np.unique(keys, return_counts=True))

    def _class_of(self, old: UIntArray) -> npt.NDArray[np.uint16]:
        if not self._mask:
            return np.zeros(old.size, np.uint16)
        classes: npt.NDArray[np.uint16] = (old >> old.dtype.type(self._low)).astype(np.uint16) & np.uint16(self._mask)
        return classes

    def _add_keys(self, keys: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
        both = np.concatenate([self._keys, keys])
        self._keys, where = np.unique(both, return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._counts = np.bincount(where, weights=weights, minlength=self._keys.size).astype(np.int64)


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
    unconditional_bits = _position_bits(np.array([total]), np.array([changed]))
    unconditional_bits += _entropy_bits(np.array(list(steps.values())))
    return EntropyBound(total, changed, position_bits, step_bits, unconditional_bits)


def _entropy_bits(counts: npt.NDArray[np.int64]) -> float:
    """Total bits of a sequence with these symbol counts under its own frequencies."""
    some = counts[counts > 0].astype(np.float64)
    return float(np.sum(some * np.log2(some.sum() / some)))


def _position_bits(n: npt.NDArray[np.int64], k: npt.NDArray[np.int64]) -> float:
    """Sum of n H(k / n) in bits over classes."""
    return sum(_entropy_bits(np.array([hit, whole - hit])) for whole, hit in zip(n, k, strict=True) if whole)
