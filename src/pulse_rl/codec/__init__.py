"""How the changes of one block are coded (docs/format.md, section 3.5).

Users choose between ``"auto"`` and ``"zstd"``. For ``"auto"`` the kernel chooses among the codecs
that code against the old elements (``src/native/codecs/block.cpp``). `encode_block` uses ``RAW``
instead if that is smaller.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _native
from ..errors import CorruptPatch, FormatError, InputError
from ..state import bits
from ..state.bits import UIntArray
from ..state.tensors import DType

if TYPE_CHECKING or sys.version_info < (3, 14):
    from backports import zstd
else:
    from compression import zstd

__all__ = ["CODECS", "Changes", "Encoded", "Layout", "Run", "decode_block", "encode_block"]

AUTO, ZSTD = "auto", "zstd"
#: The values that a user can choose: the smallest fast codec, or the layout of the PULSE paper.
CODECS = (AUTO, ZSTD)

#: The ids of codecs in a patch. `SAME`: no element changed, and the payload is empty. `HISTORY`:
#: the decoder needs the changes of the versions before. `NIBBLES`: integers that are packed codes
#: of four bits.
SAME, RAW, PAPER, GAPS, SPARSE, TABLE, HISTORY, NIBBLES = range(8)

# In the order of the ids.
_NAMES = ("same", "raw", "zstd", "gaps", "sparse", "table", "history", "nibbles")

#: Positions in a block fit in 32 bits with room to spare. This also bounds what one block can make
#: a reader allocate.
MAX_BLOCK_ELEMENTS = 1 << 24

# A block whose payload exceeds this share of its plain bytes is also tried raw; below it raw never
# wins, because byte planes save at most about a third of trained weights.
_TRY_RAW = 0.5


class Run(NamedTuple):
    """The ``elements`` of one tensor in a block.

    ``row`` is the tensor's last dimension, or its length if it has only one. ``phase`` is the
    position of the run's first element in its row.
    """

    elements: int
    row: int
    phase: int


#: The changes of a block in each of the last versions, oldest first, as records
#: (`pulse_rl._native.history_records`). The last of them led to the old bits.
Past = tuple[npt.NDArray[np.uint8], ...]


class Layout(NamedTuple):
    """The shape of a block: its dtype, the rows of its tensors, and its ``past`` changes.

    Encoder and decoder both know it, in addition to the old bits.
    """

    dtype: DType
    runs: tuple[Run, ...]
    past: Past = ()


class Changes(NamedTuple):
    """The changed elements of one block: ascending positions and the new bits, each of shape
    [changes].

    ``before`` holds the old bits at the positions, if the decoder kept them.
    """

    positions: npt.NDArray[np.uint32]
    values: UIntArray
    before: UIntArray | None = None

    def replaced(self, old: UIntArray) -> UIntArray:
        """The old bits at the positions, in a block with the elements ``old``."""
        return bits.take(old, self.positions) if self.before is None else self.before


class Encoded(NamedTuple):
    """A block as a patch stores it.

    ``found`` holds the changes that the encoder compared, if it kept them. ``decoded`` holds what
    the payload decodes to, if the encoder proved it.
    """

    codec_id: int
    payload: bytes
    changed: int
    found: Changes | None = None
    decoded: Changes | None = None


def check_codec(name: str) -> None:
    """Raise InputError unless ``name`` is one of `CODECS`."""
    if name not in CODECS:
        raise InputError(f"unknown codec {name!r}", hint=f"Choose one of: {', '.join(CODECS)}.")


def codec_name(codec_id: int) -> str:
    """The name of a codec id of a patch; raises CorruptPatch for an unknown id."""
    if not 0 <= codec_id < len(_NAMES):
        raise CorruptPatch(
            f"codec {codec_id} is unknown",
            hint="The patch may come from a newer pulse-rl: upgrade.",
        )
    return _NAMES[codec_id]


def encode_block(
    old: UIntArray,
    new: UIntArray,
    layout: Layout,
    *,
    codec: str = AUTO,
    prove: bool = False,
    only: int = 0,
) -> Encoded:
    """Encode the change of one block from ``old`` to ``new``.

    Args:
        old: The old bits, shape [elements], at most ``MAX_BLOCK_ELEMENTS``.
        new: The new bits, of the same shape.
        layout: The dtype, the tensors' rows and the history of the block.
        codec: One of `CODECS`. Elements of 8 bytes are always coded as by ``"zstd"``.
        prove: Decode a ``HISTORY`` block at once, which is cheaper than to decode it later.
        only: For tests, the id of the codec.
    Returns: The block; ``SAME`` if nothing changed.
    Raises: CorruptPatch if a proved payload does not decode, because another thread wrote to the
        elements meanwhile.
    """
    # 1. The payload: by byte planes, or by the codec that the kernel chooses.
    found = decoded = None
    if codec == ZSTD or layout.dtype.width > 4:
        codec_id = PAPER
        payload, changed = _encode_paper(old, new)
    else:
        try:
            codec_id, payload, changed, seen, proved = _native.encode_block(
                list(layout.past),
                old.view(np.uint8),
                new.view(np.uint8),
                element_kind(layout.dtype),
                list(layout.runs),
                prove,
                only,
            )
        except _native.Malformed as error:
            raise CorruptPatch(str(error)) from None
        found = Changes(seen[0], seen[1].view(layout.dtype.uint)) if seen else None
        decoded = _changes(proved, layout.dtype) if proved else None
    if changed == 0:
        return Encoded(SAME, b"", 0)
    # 2. All new elements, where so much changed that they take fewer bytes.
    if len(payload) > _TRY_RAW * new.nbytes and not only:
        raw = _encode_raw(new)
        if len(raw) < len(payload):
            return Encoded(RAW, raw, changed)
    return Encoded(codec_id, payload, changed, found, decoded)


def decode_block(codec_id: int, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
    """Decode the changes that a payload makes to the elements ``old``.

    Args:
        codec_id: The codec of the payload.
        payload: The bytes of the block.
        old: The old bits, shape [elements].
        layout: The dtype, the tensors' rows and the history of the block.
    Returns: Changes whose positions ascend and are below ``len(old)``, for any payload.
    Raises: FormatError if the payload is malformed.
    """
    name = codec_name(codec_id)
    if codec_id == SAME:
        return Changes(np.empty(0, np.uint32), np.empty(0, layout.dtype.uint))
    if codec_id == RAW:
        new = _decode_raw(payload, len(old), layout.dtype.uint)
        positions = bits.differing(old, new)
        return Changes(positions, new[positions])
    if codec_id == PAPER:
        return Changes(*_decode_paper(payload, len(old), layout.dtype.uint))
    if layout.dtype.width > 4:
        raise CorruptPatch(f"codec {name} does not code {layout.dtype.name}")
    # The kernel checks every position and length: a hostile payload raises Malformed.
    data = np.frombuffer(payload, np.uint8)
    try:
        past = list(layout.past) if codec_id == HISTORY else []
        found = _native.decode_block(
            codec_id, past, data, old.view(np.uint8), element_kind(layout.dtype), list(layout.runs)
        )
    except _native.Malformed as error:
        raise CorruptPatch(str(error)) from None
    return _changes(found, layout.dtype)


def element_kind(dtype: DType) -> tuple[int, int, int, bool]:
    """(width, shift, mask, floating) of a dtype, as the kernels take it.

    The class of an element is its exponent field, ``bits >> shift & mask``. Integers have one
    class.
    """
    if dtype.exponent is None:
        return dtype.width, 0, 0, False
    shift, width = dtype.exponent
    return dtype.width, shift, (1 << width) - 1, True


def _changes(
    found: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.uint8]], dtype: DType
) -> Changes:
    positions, values, before = found
    return Changes(positions, values.view(dtype.uint), before.view(dtype.uint))


# -- the two codecs without a kernel of their own: byte planes through zstd
#
# Byte planes: the lowest bytes of all elements together, then the next bytes, and so on. The planes
# of a weight differ in kind (sign and exponent repeat, mantissas look random), so a byte compressor
# does better on one plane after another.
#
# * raw: all new elements. For each plane a u32 length and a zstd frame. Each plane has its own
#   frame, because the planes of a whole tensor are long and no entropy table fits two of them.
# * paper (PULSE, Algorithm 1): sorted positions, delta-coded and narrowed, and the new values: u32
#   number of changes, u8 width of a gap in bytes, u32 length of the first frame. Then a zstd frame
#   of the planes of the gaps, and one of the planes of the values. A gap is the number of unchanged
#   elements between a change and the one before it, or the start of the block.

_LEVEL = 1
_HEAD = struct.Struct("<IBI")
_GAP_TYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"))


def _encode_raw(new: UIntArray) -> bytes:
    """The payload of all elements ``new`` [elements]."""
    frames = [compress(plane, _LEVEL) for plane in _split(new)]
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


def _decode_raw(
    payload: memoryview, elements: int, dtype: np.dtype[np.unsignedinteger]
) -> UIntArray:
    """All new elements [elements]. Raises FormatError."""
    cut = []
    for _ in range(dtype.itemsize):
        length = int.from_bytes(payload[:4], "little")
        frame, payload = payload[4 : 4 + length], payload[4 + length :]
        if len(frame) != length:
            raise CorruptPatch("a byte plane is longer than its block")
        cut.append(decompress(frame, elements))
    if len(payload):
        raise CorruptPatch(f"{len(payload)} bytes follow the block's end")
    return _merge(b"".join(cut), dtype)


def _encode_paper(old: UIntArray, new: UIntArray) -> tuple[bytes, int]:
    """(payload, number of changes) of ``old`` and ``new``, both of shape [elements]."""
    positions = np.flatnonzero(old != new)  # [changes]
    gaps = np.diff(positions, prepend=-1) - 1
    largest = int(gaps.max(initial=0))
    gap_type = next(t for t in _GAP_TYPES if largest <= np.iinfo(t).max)
    where = compress(b"".join(_split(gaps.astype(gap_type))), _LEVEL)
    what = compress(b"".join(_split(new[positions])), _LEVEL)
    return _HEAD.pack(len(positions), gap_type.itemsize, len(where)) + where + what, len(positions)


def _decode_paper(
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
    # 2. The frames. A payload of 13 bytes may claim terabytes: `decompress` takes no more than
    # the size that the head implies.
    frames = payload[_HEAD.size :]
    gaps = _merge(decompress(frames[:length], count * width), np.dtype(f"<u{width}"))
    values = _merge(decompress(frames[length:], count * dtype.itemsize), dtype)
    # 3. Positions. In 64 bits the sum of 2^24 gaps cannot wrap: the last position is the largest.
    positions = np.cumsum(gaps.astype(np.uint64) + np.uint64(1)) - np.uint64(1)
    if count and int(positions[-1]) >= elements:
        raise CorruptPatch(f"change at element {int(positions[-1])}, beyond the block's {elements}")
    return positions.astype(np.uint32), values


def _split(values: UIntArray) -> list[bytes]:
    """One bytes object for each plane, lowest byte first, each as long as ``values`` has
    elements."""
    raw = values.view(np.uint8).reshape(-1, values.dtype.itemsize)  # [elements, width]
    return [np.ascontiguousarray(plane).tobytes() for plane in raw.T]


def _merge(planes: bytes, dtype: np.dtype[np.unsignedinteger]) -> UIntArray:
    raw = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1)  # [width, elements]
    return np.ascontiguousarray(raw.T).reshape(-1).view(dtype)


# -- zstd with a bound on every decode: a 13-byte frame that claims terabytes must not allocate them


def compress(data: bytes | memoryview, level: int) -> bytes:
    """One zstd frame without a checksum, since every caller covers its bytes with SHA-256."""
    return zstd.compress(data, level)


def decompress(data: bytes | memoryview, size: int) -> bytes:
    """The content of exactly one zstd frame, which must have ``size`` bytes; raises FormatError."""
    # At most size + 1 bytes are decoded: one more than promised shows that the frame is too long.
    decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 27})
    try:
        content = decoder.decompress(data, size + 1)
    except zstd.ZstdError as error:
        raise FormatError(f"not a zstd frame: {error}") from None
    if len(content) != size or not decoder.eof or decoder.unused_data:
        raise FormatError(f"the zstd frame does not hold the {size} bytes it should")
    return content
