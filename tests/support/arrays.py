"""Arrays at addresses that numpy would not choose."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def misaligned(array: Array, offset: int = 1) -> Array:
    """The same flat bits at an address ``offset`` bytes past a multiple of 8."""
    room = np.empty(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 8 + offset
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy
