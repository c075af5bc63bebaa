"""Byte planes: the k-th bytes of all elements together, each plane a zstd frame of its own.

The planes of a weight differ in kind (sign and exponent repeat, mantissas look random), so one entropy table for all of
them would fit none.
"""

from __future__ import annotations

import numpy as np

from .. import _zstd
from ..errors import CorruptPatch, FormatError
from ..tensors import UIntArray

_LEVEL = 1
_LENGTH_BYTES = 4


def pack(values: UIntArray) -> bytes:
    """Planes from the lowest byte up: for each a u32 length and that many bytes of zstd."""
    raw = values.view(np.uint8).reshape(-1, values.dtype.itemsize)
    frames = [_zstd.compress(np.ascontiguousarray(plane).data, _LEVEL) for plane in raw.T]
    return b"".join(len(f).to_bytes(_LENGTH_BYTES, "little") + f for f in frames)


def unpack(data: memoryview, count: int, dtype: np.dtype[np.unsignedinteger]) -> tuple[UIntArray, memoryview]:
    """(``count`` values of ``dtype``, the rest of ``data``); raises CorruptPatch."""
    raw = np.empty((count, dtype.itemsize), np.uint8)
    for k in range(dtype.itemsize):
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        frame, data = data[_LENGTH_BYTES : _LENGTH_BYTES + length], data[_LENGTH_BYTES + length :]
        if len(frame) != length:
            raise CorruptPatch("a byte plane is longer than its block")
        try:
            raw[:, k] = np.frombuffer(_zstd.decompress(frame, count), np.uint8)
        except FormatError as error:
            raise CorruptPatch(f"a byte plane does not decode: {error}") from None
    return raw.reshape(-1).view(dtype), data
