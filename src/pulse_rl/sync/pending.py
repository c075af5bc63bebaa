"""One rank's part of the next version before the commit: changes to its baseline, or a new
baseline."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .. import codec as codecs
from .._util.threads import hit, ordered_map
from ..codec import Changes
from ..errors import StateMismatch
from ..patch.apply import Journal, advance_state
from ..patch.blocks import Block
from ..patch.build import code_blocks, entry_of
from ..patch.header import PatchHeader, slices_of
from ..patch.history import History, Recorder, Records
from ..patch.tree import Leaves, inner_leaves
from ..state import bits
from ..state.bits import UIntArray
from ..state.digest import StateDigest
from ..state.tensors import Segment, State, TensorSpec
from ..stream.manifest import Payload

_NOTHING = History()
#: The start of `PublishState.reason` for a patch that would be no smaller than the state.
NO_SMALLER = "anchor: a patch would have"


@dataclass(frozen=True)
class PublishLayout:
    """The tensors ``specs`` of a version in name order, and the ``aliases`` of tied ones.

    A single process publishes all of each tensor; a subclass says which rank publishes what.
    Layouts in which ranks publish the same have the same ``digest``.
    """

    specs: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    digest: str = ""

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec in self.specs)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The segments that ``rank`` publishes, in name order."""
        return tuple(Segment(spec, 0, spec.elements) for spec in self.specs)

    def has_file(self, rank: int) -> bool:
        """Whether ``rank`` stores a file of a patch, or a shard.

        A rank does if it publishes something, or if no rank does.
        """
        return True


def difference(old: PublishLayout, new: PublishLayout) -> str:
    """Why no patch leads from ``old`` to ``new``; "" if one does."""
    if old.specs != new.specs:
        # A tensor that became tied or untied explains a missing name better than the name itself.
        before, now = {spec.name for spec in old.specs}, {spec.name for spec in new.specs}
        for alias, name in old.aliases.items():
            if alias in now:
                return f"anchor: tensor {alias!r} is not tied to {name!r} any more"
        for alias, name in new.aliases.items():
            if alias in before:
                return f"anchor: tensor {alias!r} is tied to {name!r} now"
        try:
            State(new.specs, {}).require_specs(old.specs, "the version before")
        except StateMismatch as error:
            return f"anchor: {error}"
    if old.digest != new.digest:
        return "anchor: the ranks have other slices than of the version before"
    return ""


class Baseline(NamedTuple):
    """This rank's part of a committed version, in a ``state`` of its own.

    ``segments`` are in name order and cut into ``blocks``. ``leaves`` are those that end on this
    rank. ``history`` covers all blocks, ``sampled`` those of the sample (`HistoryPolicy`).
    """

    version: int
    root: str
    layout: PublishLayout
    segments: tuple[Segment, ...]
    blocks: tuple[Block, ...]
    state: State
    leaves: Leaves
    history: History = _NOTHING
    sampled: History = _NOTHING


@dataclass
class PublishState:
    """This rank's part of the next version, on its way from the caller's tensors to the store.

    With a ``base`` it has the ``changes`` to the base's ``state`` by block. Without one ``state``
    is the version's own.

    Args:
        layout: The tensors of the version, and who publishes what.
        segments: What this rank publishes, in name order.
        blocks: The cut of the segments.
        state: The base's state, or the new state.
        base: The version to which the changes apply; None for a full state.
        reason: See `Published`.
        coded: The encoded blocks of the patch.
        changes: The changes by block; None for a block without changes.
        leaves: The leaves that end on this rank.
        records: What a history remembers of the patch; None if that is too large.
        history: The history at the version.
        sampled: The same for the blocks of the sample.
        remembers: Whether all blocks are recorded.
        shards: The shards of the anchor, once they are stored.
        root: The root of the version of all ranks.
        tree: On rank 0, the digest tree of the version.
        patch_bytes: Bytes of the patches of all ranks.
    """

    layout: PublishLayout
    segments: tuple[Segment, ...]
    blocks: tuple[Block, ...]
    state: State
    base: Baseline | None
    reason: str
    coded: list[codecs.Encoded] = field(default_factory=list)
    changes: list[Changes | None] = field(default_factory=list)
    leaves: Leaves = field(default_factory=dict)
    records: Mapping[int, Records] | None = None
    history: History = _NOTHING
    sampled: History = _NOTHING
    remembers: bool = False
    shards: list[Payload] | None = None
    root: str = ""
    tree: StateDigest | None = None
    patch_bytes: int = 0

    @property
    def own_patch_bytes(self) -> int:
        """Bytes of the blocks of this rank's patch."""
        return sum(len(encoded.payload) for encoded in self.coded)

    @property
    def changed(self) -> int:
        return sum(encoded.changed for encoded in self.coded)

    def file(self) -> list[bytes]:
        """This rank's file of the patch, in chunks: its header, then one payload for each block."""
        assert self.base is not None
        # The header names the history only if a block needs it: a reader without it can then apply
        # the patch.
        named = any(encoded.codec_id == codecs.HISTORY for encoded in self.coded)
        slices = slices_of(self.layout.specs, self.segments)
        blocks, history = tuple(map(entry_of, self.coded)), self.base.history
        past = history.name if named else None
        header = PatchHeader(self.base.root, self.root, slices, blocks, past)
        return [header.to_bytes(), *(encoded.payload for encoded in self.coded)]

    def elements(self, segment: Segment) -> UIntArray:
        """The new elements of a segment that lies in one segment of a block."""
        now = self.state.read(*segment.place)
        found = self.changes_in(segment)
        if found is None:
            return now
        # The state still has the base's bits, which the next publish may need: the changes go into
        # a copy.
        changed = now.copy()
        bits.put(changed, *found)
        return changed

    def advance_baseline(
        self, version: int, root: str, *, journal: Journal | None = None, threads: int | None
    ) -> Baseline:
        """The baseline after the commit of this version.

        It changes the base's state in place, so it can be called once. ``journal`` records each
        block before the first write to it.
        """
        hit("baseline.before")
        if self.changes:
            advance_state(self.state, self.blocks, self.changes, journal=journal, threads=threads)
        hit("baseline.written")
        of = self.layout, self.segments, self.blocks, self.state, self.leaves
        return Baseline(version, root, *of, self.history, self.sampled)

    def changes_in(self, segment: Segment) -> tuple[np.ndarray, UIntArray, int] | None:
        """(positions, values, position of the segment's first element) of a segment's changes, or
        None."""
        if not self.changes:
            return None
        index, base = self._place_of(segment)
        changes = self.changes[index]
        if changes is None:
            return None
        # Positions count through the block, in which the segment begins at `base`.
        low, high = bits.below(changes.positions, (base, base + segment.elements))
        return (changes.positions[low:high], changes.values[low:high], base) if low < high else None

    def _place_of(self, segment: Segment) -> tuple[int, int]:
        """The block that contains the segment, and its position there."""
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


def make_pending(
    layout: PublishLayout,
    segments: tuple[Segment, ...],
    blocks: tuple[Block, ...],
    tasks: Iterable[tuple[range, State]],
    base: Baseline | None,
    reason: str,
    *,
    owned: State | None = None,
    allocate: Callable[[Sequence[Segment]], State],
    store: Callable[[PublishState, Iterable[Sequence[Segment]]], list[Payload]] | None = None,
    history: History | None = None,
    recorder: Recorder | None = None,
    check: Callable[[range], None] | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> PublishState:
    """Build this rank's part of a version, with the leaves that lie wholly in it.

    Args:
        layout, segments, blocks: The tensors of the version, the parts that this rank publishes,
            and the cut of these.
        tasks: Groups of blocks that are hashed at once, each with a state that has their new
            elements.
        base: The version to compare with and to code against, block by block. None: the elements
            are copied.
        reason: See `Published`.
        owned: The new state if nobody else writes to it: it may become the baseline without a copy.
        allocate: Allocates memory for copied segments.
        store: Stores a state while it is filled, and returns its shards.
        history: The changes by which the patch may be coded.
        recorder: Gets what a history remembers of the patch.
        check: Called with each group of blocks before it is coded. Default: nothing.
        progress: Gets the bytes that were processed since its last call.

    Raises:
        IntegrityError: The elements changed during the call.
    """
    # 1. A patch. Only the changes of the new state are kept; after the commit they move the
    # baseline.
    if base:
        made = PublishState(
            layout, segments, blocks, base.state, base, reason, leaves=dict(base.leaves)
        )
        groups = code_blocks(
            blocks,
            base.state,
            tasks,
            history=history,
            recorder=recorder,
            check=check,
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
    # 2. No patch. The state is copied; the copy becomes the baseline and is the one that is hashed.
    state = owned if owned is not None else allocate(segments)
    made = PublishState(layout, segments, blocks, state, None, reason)

    def copy(task: tuple[range, State]) -> tuple[range, Leaves]:
        group, new = task
        some = [blocks[index] for index in group]
        if owned is None:
            for segment in (segment for block in some for segment in block.segments):
                state.read(*segment.place)[:] = new.read(*segment.place)
        return group, inner_leaves(some, lambda segment: state.read(*segment.place))

    def filled() -> Generator[list[Segment], None, None]:
        with closing(ordered_map(copy, tasks, threads)) as copied:
            for group, leaves in copied:
                made.leaves |= leaves
                _count(progress, blocks, group)
                yield [segment for index in group for segment in blocks[index].segments]

    # The store draws segments as they are copied, so the upload overlaps the copy. The loop draws
    # the rest, which is everything without a store.
    with closing(filled()) as segments_filled:
        if store:
            made.shards = store(made, segments_filled)
        for _ in segments_filled:
            pass
    return made


def _count(
    progress: Callable[[int], None] | None, blocks: Sequence[Block], group: Sequence[int]
) -> None:
    if progress:
        for index in group:
            progress(blocks[index].nbytes)
