"""The codec with memory: elements that changed lately are said first, by when and how they did; all others as `context`
or `groups` have them (docs/format.md, section 3.10).

Momentum lasts for several steps: who has just changed will often change again, in the same direction.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._native import Malformed, history_decode, history_encode
from ..errors import CorruptPatch
from ..state.tensors import DType, UIntArray
from .base import Changes, Layout, as_changes, element_kind


class HistoryCodec:
    id = 6
    name = "history"

    def supports(self, dtype: DType) -> bool:
        return dtype.width <= 4

    def encode(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int] | None:
        few = encode_few(old, new, layout)
        return (few.payload, len(few.found.positions)) if few.codec == self.name else None

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        data = np.frombuffer(payload, np.uint8)
        kind = element_kind(layout.dtype)
        try:
            found = history_decode(list(layout.past), data, old.view(np.uint8), *kind, list(layout.runs))
        except Malformed as error:
            raise CorruptPatch(str(error)) from None
        return as_changes(found, layout.dtype)


class Few(NamedTuple):
    """A block of which few elements changed: its ``payload``, the name of its ``codec``, what was ``found`` to have
    changed, and the changes that the payload was ``decoded`` to, where the encoder has done that."""

    payload: bytes
    codec: str
    found: Changes
    decoded: Changes | None


def encode_few(old: UIntArray, new: UIntArray, layout: Layout, *, prove: bool = False) -> Few:
    """By ``history`` where the past helps; else by ``groups`` in large blocks of which few elements change, and by
    ``context``. To ``prove`` a payload of ``history``, it is decoded, too: what is remembered is put together once for
    both; raises CorruptPatch where it cannot be, since the elements were written to.
    """
    kind = element_kind(layout.dtype)
    try:
        payload, name, positions, values, decoded = history_encode(
            list(layout.past), old.view(np.uint8), new.view(np.uint8), *kind, list(layout.runs), prove
        )
    except Malformed as error:
        raise CorruptPatch(str(error)) from None
    found = Changes(positions, values.view(layout.dtype.uint))
    return Few(payload, name, found, as_changes(decoded, layout.dtype) if decoded else None)
