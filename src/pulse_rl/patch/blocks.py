"""How a state is cut into blocks: a pure function of the tensors' specs and one number (docs/format.md, section 3).

Sender and receiver compute the same cut, so a patch header lists no block boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..codec import Changes, Layout, Run
from ..state import bits
from ..state.digest import LEAF_BYTES
from ..state.memory import Allocate, joined, pageable
from ..state.slices import Segment
from ..state.tensors import DType, State, TensorSpec, UIntArray

DEFAULT_BLOCK_ELEMENTS = 1 << 22


class Block(NamedTuple):
    """A run of elements of one tensor, or several whole small tensors of one dtype, in name order."""

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
        """The block's elements one after another: a view where they are so in host memory, else a copy."""
        return self.read_into(state, pageable)[0]

    def read_into(self, state: State, allocate: Allocate) -> tuple[UIntArray, bool]:
        """The same, and whether it is a copy: the state made it, by a cast say, or it is in what ``allocate`` makes."""
        parts = [state.read(*s.place) for s in self.segments]
        view = parts[0] if len(parts) == 1 else joined(parts)
        if view is not None:
            return view, view.flags.owndata
        return np.concatenate(parts, out=allocate(self.nbytes).view(self.dtype.uint)), True

    def __str__(self) -> str:
        first, last = self.segments[0], self.segments[-1]
        if len(self.segments) == 1:
            return f"{first.spec.name}[{first.start}:{first.stop}]"
        return f"{first.spec.name} … {last.spec.name}"


def cut(specs: tuple[TensorSpec, ...], block_elements: int) -> list[Block]:
    """The blocks of a state. ``specs`` are in name order; tensors without elements are in no block.

    A tensor of more than ``block_elements`` is cut into the fewest runs of nearly equal length, each but the last a
    whole number of digest leaves. Consecutive smaller tensors of one dtype share a block while they fit.
    """
    blocks: list[Block] = []
    group: list[Segment] = []
    room = 0

    def close() -> None:
        if group:
            blocks.append(Block(group[0].spec.dtype, tuple(group)))
            group.clear()

    for spec in specs:
        if spec.elements > block_elements:
            close()
            leaf = LEAF_BYTES // spec.dtype.width
            runs = -(-spec.elements // block_elements)
            step = -(-spec.elements // (runs * leaf)) * leaf
            for start in range(0, spec.elements, step):
                blocks.append(Block(spec.dtype, (Segment(spec, start, min(start + step, spec.elements)),)))
        elif spec.elements:
            if group and (group[0].spec.dtype != spec.dtype or spec.elements > room):
                close()
            if not group:
                room = block_elements
            group.append(Segment(spec, 0, spec.elements))
            room -= spec.elements
    close()
    return blocks


def pieces_of(block: Block, changes: Changes) -> Iterator[tuple[Segment, int, Changes]]:
    """The changes of a block by segment: (segment, place of its first element in the block, its changes)."""
    ends = list(accumulate(segment.stop - segment.start for segment in block.segments))
    base = first = 0
    for segment, end, last in zip(block.segments, ends, bits.below(changes.positions, ends), strict=True):
        if last > first:
            yield segment, base, Changes(changes.positions[first:last], changes.values[first:last])
        base, first = end, last
