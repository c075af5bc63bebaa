"""A patch is parsed, and applied in place or undone exactly (docs/format.md, section 3); and what
that changes, by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import codec as codecs
from .._util.threads import hit, ordered_map
from ..codec import Changes
from ..errors import CorruptPatch, DigestMismatch, PulseError, StateMismatch, WrongBase
from ..state import bits
from ..state.bits import UIntArray
from ..state.digest import LEAF_BYTES, PartDigest, StateDigest, leaves_of
from ..state.tensors import Segment, State, TensorSpec
from .blocks import Block, pieces_of
from .header import Base, BlockEntry, JoinedHeader, ParsedHeader, Room, check_of, parse_header
from .history import History, Recorder, Records
from .tree import SIDE_BY_SIDE, Leaves, hashed_together, inner_leaves, numbered, with_leaves

Journal = Callable[[Block, Changes], None]
"""Takes note of a block and its old bits, in any thread."""


class Piece(NamedTuple):
    """Changes of a part of a tensor: new bits at ``positions + shift``, which ascend."""

    positions: npt.NDArray[np.uint32] | npt.NDArray[np.int64]
    shift: int
    values: UIntArray

    @property
    def first(self) -> int:
        return int(self.positions[0]) + self.shift


class TensorChanges:
    """Changed elements of one tensor: flat indices, ascending, and the new bits at them. Both are
    put together from ``pieces``, none empty, when they are asked for: indices take four times the
    memory of most changes' bits."""

    __slots__ = ("_count", "_pieces")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        found = tuple(pieces)
        self._pieces = found if len(found) == 1 else tuple(sorted(found, key=attrgetter("first")))
        self._count = sum(len(piece.values) for piece in self._pieces)

    @classmethod
    def at(cls, indices: npt.NDArray[np.int64], values: UIntArray) -> TensorChanges:
        """New bits ``values`` at ``indices``, which ascend."""
        return cls((Piece(indices, 0, values),))

    def __len__(self) -> int:
        """How many elements."""
        return self._count

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """int64, ascending, into the flattened tensor."""
        return self._joined().positions.astype(np.int64, copy=False)

    @property
    def values(self) -> UIntArray:
        """The new bits there."""
        return self._joined().values

    def fits(self, elements: int, width: int) -> bool:
        """Whether it can be written into a tensor of so many elements of ``width`` bytes."""
        kind = np.dtype(f"u{width}")
        for positions, shift, values in self._pieces:
            if (
                values.dtype != kind
                or positions.dtype.kind not in "iu"
                or values.shape != positions.shape
            ):
                return False
            if (
                len(values)
                and not -shift <= int(positions.min()) <= int(positions.max()) < elements - shift
            ):
                return False
        return True

    def cut(self, most: int) -> Iterator[TensorChanges]:
        """The same in parts of at most so many elements."""
        for positions, shift, values in self._pieces:
            for start in range(0, len(values), most):
                part = slice(start, start + most)
                yield TensorChanges((Piece(positions[part], shift, values[part]),))

    def write_into(self, indices: npt.NDArray[Any], values: UIntArray) -> None:
        """Writes both into arrays of this length; the indices as int32, where that is enough for
        them, or int64."""
        at = 0
        for positions, shift, new in self._pieces:
            part = slice(at, at + len(new))
            np.add(positions, shift, out=indices[part], dtype=np.int64, casting="unsafe")
            values[part] = new
            at += len(new)

    def _joined(self) -> Piece:
        pieces = self._pieces
        if len(pieces) == 1 and pieces[0].positions.dtype == np.int64:
            return pieces[0]
        indices = np.empty(self._count, np.int64)
        at = 0
        for positions, shift, values in pieces:
            np.add(positions, shift, out=indices[at : at + len(values)], dtype=np.int64)
            at += len(values)
        joined = Piece(
            indices,
            0,
            pieces[0].values if len(pieces) == 1 else np.concatenate([p.values for p in pieces]),
        )
        self._pieces = (joined,)
        return joined


StateChanges = dict[str, TensorChanges]
"""What changed in a state, by the name of the tensor; tensors without changes are left out."""


def merged(steps: tuple[StateChanges, ...], state: State) -> StateChanges:
    """One change per element over several steps, with the bits of ``state``, to which the last one
    led."""
    if len(steps) == 1:
        return steps[0]
    whole: StateChanges = {}
    for name in sorted({name for step in steps for name in step}):
        # Places are joined, and values read from the state: the last of several changes is what it
        # holds.
        indices = np.unique(np.concatenate([step[name].indices for step in steps if name in step]))
        whole[name] = TensorChanges.at(indices, state.read(name)[indices])
    return whole


def elements(changes: StateChanges) -> int:
    """How many changed."""
    return sum(len(changed) for changed in changes.values())


def difference(old: State, new: State) -> StateChanges:
    """What changed where ``new`` took the place of ``old``, a state of the same tensors."""
    changes = {}
    for spec in new.specs:
        indices = np.flatnonzero(
            old.read(spec.name) != new.read(spec.name)
        )  # may exceed 32-bit positions
        if len(indices):
            changes[spec.name] = TensorChanges.at(indices, new.read(spec.name)[indices])
    return changes


# -- a patch


@dataclass(frozen=True, slots=True)
class Patch:
    """The whole ``header`` of a patch and the bytes of its blocks by index, of all or of those that
    a receiver needs, not yet decoded. Who holds a part of the state has the digests of all
    ``tensors`` of the target, 32 bytes each; others compute them. ``nbytes`` were read."""

    header: JoinedHeader
    payloads: Mapping[int, memoryview]
    tensors: bytes = b""
    nbytes: int = 0

    def require(self, state: State, digest: StateDigest) -> None:
        """Raises StateMismatch unless the patch is for the tensors of ``state``, or of those of
        which it is a part and has all blocks of that part."""
        if not isinstance(digest, PartDigest):
            state.require_specs(self.header.specs, "the patch")
            return
        covered = {
            segment.spec for index in self.payloads for segment in self.header.cuts[index].segments
        }
        if digest.whole != self.header.specs or covered != {
            spec for spec in state.specs if spec.elements
        }:
            raise StateMismatch(
                "the patch is for other tensors, or cut in another way, than the part that is held"
            )


def parse_patch(files: Sequence[bytes | memoryview], base: StateDigest) -> Patch:
    """The patch that these ``files`` are together, for the state with the tree ``base``.

    Raises WrongBase where it is for another state, and CorruptPatch: magic, checksum, caps and
    tiling are checked here, the blocks' own bytes when they are decoded.
    """
    state, room = Base(base.specs, base.root), Room()
    parsed: list[ParsedHeader] = []
    payloads: list[memoryview] = []
    for data in files:
        view = memoryview(data)
        parsed.append(found := parse_header(view, state, room=room))
        require_bytes(found, len(view))
        payloads += [view[start:end] for start, end in pairwise(places_of(found))]
    return Patch(
        JoinedHeader.of(parsed, state), dict(enumerate(payloads)), nbytes=sum(map(len, files))
    )


def require_bytes(parsed: ParsedHeader, nbytes: int) -> None:
    """Raises CorruptPatch unless the blocks tile a file of ``nbytes`` behind its header."""
    implied = parsed.end + parsed.header.body_bytes
    if implied != nbytes:
        raise CorruptPatch(f"the patch has {nbytes} bytes, its header implies {implied}")


def places_of(parsed: ParsedHeader) -> list[int]:
    """Where the blocks of a file begin, and where the last one ends."""
    return list(accumulate((entry.length for entry in parsed.header.blocks), initial=parsed.end))


@dataclass(frozen=True, slots=True)
class AppliedPatch:
    """What `apply_patch` did: the changes per tensor name, the digest tree of the state now, and
    what a history is to remember of it: None where that was not asked for, cannot be had, or is too
    much."""

    changes: StateChanges
    digest: StateDigest
    records: dict[int, Records] | None


def advance_state(
    state: State,
    blocks: Sequence[Block],
    changed: Sequence[Changes | None],
    *,
    journal: Journal | None = None,
    threads: int | None = None,
) -> None:
    """Makes the changes of ``blocks`` in a state, in place.

    Nothing is decoded or hashed: `code_blocks` has proved each block. A state in which this was
    interrupted must be given up. ``journal`` is called with each block and its old bits before the
    block is written to.
    """

    def run(index: int) -> None:
        block, changes = blocks[index], changed[index]
        if changes is None:
            return
        if journal:
            journal(block, Changes(changes.positions, changes.replaced(block.read(state))))
        scatter(block, state, changes)

    for _ in ordered_map(run, range(len(blocks)), threads):
        pass


def apply_patch(
    patch: Patch,
    state: State,
    digest: StateDigest,
    *,
    history: History | None = None,
    max_records: int = 0,
    journal: Journal | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> AppliedPatch:
    """Turns ``state`` (host memory, with tree ``digest``) into the patch's target, or leaves it
    exactly as it was.

    The state's root must be the patch's base root (WrongBase), so that applying twice is refused
    rather than harmful. ``history``: what changed up to ``state``; a patch that needs another one
    is refused (WrongHistory). ``max_records``: the bytes of records of it that may be kept, for a
    history. ``journal`` is told of each block and its old bits before it is written to. Every
    block's bytes are checked against the header, every changed leaf is hashed again and the root
    compared with the target root (DigestMismatch). On any failure, cancellation included, what was
    written is undone first.
    """
    # 1. Whether the patch fits, before the first write.
    header = patch.header
    if header.base_root != digest.root:
        raise WrongBase(
            f"the patch applies to root {header.base_root[:16]}…, the state has {digest.root[:16]}…"
        )
    patch.require(state, digest)
    blocks, payloads = header.cuts, patch.payloads
    needed = (
        header.history
        if any(header.blocks[index].codec_id == codecs.HISTORY for index in payloads)
        else None
    )
    known = (history or History()).named(needed, blocks) if needed else None
    sliced = not header.is_whole  # blocks begin and end within leaves, which are hashed at the end
    recorder = Recorder(max_records) if max_records else None
    indices = list(payloads)
    if sliced:
        groups = [[index] for index in indices]
    else:
        groups = [
            [indices[k] for k in group]
            for group in hashed_together([blocks[k] for k in indices], threads)
        ]
    undo: dict[int, Changes] = {}

    def change(index: int) -> Changes:
        block, entry = blocks[index], header.blocks[index]
        before = block.read(state)
        past = known.past(index) if known else ()
        changes = decode_block(index, block, entry, payloads[index], before, past)
        if entry.codec_id == codecs.SAME:
            return changes
        # The old bits are noted before the first write, so that undo finds them whenever this
        # stops.
        undo[index] = Changes(changes.positions, changes.replaced(before))
        if journal:
            journal(block, undo[index])
        if recorder:
            recorder.add(index, block.dtype, changes._replace(before=undo[index].values), before)
        scatter(block, state, changes)
        return changes

    def run(group: Sequence[int]) -> tuple[list[tuple[int, list[tuple[str, Piece]]]], Leaves]:
        made = [(index, _by_tensor(blocks[index], change(index))) for index in group]
        written = [blocks[index] for index in group if index in undo and not sliced]
        return made, inner_leaves(written, lambda segment: state.read(*segment.place))

    # 2. Blocks in parallel: check, decode, note the old bits, write, and hash again what was
    # written.
    leaves: Leaves = {}
    per_tensor: dict[str, list[Piece]] = {}
    try:
        # closing() ends the calls in flight before the undo below, so that none writes after it.
        with closing(ordered_map(run, groups, threads)) as results:
            for made, written in results:
                leaves |= written
                for index, changes in made:
                    for name, found in changes:
                        per_tensor.setdefault(name, []).append(found)
                    if progress:
                        progress(blocks[index].nbytes)
        hit("apply.written")
        # 3. The root covers every bit of the state, those that were there before as well as the new
        # ones.
        joined = {name: TensorChanges(pieces) for name, pieces in per_tensor.items()}
        if sliced:
            leaves = rehashed(state, joined, threads)
        target = with_leaves(digest, leaves, patch.tensors)
        if target.root != header.target_root:
            raise DigestMismatch(
                f"the patched state has root {target.root[:16]}…, the patch promises "
                f"{header.target_root[:16]}…"
            )
    except BaseException:
        # 4. Undo restores what was noted; what was not written yet is written once more with its
        # own bits.
        hit("apply.undo")
        for index, old in undo.items():
            scatter(blocks[index], state, old)
        raise
    return AppliedPatch(joined, target, recorder.records if recorder else None)


def decode_block(
    index: int,
    block: Block,
    entry: BlockEntry,
    payload: memoryview,
    before: UIntArray,
    past: codecs.Past = (),
) -> Changes:
    """The changes of one block with elements ``before`` and this ``past``, checked against its
    entry; every error names the block and its tensors. Raises CorruptPatch."""
    where = f"block {index} ({block})"
    if entry.codec_id == codecs.SAME:
        return Changes(np.empty(0, np.uint32), np.empty(0, block.dtype.uint))
    # Here damage gets the name of its block, and costs no decoding. What proves the state is the
    # root at the end.
    if check_of(payload) != entry.check:
        raise CorruptPatch(f"{where} does not match its checksum")
    try:
        changes = codecs.decode_block(
            entry.codec_id, payload, before, block.layout._replace(past=past)
        )
    except PulseError as error:
        raise CorruptPatch(f"{where}: {error}", hint=error.hint) from error
    if len(changes.positions) != entry.changed:
        raise CorruptPatch(
            f"{where}: {len(changes.positions)} changes, but the header says {entry.changed}"
        )
    return changes


def scatter(block: Block, state: State, changes: Changes) -> None:
    """Makes the changes of a block in a state."""
    if (view := block.view(state)) is not None:
        bits.put(view, changes.positions, changes.values)
        return
    for segment, base, piece in pieces_of(block, changes):
        bits.put(state.read(*segment.place), piece.positions, piece.values, base)


def _by_tensor(block: Block, changes: Changes) -> list[tuple[str, Piece]]:
    """The changes of a block by the names of its tensors."""
    return [
        (segment.spec.name, Piece(piece.positions, segment.start - base, piece.values))
        for segment, base, piece in pieces_of(block, changes)
    ]


def rehashed(state: State, changes: StateChanges, threads: int | None) -> Leaves:
    """The leaves of ``state`` in which something of the ``changes`` is, hashed again."""
    runs = [run for name, changed in changes.items() for run in _runs(state.spec(name), changed)]

    def leaves(run: Segment) -> Leaves:
        return numbered([run], leaves_of([state.read(*run.place)]))

    found: Leaves = {}
    for some in ordered_map(leaves, runs, threads):
        found |= some
    return found


def _runs(spec: TensorSpec, changes: TensorChanges) -> Iterator[Segment]:
    """The changed leaves of a tensor, those side by side as one segment of at most 16."""
    per_leaf = LEAF_BYTES // spec.dtype.width
    changed = np.unique(changes.indices // per_leaf)
    # Where a row of neighbors begins. Neighbors are hashed in one call, which fills the lanes of
    # a processor.
    starts = np.flatnonzero(np.diff(changed, prepend=-2) != 1)
    for first, end in pairwise([*starts.tolist(), len(changed)]):
        for at in range(first, end, SIDE_BY_SIDE):
            last = int(changed[min(at + SIDE_BY_SIDE, end) - 1])
            yield Segment(
                spec, int(changed[at]) * per_leaf, min((last + 1) * per_leaf, spec.elements)
            )
