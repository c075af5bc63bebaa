"""The SHA-256 tree of a patch's target: new leaves for changed blocks, old leaves elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from .._util.threads import default_threads
from ..codec import Changes
from ..state import bits
from ..state.bits import UIntArray
from ..state.digest import (
    LEAF_BYTES,
    Changed,
    PartDigest,
    StateDigest,
    changed_leaves_of,
    leaves_of,
)
from ..state.tensors import Segment, TensorSpec
from .blocks import Block

#: Digests of leaves by tensor name and leaf number.
Leaves = dict[tuple[str, int], bytes]
# The vector lanes of a core hash this many leaves at once (AVX-512; other kernels have 4 or 8).
SIDE_BY_SIDE = 16
_ROUNDS = 4  # full lanes that each thread needs; with fewer leaves a block is a group


def hashed_together(blocks: Sequence[Block], threads: int | None) -> list[range]:
    """Groups of blocks, as ranges of indices, that one thread hashes in one call.

    Neighbors of one dtype form a group until their leaves fill the lanes of a processor. Groups are
    single blocks if there are too few leaves for all threads.
    """
    leaves = [
        sum(-(-(s.stop - s.start) * s.spec.dtype.width // LEAF_BYTES) for s in block.segments)
        for block in blocks
    ]
    enough = SIDE_BY_SIDE * _ROUNDS * (threads or default_threads())
    lanes = SIDE_BY_SIDE if sum(leaves) >= enough else 1
    # Close a group when it fills the lanes or the dtype changes.
    groups, start, found = [], 0, 0
    for index, block in enumerate(blocks):
        if found >= lanes or block.dtype != blocks[start].dtype:
            groups.append(range(start, index))
            start, found = index, 0
        found += leaves[index]
    return [*groups, range(start, len(blocks))] if blocks else []


class ChangedBlock(NamedTuple):
    """A block with changes.

    ``elements`` are those before the ``changes``, or after them if ``made``.
    """

    block: Block
    elements: UIntArray
    changes: Changes
    made: bool


def inner(segment: Segment) -> Segment | None:
    """The part of a segment whose leaves lie wholly in it; None if there is none."""
    spec, per_leaf = segment.spec, LEAF_BYTES // segment.spec.dtype.width
    start = -(-segment.start // per_leaf) * per_leaf
    stop = segment.stop if segment.stop == spec.elements else segment.stop // per_leaf * per_leaf
    return Segment(spec, start, stop) if start < stop else None


def inner_leaves(blocks: Iterable[Block], elements: Callable[[Segment], UIntArray]) -> Leaves:
    """The leaves that lie wholly in a segment of ``blocks``, hashed in one call."""
    parts = [part for block in blocks for part in map(inner, block.segments) if part]
    return numbered(parts, leaves_of([elements(part) for part in parts])) if parts else {}


def changed_inner_leaves(blocks: Sequence[ChangedBlock]) -> Leaves:
    """The inner leaves of changed blocks of one dtype, without segments that have no changes."""
    parts: list[Segment] = []
    pieces: list[Changed] = []
    for block, elements, (positions, values, _), made in blocks:
        # A segment covers positions [base, next end) of its block, and changes [first, last) of the
        # block.
        ends = list(accumulate(segment.elements for segment in block.segments))
        places = pairwise([0, *bits.below(positions, ends)])
        for segment, (base, _), (first, last) in zip(
            block.segments, pairwise([0, *ends]), places, strict=True
        ):
            part = inner(segment) if last > first else None
            if part is None:
                continue
            start = base + part.start - segment.start
            end = start + part.elements
            # The elements are new already: no change is put into them. Otherwise the changes of the
            # part.
            if made:
                low, high = 0, 0
            elif part == segment:
                low, high = first, last
            else:
                low, high = bits.below(positions, (start, end))
            parts.append(part)
            pieces.append(
                Changed(elements[start:end], positions[low:high], start, values[low:high])
            )
    return numbered(parts, changed_leaves_of(pieces)) if parts else {}


def numbered(parts: Sequence[Segment], digests: Sequence[bytes]) -> Leaves:
    """Assign digests of consecutive leaves to tensor names and leaf numbers."""
    found: Leaves = {}
    for part, of in zip(parts, digests, strict=True):
        first = part.start * part.spec.dtype.width // LEAF_BYTES
        found |= {
            (part.spec.name, first + k): of[32 * k : 32 * k + 32] for k in range(len(of) // 32)
        }
    return found


def numbered_leaves(digest: StateDigest) -> Leaves:
    """All leaves of a tree by name and number."""
    whole = [Segment(spec, 0, spec.elements) for spec in digest.specs]
    return numbered(whole, [digest.leaves[spec.name] for spec in digest.specs])


def tree_of(specs: tuple[TensorSpec, ...], leaves: Leaves) -> StateDigest:
    """The tree of a state of ``specs`` from all its leaves."""
    made = {
        spec.name: b"".join(leaves[spec.name, k] for k in range(-(-spec.nbytes // LEAF_BYTES)))
        for spec in specs
    }
    return StateDigest(specs, made)


def with_leaves(old: StateDigest, changed: Leaves, tensors: bytes = b"") -> StateDigest:
    """The tree ``old`` with the ``changed`` leaves.

    For a worker that holds a part of the state, ``tensors`` has the new digests of all tensors.
    """
    made = {name: bytearray(digests) for name, digests in old.leaves.items()}
    for (name, number), digest in changed.items():
        made[name][32 * number : 32 * number + 32] = digest
    leaves = {name: bytes(digests) for name, digests in made.items()}
    if isinstance(old, PartDigest):
        return PartDigest(old.specs, leaves, old.whole, tensors)
    return StateDigest(old.specs, leaves)
