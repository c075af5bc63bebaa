"""The SHA-256 tree of a state that a patch leads to: new leaves where a block changed, the old state's elsewhere."""

from __future__ import annotations

from itertools import accumulate, pairwise

from ..codec import Changes
from ..state.digest import LEAF_BYTES, PartDigest, StateDigest, changed_leaves_of, leaves_of
from ..state.tensors import State, UIntArray
from .blocks import Block


def block_leaves(block: Block, state: State) -> list[bytes]:
    """Leaf digests per segment of a block as it is in ``state``."""
    return leaves_of([state.read(*segment.place) for segment in block.segments])


def changed_leaves(block: Block, before: UIntArray, changes: Changes) -> list[bytes]:
    """Leaf digests per segment of a block with elements ``before`` once ``changes`` are made to them."""
    ends = list(accumulate(segment.stop - segment.start for segment in block.segments))
    arrays = [before[start:end] for start, end in pairwise([0, *ends])]
    return changed_leaves_of(arrays, changes.positions, changes.values)


class TreeUpdate:
    """The tree of a new state, block by block in order; blocks without changes keep the old state's leaves."""

    def __init__(self, old: StateDigest) -> None:
        self._old = old
        self._pieces: dict[str, list[bytes]] = {}

    def add(self, block: Block, leaves: list[bytes] | None) -> None:
        for k, segment in enumerate(block.segments):
            if leaves is not None:
                piece = leaves[k]
            else:
                per_leaf = LEAF_BYTES // segment.spec.dtype.width
                old = self._old.leaves[segment.spec.name]
                piece = old[segment.start // per_leaf * 32 : -(-segment.stop // per_leaf) * 32]
            self._pieces.setdefault(segment.spec.name, []).append(piece)

    def finish(self, tensors: bytes = b"") -> StateDigest:
        """The new tree; of a state that is held in part with the new digests of all ``tensors``."""
        leaves = {spec.name: b"".join(self._pieces.get(spec.name, ())) for spec in self._old.specs}
        if isinstance(self._old, PartDigest):
            return PartDigest(self._old.specs, leaves, self._old.whole, tensors)
        return StateDigest(self._old.specs, leaves)
