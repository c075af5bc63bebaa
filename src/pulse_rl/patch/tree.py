"""The SHA-256 tree of a state that a patch leads to: new leaves where a block changed, the old
state's elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

import numpy as np

from .._util.threads import checked_threads, default_threads, ordered_map
from ..codec import Changes
from ..state import bits
from ..state.digest import (
    LEAF_BYTES,
    Changed,
    PartDigest,
    StateDigest,
    changed_leaves_of,
    leaves_of,
)
from ..state.tensors import Segment, State, TensorSpec, UIntArray
from .blocks import Block
from .changes import StateChanges, TensorChanges

_NOWHERE = np.empty(0, np.uint32)
_SIDE_BY_SIDE = 16
_ROUNDS = 4  # of so many leaves for each thread, at least


def hashed_together(blocks: Sequence[Block], threads: int | None) -> list[range]:
    """Which of the blocks one thread hashes at once: neighbors of one dtype, until their leaves
    fill the lanes of a processor, where that leaves enough work for all threads. Raises
    InputError."""
    checked_threads(threads)
    leaves = [
        sum(-(-(s.stop - s.start) * s.spec.dtype.width // LEAF_BYTES) for s in block.segments)
        for block in blocks
    ]
    lanes = (
        _SIDE_BY_SIDE
        if sum(leaves) >= _SIDE_BY_SIDE * _ROUNDS * (threads or default_threads())
        else 1
    )
    groups, start, found = [], 0, 0
    for index, block in enumerate(blocks):
        if found >= lanes or block.dtype != blocks[start].dtype:
            groups.append(range(start, index))
            start, found = index, 0
        found += leaves[index]
    return [*groups, range(start, len(blocks))] if blocks else []


def block_leaves(blocks: Sequence[Block], state: State) -> list[list[bytes]]:
    """Leaf digests per segment of each block as it is in ``state``."""
    pieces = [state.read(*segment.place) for block in blocks for segment in block.segments]
    return _by_block(blocks, leaves_of(pieces)) if pieces else []


def changed_leaves(
    blocks: Sequence[Block], elements: Sequence[UIntArray], changes: Sequence[Changes | None]
) -> list[list[bytes]]:
    """Leaf digests per segment of each of the blocks, of one dtype, that have these ``elements``,
    once their ``changes`` are made to them; None: as they are."""
    pieces = []
    for block, before, made in zip(blocks, elements, changes, strict=True):
        positions, values = made[:2] if made is not None else (_NOWHERE, before[:0])
        # A block's changes, cut where one tensor ends and the next begins: leaves never reach over
        # that.
        ends = list(accumulate(segment.stop - segment.start for segment in block.segments))
        for (start, end), (first, last) in zip(
            pairwise([0, *ends]), pairwise([0, *bits.below(positions, ends)]), strict=True
        ):
            pieces.append(
                Changed(before[start:end], positions[first:last], start, values[first:last])
            )
    return _by_block(blocks, changed_leaves_of(pieces)) if pieces else []


def _by_block(blocks: Sequence[Block], leaves: list[bytes]) -> list[list[bytes]]:
    left = iter(leaves)
    return [list(islice(left, len(block.segments))) for block in blocks]


class TreeUpdate:
    """The tree of a new state, block by block in order; blocks without changes keep the old state's
    leaves."""

    def __init__(self, old: StateDigest) -> None:
        self._old = old
        self._pieces: dict[str, list[bytes]] = {}

    def add(self, block: Block, leaves: list[bytes] | None) -> None:
        for k, segment in enumerate(block.segments):
            if leaves is not None:
                piece = leaves[k]
            else:
                # Segments begin where leaves do, and end there or with their tensor: 32 bytes a
                # leaf, also a short one.
                per_leaf = LEAF_BYTES // segment.spec.dtype.width
                old = self._old.leaves[segment.spec.name]
                piece = old[segment.start // per_leaf * 32 : -(-segment.stop // per_leaf) * 32]
            self._pieces.setdefault(segment.spec.name, []).append(piece)

    def finish(self, tensors: bytes = b"") -> StateDigest:
        """The new tree; of a state that is held in part with the new digests of all ``tensors``."""
        return _tree(
            self._old,
            {spec.name: b"".join(self._pieces.get(spec.name, ())) for spec in self._old.specs},
            tensors,
        )


def rehashed(
    old: StateDigest,
    state: State,
    changes: StateChanges,
    tensors: bytes = b"",
    *,
    threads: int | None = None,
) -> StateDigest:
    """The tree of ``state`` once ``changes`` were made to the one with the tree ``old``: the leaves
    in which something changed are hashed again. ``tensors``: see `TreeUpdate.finish`."""
    leaves = {name: bytearray(digests) for name, digests in old.leaves.items()}
    tasks = [task for name, changed in changes.items() for task in _runs(state.spec(name), changed)]

    def run(task: Segment) -> bytes:
        return leaves_of([state.read(*task.place)])[0]

    for task, digests in zip(tasks, ordered_map(run, tasks, threads), strict=True):
        first = 32 * (task.start * task.spec.dtype.width // LEAF_BYTES)
        leaves[task.spec.name][first : first + len(digests)] = digests
    return _tree(old, {name: bytes(digests) for name, digests in leaves.items()}, tensors)


def _runs(spec: TensorSpec, changes: TensorChanges) -> Iterator[Segment]:
    """The changed leaves of a tensor, those side by side as one segment of at most 16."""
    per_leaf = LEAF_BYTES // spec.dtype.width
    changed = np.unique(changes.indices // per_leaf)
    # Where a row of neighbors begins. Neighbors are hashed in one call, which fills the lanes of
    # a processor.
    starts = np.flatnonzero(np.diff(changed, prepend=-2) != 1)
    for first, end in pairwise([*starts.tolist(), len(changed)]):
        for at in range(first, end, _SIDE_BY_SIDE):
            last = int(changed[min(at + _SIDE_BY_SIDE, end) - 1])
            yield Segment(
                spec, int(changed[at]) * per_leaf, min((last + 1) * per_leaf, spec.elements)
            )


def _tree(old: StateDigest, leaves: dict[str, bytes], tensors: bytes) -> StateDigest:
    if isinstance(old, PartDigest):
        return PartDigest(old.specs, leaves, old.whole, tensors)
    return StateDigest(old.specs, leaves)
