"""The fallback where a patch would be larger than the elements themselves: all new values in byte planes."""

from __future__ import annotations

import numpy as np

from ..errors import CorruptPatch
from ..tensors import DType, UIntArray
from . import planes
from .base import Changes


class DenseCodec:
    id = 1
    name = "dense"

    def supports(self, dtype: DType) -> bool:
        return True

    def encode(self, old: UIntArray, new: UIntArray, dtype: DType) -> tuple[bytes, int]:
        return planes.pack(new), int(np.count_nonzero(old != new))

    def decode(self, payload: memoryview, old: UIntArray, dtype: DType) -> Changes:
        new, rest = planes.unpack(payload, len(old), dtype.uint)
        if len(rest):
            raise CorruptPatch(f"{len(rest)} bytes follow the block's end")
        positions = np.flatnonzero(old != new).astype(np.uint32)
        return Changes(positions, new[positions])
