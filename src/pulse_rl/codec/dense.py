"""The fallback when a patch would be larger than the elements themselves: all new values.

Payload: for each byte plane of the values a u32 length and a zstd frame, level 1. The frames are separate because the
planes of a whole tensor are long, and no entropy table fits two of them.
"""

from __future__ import annotations

from .._util import zstd as _zstd
from ..errors import CorruptPatch
from ..state import bits
from ..state.tensors import DType, UIntArray
from . import planes
from .base import Changes, Layout

_LEVEL = 1


class DenseCodec:
    id = 1
    name = "dense"

    def supports(self, dtype: DType) -> bool:
        return True

    def encode(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int]:
        frames = [_zstd.compress(plane, _LEVEL) for plane in planes.split(new)]
        return b"".join(len(f).to_bytes(4, "little") + f for f in frames), len(bits.differing(old, new))

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        cut = []
        for _ in range(layout.dtype.width):
            length = int.from_bytes(payload[:4], "little")
            frame, payload = payload[4 : 4 + length], payload[4 + length :]
            if len(frame) != length:
                raise CorruptPatch("a byte plane is longer than its block")
            cut.append(_zstd.decompress(frame, len(old)))
        if len(payload):
            raise CorruptPatch(f"{len(payload)} bytes follow the block's end")
        new = planes.merge(b"".join(cut), layout.dtype.uint)
        positions = bits.differing(old, new)
        return Changes(positions, new[positions])
