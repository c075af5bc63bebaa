"""The last states of one block: the newest in full, and for each older one the old bits of what changed after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..codec import Changes
from ..state import bits
from ..state.tensors import UIntArray
from .last_changes import Step


class EarlierBlock(NamedTuple):
    """The block ``k`` states before the newest one, and where it changed at least once since. Views, valid until the
    next one is asked for."""

    k: int
    elements: UIntArray
    touched: npt.NDArray[np.bool_]


class BlockHistory:
    """At most ``depth`` states before the newest.

    An older state takes a position and a value a change, or one copy of the block where that is less; so the whole
    takes at most ``depth + 1`` copies.
    """

    def __init__(self, depth: int) -> None:
        self.newest: UIntArray | None = None
        self._undo: deque[Changes | UIntArray] = deque(maxlen=depth)

    @property
    def nbytes(self) -> int:
        held = 0 if self.newest is None else self.newest.nbytes
        return held + sum(
            u.positions.nbytes + u.values.nbytes if isinstance(u, Changes) else u.nbytes for u in self._undo
        )

    def push(self, elements: UIntArray) -> None:
        """Takes a copy of the next state's elements."""
        if self.newest is None:
            self.newest = elements.copy()
            return
        positions = bits.differing(self.newest, elements)
        if positions.size * (positions.itemsize + elements.itemsize) < elements.nbytes:
            self._undo.append(Changes(positions, bits.take(self.newest, positions)))
            bits.put(self.newest, positions, bits.take(elements, positions))
        else:
            self._undo.append(self.newest)
            self.newest = elements.copy()

    def last_step(self) -> Step:
        """What changed from the state before to the newest one, of two and more."""
        newest, undo = self.newest, self._undo[-1]
        assert newest is not None
        if isinstance(undo, Changes):
            return Step(undo.positions, undo.values, bits.take(newest, undo.positions))
        positions = bits.differing(undo, newest)
        return Step(positions, bits.take(undo, positions), bits.take(newest, positions))

    def earlier(self) -> Iterator[EarlierBlock]:
        """The states before the newest, the latest first."""
        if self.newest is None:
            return
        now = self.newest.copy()
        touched = np.zeros(now.size, np.bool_)
        for k, undo in enumerate(reversed(self._undo), 1):
            if isinstance(undo, Changes):
                bits.put(now, undo.positions, undo.values)
                touched[undo.positions] = True
            else:
                touched |= undo != now
                now = undo.copy()
            yield EarlierBlock(k, now, touched)
