"""One rank's part of the next version before it is committed: changes to its baseline, or a new
baseline."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from .. import codec as codecs
from .._util.collective import RankGroup
from .._util.faults import hit
from .._util.threads import ordered_map
from ..codec import Changes
from ..patch.apply import Journal, advance_state
from ..patch.blocks import Block, cut, runs_of
from ..patch.build import code_blocks, entry_of, smallest
from ..patch.header import PatchHeader, slices_of
from ..patch.history import History, HistoryName, Recorder, Records
from ..patch.tree import hashed_together
from ..state import bits
from ..state.digest import StateDigest
from ..state.memory import DeviceTensor
from ..state.tensors import Empty, Segment, SlicedState, State, TensorSpec, UIntArray
from ..stream.manifest import Payload
from .columns import ColumnExchange
from .layout import Fragment, Layout
from .leaves import Leaves, changed_inner_leaves, hash_shared, inner_leaves

_NOTHING = History()
NO_SMALLER = "anchor: a patch would have"
"""How `PendingVersion.reason` begins where a patch would be no smaller than the state."""


class Baseline(NamedTuple):
    """What this rank publishes of a committed ``version`` with this ``root``: ``segments`` in the
    order of the names, cut into ``blocks``, in a ``state`` of its own; the leaves that end on it,
    and the ``history`` of its blocks, or, as ``sampled``, of some (`HistoryPolicy`)."""

    version: int
    root: str
    layout: Layout
    segments: tuple[Segment, ...]
    blocks: tuple[Block, ...]
    state: State
    leaves: Leaves
    history: History = _NOTHING
    sampled: History = _NOTHING

    def header(
        self,
        base_root: str,
        target_root: str,
        coded: Sequence[codecs.Encoded],
        history: HistoryName | None = None,
    ) -> PatchHeader:
        """The header of this rank's file of a patch between these roots, of its blocks as they are
        ``coded``."""
        slices = slices_of(self.layout.specs, self.segments)
        return PatchHeader(base_root, target_root, slices, tuple(map(entry_of, coded)), history)


@dataclass
class PendingVersion:
    """What this rank publishes of the next version: ``state`` and the ``changes`` to it by block;
    without a ``base`` the state is the version's. ``leaves`` are those that end on this rank,
    ``resident`` its tensors that lie on devices, ``records`` what a history is to remember, None
    where that is too much. ``history``: what is remembered at the version; ``sampled``: of some
    blocks. ``remembers``: whether all blocks are recorded. ``reason``: see `Published`. ``shards``:
    those of the anchor, if they are stored."""

    layout: Layout
    segments: tuple[Segment, ...]
    blocks: tuple[Block, ...]
    state: State
    base: Baseline | None
    reason: str
    coded: list[codecs.Encoded] = field(default_factory=list)
    changes: list[Changes | None] = field(default_factory=list)
    leaves: Leaves = field(default_factory=dict)
    records: Mapping[int, Records] | None = None
    resident: Mapping[str, DeviceTensor] = field(default_factory=dict)
    history: History = _NOTHING
    sampled: History = _NOTHING
    remembers: bool = False
    shards: list[Payload] | None = None

    @property
    def patch_bytes(self) -> int:
        """Bytes of the blocks of this rank's part."""
        return sum(len(encoded.payload) for encoded in self.coded)

    @property
    def changed(self) -> int:
        return sum(encoded.changed for encoded in self.coded)

    def file(self, root: str, *, codec: str, threads: int | None) -> list[bytes]:
        """This rank's file of the patch to ``root``, in chunks: its header, and a payload a
        block."""
        assert self.base is not None
        header, coded = smallest(
            partial(self.base.header, self.base.root, root),
            self.blocks,
            self.state,
            self.coded,
            self.changes,
            self.base.history,
            codec=codec,
            threads=threads,
        )
        return [header.to_bytes(), *(encoded.payload for encoded in coded)]

    def elements(self, segment: Segment) -> UIntArray:
        """The new elements of a segment that lies in one segment of a block."""
        now = self.state.read(*segment.place)
        found = self._changes_in(segment)
        if found is None:
            return now
        changed = now.copy()
        bits.put(changed, *found)
        return changed

    def whole(self) -> State:
        """The version's state where this rank has all of it, made as it is read."""
        if not self.changes:
            return self.state
        return State(
            self.layout.specs, {spec.name: _Drafted(self, spec) for spec in self.layout.specs}
        )

    def is_changed(self, fragment: Fragment) -> bool:
        """Whether an element of it is another than in the base; without one, yes."""
        return self.base is None or self._changes_in(fragment.segment) is not None

    def advance_baseline(
        self, version: int, root: str, *, journal: Journal | None = None, threads: int | None
    ) -> tuple[Baseline, dict[int, Changes]]:
        """The baseline that this is once it is committed, and the old bits by block. The state of
        the base is changed in place, once; ``journal`` is told of each block before."""
        hit("baseline.before")
        undo: dict[int, Changes] = {}
        if self.changes:
            undo = advance_state(
                self.state, self.blocks, self.changes, journal=journal, threads=threads
            )
        hit("baseline.written")
        of = self.layout, self.segments, self.blocks, self.state, self.leaves
        return Baseline(version, root, *of, self.history, self.sampled), undo

    def _changes_in(self, segment: Segment) -> tuple[np.ndarray, UIntArray, int] | None:
        """(positions, values, position of the segment's first element) of its changes; None if
        there are none."""
        if not self.changes:
            return None
        index, base = self._place_of(segment)
        changes = self.changes[index]
        if changes is None:
            return None
        low, high = bits.below(changes.positions, (base, base + segment.elements))
        return (changes.positions[low:high], changes.values[low:high], base) if low < high else None

    def _place_of(self, segment: Segment) -> tuple[int, int]:
        """The block in which it lies, and its position there."""
        for index, of, base in self._places[segment.spec.name]:
            if of.start <= segment.start and segment.stop <= of.stop:
                return index, base + segment.start - of.start
        raise KeyError(segment.place)

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, Segment, int]]]:
        places: dict[str, list[tuple[int, Segment, int]]] = {}
        for index, block in enumerate(self.blocks):
            base = 0
            for segment in block.segments:
                places.setdefault(segment.spec.name, []).append((index, segment, base))
                base += segment.elements
        return places


class _Drafted(NamedTuple):
    """A whole tensor of a pending version, as a state has it."""

    draft: PendingVersion
    spec: TensorSpec

    def read(self, start: int, stop: int) -> UIntArray:
        runs = runs_of(Segment(self.spec, 0, self.spec.elements))
        places = [(max(run.start, start), min(run.stop, stop)) for run in runs]
        found = [
            self.draft.elements(Segment(self.spec, *place))
            for place in places
            if place[0] < place[1]
        ]
        return np.concatenate(found) if found else np.empty(0, self.spec.dtype.uint)


class Built(NamedTuple):
    """The next version: this rank's ``draft``, the ``root``, on rank 0 the digest ``tree``, and the
    ``patch_bytes`` of all ranks."""

    draft: PendingVersion
    root: str
    tree: StateDigest | None
    patch_bytes: int


def make_pending(
    layout: Layout,
    ranks: RankGroup,
    local: State,
    base: Baseline | None,
    reason: str,
    *,
    owned: bool = False,
    empty: Empty = State.empty,
    store: Callable[[PendingVersion, Iterator[Sequence[Segment]]], list[Payload]] | None = None,
    codec: str = codecs.AUTO,
    history: History | None = None,
    recorder: Recorder | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> PendingVersion:
    """Compares with ``base`` and codes, block by block, or copies where there is none; hashes all
    leaves that no other rank has a piece of. ``local`` has this rank's elements of the new state;
    ``owned``: nobody else writes to them, so that they may become the baseline as they are; else
    they are copied into what ``empty`` makes. ``store`` stores such a state while it is filled, and
    returns its shards. ``history``: what the patch may be coded by; ``recorder`` gets what is to be
    remembered of it. ``progress`` gets the bytes that were worked through since its last call.

    Raises what `code_blocks` raises, and RankLost: whatever fails here, this rank has taken part in
    moving columns to rows when this returns or raises.
    """
    segments = base.segments if base else layout.segments(ranks.rank)
    blocks = base.blocks if base else cut(layout.specs, segments)
    # Columns are moved to rows while rows are coded: a task waits for its window, and no rank holds
    # a whole tensor.
    columns = ColumnExchange(layout, ranks, local)
    try:
        source = _sliced(tuple(s for s in segments if s.spec.name not in layout.moved), local)
        tasks = columns.tasks(hashed_together(blocks, threads), blocks, source)
        if base is None:
            # No patch: the state is copied, which becomes the baseline, and hashed from the copy.
            state = local if owned else allocated(segments, empty)
            made = PendingVersion(layout, segments, blocks, state, None, reason)

            def copy(task: tuple[range, State]) -> tuple[range, Leaves]:
                group, new = task
                some = [blocks[index] for index in group]
                for segment in (
                    segment for block in some for segment in block.segments if not owned
                ):
                    state.read(*segment.place)[:] = new.read(*segment.place)
                return group, inner_leaves(some, lambda segment: state.read(*segment.place))

            def filled() -> Generator[list[Segment], None, None]:
                with closing(ordered_map(copy, tasks, threads)) as copied:
                    for group, leaves in copied:
                        made.leaves |= leaves
                        _count(progress, blocks, group)
                        yield [segment for index in group for segment in blocks[index].segments]

            with closing(filled()) as segments_filled:
                if store:
                    made.shards = store(made, segments_filled)
                for _ in segments_filled:
                    pass
            return made
        # A patch: of the new state only the changes are kept, until the commit moves the baseline
        # by them.
        made = PendingVersion(
            layout, segments, blocks, base.state, base, reason, leaves=dict(base.leaves)
        )
        groups = code_blocks(
            blocks,
            base.state,
            tasks,
            changed_inner_leaves,
            codec=codec,
            history=history,
            recorder=recorder,
            threads=threads,
        )
        with closing(groups):
            for coded, leaves in groups:
                made.coded += [encoded for _, encoded, _ in coded]
                made.changes += [changes for _, _, changes in coded]
                made.leaves |= leaves
                _count(progress, blocks, [index for index, _, _ in coded])
        made.records = recorder.records if recorder else None
        return made
    finally:
        columns.finish()  # other ranks wait for this rank's columns, whatever failed here


def allocated(segments: Sequence[Segment], empty: Empty = State.empty) -> State:
    """Segments in what ``empty`` makes, with uninitialised values."""
    if all(segment.is_whole for segment in segments):
        return empty(tuple(segment.spec for segment in segments), None)
    return SlicedState.allocate(segments, empty)


def _sliced(segments: tuple[Segment, ...], local: State) -> State:
    """The segments of what a rank has, by their places in the whole tensors."""
    return local if all(segment.is_whole for segment in segments) else SlicedState(segments, local)


def _count(
    progress: Callable[[int], None] | None, blocks: Sequence[Block], group: Sequence[int]
) -> None:
    if progress:
        for index in group:
            progress(blocks[index].nbytes)


def hash_shared_leaves(draft: PendingVersion, ranks: RankGroup, threads: int | None) -> int:
    """Hashes the leaves that ranks share, if something in them changed; returns the bytes of all
    ranks' blocks. A collective, which raises what `RankGroup.run_on_all` raises."""
    if ranks.size == 1:
        return draft.patch_bytes
    shared = draft.layout.shared
    own = np.zeros(draft.layout.shares, bool)
    for k, fragments in shared.items():
        own[k] = any(f.rank == ranks.rank and draft.is_changed(f) for f in fragments)
    # A leaf is hashed again where any rank's piece of it changed: one bit each says so.
    flags = np.packbits(own).tobytes()
    said = ranks.run_on_all(lambda: draft.patch_bytes.to_bytes(8, "little") + flags)
    packed = np.bitwise_or.reduce([np.frombuffer(message[8:], np.uint8) for message in said])
    changed = np.unpackbits(packed, count=len(own))
    some = [fragments for k, fragments in shared.items() if changed[k]]
    with ranks.isolated():
        draft.leaves |= hash_shared(some, ranks, draft.elements, threads)
    return sum(int.from_bytes(message[:8], "little") for message in said)
