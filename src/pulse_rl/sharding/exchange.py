"""What ranks send each other while they build a version: the elements of tensors that are sharded
over columns, which are published by rows; and the state of the hash of a leaf that several ranks
publish (docs/format.md, section 2), with the digests of all leaves. Never whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from .._native import sha256_absorb, sha256_begin, sha256_digests
from .._util.collective import RankGroup
from .._util.threads import ordered_map
from ..errors import RankLost
from ..patch.blocks import Block, runs_of
from ..patch.tree import Leaves, tree_of
from ..state.bits import UIntArray
from ..state.digest import StateDigest
from ..state.tensors import Segment, State
from .layout import ShardedLayout, SharedLeaf, SliceSpec, whole_leaves

MIDSTATE_BYTES = 104
_TOGETHER = 64


# -- columns, in chunks of a block's size


class _Chunk(NamedTuple):
    """Of one tensor what each rank receives next, and the boxes of those that have it."""

    name: str
    targets: dict[int, Segment]
    boxes: dict[int, SliceSpec]


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
        places: dict[int, tuple[int, int]] = {}
        if mine is not None:
            places = {rank: _inside(box, mine) for rank, box in chunk.boxes.items()}
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
        except BaseException as error:
            self._error = self._error or error
            return np.zeros((high - low) * width, np.uint8)


def _chunks(layout: ShardedLayout) -> Iterator[_Chunk]:
    for name, boxes in layout.moved.items():
        runs = {rank: runs_of(segment) for rank, segment in layout.published[name].items()}
        for k in range(max(map(len, runs.values()))):
            yield _Chunk(name, {rank: of[k] for rank, of in runs.items() if k < len(of)}, boxes)


def _inside(box: SliceSpec, target: Segment) -> tuple[int, int]:
    """The elements of the box that lie in the segment, by their numbers in the box."""
    return box.below(target.start), box.below(target.stop)


# -- leaves


def hash_shared(
    leaves: Sequence[tuple[SharedLeaf, ...]],
    ranks: RankGroup,
    elements: Callable[[Segment], UIntArray],
    threads: int | None,
) -> Leaves:
    """Hashes ``leaves``, each given by its ranks' fragments in order, rank by rank; returns those
    that end on this one.

    ``elements`` gives this rank's. All ranks call this with the same leaves. Raises RankLost.
    """

    def absorb(some: list[tuple[bytes, Segment]]) -> list[bytes]:
        """The midstates, once each has absorbed the elements of its segment."""
        midstates = np.frombuffer(b"".join(midstate for midstate, _ in some), np.uint8)
        arrays = [elements(segment).view(np.uint8) for _, segment in some]
        data = sha256_absorb(midstates, arrays)
        return [data[MIDSTATE_BYTES * k :][:MIDSTATE_BYTES] for k in range(len(some))]

    me, found = ranks.rank, dict[tuple[str, int], bytes]()
    held: dict[int, bytes] = {}
    # Step by step, all leaves at once: of each the rank whose turn it is absorbs its bytes, and
    # passes the state on.
    for step in range(max(map(len, leaves), default=0)):
        now = [k for k, fragments in enumerate(leaves) if step < len(fragments)]
        mine = [k for k in now if leaves[k][step].rank == me]
        if step == 0:
            held = {k: sha256_begin(1) for k in mine}
        due = [(held.pop(k), leaves[k][step].segment) for k in mine]
        batches = [due[at : at + _TOGETHER] for at in range(0, len(due), _TOGETHER)]
        absorbed = chain.from_iterable(ordered_map(absorb, batches, threads))
        sent: dict[int, bytearray] = {}
        for k, midstate in zip(mine, absorbed, strict=True):
            if step + 1 == len(leaves[k]):  # the last fragment: the leaf is this rank's
                last = leaves[k][step]
                found[last.segment.spec.name, last.leaf] = sha256_digests(
                    np.frombuffer(midstate, np.uint8)
                )
            else:
                sent.setdefault(leaves[k][step + 1].rank, bytearray()).extend(midstate)
        coming = [k for k in now if step + 1 < len(leaves[k]) and leaves[k][step + 1].rank == me]
        senders: dict[int, list[int]] = {}
        for k in coming:
            senders.setdefault(leaves[k][step].rank, []).append(k)
        received = ranks.exchange(
            {rank: np.frombuffer(data, np.uint8) for rank, data in sent.items()},
            {rank: MIDSTATE_BYTES * len(of) for rank, of in senders.items()},
        )
        for rank, of in senders.items():
            data = received[rank].tobytes()
            held |= {k: data[MIDSTATE_BYTES * i :][:MIDSTATE_BYTES] for i, k in enumerate(of)}
    return found


def gather_tree(layout: ShardedLayout, ranks: RankGroup, own: Leaves) -> StateDigest | None:
    """The tree of the whole state, on rank 0; ``own`` are the leaves that end on this rank. Raises
    RankLost."""
    # In the order of the layout, which all know: digests alone travel, 32 bytes for each MiB.
    whose = [ranks.rank] if ranks.rank else range(ranks.size)
    ended = {rank: list(whole_leaves(layout, rank)) for rank in whose}
    data = np.frombuffer(b"".join(own[leaf] for leaf in ended[ranks.rank]), np.uint8)
    lengths = {} if ranks.rank else {rank: 32 * len(of) for rank, of in ended.items()}
    received = ranks.exchange({0: data}, lengths)
    if ranks.rank:
        return None
    found: Leaves = {}
    for rank, of in ended.items():
        digests = received[rank].tobytes()
        found |= {leaf: digests[32 * k : 32 * k + 32] for k, leaf in enumerate(of)}
    return tree_of(layout.specs, found)
