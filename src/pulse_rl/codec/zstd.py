"""The paper's codec (PULSE, Algorithm 1): sorted indices delta-coded and narrowed, absolute new values, zstd level 1.

Payload: u32 count, u8 width of a gap in bytes, u32 length of the first of two zstd frames; the frames hold the byte
planes of the gaps and those of the values. A gap is the number of unchanged elements since the previous change (or
since the start of the block).
"""

from __future__ import annotations

import struct

import numpy as np

from .._util import zstd as _zstd
from ..errors import CorruptPatch
from ..state.tensors import DType, UIntArray
from . import planes
from .base import Changes, Layout

_LEVEL = 1
_HEAD = struct.Struct("<IBI")
_GAP_TYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"))


class ZstdCodec:
    id = 2
    name = "zstd"

    def supports(self, dtype: DType) -> bool:
        return True

    def encode(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int]:
        positions = np.flatnonzero(old != new)
        gaps = np.diff(positions, prepend=-1) - 1
        largest = int(gaps.max(initial=0))
        gap_type = next(t for t in _GAP_TYPES if largest <= np.iinfo(t).max)
        where = _zstd.compress(b"".join(planes.split(gaps.astype(gap_type))), _LEVEL)
        what = _zstd.compress(b"".join(planes.split(new[positions])), _LEVEL)
        return _HEAD.pack(len(positions), gap_type.itemsize, len(where)) + where + what, len(positions)

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        if len(payload) < _HEAD.size:
            raise CorruptPatch("the block ends inside its head")
        count, width, length = _HEAD.unpack_from(payload)
        if count > len(old) or width not in (1, 2, 4):
            raise CorruptPatch(f"the block claims {count} changes of {len(old)} elements, gaps of {width} bytes")
        frames = payload[_HEAD.size :]
        gaps = planes.merge(_zstd.decompress(frames[:length], count * width), np.dtype(f"<u{width}"))
        values = planes.merge(_zstd.decompress(frames[length:], count * layout.dtype.width), layout.dtype.uint)
        positions = np.cumsum(gaps.astype(np.uint64) + np.uint64(1)) - np.uint64(1)
        if count and int(positions[-1]) >= len(old):
            raise CorruptPatch(f"change at element {int(positions[-1])}, beyond the block's {len(old)}")
        return Changes(positions.astype(np.uint32), values)
