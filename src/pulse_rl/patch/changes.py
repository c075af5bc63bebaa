"""Changes of a state: per tensor, the elements and their new bits; and merging several changes into one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..state.tensors import State, UIntArray


class TensorChanges(NamedTuple):
    """Changed elements of one tensor: flat indices, ascending, and the new bits at them."""

    indices: npt.NDArray[np.int64]
    values: UIntArray


StateChanges = dict[str, TensorChanges]
"""What changed in a state, by the name of the tensor; tensors without changes are left out."""


def merged(steps: tuple[StateChanges, ...], state: State) -> StateChanges:
    """One change per element over several steps, with the bits of ``state``, to which the last one led."""
    if len(steps) == 1:
        return steps[0]
    whole: StateChanges = {}
    for name in sorted({name for step in steps for name in step}):
        indices = np.unique(np.concatenate([step[name].indices for step in steps if name in step]))
        whole[name] = TensorChanges(indices, state.read(name)[indices])
    return whole


def elements(changes: StateChanges) -> int:
    """How many changed."""
    return sum(len(changed.indices) for changed in changes.values())


def difference(old: State, new: State) -> StateChanges:
    """What changed where ``new`` took the place of ``old``, a state of the same tensors."""
    changes = {}
    for spec in new.specs:
        indices = np.flatnonzero(old.read(spec.name) != new.read(spec.name))  # may exceed 32-bit positions
        if len(indices):
            changes[spec.name] = TensorChanges(indices, new.read(spec.name)[indices])
    return changes
