"""One rank's part of the next version before it is stored: changes to its baseline, or a new baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ... import codec as codecs
from ..._util.collective import RankGroup
from ..._util.threads import ordered_map
from ...codec import Changes
from ...patch.blocks import Block, cut, pieces_of
from ...patch.build import encode_proved, entry_of, to_keep
from ...patch.header import PatchHeader, slices_of
from ...state import bits
from ...state.digest import StateDigest
from ...state.slices import Segment, SlicedState
from ...state.tensors import UIntArray
from .layout import Fragment, Layout
from .leaves import Leaves, changed_inner_leaves, hash_shared, inner_leaves
from .local import LocalState
from .windows import Windows


class Baseline(NamedTuple):
    """What this rank publishes of a committed ``version`` with this ``root``, and the leaves that end on it; ``blocks``
    are those of its part of a patch."""

    version: int
    root: str
    layout: Layout
    blocks: list[Block]
    state: SlicedState
    leaves: Leaves


def header_of(baseline: Baseline, base_root: str, target_root: str, coded: Sequence[codecs.Encoded]) -> PatchHeader:
    """The header of this rank's file of a patch with such blocks."""
    slices = slices_of(baseline.layout.specs, baseline.state.segments)
    return PatchHeader(base_root, target_root, slices, tuple(map(entry_of, coded)))


@dataclass
class Draft:
    """What this rank publishes of the next version: ``state`` and the ``changes`` to it by block; without a ``base``
    the state is the version's. ``leaves`` are those that end on this rank."""

    layout: Layout
    blocks: list[Block]
    state: SlicedState
    base: Baseline | None
    reason: str
    coded: list[codecs.Encoded] = field(default_factory=list)
    changes: list[Changes | None] = field(default_factory=list)
    leaves: Leaves = field(default_factory=dict)

    @property
    def patch_bytes(self) -> int:
        """Bytes of the blocks of this rank's part."""
        return sum(len(encoded.payload) for encoded in self.coded)

    @property
    def changed(self) -> int:
        return sum(encoded.changed for encoded in self.coded)

    def header(self, root: str) -> PatchHeader:
        """The header of this rank's file of the patch to ``root``."""
        assert self.base is not None
        return header_of(self.base, self.base.root, root, self.coded)

    def elements(self, segment: Segment) -> UIntArray:
        """The new elements of a segment that lies in one segment of a block."""
        now = self.state.read(*segment.place)
        found = self._changes_in(segment)
        if found is None:
            return now
        changed = now.copy()
        bits.put(changed, *found)
        return changed

    def is_changed(self, fragment: Fragment) -> bool:
        """Whether an element of it is another than in the base; without one, yes."""
        return self.base is None or self._changes_in(fragment.segment) is not None

    def take_effect(self, version: int, root: str, undo: dict[int, Changes] | None = None) -> Baseline:
        """The baseline that this is once it is committed. The state of the base is changed in place. ``undo`` gets the
        old bits by block."""
        for index, (block, changes) in enumerate(zip(self.blocks, self.changes, strict=False)):
            if changes is None:
                continue
            if undo is not None:
                undo[index] = Changes(changes.positions, changes.replaced(block.read(self.state)))
            for segment, base, piece in pieces_of(block, changes):
                bits.put(self.state.read(*segment.place), piece.positions, piece.values, base)
        return Baseline(version, root, self.layout, self.blocks, self.state, self.leaves)

    def _changes_in(self, segment: Segment) -> tuple[np.ndarray, UIntArray, int] | None:
        """(positions, values, position of the segment's first element) of its changes; None if there are none."""
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

    def __post_init__(self) -> None:
        self._places: dict[str, list[tuple[int, Segment, int]]] = {}
        for index, block in enumerate(self.blocks):
            base = 0
            for segment in block.segments:
                self._places.setdefault(segment.spec.name, []).append((index, segment, base))
                base += segment.elements


class Built(NamedTuple):
    """The next version: this rank's ``draft``, the ``root``, on rank 0 the digest ``tree``, and the ``patch_bytes`` of
    all ranks."""

    draft: Draft
    root: str
    tree: StateDigest | None
    patch_bytes: int


def make_draft(
    layout: Layout,
    ranks: RankGroup,
    local: LocalState,
    base: Baseline | None,
    reason: str,
    *,
    codec: str,
    threads: int | None,
    progress: Callable[[int], None] | None,
) -> Draft:
    """Compares with ``base`` and codes, block by block, or copies where there is none; hashes all leaves that no other
    rank has a piece of. Raises what `build_patch` raises, and RankLost: whatever fails here, this rank has taken part
    in moving columns to rows when this returns or raises."""
    segments = layout.segments(ranks.rank)
    blocks = cut(layout.specs, segments)
    windows = Windows(layout, ranks, local)
    source = SlicedState([s for s in segments if s.spec.name not in layout.moved], local.state)
    try:
        state = base.state if base else SlicedState.allocate(segments)
        draft = Draft(layout, blocks, state, base, reason, leaves=dict(base.leaves) if base else {})

        def work(task: tuple[Block, dict[str, UIntArray]]) -> tuple[codecs.Encoded, Changes | None, Leaves]:
            block, moved = task
            after = [moved[s.spec.name] if s.spec.name in moved else source.read(*s.place) for s in block.segments]
            if base is None:
                for segment, elements in zip(block.segments, after, strict=True):
                    state.read(*segment.place)[:] = elements
                leaves = inner_leaves(block, lambda segment: state.read(*segment.place))
                return codecs.Encoded(codecs.SAME, b"", 0), None, leaves
            before = block.read(state)
            whole = after[0] if len(after) == 1 else np.concatenate(after)
            encoded, changes = encode_proved(block, before, whole, codec=codec)
            if changes is None:
                return encoded, None, {}
            return encoded, to_keep(changes, block), changed_inner_leaves(block, before, changes)

        with closing(ordered_map(work, _tasks(blocks, windows), threads)) as results:
            for block, (encoded, changes, leaves) in zip(blocks, results, strict=True):
                if base:
                    draft.coded.append(encoded)
                    draft.changes.append(changes)
                draft.leaves |= leaves
                if progress:
                    progress(block.nbytes)
    finally:
        windows.finish()
    return draft


def _tasks(blocks: list[Block], windows: Windows) -> Iterator[tuple[Block, dict[str, UIntArray]]]:
    for block in blocks:
        yield block, windows.of(block)


def hash_shared_leaves(draft: Draft, ranks: RankGroup, threads: int | None) -> int:
    """Hashes the leaves that ranks share, if something in them changed; returns the bytes of all ranks' blocks. A
    collective, which raises what `RankGroup.run_on_all` raises."""
    shared = draft.layout.shared
    own = np.zeros(draft.layout.shares, bool)
    for k, fragments in shared.items():
        own[k] = any(f.rank == ranks.rank and draft.is_changed(f) for f in fragments)
    flags = np.packbits(own).tobytes()
    said = ranks.run_on_all(lambda: draft.patch_bytes.to_bytes(8, "little") + flags)
    packed = np.bitwise_or.reduce([np.frombuffer(message[8:], np.uint8) for message in said])
    changed = np.unpackbits(packed, count=len(own))
    some = [fragments for k, fragments in shared.items() if changed[k]]
    with ranks.isolated():
        draft.leaves |= hash_shared(some, ranks, draft.elements, threads)
    return sum(int.from_bytes(message[:8], "little") for message in said)


def all_inner_leaves(blocks: Sequence[Block], state: SlicedState, threads: int | None) -> Leaves:
    """The leaves that lie wholly in what this rank publishes, the ``blocks`` of its ``state``."""
    found: Leaves = {}

    def work(block: Block) -> Leaves:
        return inner_leaves(block, lambda segment: state.read(*segment.place))

    for leaves in ordered_map(work, blocks, threads):
        found |= leaves
    return found
