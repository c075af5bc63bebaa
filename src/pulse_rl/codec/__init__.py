"""How the changes of one block are coded (docs/format.md, section 3.5).

A user says ``"auto"`` or ``"zstd"`` and nothing else. Which codec an ``"auto"`` block gets is
decided in `encode_block` and, of those that code against the old elements, in the kernel that it
calls (``src/native/codecs/block.cpp``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _native
from ..errors import CorruptPatch, InputError
from ..state import bits
from ..state.tensors import DType, UIntArray
from . import planes

__all__ = ["CODECS", "Changes", "Encoded", "Layout", "Run", "decode_block", "encode_block"]

AUTO, ZSTD = "auto", "zstd"
CODECS = (AUTO, ZSTD)
"""What a user can choose: the smallest that is fast, or the layout of the PULSE paper."""

SAME, RAW, PAPER, GAPS, SPARSE, TABLE, HISTORY, NIBBLES = range(8)
"""The ids of codecs in a patch. `SAME`: no element changed, the payload is empty; `HISTORY`:
decoded by what changed in the versions before; `NIBBLES`: integers that are packed codes of four
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
    """``elements`` of one tensor in a block. ``row`` is the tensor's last dimension (its length, if
    it has only one), ``phase`` the position of the run's first element in its row."""

    elements: int
    row: int
    phase: int


Past = tuple[tuple[npt.NDArray[np.uint8], int], ...]
"""What changed in a block in the last versions: records (`pulse_rl._native.history_records`) and
how many versions they span, oldest first; the last ones end at the old bits."""


class Layout(NamedTuple):
    """What both sides know about a block besides the old bits: its dtype, its tensors' rows, and
    its ``past``."""

    dtype: DType
    runs: tuple[Run, ...]
    past: Past = ()

    @classmethod
    def flat(cls, dtype: DType, elements: int) -> Layout:
        """The layout of a block that is one 1-D tensor of ``elements`` elements of ``dtype``."""
        return cls(dtype, (Run(elements, max(elements, 1), 0),))


class Changes(NamedTuple):
    """The changed elements of one block: uint32 positions, strictly ascending, and the new bits at
    them. ``before``: the old bits, where a decoder had them at hand."""

    positions: npt.NDArray[np.uint32]
    values: UIntArray
    before: UIntArray | None = None

    def replaced(self, old: UIntArray) -> UIntArray:
        """The old bits, of a block with the elements ``old``."""
        return bits.take(old, self.positions) if self.before is None else self.before


class Encoded(NamedTuple):
    """A block as a patch has it. ``found``: what was seen to have changed, where the encoder kept
    it; ``decoded``: what the payload decodes to, where the encoder has proved it."""

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
    """What a codec of a patch is called; raises CorruptPatch."""
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
    """Encodes the change of one block from ``old`` to ``new``, flat unsigned arrays of at most
    ``MAX_BLOCK_ELEMENTS`` elements that ``layout`` describes, as ``SAME`` if nothing changed.

    ``codec`` is one of `CODECS`; elements of 8 bytes are always coded as by ``"zstd"``. To
    ``prove`` a block whose proof is cheaper beside its coding, it is decoded at once. ``only``: for
    tests, the id of the codec. Raises CorruptPatch if what is proved does not decode, since
    elements were written to meanwhile.
    """
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
    if len(payload) > _TRY_RAW * new.nbytes and not only:
        raw = planes.encode_raw(new)
        if len(raw) < len(payload):
            return Encoded(RAW, raw, changed)
    return Encoded(codec_id, payload, changed, found, decoded)


def decode_block(codec_id: int, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
    """The changes to ``old``, described by ``layout``, that a ``payload`` of the codec ``codec_id``
    encodes: positions in range and ascending. Raises FormatError on a malformed payload."""
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
    """(width, shift, mask, floating), as the kernels take them: the class of an element is its
    exponent field; integers are all of one class."""
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
