"""The paper's codec (PULSE, Algorithm 1): sorted indices delta-coded and narrowed, absolute new values, zstd level 1.

Payload: u32 count, u8 width of a gap in bytes, then one zstd frame of the gaps' byte planes and the values' byte
planes. A gap is the number of unchanged elements since the previous change (or since the start of the block).
"""

from __future__ import annotations

import struct

import numpy as np

from .. import _zstd
from ..errors import CorruptPatch
from ..tensors import DType, UIntArray
from . import planes
from .base import Changes, Layout

_LEVEL = 1
_HEAD = struct.Struct("<IB")
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
        content = b"".join(planes.split(gaps.astype(gap_type)) + planes.split(new[positions]))
        return _HEAD.pack(len(positions), gap_type.itemsize) + _zstd.compress(content, _LEVEL), len(positions)

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        if len(payload) < _HEAD.size:
            raise CorruptPatch("the block ends inside its head")
        count, width = _HEAD.unpack_from(payload)
        if count > len(old) or width not in (1, 2, 4):
            raise CorruptPatch(f"the block claims {count} changes of {len(old)} elements, gaps of {width} bytes")
        content = _zstd.decompress(payload[_HEAD.size :], count * (width + layout.dtype.width))
        cut = [content[k * count : (k + 1) * count] for k in range(width + layout.dtype.width)]
        gaps, values = planes.merge(cut[:width], np.dtype(f"<u{width}")), planes.merge(cut[width:], layout.dtype.uint)
        positions = np.cumsum(gaps.astype(np.uint64) + np.uint64(1)) - np.uint64(1)
        if count and int(positions[-1]) >= len(old):
            raise CorruptPatch(f"a change at element {int(positions[-1])} of {len(old)}")
        return Changes(positions.astype(np.uint32), values)
