"""The registry of codecs, and the choice between them for one block.

To add a codec: write a module with a class that implements `base.Codec`, give it an unused id, add it to ``_CODECS``,
specify its payload in docs/format.md and add golden bytes to the tests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._native import sampled_spread
from ..errors import CorruptPatch, InputError
from ..state.tensors import UIntArray
from .base import MAX_BLOCK_ELEMENTS, Changes, Codec, Layout, Past, Run
from .context import ContextCodec
from .dense import DenseCodec
from .groups import GroupsCodec
from .history import HistoryCodec, encode_few
from .rans import RansCodec
from .zstd import ZstdCodec

__all__ = [
    "DEFAULT",
    "HISTORY",
    "MAX_BLOCK_ELEMENTS",
    "SAME",
    "Changes",
    "Codec",
    "Encoded",
    "Layout",
    "Past",
    "Run",
    "by_id",
    "by_name",
    "encode_block",
    "names",
]

SAME = 0
"""The id of a block without changes: its payload is empty."""

HISTORY = HistoryCodec.id
"""The id of blocks that are decoded by what changed before."""

_GROUPS = GroupsCodec()
_CODECS: tuple[Codec, ...] = (DenseCodec(), ZstdCodec(), ContextCodec(), RansCodec(), HistoryCodec(), _GROUPS)
DEFAULT = "context"

# From this density on `rans` takes the place of `context`, where the changes are so evenly spread that it costs at most
# about a tenth more bytes (docs/design/0023), and in blocks so large that its states do not show.
_MANY, _EVEN, _LARGE = 0.03, 0.8, 1 << 19

# A block whose patch exceeds this share of its plain bytes is also tried dense; below it dense never wins, because
# byte planes save at most about a third of trained weights.
_TRY_DENSE = 0.5


class Encoded(NamedTuple):
    """A block as a patch has it. ``found``: what was seen to have changed, where the encoder kept it; ``decoded``: what
    the payload decodes to, where the encoder has proved it."""

    codec_id: int
    payload: bytes
    changed: int
    found: Changes | None = None
    decoded: Changes | None = None


def names() -> list[str]:
    """The codecs that a user can choose; ``groups`` stands in for ``context`` by itself."""
    return [codec.name for codec in _CODECS if codec is not _GROUPS]


def by_name(name: str) -> Codec:
    """The codec called ``name``; raises InputError."""
    for codec in _CODECS:
        if codec.name == name:
            return codec
    raise InputError(f"unknown codec {name!r}", hint=f"Choose one of: {', '.join(names())}.")


def by_id(codec_id: int) -> Codec:
    """The codec with the id ``codec_id`` from a patch; raises CorruptPatch."""
    for codec in _CODECS:
        if codec.id == codec_id:
            return codec
    raise CorruptPatch(f"codec {codec_id} is unknown", hint="The patch may come from a newer pulse-rl: upgrade.")


def encode_block(codec: Codec, old: UIntArray, new: UIntArray, layout: Layout, *, prove: bool = False) -> Encoded:
    """Encodes the change of one block from ``old`` to ``new``, described by ``layout``: with ``codec``, with the dense
    codec if that is smaller, or as `SAME` if nothing changed. Where many elements changed, ``rans`` stands in for
    ``context`` and ``history``; ``context`` for ``history`` where the past does not help; ``groups`` for ``context`` in
    large blocks. To ``prove`` a block whose proof is cheaper beside its coding, it is decoded at once.
    """
    if not codec.supports(layout.dtype):
        codec = by_name("zstd")
    if codec.name in ("context", "history") and _many_changes(old, new):
        codec = by_name("rans")
    found = decoded = None
    if codec.name in ("context", "history"):
        past = layout.past if codec.name == "history" else ()
        payload, name, found, decoded = encode_few(old, new, layout._replace(past=past), prove=prove)
        changed = len(found.positions)
        codec = by_name(name)
    else:
        encoded = codec.encode(old, new, layout)
        assert encoded is not None
        payload, changed = encoded
    if changed == 0:
        return Encoded(SAME, b"", 0)
    if len(payload) > _TRY_DENSE * new.nbytes:
        dense = by_name("dense")
        whole = dense.encode(old, new, layout)
        if whole and len(whole[0]) < len(payload):
            return Encoded(dense.id, whole[0], changed)
    return Encoded(codec.id, payload, changed, found, decoded)


def _many_changes(old: UIntArray, new: UIntArray) -> bool:
    if old.size < _LARGE:
        return False
    density, evenness = sampled_spread(old.view(np.uint8), new.view(np.uint8), old.dtype.itemsize)
    return density >= _MANY and evenness >= _EVEN
