"""How the changes of one block are coded (docs/format.md, section 3.5).

Users choose between ``"auto"`` and ``"zstd"``. For ``"auto"`` the kernel chooses among the codecs
that code against the old elements (``src/native/codecs/block.cpp``); `encode_block` replaces its
choice by ``RAW`` where that is smaller.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _native
from ..errors import CorruptPatch, InputError
from ..state import bits
from ..state.bits import UIntArray
from ..state.tensors import DType
from . import planes

__all__ = ["CODECS", "Changes", "Encoded", "Layout", "Run", "decode_block", "encode_block"]

AUTO, ZSTD = "auto", "zstd"
CODECS = (AUTO, ZSTD)
"""The values a user can choose: the smallest codec that is fast, or the layout of the PULSE
paper."""

SAME, RAW, PAPER, GAPS, SPARSE, TABLE, HISTORY, NIBBLES = range(8)
"""The ids of codecs in a patch. `SAME`: no element changed, the payload is empty. `HISTORY`: the
decoder needs the changes of the versions before. `NIBBLES`: integers that are packed codes of four
bits."""

_NAMES = {
    SAME: "same",
    RAW: "raw",
    PAPER: "zstd",
    GAPS: "gaps",
    SPARSE: "sparse",
    TABLE: "table",
    HISTORY: "history",
    NIBBLES: "nibbles",
}

MAX_BLOCK_ELEMENTS = 1 << 24
"""Positions in a block fit in 32 bits with room to spare; also the cap on what one block may make a
reader allocate."""

# A block whose payload exceeds this share of its plain bytes is also tried raw; below it raw never
# wins, because byte planes save at most about a third of trained weights.
_TRY_RAW = 0.5


class Run(NamedTuple):
    """The ``elements`` that a block holds of one tensor. ``row``: the tensor's last dimension (its
    length if it has only one). ``phase``: the position of the run's first element in its row."""

    elements: int
    row: int
    phase: int


Past = tuple[npt.NDArray[np.uint8], ...]
"""What changed in a block in each of the last versions, oldest first, as records
(`pulse_rl._native.history_records`). The last version is the one of the old bits."""


class Layout(NamedTuple):
    """What encoder and decoder know about a block in addition to the old bits: its dtype, the rows
    of its tensors, and its ``past``."""

    dtype: DType
    runs: tuple[Run, ...]
    past: Past = ()

    @classmethod
    def flat(cls, dtype: DType, elements: int) -> Layout:
        """The layout of a block that is one 1-D tensor of ``elements`` elements of ``dtype``."""
        return cls(dtype, (Run(elements, max(elements, 1), 0),))


class Changes(NamedTuple):
    """The changed elements of one block, each array of shape [changes]: positions, strictly
    ascending, and the new bits there. ``before``: the old bits there, if the decoder kept them."""

    positions: npt.NDArray[np.uint32]
    values: UIntArray
    before: UIntArray | None = None

    def replaced(self, old: UIntArray) -> UIntArray:
        """The old bits, of a block with the elements ``old``."""
        return bits.take(old, self.positions) if self.before is None else self.before


class Encoded(NamedTuple):
    """A block as a patch stores it. ``found``: the changes that the encoder compared, if it kept
    them. ``decoded``: what the payload decodes to, if the encoder proved it."""

    codec_id: int
    payload: bytes
    changed: int
    found: Changes | None = None
    decoded: Changes | None = None


def check_codec(name: str) -> None:
    """Raises InputError unless ``name`` is one of `CODECS`."""
    if name not in CODECS:
        raise InputError(f"unknown codec {name!r}", hint=f"Choose one of: {', '.join(CODECS)}.")


def codec_name(codec_id: int) -> str:
    """The name of a codec of a patch. Raises CorruptPatch for an unknown id."""
    if codec_id not in _NAMES:
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
    Raises: CorruptPatch if a proved payload does not decode, because somebody wrote to the
        elements meanwhile.
    """
    # 1. The payload: by byte planes, or by the codec that the kernel chooses.
    found = decoded = None
    if codec == ZSTD or layout.dtype.width > 4:
        codec_id = PAPER
        payload, changed = planes.encode_paper(old, new)
    else:
        try:
            codec_id, payload, changed, seen, proved = _native.encode_block(
                list(layout.past),
                _bytes(old),
                _bytes(new),
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
        raw = planes.encode_raw(new)
        if len(raw) < len(payload):
            return Encoded(RAW, raw, changed)
    return Encoded(codec_id, payload, changed, found, decoded)


def decode_block(codec_id: int, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
    """Decode the changes that a ``payload`` of the codec ``codec_id`` makes to ``old``, shape
    [elements], which ``layout`` describes.

    Returns: Changes whose positions ascend and are below ``len(old)``, for any payload.
    Raises: FormatError if the payload is malformed.
    """
    name = codec_name(codec_id)
    if codec_id == SAME:
        return Changes(np.empty(0, np.uint32), np.empty(0, layout.dtype.uint))
    if codec_id == RAW:
        new = planes.decode_raw(payload, len(old), layout.dtype.uint)
        positions = bits.differing(old, new)
        return Changes(positions, new[positions])
    if codec_id == PAPER:
        return Changes(*planes.decode_paper(payload, len(old), layout.dtype.uint))
    if layout.dtype.width > 4:
        raise CorruptPatch(f"codec {name} does not code {layout.dtype.name}")
    data = np.frombuffer(payload, np.uint8)
    try:
        past = list(layout.past) if codec_id == HISTORY else []
        found = _native.decode_block(
            codec_id, past, data, _bytes(old), element_kind(layout.dtype), list(layout.runs)
        )
    except _native.Malformed as error:
        raise CorruptPatch(str(error)) from None
    return _changes(found, layout.dtype)


def element_kind(dtype: DType) -> tuple[int, int, int, bool]:
    """(width, shift, mask, floating), as the kernels take them. The class of an element is its
    exponent field, ``bits >> shift & mask``; integers are all of one class."""
    if dtype.exponent is None:
        return dtype.width, 0, 0, False
    shift, width = dtype.exponent
    return dtype.width, shift, (1 << width) - 1, True


def _bytes(elements: UIntArray) -> npt.NDArray[np.uint8]:
    return elements.view(np.uint8)


def _changes(
    found: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.uint8]], dtype: DType
) -> Changes:
    positions, values, before = found
    return Changes(positions, values.view(dtype.uint), before.view(dtype.uint))
