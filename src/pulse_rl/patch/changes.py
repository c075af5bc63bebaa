"""Changes of a state: per tensor, the elements and their new bits; and merging several changes into
one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..state.bits import UIntArray
from ..state.tensors import State


class Piece(NamedTuple):
    """Changes of a part of a tensor: new bits at ``positions + shift``, which ascend."""

    positions: npt.NDArray[np.uint32] | npt.NDArray[np.int64]
    shift: int
    values: UIntArray

    @property
    def first(self) -> int:
        return int(self.positions[0]) + self.shift


class TensorChanges:
    """Changed elements of one tensor: flat indices, ascending, and the new bits at them. Both are
    put together from ``pieces``, none empty, when they are asked for: indices take four times the
    memory of most changes' bits."""

    __slots__ = ("_count", "_pieces")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        found = tuple(pieces)
        self._pieces = found if len(found) == 1 else tuple(sorted(found, key=attrgetter("first")))
        self._count = sum(len(piece.values) for piece in self._pieces)

    @classmethod
    def at(cls, indices: npt.NDArray[np.int64], values: UIntArray) -> TensorChanges:
        """New bits ``values`` at ``indices``, which ascend."""
        return cls((Piece(indices, 0, values),))

    def __len__(self) -> int:
        """How many elements."""
        return self._count

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """int64, ascending, into the flattened tensor."""
        return self._joined().positions.astype(np.int64, copy=False)

    @property
    def values(self) -> UIntArray:
        """The new bits there."""
        return self._joined().values

    def fits(self, elements: int, width: int) -> bool:
        """Whether it can be written into a tensor of so many elements of ``width`` bytes."""
        kind = np.dtype(f"u{width}")
        for positions, shift, values in self._pieces:
            if (
                values.dtype != kind
                or positions.dtype.kind not in "iu"
                or values.shape != positions.shape
            ):
                return False
            if (
                len(values)
                and not -shift <= int(positions.min()) <= int(positions.max()) < elements - shift
            ):
                return False
        return True

    def cut(self, most: int) -> Iterator[TensorChanges]:
        """The same in parts of at most so many elements."""
        for positions, shift, values in self._pieces:
            for start in range(0, len(values), most):
                part = slice(start, start + most)
                yield TensorChanges((Piece(positions[part], shift, values[part]),))

    def write_into(self, indices: npt.NDArray[Any], values: UIntArray) -> None:
        """Writes both into arrays of this length; the indices as int32, where that is enough for
        them, or int64."""
        at = 0
        for positions, shift, new in self._pieces:
            part = slice(at, at + len(new))
            np.add(positions, shift, out=indices[part], dtype=np.int64, casting="unsafe")
            values[part] = new
            at += len(new)

    def _joined(self) -> Piece:
        pieces = self._pieces
        if len(pieces) == 1 and pieces[0].positions.dtype == np.int64:
            return pieces[0]
        indices = np.empty(self._count, np.int64)
        at = 0
        for positions, shift, values in pieces:
            np.add(positions, shift, out=indices[at : at + len(values)], dtype=np.int64)
            at += len(values)
        joined = Piece(
            indices,
            0,
            pieces[0].values if len(pieces) == 1 else np.concatenate([p.values for p in pieces]),
        )
        self._pieces = (joined,)
        return joined


StateChanges = dict[str, TensorChanges]
"""What changed in a state, by the name of the tensor; tensors without changes are left out."""


def merged(steps: tuple[StateChanges, ...], state: State) -> StateChanges:
    """One change per element over several steps, with the bits of ``state``, to which the last one
    led."""
    if len(steps) == 1:
        return steps[0]
    whole: StateChanges = {}
    for name in sorted({name for step in steps for name in step}):
        # Places are joined, and values read from the state: the last of several changes is what it
        # holds.
        indices = np.unique(np.concatenate([step[name].indices for step in steps if name in step]))
        whole[name] = TensorChanges.at(indices, state.read(name)[indices])
    return whole


def elements(changes: StateChanges) -> int:
    """How many changed."""
    return sum(len(changed) for changed in changes.values())


def difference(old: State, new: State) -> StateChanges:
    """What changed where ``new`` took the place of ``old``, a state of the same tensors."""
    changes = {}
    for spec in new.specs:
        indices = np.flatnonzero(
            old.read(spec.name) != new.read(spec.name)
        )  # may exceed 32-bit positions
        if len(indices):
            changes[spec.name] = TensorChanges.at(indices, new.read(spec.name)[indices])
    return changes
