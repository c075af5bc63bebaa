"""The classes of parameters that messages are coded by (docs/loco.md, section 3.1), kept from one round to the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._native import shared_octaves
from .gate import Floats
from .parameters import FlatBlock
from .shares import Unit
from .wire import KnownClasses


class Classes:
    """The classes of all parameters of ``blocks`` by their present theta and momentum, as far as they are known: a byte
    for each. Whoever changes theta or momentum renews or forgets them."""

    def __init__(self, blocks: Sequence[FlatBlock]) -> None:
        self._flat = np.empty(blocks[-1].stop, np.uint8)
        self._octaves: list[tuple[int, int] | None] = [None] * len(blocks)

    def forget(self) -> None:
        self._octaves = [None] * len(self._octaves)

    def renewed(self, block: FlatBlock, momentum: Floats) -> KnownClasses:
        """Where the block's new classes go, and for which octaves; ``momentum`` is the block's, and may be the old one,
        which suggests the octaves."""
        octaves = self._octaves[block.number] = shared_octaves(momentum)
        return self._flat[block.start : block.stop], octaves

    def of(self, unit: Unit) -> KnownClasses | None:
        octaves = self._octaves[unit.block.number]
        first = unit.block.start
        return None if octaves is None else (self._flat[first + unit.start : first + unit.stop], octaves)
