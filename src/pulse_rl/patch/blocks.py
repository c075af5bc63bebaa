"""How a state is cut into blocks (docs/format.md, section 3).

The cut is a pure function of the tensors' specs and of the slices in a file. Sender and receiver
compute the same cut, so a patch header lists no block boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..codec import Changes, Layout, Run
from ..state import bits
from ..state.bits import Allocate, UIntArray, joined, pageable
from ..state.digest import LEAF_BYTES
from ..state.tensors import DType, Segment, State, TensorSpec, is_view, views_of

# Elements of a block, at most. Blocks of 2^20 make patches 2.3% larger; blocks of 2^23 make them
# 0.2% smaller and halve the parallelism (design note 0001).
BLOCK_ELEMENTS = 1 << 22
# Between two tensors of a block lie at most 1/64 of a block's elements, or the block itself is that
# small. This bounds what a worker that holds a part of the state decodes for nothing.
_NEAR = 64
_MAX_VIEWS = 1 << 14


class Block(NamedTuple):
    """A run of elements of one tensor, or several small tensors of one dtype in name order.

    Of small tensors it has the slices that the file holds.
    """

    dtype: DType
    segments: tuple[Segment, ...]

    @property
    def elements(self) -> int:
        return sum(s.stop - s.start for s in self.segments)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.width

    @property
    def layout(self) -> Layout:
        runs = []
        for spec, start, stop in self.segments:
            row = spec.shape[-1] if spec.shape else 1
            runs.append(Run(stop - start, row, start % row))
        return Layout(self.dtype, tuple(runs))

    def read(self, state: State) -> UIntArray:
        """The block's elements in order: a view if they are adjacent in host memory, else a
        copy."""
        return self.read_into(state, pageable)[0]

    def read_into(self, state: State, allocate: Allocate) -> tuple[UIntArray, bool]:
        """The block's elements, and whether they are a copy.

        A copy is either in memory from ``allocate`` or made by the state, for example by a cast.
        """
        if len(self.segments) == 1:
            view = state.read(*self.segments[0].place)
            return view, view.flags.owndata
        if (joint := self.view(state)) is not None:
            return joint, False
        parts = [state.read(*s.place) for s in self.segments]
        return np.concatenate(parts, out=allocate(self.nbytes).view(self.dtype.uint)), True

    def view(self, state: State) -> UIntArray | None:
        """One view of the block's tensors if they are adjacent in host memory; else None.

        The result is cached: for tens of thousands of small tensors the search takes longer than
        reading their bits.
        """
        views = views_of(state)
        known = views.get(id(self))
        if known is None or known[0] is not self:
            if len(views) > _MAX_VIEWS:
                views.clear()
            # A state that computes its elements has no memory of its own. Reading it here would
            # compute them for nothing.
            several = len(self.segments) > 1 and all(
                is_view(state, s.spec.name) for s in self.segments
            )
            view = joined([state.read(*s.place) for s in self.segments]) if several else None
            known = views[id(self)] = self, view
        return known[1]

    def __str__(self) -> str:
        first, last = self.segments[0], self.segments[-1]
        if len(self.segments) == 1:
            return f"{first.spec.name}[{first.start}:{first.stop}]"
        return f"{first.spec.name} … {last.spec.name}"


def cut(
    specs: Sequence[TensorSpec], held: Sequence[Segment] | None = None, *, most: int | None = None
) -> tuple[Block, ...]:
    """The blocks of a file that holds the slices ``held`` of the tensors ``specs``.

    A tensor of more than `BLOCK_ELEMENTS` elements is cut by `runs_of`. Smaller tensors of one
    dtype share a block while they fit, and while little lies between them or is in the block. The
    slices in a file do not change these blocks, so a reader that decodes whole tensors can decode
    parts of them. Tensors without elements are in no block. The order of blocks is that of the
    tensor that closes them.

    Args:
        specs: All tensors in name order.
        held: The slices that the file holds, in the same order. Default: all elements.
        most: Another number instead of `BLOCK_ELEMENTS`, for cuts that are not patch files.
    """
    # `passed` counts the elements of all tensors so far: the distance between two tensors of a
    # block.
    most = BLOCK_ELEMENTS if most is None else most
    of: dict[str, list[Segment]] = {}
    for segment in held or ():
        of.setdefault(segment.spec.name, []).append(segment)
    blocks: list[Block] = []
    groups: dict[DType, _Group] = {}  # the open ones
    passed = 0

    def close(dtype: DType) -> None:
        if (group := groups.pop(dtype, None)) and group.segments:
            blocks.append(Block(dtype, tuple(group.segments)))

    for spec in specs:
        slices = of.get(spec.name, []) if held is not None else [Segment(spec, 0, spec.elements)]
        if spec.elements > most:
            close(spec.dtype)
            blocks += [
                Block(spec.dtype, (run,)) for segment in slices for run in runs_of(segment, most)
            ]
        elif spec.elements:
            group = groups.get(spec.dtype)
            if group is None or not group.takes(spec.elements, passed, most):
                close(spec.dtype)
                group = groups[spec.dtype] = _Group()
            group.segments += slices
            group.elements += spec.elements
            group.end = passed + spec.elements
        passed += spec.elements
    for dtype in list(groups):
        close(dtype)
    return tuple(blocks)


_whole: tuple[tuple[TensorSpec, ...], tuple[Block, ...]] = (), ()


def cut_whole(specs: tuple[TensorSpec, ...]) -> tuple[Block, ...]:
    """`cut` of whole tensors. It remembers the last cut, since the versions of a stream share
    tensors."""
    global _whole
    known, blocks = _whole
    if known is not specs:
        blocks = cut(specs)
        _whole = specs, blocks
    return blocks


@dataclass(slots=True)
class _Group:
    """Small tensors of one dtype that share a block, ``elements`` in all.

    The last tensor ends at element ``end`` of the state. ``segments`` are the slices that the file
    holds.
    """

    segments: list[Segment] = field(default_factory=list)
    elements: int = 0
    end: int = 0

    def takes(self, elements: int, start: int, most: int) -> bool:
        """Whether a tensor of ``elements`` elements, which begins at element ``start`` of the
        state, joins.

        Either the distance to the group or the group itself must be small: a reader of one tensor
        decodes the whole block.
        """
        near, together = start - self.end, self.elements + elements
        return together <= most and min(near, together) <= most // _NEAR


def runs_of(segment: Segment, most: int | None = None) -> list[Segment]:
    """Cut a slice of one tensor into the runs that are coded one by one.

    A tensor of at most `BLOCK_ELEMENTS` elements stays one run. A larger one becomes the fewest
    runs of nearly equal length that end between leaves.
    """
    most = BLOCK_ELEMENTS if most is None else most
    spec, start, stop = segment
    if spec.elements <= most:
        return [segment]
    leaf = LEAF_BYTES // spec.dtype.width
    # Runs count from the start of a leaf, so every inner cut lies between leaves for any slice of a
    # rank. One block then hashes each leaf alone.
    first = start // leaf * leaf
    runs = -(-(stop - first) // most)
    step = -(-(stop - first) // (runs * leaf)) * leaf
    return [Segment(spec, max(start, at), min(at + step, stop)) for at in range(first, stop, step)]


def pieces_of(block: Block, changes: Changes) -> Iterator[tuple[Segment, int, Changes]]:
    """For each changed segment of a block: (segment, position of its first element, its
    changes)."""
    ends = list(accumulate(segment.stop - segment.start for segment in block.segments))
    lasts = bits.below(changes.positions, ends)
    base = first = 0
    for segment, end, last in zip(block.segments, ends, lasts, strict=True):
        if last > first:
            yield segment, base, Changes(changes.positions[first:last], changes.values[first:last])
        base, first = end, last


def recut(
    changes: Mapping[int, Changes], old: Sequence[Block], new: Sequence[Block]
) -> dict[int, Changes]:
    """Translate changes by index of the blocks ``old`` to the blocks ``new`` of the same tensors.

    Changes outside of all ``new`` blocks are left out.
    """
    # 1. The changes by tensor, at positions from the start of their segment, in element order.
    of: dict[str, list[tuple[Segment, Changes]]] = {}
    for index, found in changes.items():
        for segment, base, piece in pieces_of(old[index], found):
            placed = Changes(piece.positions - np.uint32(base), piece.values)
            of.setdefault(segment.spec.name, []).append((segment, placed))
    # Every segment appears once, so sorting by its start orders the elements.
    for pieces in of.values():
        pieces.sort(key=lambda item: item[0].start)
    # 2. For each new block, the overlap of its segments with those of the old blocks.
    made: dict[int, Changes] = {}
    for index, block in enumerate(new):
        positions, values, base = [], [], 0
        for spec, start, stop in block.segments:
            for segment, piece in of.get(spec.name, ()):
                low, high = max(start, segment.start), min(stop, segment.stop)
                if low < high:
                    first, last = bits.below(
                        piece.positions, (low - segment.start, high - segment.start)
                    )
                    # From a position in the old segment to one in the new block. The sum has 64
                    # bits, since the shift may be negative.
                    shift = base + segment.start - start
                    moved = piece.positions[first:last].astype(np.int64) + shift
                    positions.append(moved.astype(np.uint32))
                    values.append(piece.values[first:last])
            base += stop - start
        if sum(map(len, positions)):
            made[index] = Changes(np.concatenate(positions), np.concatenate(values))
    return made
