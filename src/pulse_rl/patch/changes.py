"""What changed over several moves of a state: per tensor, the elements that moved and their bits."""

from __future__ import annotations

import numpy as np

from ..state.tensors import State
from .patch import TensorChanges

Moves = dict[str, TensorChanges]


def merged(moves: tuple[Moves, ...], state: State) -> Moves:
    """One change per element over several moves, with the bits of the state now."""
    if len(moves) == 1:
        return moves[0]
    whole: Moves = {}
    for name in sorted({name for move in moves for name in move}):
        indices = np.unique(np.concatenate([move[name].indices for move in moves if name in move]))
        whole[name] = TensorChanges(indices, state.read(name)[indices])
    return whole


def difference(old: State, new: State) -> Moves:
    """What a state that replaced another changed in it."""
    changes = {}
    for spec in new.specs:
        indices = np.flatnonzero(old.read(spec.name) != new.read(spec.name))  # may exceed 32-bit positions
        if len(indices):
            changes[spec.name] = TensorChanges(indices, new.read(spec.name)[indices])
    return changes
