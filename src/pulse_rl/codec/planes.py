"""Byte planes: the lowest bytes of all elements together, then the next bytes, and so on.

The planes of a weight differ in kind (sign and exponent repeat, mantissas look random), so a byte compressor does
better on one plane after another than on whole elements.
"""

from __future__ import annotations

import numpy as np

from ..state.tensors import UIntArray


def split(values: UIntArray) -> list[bytes]:
    """One bytes object a plane, lowest first, each as long as ``values`` has elements."""
    raw = values.view(np.uint8).reshape(-1, values.dtype.itemsize)
    return [np.ascontiguousarray(plane).tobytes() for plane in raw.T]


def merge(planes: bytes, dtype: np.dtype[np.unsignedinteger]) -> UIntArray:
    """The elements of ``split``'s planes, given one after another."""
    raw = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(raw.T).reshape(-1).view(dtype)
