"""The paper's codec (PULSE, Algorithm 1): sorted indices delta-coded and narrowed, absolute new values, zstd level 1.

Payload: u32 count, u8 width of a gap in bytes, planes of the gaps, planes of the values. A gap is the number of
unchanged elements since the previous change (or since the start of the block).
"""

from __future__ import annotations

import struct

import numpy as np

from ..errors import CorruptPatch
from ..tensors import DType, UIntArray
from . import planes
from .base import Changes

_HEAD = struct.Struct("<IB")
_GAP_TYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"))


class ZstdCodec:
    id = 2
    name = "zstd"

    def supports(self, dtype: DType) -> bool:
        return True

    def encode(self, old: UIntArray, new: UIntArray, dtype: DType) -> tuple[bytes, int]:
        positions = np.flatnonzero(old != new)
        gaps = np.diff(positions, prepend=-1) - 1
        largest = int(gaps.max(initial=0))
        gap_type = next(t for t in _GAP_TYPES if largest <= np.iinfo(t).max)
        head = _HEAD.pack(len(positions), gap_type.itemsize)
        return head + planes.pack(gaps.astype(gap_type)) + planes.pack(new[positions]), len(positions)

    def decode(self, payload: memoryview, old: UIntArray, dtype: DType) -> Changes:
        if len(payload) < _HEAD.size:
            raise CorruptPatch("the block ends inside its head")
        count, width = _HEAD.unpack_from(payload)
        if count > len(old) or width not in (1, 2, 4):
            raise CorruptPatch(f"the block claims {count} changes of {len(old)} elements, gaps of {width} bytes")
        gaps, rest = planes.unpack(payload[_HEAD.size :], count, np.dtype(f"<u{width}"))
        values, rest = planes.unpack(rest, count, dtype.uint)
        if len(rest):
            raise CorruptPatch(f"{len(rest)} bytes follow the block's end")
        positions = np.cumsum(gaps.astype(np.uint64) + np.uint64(1)) - np.uint64(1)
        if count and int(positions[-1]) >= len(old):
            raise CorruptPatch(f"a change at element {int(positions[-1])} of {len(old)}")
        return Changes(positions.astype(np.uint32), values)
