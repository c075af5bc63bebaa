"""The codec of blocks of which many elements changed: the step of every element, by static frequencies that belong to
the old element's exponent (docs/format.md, section 3.8).

`context` adapts with every change, which is a chain of dependent operations; here 64 coders work side by side.
"""

from __future__ import annotations

import numpy as np

from .._native import Malformed, rans_decode, rans_encode
from ..errors import CorruptPatch
from ..state.tensors import DType, UIntArray
from .base import Changes, Layout, as_changes, element_kind


class RansCodec:
    id = 5
    name = "rans"

    def supports(self, dtype: DType) -> bool:
        return dtype.width <= 4

    def encode(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int]:
        return rans_encode(old.view(np.uint8), new.view(np.uint8), *element_kind(layout.dtype))

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        data = np.frombuffer(payload, np.uint8)
        try:
            found = rans_decode(data, old.view(np.uint8), *element_kind(layout.dtype))
        except Malformed as error:
            raise CorruptPatch(str(error)) from None
        return as_changes(found, layout.dtype)
