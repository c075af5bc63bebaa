"""The SHA-256 tree of a state that a patch leads to: new leaves where a block changed, the old state's elsewhere."""

from __future__ import annotations

import numpy as np

from ..codec import Changes
from ..state import bits
from ..state.digest import LEAF_BYTES, StateDigest, leaf_digests
from ..state.tensors import UIntArray
from .blocks import Block


def block_leaves(block: Block, elements: UIntArray) -> list[bytes]:
    """Leaf digests per segment of a block whose elements are given one segment after another."""
    leaves, at = [], 0
    for segment in block.segments:
        length = segment.stop - segment.start
        leaves.append(leaf_digests(elements[at : at + length]))
        at += length
    return leaves


def changed_leaves(block: Block, before: UIntArray, changes: Changes) -> list[bytes]:
    """Leaf digests per segment of a block with elements ``before`` and ``changes`` made to them, which is done leaf by
    leaf, in memory that stays in the cache."""
    per_leaf = LEAF_BYTES // block.dtype.width
    room = np.empty(min(per_leaf, block.elements), before.dtype)
    leaves, base = [], 0
    for segment in block.segments:
        end = base + segment.stop - segment.start
        starts = [*range(base, end, per_leaf), end]
        bounds = np.searchsorted(changes.positions, starts)
        digests = []
        for k in range(len(starts) - 1):
            leaf = room[: starts[k + 1] - starts[k]]
            leaf[:] = before[starts[k] : starts[k + 1]]
            own = slice(int(bounds[k]), int(bounds[k + 1]))
            bits.put(leaf, changes.positions[own], changes.values[own], starts[k])
            digests.append(leaf_digests(leaf))
        leaves.append(b"".join(digests))
        base = end
    return leaves


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

    def finish(self) -> StateDigest:
        leaves = {spec.name: b"".join(self._pieces.get(spec.name, ())) for spec in self._old.specs}
        return StateDigest(self._old.specs, leaves)
