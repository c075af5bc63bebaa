"""Parse a patch, apply it in place, or undo it exactly (docs/format.md, section 3).

Applying returns the changes by tensor.
"""

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

#: Records a block and its old bits. Any thread may call it.
Journal = Callable[[Block, Changes], None]


class Piece(NamedTuple):
    """Changes of a part of a tensor: new bits at ``positions + shift``, which ascend."""

    positions: npt.NDArray[np.uint32] | npt.NDArray[np.int64]
    shift: int
    values: UIntArray

    @property
    def first(self) -> int:
        return int(self.positions[0]) + self.shift


class TensorChanges:
    """The changed elements of one tensor: ascending flat indices and the new bits.

    Both arrays are joined from the non-empty ``pieces`` on first use: int64 indices take four times
    the memory of BF16 bits.
    """

    __slots__ = ("_count", "_pieces")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        found = tuple(pieces)
        self._pieces = found if len(found) == 1 else tuple(sorted(found, key=attrgetter("first")))
        self._count = sum(len(piece.values) for piece in self._pieces)

    @classmethod
    def at(cls, indices: npt.NDArray[np.int64], values: UIntArray) -> TensorChanges:
        """The changes that write ``values`` at the ascending ``indices``."""
        return cls((Piece(indices, 0, values),))

    def __len__(self) -> int:
        """The number of changed elements."""
        return self._count

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Ascending int64 indices [changes] into the flattened tensor."""
        return self._joined().positions.astype(np.int64, copy=False)

    @property
    def values(self) -> UIntArray:
        """The new bits [changes]."""
        return self._joined().values

    def fits(self, elements: int, width: int) -> bool:
        """Whether the changes fit a tensor of ``elements`` elements of ``width`` bytes."""
        kind = np.dtype(f"u{width}")
        for positions, shift, values in self._pieces:
            alike = values.dtype == kind and values.shape == positions.shape
            if not alike or positions.dtype.kind not in "iu":
                return False
            first, end = -shift, elements - shift
            if len(values) and not first <= int(positions.min()) <= int(positions.max()) < end:
                return False
        return True

    def cut(self, most: int) -> Iterator[TensorChanges]:
        """The same changes in parts of at most ``most`` elements."""
        for positions, shift, values in self._pieces:
            for start in range(0, len(values), most):
                part = slice(start, start + most)
                yield TensorChanges((Piece(positions[part], shift, values[part]),))

    def write_into(self, indices: npt.NDArray[Any], values: UIntArray) -> None:
        """Write indices and values into arrays [changes].

        ``indices`` is int64, or int32 if the tensor is small enough.
        """
        at = 0
        for positions, shift, new in self._pieces:
            part = slice(at, at + len(new))
            np.add(positions, shift, out=indices[part], dtype=np.int64, casting="unsafe")
            values[part] = new
            at += len(new)

    def _joined(self) -> Piece:
        first = self._pieces[0]
        if len(self._pieces) > 1 or first.positions.dtype != np.int64:
            indices = np.empty(self._count, np.int64)
            values = np.empty(self._count, first.values.dtype)
            self.write_into(indices, values)
            self._pieces = (Piece(indices, 0, values),)
        return self._pieces[0]


#: The changes of a state by tensor name, without unchanged tensors.
StateChanges = dict[str, TensorChanges]


def merged(steps: tuple[StateChanges, ...], state: State) -> StateChanges:
    """The changes of several steps as one, each element once, with its bits in ``state``.

    ``state`` is the state to which the last step led.
    """
    if len(steps) == 1:
        return steps[0]
    whole: StateChanges = {}
    for name in sorted({name for step in steps for name in step}):
        # Only indices are joined. The values are read from the state, which holds the last change
        # of each.
        indices = np.unique(np.concatenate([step[name].indices for step in steps if name in step]))
        whole[name] = TensorChanges.at(indices, state.read(name)[indices])
    return whole


def elements(changes: StateChanges) -> int:
    """The number of changed elements."""
    return sum(len(changed) for changed in changes.values())


def difference(old: State, new: State) -> StateChanges:
    """The changes from ``old`` to ``new``, two states of the same tensors."""
    changes = {}
    for spec in new.specs:
        # int64: a tensor may have more than 2^32 elements.
        indices = np.flatnonzero(old.read(spec.name) != new.read(spec.name))
        if len(indices):
            changes[spec.name] = TensorChanges.at(indices, new.read(spec.name)[indices])
    return changes


# -- a patch


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch: its joined ``header``, and the bytes of its blocks by index, not yet decoded.

    A worker that holds a part of the state has only the blocks of that part. It also has the
    digests of all ``tensors`` of the target, 32 bytes each; other workers compute these. ``nbytes``
    is the number of bytes that were read.
    """

    header: JoinedHeader
    payloads: Mapping[int, memoryview]
    tensors: bytes = b""
    nbytes: int = 0

    def require(self, state: State, digest: StateDigest) -> None:
        """Raise StateMismatch unless the patch is for the tensors of ``state``.

        For a part of a state, the patch must have exactly the blocks of that part.
        """
        if not isinstance(digest, PartDigest):
            state.require_specs(self.header.specs, "the patch")
            return
        covered = {
            segment.spec for index in self.payloads for segment in self.header.cuts[index].segments
        }
        held = {spec for spec in state.specs if spec.elements}
        if digest.whole != self.header.specs or covered != held:
            raise StateMismatch(
                "the patch is for other tensors, or cut in another way, than the part that is held"
            )


def parse_patch(files: Sequence[bytes | memoryview], base: StateDigest) -> Patch:
    """The patch in these ``files``, for the state with the tree ``base``.

    Magic, checksum, caps and tiling are checked here; the bytes of blocks are checked when they are
    decoded. Raises WrongBase if the patch is for another state, and CorruptPatch.
    """
    # The files share one `Room`, so many small files cannot list more slices than one large file.
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
    """Raise CorruptPatch unless the blocks tile a file of ``nbytes`` after its header."""
    implied = parsed.end + parsed.header.body_bytes
    if implied != nbytes:
        raise CorruptPatch(f"the patch has {nbytes} bytes, its header implies {implied}")


def places_of(parsed: ParsedHeader) -> list[int]:
    """The start of each block in a file, and the end of the last one."""
    return list(accumulate((entry.length for entry in parsed.header.blocks), initial=parsed.end))


@dataclass(frozen=True, slots=True)
class AppliedPatch:
    """The result of `apply_patch`.

    ``changes`` are by tensor name, and ``digest`` is the tree of the new state. ``records`` is what
    a history remembers of the patch; None if nobody asked for it, or if it is too large.
    """

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
    """Apply the changes of ``blocks`` to a state in place.

    Nothing is decoded or hashed, because `code_blocks` has proved each block. If this is
    interrupted, the state must be given up. ``journal`` records each block and its old bits before
    the first write to it.
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
    """Turn ``state`` into the patch's target in place, or leave it exactly as it was.

    Every block is checked against the header, every changed leaf is hashed again, and the new root
    is compared with the target root. On any failure, cancellation included, all writes are undone
    first.

    Args:
        patch: The patch. Its base root must be the state's root, so applying it twice is refused.
        state: The state, in host memory.
        digest: The tree of ``state``.
        history: The changes that led to ``state``. Default: none.
        max_records: Bytes of records that may be kept for a history. Default: none.
        journal: Records each block and its old bits before the first write to it.
        threads: The maximum number of threads. Default: one per core.
        progress: Gets the bytes of each block that is done.
    Raises:
        WrongBase: The patch is for another state.
        WrongHistory: The patch needs another history.
        StateMismatch: The patch is for other tensors.
        CorruptPatch: A block does not decode to what the header says.
        DigestMismatch: The new state does not have the target root.
    """
    # 1. Check that the patch fits, before the first write.
    header = patch.header
    if header.base_root != digest.root:
        raise WrongBase(
            f"the patch applies to root {header.base_root[:16]}…, the state has {digest.root[:16]}…"
        )
    patch.require(state, digest)
    blocks, payloads = header.cuts, patch.payloads
    by_history = any(header.blocks[index].codec_id == codecs.HISTORY for index in payloads)
    known = (history or History()).named(header.history, blocks) if by_history else None
    sliced = not header.is_whole  # blocks may end within leaves: hash these at the end
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
        # The old bits are recorded before the first write: the undo finds them wherever this stops.
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

    # 2. Blocks in parallel: check, decode, record the old bits, write, and hash the changed leaves.
    leaves: Leaves = {}
    per_tensor: dict[str, list[Piece]] = {}
    try:
        # closing() waits for the calls in flight. Without it a call could write after the undo
        # below.
        with closing(ordered_map(run, groups, threads)) as results:
            for made, written in results:
                leaves |= written
                for index, changes in made:
                    for name, found in changes:
                        per_tensor.setdefault(name, []).append(found)
                    if progress:
                        progress(blocks[index].nbytes)
        hit("apply.written")
        # 3. The root covers all leaves: changed ones are hashed again with their old and new bits,
        # all others keep their digests.
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
        # 4. Undo: write back what was recorded. A block that was not written yet gets its own bits
        # again.
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
    """Decode one block and check it against its header ``entry``.

    ``before`` are its old elements, ``past`` its earlier changes. Every error names the block and
    its tensors. Raises CorruptPatch.
    """
    where = f"block {index} ({block})"
    if entry.codec_id == codecs.SAME:
        return Changes(np.empty(0, np.uint32), np.empty(0, block.dtype.uint))
    # The checksum names the damaged block and saves its decoding. It is no proof: the root is.
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
    """Write the changes of a block into a state."""
    if (view := block.view(state)) is not None:
        bits.put(view, changes.positions, changes.values)
        return
    for segment, base, piece in pieces_of(block, changes):
        bits.put(state.read(*segment.place), piece.positions, piece.values, base)


def _by_tensor(block: Block, changes: Changes) -> list[tuple[str, Piece]]:
    """The changes of a block with the name of each tensor."""
    return [
        (segment.spec.name, Piece(piece.positions, segment.start - base, piece.values))
        for segment, base, piece in pieces_of(block, changes)
    ]


def rehashed(state: State, changes: StateChanges, threads: int | None) -> Leaves:
    """The leaves of ``state`` that contain ``changes``, hashed again."""
    runs = [run for name, changed in changes.items() for run in _runs(state.spec(name), changed)]

    def leaves(run: Segment) -> Leaves:
        return numbered([run], leaves_of([state.read(*run.place)]))

    found: Leaves = {}
    for some in ordered_map(leaves, runs, threads):
        found |= some
    return found


def _runs(spec: TensorSpec, changes: TensorChanges) -> Iterator[Segment]:
    """The changed leaves of a tensor; adjacent ones form one segment of at most 16."""
    per_leaf = LEAF_BYTES // spec.dtype.width
    changed = np.unique(changes.indices // per_leaf)
    # The starts of rows of adjacent leaves. One call hashes up to 16 of them on the vector lanes of
    # a core.
    starts = np.flatnonzero(np.diff(changed, prepend=-2) != 1)
    for first, end in pairwise([*starts.tolist(), len(changed)]):
        for at in range(first, end, SIDE_BY_SIDE):
            last = int(changed[min(at + SIDE_BY_SIDE, end) - 1])
            yield Segment(
                spec, int(changed[at]) * per_leaf, min((last + 1) * per_leaf, spec.elements)
            )
