"""The default codec: positions and steps, encoded against the old elements by the native kernels (docs/format.md,
section 3.6).

A weight's chance to change depends on its exponent, since the rounding step does, and the receiver has the old weights.
"""

from __future__ import annotations

import numpy as np

from .._native import Malformed, context_decode, context_encode
from ..errors import CorruptPatch
from ..state.tensors import DType, UIntArray
from .base import Changes, Layout, as_changes, element_kind


class ContextCodec:
    id = 3
    name = "context"

    def supports(self, dtype: DType) -> bool:
        return dtype.width <= 4

    def encode(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int]:
        return context_encode(old.view(np.uint8), new.view(np.uint8), *element_kind(layout.dtype), list(layout.runs))

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        data = np.frombuffer(payload, np.uint8)
        try:
            found = context_decode(data, old.view(np.uint8), *element_kind(layout.dtype), list(layout.runs))
        except Malformed as error:
            raise CorruptPatch(str(error)) from None
        return as_changes(found, layout.dtype)
