"""The codec of large blocks of which few elements changed: what `context` models, by groups of eight elements and 64
coders side by side (docs/format.md, section 3.11).
"""

from __future__ import annotations

import numpy as np

from .._native import Malformed, groups_decode, groups_encode
from ..errors import CorruptPatch
from ..state.tensors import DType, UIntArray
from .base import Changes, Layout, as_changes, element_kind


class GroupsCodec:
    id = 7
    name = "groups"

    def supports(self, dtype: DType) -> bool:
        return dtype.width <= 4

    def encode(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int] | None:
        payload, by_groups, changes = self.encode_or_context(old, new, layout)
        return (payload, len(changes.positions)) if by_groups else None

    def encode_or_context(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, bool, Changes]:
        """(payload, whether it is this codec's, what was found to have changed): `context` codes what suits it
        better."""
        kind = element_kind(layout.dtype)
        payload, by_groups, positions, values = groups_encode(
            old.view(np.uint8), new.view(np.uint8), *kind, list(layout.runs)
        )
        return payload, by_groups, Changes(positions, values.view(layout.dtype.uint))

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        data = np.frombuffer(payload, np.uint8)
        try:
            found = groups_decode(data, old.view(np.uint8), *element_kind(layout.dtype), list(layout.runs))
        except Malformed as error:
            raise CorruptPatch(str(error)) from None
        return as_changes(found, layout.dtype)
