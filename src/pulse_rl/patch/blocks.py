"""How a state is cut into blocks: a pure function of the tensors' specs and of what a file holds of
them (docs/format.md, section 3).

Sender and receiver compute the same cut, so a patch header lists no block boundaries.
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

BLOCK_ELEMENTS = 1 << 22
_NEAR = 64
_MOST_VIEWS = 1 << 14


class Block(NamedTuple):
    """A run of elements of one tensor, or what is held of several small tensors of one dtype, in
    name order."""

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
        """The block's elements one after another: a view where they are so in host memory, else a
        copy."""
        return self.read_into(state, pageable)[0]

    def read_into(self, state: State, allocate: Allocate) -> tuple[UIntArray, bool]:
        """The same, and whether it is a copy: the state made it, by a cast say, or it is in what
        ``allocate`` makes."""
        if len(self.segments) == 1:
            view = state.read(*self.segments[0].place)
            return view, view.flags.owndata
        if (joint := self.view(state)) is not None:
            return joint, False
        parts = [state.read(*s.place) for s in self.segments]
        return np.concatenate(parts, out=allocate(self.nbytes).view(self.dtype.uint)), True

    def view(self, state: State) -> UIntArray | None:
        """The block's elements as one view of host memory, of several tensors that lie one behind
        another there; else None. It is looked for once: of tens of thousands of small tensors that
        takes longer than their bits."""
        views = views_of(state)
        known = views.get(id(self))
        if known is None or known[0] is not self:
            if len(views) > _MOST_VIEWS:
                views.clear()
            # What is made when it is read lies nowhere, and would be made for nothing.
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
    """The blocks of a file that holds the slices ``held`` of the tensors ``specs``, both in order;
    None: all of them.

    Tensors of at most `BLOCK_ELEMENTS` elements share a block with the next ones of their dtype
    while the whole tensors fit, and little lies between them or is in the block, whatever the file
    holds of them: so a reader that decodes whole tensors can decode parts of them. A slice of a
    larger tensor is cut by `runs_of`. Tensors without elements are in no block. Blocks are in the
    order in which their last tensor, or the one that closes them, comes. ``most``: another number
    in the place of `BLOCK_ELEMENTS`, for what is no patch file.
    """
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
    """`cut` of whole tensors. Versions of one stream have the same tensors: the last cut is
    remembered."""
    global _whole
    known, blocks = _whole
    if known is not specs:
        blocks = cut(specs)
        _whole = specs, blocks
    return blocks


@dataclass(slots=True)
class _Group:
    """Small tensors of one dtype, ``elements`` in all; the last one ends at element ``end`` of the
    state. ``segments``: what is held of them."""

    segments: list[Segment] = field(default_factory=list)
    elements: int = 0
    end: int = 0

    def takes(self, elements: int, start: int, most: int) -> bool:
        """Whether a tensor of so many elements, which starts at element ``start`` of the state,
        joins. What lies between its tensors, or what it holds, stays small: who needs one of them
        decodes all."""
        near, together = start - self.end, self.elements + elements
        return together <= most and min(near, together) <= most // _NEAR


def runs_of(segment: Segment, most: int | None = None) -> list[Segment]:
    """A slice of one tensor as the pieces that are coded one by one: as it is, if the tensor has at
    most `BLOCK_ELEMENTS` elements; else the fewest runs of nearly equal length that end between
    leaves."""
    most = BLOCK_ELEMENTS if most is None else most
    spec, start, stop = segment
    if spec.elements <= most:
        return [segment]
    leaf = LEAF_BYTES // spec.dtype.width
    # Counted from the start of a leaf: whatever a rank holds, its inner cuts lie between leaves,
    # which one block then hashes alone.
    first = start // leaf * leaf
    runs = -(-(stop - first) // most)
    step = -(-(stop - first) // (runs * leaf)) * leaf
    return [Segment(spec, max(start, at), min(at + step, stop)) for at in range(first, stop, step)]


def pieces_of(block: Block, changes: Changes) -> Iterator[tuple[Segment, int, Changes]]:
    """The changes of a block by segment: (segment, place of its first element in the block, its
    changes)."""
    ends = list(accumulate(segment.stop - segment.start for segment in block.segments))
    base = first = 0
    for segment, end, last in zip(
        block.segments, ends, bits.below(changes.positions, ends), strict=True
    ):
        if last > first:
            yield segment, base, Changes(changes.positions[first:last], changes.values[first:last])
        base, first = end, last


def recut(
    changes: Mapping[int, Changes], old: Sequence[Block], new: Sequence[Block]
) -> dict[int, Changes]:
    """Changes by index of the blocks ``old`` as those of ``new``, another cut of the same tensors.
    What lies in no block of ``new`` is left out."""
    of: dict[str, list[tuple[Segment, Changes]]] = {}
    for index, found in changes.items():
        for segment, base, piece in pieces_of(old[index], found):
            placed = Changes(piece.positions - np.uint32(base), piece.values)
            of.setdefault(segment.spec.name, []).append((segment, placed))
    # 1. The changes by tensor, in the order of their elements; 2. those that lie in each of the new
    # blocks.
    for pieces in of.values():
        pieces.sort(key=lambda item: item[0].start)
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
                    shift = base + segment.start - start
                    positions.append(
                        (piece.positions[first:last].astype(np.int64) + shift).astype(np.uint32)
                    )
                    values.append(piece.values[first:last])
            base += stop - start
        if sum(map(len, positions)):
            made[index] = Changes(np.concatenate(positions), np.concatenate(values))
    return made
