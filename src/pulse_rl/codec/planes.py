"""The two codecs without a kernel of their own: byte planes through zstd (docs/format.md, section
3.5).

Byte planes: the lowest bytes of all elements together, then the next bytes, and so on. The planes
of a weight differ in kind (sign and exponent repeat, mantissas look random), so a byte compressor
does better on one plane after another.

* raw: all new elements. For each plane a u32 length and a zstd frame. Each plane has its own frame,
  because the planes of a whole tensor are long and no entropy table fits two of them.
* paper (PULSE, Algorithm 1): sorted positions, delta-coded and narrowed, and the new values: u32
  number of changes, u8 width of a gap in bytes, u32 length of the first frame. Then a zstd frame of
  the planes of the gaps, and one of the planes of the values. A gap is the number of unchanged
  elements between a change and the one before it, or the start of the block.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from .._util import zstd
from ..errors import CorruptPatch
from ..state.bits import UIntArray

_LEVEL = 1
_HEAD = struct.Struct("<IBI")
_GAP_TYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"))


def encode_raw(new: UIntArray) -> bytes:
    """The payload of ``new``, shape [elements]."""
    frames = [zstd.compress(plane, _LEVEL) for plane in _split(new)]
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


def decode_raw(
    payload: memoryview, elements: int, dtype: np.dtype[np.unsignedinteger]
) -> UIntArray:
    """All new elements, shape [elements]. Raises FormatError."""
    cut = []
    for _ in range(dtype.itemsize):
        length = int.from_bytes(payload[:4], "little")
        frame, payload = payload[4 : 4 + length], payload[4 + length :]
        if len(frame) != length:
            raise CorruptPatch("a byte plane is longer than its block")
        cut.append(zstd.decompress(frame, elements))
    if len(payload):
        raise CorruptPatch(f"{len(payload)} bytes follow the block's end")
    return _merge(b"".join(cut), dtype)


def encode_paper(old: UIntArray, new: UIntArray) -> tuple[bytes, int]:
    """(payload, number of changes) of ``old`` and ``new``, both of shape [elements]."""
    positions = np.flatnonzero(old != new)  # [changes]
    gaps = np.diff(positions, prepend=-1) - 1
    largest = int(gaps.max(initial=0))
    gap_type = next(t for t in _GAP_TYPES if largest <= np.iinfo(t).max)
    where = zstd.compress(b"".join(_split(gaps.astype(gap_type))), _LEVEL)
    what = zstd.compress(b"".join(_split(new[positions])), _LEVEL)
    return _HEAD.pack(len(positions), gap_type.itemsize, len(where)) + where + what, len(positions)


def decode_paper(
    payload: memoryview, elements: int, dtype: np.dtype[np.unsignedinteger]
) -> tuple[npt.NDArray[np.uint32], UIntArray]:
    """(positions, new elements there), both of shape [changes]. Raises FormatError."""
    # 1. The head, whose numbers bound what the frames may decompress to.
    if len(payload) < _HEAD.size:
        raise CorruptPatch("the block ends inside its head")
    count, width, length = _HEAD.unpack_from(payload)
    if count > elements or width not in (1, 2, 4):
        raise CorruptPatch(
            f"the block claims {count} changes of {elements} elements, gaps of {width} bytes"
        )
    # 2. The frames. A payload of 13 bytes may claim terabytes: `zstd.decompress` takes no more than
    # the size that the head implies.
    frames = payload[_HEAD.size :]
    gaps = _merge(zstd.decompress(frames[:length], count * width), np.dtype(f"<u{width}"))
    values = _merge(zstd.decompress(frames[length:], count * dtype.itemsize), dtype)
    # 3. Positions. In 64 bits the sum of 2^24 gaps cannot wrap: the last position is the largest.
    positions = np.cumsum(gaps.astype(np.uint64) + np.uint64(1)) - np.uint64(1)
    if count and int(positions[-1]) >= elements:
        raise CorruptPatch(f"change at element {int(positions[-1])}, beyond the block's {elements}")
    return positions.astype(np.uint32), values


def _split(values: UIntArray) -> list[bytes]:
    """One bytes object for each plane, lowest first, each as long as ``values`` has elements."""
    raw = values.view(np.uint8).reshape(-1, values.dtype.itemsize)  # [elements, width]
    return [np.ascontiguousarray(plane).tobytes() for plane in raw.T]


def _merge(planes: bytes, dtype: np.dtype[np.unsignedinteger]) -> UIntArray:
    raw = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1)  # [width, elements]
    return np.ascontiguousarray(raw.T).reshape(-1).view(dtype)
