"""Tensors that are sharded over columns, re-laid into rows: in chunks of a block's size, between
the ranks that have them, so that no rank ever holds a whole tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._util.collective import RankGroup
from ..errors import RankLost
from ..patch.blocks import Block, runs_of
from ..state.bits import UIntArray
from ..state.tensors import Segment, State
from .layout import Box, ShardedLayout


class _Chunk(NamedTuple):
    """Of one tensor what each rank receives next, and the boxes of those that have it."""

    name: str
    targets: dict[int, Segment]
    boxes: dict[int, Box]


class _Arrived(State):
    """Segments that came from other ranks, by the tensor's name and the place of their first
    element; all else is read of ``source``."""

    def __init__(self, came: dict[tuple[str, int], UIntArray], source: State) -> None:
        super().__init__((), {})
        self._came = came
        self._source = source

    def read(self, name: str, start: int = 0, stop: int | None = None) -> UIntArray:
        """A whole segment, as it came."""
        found = self._came.get((name, start))
        return self._source.read(name, start, stop) if found is None else found


class ColumnExchange:
    """Moves the elements of ``layout.moved`` to the ranks that publish them; all ranks go through
    the same chunks."""

    def __init__(self, layout: ShardedLayout, ranks: RankGroup, local: State) -> None:
        self._ranks = ranks
        self._local = local
        self._chunks = _chunks(layout)
        self._arrived: dict[tuple[str, int], UIntArray] = {}
        self._moved = layout.moved
        self._error: BaseException | None = None

    def tasks(
        self, groups: Iterable[range], blocks: Sequence[Block], source: State
    ) -> Iterator[tuple[range, State]]:
        """Each group of ``blocks`` with a state that has its new elements: those that were moved
        here, and the others of ``source``. The ranks exchange what is moved as this goes on. Raises
        RankLost."""
        if not self._moved:
            yield from ((group, source) for group in groups)
            return
        for group in groups:
            came: dict[tuple[str, int], UIntArray] = {}
            for segment in (segment for index in group for segment in blocks[index].segments):
                place = segment.spec.name, segment.start
                if segment.spec.name in self._moved:
                    while place not in self._arrived:
                        self._exchange(next(self._chunks))
                    came[place] = self._arrived.pop(place)
            yield group, _Arrived(came, source) if came else source

    def finish(self) -> None:
        """Takes part in what is left. Raises what kept this rank from sending what it has, and
        RankLost."""
        for chunk in self._chunks:
            self._exchange(chunk)
        self._arrived.clear()
        if self._error is not None:
            raise self._error

    def _exchange(self, chunk: _Chunk) -> None:
        me = self._ranks.rank
        width = next(iter(chunk.targets.values())).spec.dtype.width
        sent: dict[int, UIntArray] = {}
        if me in chunk.boxes:
            for rank, target in chunk.targets.items():
                low, high = _inside(chunk.boxes[me], target)
                if low < high:
                    sent[rank] = self._read(chunk.name, low, high, width)
        mine = chunk.targets.get(me)
        places = (
            {} if mine is None else {rank: _inside(box, mine) for rank, box in chunk.boxes.items()}
        )
        lengths = {rank: (high - low) * width for rank, (low, high) in places.items() if low < high}
        try:
            received = self._ranks.exchange(sent, lengths)
        except RankLost:
            self._chunks = iter(())  # nobody comes for what is left
            raise
        if mine is None:
            return
        whole = np.empty(mine.elements, mine.spec.dtype.uint)
        for rank, data in received.items():
            chunk.boxes[rank].put(data.view(whole.dtype), places[rank][0], whole, mine.start)
        self._arrived[chunk.name, mine.start] = whole

    def _read(self, name: str, low: int, high: int, width: int) -> UIntArray:
        """The elements as bytes. The others wait for them: what cannot be read is made up, and the
        error raised at the end, when all know of it."""
        try:
            return self._local.read(name, low, high).view(np.uint8)
        except RankLost:
            raise
        except BaseException as error:
            self._error = self._error or error
            return np.zeros((high - low) * width, np.uint8)


def _chunks(layout: ShardedLayout) -> Iterator[_Chunk]:
    for name, boxes in layout.moved.items():
        runs = {rank: runs_of(segment) for rank, segment in layout.published[name].items()}
        for k in range(max(map(len, runs.values()))):
            yield _Chunk(name, {rank: of[k] for rank, of in runs.items() if k < len(of)}, boxes)


def _inside(box: Box, target: Segment) -> tuple[int, int]:
    """The elements of the box that lie in the segment, by their numbers in the box."""
    return box.below(target.start), box.below(target.stop)
