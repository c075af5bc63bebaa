"""One patch: build it from two states, parse its header, apply it to a state (docs/format.md, section 3).

Pure functions on bytes and buffers. Blocks are coded and decoded on all cores; new leaves are hashed in the same walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import codec as codecs
from .._util.threads import ordered_map
from ..codec import Changes
from ..errors import CorruptPatch, DigestMismatch, IntegrityError, PulseError, WrongBase
from ..state import bits
from ..state.digest import LEAF_BYTES, StateDigest, leaf_digests
from ..state.tensors import State, UIntArray
from .blocks import Block, Segment, cut
from .header import BlockEntry, PatchHeader, check_block_elements, parse_header
from .undo import UndoLog

DEFAULT_BLOCK_ELEMENTS = 1 << 22

# Changes of a built patch are kept for `advance_in_place` up to this density; above it they would outweigh the saving
# and are decoded again.
_KEPT_DENSITY = 1 / 32

Progress = Callable[[int], None]
"""Called with the bytes of model that were worked through since the last call."""


@dataclass(frozen=True, slots=True)
class BuiltPatch:
    """A patch as chunks of bytes in file order (header, then a payload a block), and the digest tree of the state that
    it produces. ``changes`` holds the decoded blocks, None where they were too many to keep."""

    header: PatchHeader
    chunks: tuple[bytes, ...]
    target: StateDigest
    changes: tuple[Changes | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.chunks))

    def to_bytes(self) -> bytes:
        return b"".join(self.chunks)


@dataclass(frozen=True, slots=True)
class Patch:
    """A parsed patch: the checked header and the blocks' bytes, not yet decoded."""

    header: PatchHeader
    body: memoryview

    @classmethod
    def parse(cls, data: bytes | memoryview, elements: int | None = None) -> Patch:
        """Checks magic, header digest, caps and tiling; raises CorruptPatch. The blocks' own digests are checked when
        they are decoded. ``elements``, where given, are those that the patch has to be for."""
        view = memoryview(data)
        header, size = parse_header(view, elements)
        if size + header.body_bytes != len(view):
            raise CorruptPatch(f"the patch has {len(view)} bytes, its header speaks of {size + header.body_bytes}")
        return cls(header, view[size:])


class TensorChanges(NamedTuple):
    """Changed elements of one tensor: flat indices, ascending, and the new bits at them."""

    indices: npt.NDArray[np.int64]
    values: UIntArray


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply_in_place` did: the changes per tensor name, the digest tree of the state now, and the old bits by
    block index."""

    changes: dict[str, TensorChanges]
    digest: StateDigest
    undo: dict[int, Changes]


def build(
    old: State,
    new: State,
    old_digest: StateDigest,
    *,
    codec: str = codecs.DEFAULT,
    block_elements: int = DEFAULT_BLOCK_ELEMENTS,
    threads: int | None = None,
    progress: Progress | None = None,
) -> BuiltPatch:
    """The patch that turns ``old`` into ``new``. ``old_digest`` is the tree of ``old``.

    One walk over both: each block is compared, coded, decoded again to prove it, and hashed. Blocks without changes are
    not hashed again. Raises StateMismatch unless both hold the same tensors, and IntegrityError where a block does not
    decode to the new elements, which means that they changed during the call.
    """
    new.require_specs(old.specs, "the base state")
    check_block_elements(block_elements)
    chosen = codecs.by_name(codec)

    def run(block: Block) -> tuple[codecs.Encoded, Changes | None, list[bytes] | None]:
        before, after = block.read(old), block.read(new)
        encoded, changes = _encode(chosen, block, before, after)
        return encoded, changes, None if encoded.codec_id == codecs.SAME else _block_leaves(block, after)

    blocks = cut(old.specs, block_elements)
    tree = _LeafUpdate(old_digest)
    coded, kept = [], []
    for block, (encoded, changes, leaves) in zip(blocks, ordered_map(run, blocks, threads), strict=True):
        coded.append(encoded)
        kept.append(changes)
        tree.add(block, leaves)
        if progress:
            progress(block.nbytes)
    return _assemble(old_digest.root, tree.finish(), block_elements, coded, kept)


def fold(
    log: UndoLog, state: State, digest: StateDigest, *, codec: str = codecs.DEFAULT, threads: int | None = None
) -> BuiltPatch:
    """The patch from the version that ``log`` leads back to, to ``state`` with its tree ``digest``. Hashes nothing."""
    chosen = codecs.by_name(codec)
    blocks = cut(state.specs, DEFAULT_BLOCK_ELEMENTS)

    def run(index: int) -> codecs.Encoded:
        after = blocks[index].read(state)
        return _encode(chosen, blocks[index], log.rewind(index, after), after)[0]

    coded = list(ordered_map(run, range(len(blocks)), threads))
    return _assemble(log.base_root, digest, DEFAULT_BLOCK_ELEMENTS, coded, [None] * len(coded))


def _encode(
    chosen: codecs.Codec, block: Block, before: UIntArray, after: UIntArray
) -> tuple[codecs.Encoded, Changes | None]:
    """One block, proved by decoding it, and its changes where they are few enough to keep."""
    encoded = codecs.encode_block(chosen, before, after, block.layout)
    if encoded.codec_id == codecs.SAME:
        return encoded, None
    changes = codecs.by_id(encoded.codec_id).decode(memoryview(encoded.payload), before, block.layout)
    same = len(changes.positions) == encoded.changed
    if not same or not np.array_equal(bits.take(after, changes.positions), changes.values):
        raise IntegrityError(
            f"{block} does not decode to what was encoded", hint="Do not change tensors while they are published."
        )
    return encoded, changes if encoded.changed <= _KEPT_DENSITY * block.elements else None


def _assemble(
    base_root: str,
    target: StateDigest,
    block_elements: int,
    coded: list[codecs.Encoded],
    kept: list[Changes | None],
) -> BuiltPatch:
    entries = tuple(BlockEntry(e.codec_id, e.changed, len(e.payload), sha256(e.payload).digest()) for e in coded)
    header = PatchHeader(base_root, target.root, block_elements, target.specs, entries)
    return BuiltPatch(header, (header.to_bytes(), *(e.payload for e in coded)), target, tuple(kept))


def advance_in_place(built: BuiltPatch, state: State, *, threads: int | None = None) -> dict[int, Changes]:
    """Turns the state that a patch was built from into its target; returns the old bits by block index.

    Nothing is hashed: `build` has proved each block and knows the target's tree. A state in which this was interrupted
    must be given up.
    """
    blocks = built.header.cut()
    undo: dict[int, Changes] = {}

    def run(index: int) -> None:
        block, entry, changes = blocks[index], built.header.blocks[index], built.changes[index]
        if entry.codec_id == codecs.SAME:
            return
        before = block.read(state)
        if changes is None:
            payload = memoryview(built.chunks[1 + index])
            changes = codecs.by_id(entry.codec_id).decode(payload, before, block.layout)
        undo[index] = Changes(changes.positions, bits.take(before, changes.positions))
        _scatter(block, state, changes)

    for _ in ordered_map(run, range(len(blocks)), threads):
        pass
    return undo


def apply_in_place(
    patch: Patch,
    state: State,
    digest: StateDigest,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Applied:
    """Turns ``state`` (host memory, with tree ``digest``) into the patch's target, or leaves it exactly as it was.

    The state's root must be the patch's base root (WrongBase), so that applying twice is refused rather than harmful.
    Every block's bytes are checked against the header, every changed leaf is hashed again and the root compared with
    the target root (DigestMismatch). On any failure, cancellation included, what was written is undone first.
    """
    header = patch.header
    if header.base_root != digest.root:
        raise WrongBase(f"the patch applies to root {header.base_root[:16]}…, the state has {digest.root[:16]}…")
    state.require_specs(header.specs, "the patch")
    blocks = header.cut()
    offsets = np.concatenate([[0], np.cumsum([e.length for e in header.blocks], dtype=np.int64)])
    journal: dict[int, Changes] = {}

    def run(index: int) -> tuple[Changes, list[bytes] | None]:
        block, entry = blocks[index], header.blocks[index]
        payload = patch.body[int(offsets[index]) : int(offsets[index + 1])]
        before = block.read(state)
        changes = _decode(index, block, entry, payload, before)
        if entry.codec_id == codecs.SAME:
            return changes, None
        # The old bits enter the journal before the first write, so that undo finds them whenever this stops.
        journal[index] = Changes(changes.positions, bits.take(before, changes.positions))
        _scatter(block, state, changes)
        return changes, _block_leaves(block, block.read(state))

    tree = _LeafUpdate(digest)
    per_tensor: dict[str, list[TensorChanges]] = {}
    try:
        # closing() ends the calls in flight before the undo below, so that none writes after it.
        with closing(ordered_map(run, range(len(blocks)), threads)) as results:
            for index, (changes, leaves) in enumerate(results):
                tree.add(blocks[index], leaves)
                _collect(blocks[index], changes, per_tensor)
                if progress:
                    progress(blocks[index].nbytes)
        target = tree.finish()
        if target.root != header.target_root:
            raise DigestMismatch(
                f"the patched state has root {target.root[:16]}…, the patch promises {header.target_root[:16]}…"
            )
    except BaseException:
        for index, undo in journal.items():
            _scatter(blocks[index], state, undo)
        raise
    return Applied({name: _join(pieces) for name, pieces in per_tensor.items()}, target, journal)


def _decode(index: int, block: Block, entry: BlockEntry, payload: memoryview, before: UIntArray) -> Changes:
    """The changes of one block; every error names the block and its tensors."""
    where = f"block {index} ({block})"
    if entry.codec_id == codecs.SAME:
        return Changes(np.empty(0, np.uint32), np.empty(0, block.dtype.uint))
    if sha256(payload).digest() != entry.sha256:
        raise CorruptPatch(f"{where}: its bytes do not match their SHA-256")
    try:
        codec = codecs.by_id(entry.codec_id)
        if not codec.supports(block.dtype):
            raise CorruptPatch(f"codec {codec.name} does not code {block.dtype.name}")
        changes = codec.decode(payload, before, block.layout)
    except PulseError as error:
        raise CorruptPatch(f"{where}: {error}", hint=error.hint) from error
    if len(changes.positions) != entry.changed:
        raise CorruptPatch(f"{where}: {len(changes.positions)} changes, the header counts {entry.changed}")
    return changes


def _pieces(block: Block, changes: Changes) -> Iterator[tuple[Segment, int, Changes]]:
    """The changes of a block by segment: (segment, place of its first element in the block, its changes)."""
    base = first = 0
    for segment in block.segments:
        end = base + segment.stop - segment.start
        last = int(np.searchsorted(changes.positions, end))
        if last > first:
            yield segment, base, Changes(changes.positions[first:last], changes.values[first:last])
        base, first = end, last


def _scatter(block: Block, state: State, changes: Changes) -> None:
    for segment, base, piece in _pieces(block, changes):
        bits.put(state.read(*segment.place), piece.positions, piece.values, base)


def _collect(block: Block, changes: Changes, into: dict[str, list[TensorChanges]]) -> None:
    for segment, base, piece in _pieces(block, changes):
        indices = piece.positions.astype(np.int64) + (segment.start - base)
        into.setdefault(segment.spec.name, []).append(TensorChanges(indices, piece.values))


def _join(pieces: list[TensorChanges]) -> TensorChanges:
    if len(pieces) == 1:
        return pieces[0]
    return TensorChanges(np.concatenate([p.indices for p in pieces]), np.concatenate([p.values for p in pieces]))


def _block_leaves(block: Block, elements: UIntArray) -> list[bytes]:
    """Leaf digests per segment of a block whose elements are given one segment after another."""
    leaves, at = [], 0
    for segment in block.segments:
        length = segment.stop - segment.start
        leaves.append(leaf_digests(elements[at : at + length]))
        at += length
    return leaves


class _LeafUpdate:
    """The tree of a new state, block by block in order; blocks without changes keep the old state's leaves."""

    def __init__(self, old: StateDigest) -> None:
        self._old = old
        self._pieces: dict[str, list[bytes]] = {}

    def add(self, block: Block, leaves: list[bytes] | None) -> None:
        for k, segment in enumerate(block.segments):
            if leaves is not None:
                piece = leaves[k]
            else:
                per_leaf = LEAF_BYTES // segment.spec.dtype.width
                old = self._old.leaves[segment.spec.name]
                piece = old[segment.start // per_leaf * 32 : -(-segment.stop // per_leaf) * 32]
            self._pieces.setdefault(segment.spec.name, []).append(piece)

    def finish(self) -> StateDigest:
        leaves = {spec.name: b"".join(self._pieces.get(spec.name, ())) for spec in self._old.specs}
        return StateDigest(self._old.specs, leaves)
