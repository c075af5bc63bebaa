"""The codec of large blocks of which few elements changed: what `context` models, by groups of eight elements and 64
coders side by side (docs/format.md, section 3.11).
"""

from __future__ import annotations

import numpy as np

from .._native import Malformed, groups_decode
from ..errors import CorruptPatch
from ..state.tensors import DType, UIntArray
from .base import Changes, Layout, as_changes, element_kind
from .history import encode_few


class GroupsCodec:
    id = 7
    name = "groups"

    def supports(self, dtype: DType) -> bool:
        return dtype.width <= 4

    def encode(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int] | None:
        few = encode_few(old, new, layout._replace(past=()))
        return (few.payload, len(few.found.positions)) if few.codec == self.name else None

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        data = np.frombuffer(payload, np.uint8)
        try:
            found = groups_decode(data, old.view(np.uint8), *element_kind(layout.dtype), list(layout.runs))
        except Malformed as error:
            raise CorruptPatch(str(error)) from None
        return as_changes(found, layout.dtype)
