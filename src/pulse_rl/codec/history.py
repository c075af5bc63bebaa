"""The codec with memory: elements that changed lately are said first, by when and how they did; all others as `context`
or `groups` have them (docs/format.md, section 3.10).

Momentum lasts for several steps: who has just changed will often change again, in the same direction.
"""

from __future__ import annotations

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
        payload, name, changes = encode_few(old, new, layout)
        return (payload, len(changes.positions)) if name == self.name else None

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        data = np.frombuffer(payload, np.uint8)
        kind = element_kind(layout.dtype)
        try:
            found = history_decode(list(layout.past), data, old.view(np.uint8), *kind, list(layout.runs))
        except Malformed as error:
            raise CorruptPatch(str(error)) from None
        return as_changes(found, layout.dtype)


def encode_few(old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, str, Changes]:
    """(payload, the name of its codec, what was found to have changed): ``history`` where the past helps; else
    ``groups`` in large blocks of which few elements change, and ``context``."""
    kind = element_kind(layout.dtype)
    payload, name, positions, values = history_encode(
        list(layout.past), old.view(np.uint8), new.view(np.uint8), *kind, list(layout.runs)
    )
    return payload, name, Changes(positions, values.view(layout.dtype.uint))
