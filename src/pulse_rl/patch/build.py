"""Builds a patch from two states: compare, encode, verify and hash in one pass over the blocks (docs/format.md, 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from .. import codec as codecs
from .._util.threads import ordered_map
from ..codec import Changes
from ..errors import CorruptPatch, IntegrityError
from ..state import bits
from ..state.digest import StateDigest
from ..state.memory import Allocate, SpareMemory
from ..state.tensors import State, UIntArray
from .blocks import Block, cut
from .header import BlockEntry, PatchHeader, all_of, check_of
from .history import History, HistoryName, Recorder, Records
from .tree import TreeUpdate, changed_leaves, hashed_together
from .undo import UndoLog

_DENSE = 4  # where more than one element in so many changes, what old bits take weighs more than looking them up
_SMALL = 4096  # bytes: a patch up to that is made without a history, too, which takes some hundred bytes to say
_STRIDE, _FEW = 16, 4096  # of the trainer's tensors, one change in so many is looked at again, from so many on


@dataclass(frozen=True, slots=True)
class BuiltPatch:
    """A patch as chunks of bytes in file order (header, then a payload a block), and the digest tree of the state that
    it produces. ``changes`` holds the decoded blocks, for `advance_state`; None where nothing changed. ``records``:
    what the codec that needs a history is to remember of it, by index of the block; None for other codecs, and where
    that is too much."""

    header: PatchHeader
    chunks: tuple[bytes, ...]
    target: StateDigest
    changes: tuple[Changes | None, ...]
    records: Mapping[int, Records] | None

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.chunks))

    def to_bytes(self) -> bytes:
        return b"".join(self.chunks)


@dataclass(slots=True)
class _Built:
    """A block: how it is coded, what changed, and its leaves; None where nothing changed."""

    index: int
    encoded: codecs.Encoded
    changes: Changes | None
    leaves: list[bytes] | None = None


def build_patch(
    old: State,
    new: State,
    old_digest: StateDigest,
    *,
    codec: str = codecs.AUTO,
    history: History | None = None,
    most_records: int = 0,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> BuiltPatch:
    """The patch that turns ``old`` into ``new``. ``old_digest`` is the tree of ``old``.

    One walk over both: each block is compared, coded, decoded again to prove it, and hashed. Blocks without changes are
    not hashed again. Raises StateMismatch unless both hold the same tensors, and IntegrityError where a block does not
    decode to the new elements, which means that they changed during the call. ``history``: what changed up to ``old``,
    for the codec that needs it. ``most_records``: the bytes of the records that
    are to be kept for the next one, at most. ``progress`` is called with the bytes of model that were worked through
    since its last call.
    """
    new.require_specs(old.specs, "the base state")
    codecs.check_codec(codec)
    known = history or History()
    blocks = cut(old.specs)
    recorder = Recorder(most_records) if most_records else None

    def run(group: range, copies: Allocate) -> list[_Built]:
        built, elements, made = [], [], []
        for index in group:
            block = blocks[index]
            before, (after, copied) = block.read(old), block.read_into(new, copies)
            encoded, changes = encode_proved(
                block, before, after, known.past(index), codec=codec, stride=1 if copied else _STRIDE
            )
            if changes is None:
                built.append(_Built(index, encoded, None))
                continue
            if recorder:
                recorder.add(index, block.dtype, changes, before)
            # What is hashed is what the patch leads to, not what the tensors hold by now: a trainer may write to them.
            elements.append(after if copied else before)
            made.append(None if copied else changes)
            built.append(_Built(index, encoded, to_keep(changes, block)))
        changed = [b for b in built if b.changes is not None]
        hashed = changed_leaves([blocks[b.index] for b in changed], elements, made)
        for b, leaves in zip(changed, hashed, strict=True):
            b.leaves = leaves
        return built

    spare = SpareMemory()

    def run_with_memory(group: range) -> list[_Built]:
        with spare.lent() as copies:
            return run(group, copies)

    tree = TreeUpdate(old_digest)
    coded, kept = [], []
    for built in chain.from_iterable(ordered_map(run_with_memory, hashed_together(blocks, threads), threads)):
        coded.append(built.encoded)
        kept.append(built.changes)
        tree.add(blocks[built.index], built.leaves)
        if progress:
            progress(blocks[built.index].nbytes)
    used = any(encoded.codec_id == codecs.HISTORY for encoded in coded)
    named = known.name if used else None
    records, target = recorder.records if recorder else None, tree.finish()
    made = _assemble(old_digest.root, target, coded, kept, named, records)
    if named is None or made.nbytes > _SMALL:
        return made

    def without(index: int) -> codecs.Encoded:
        encoded, changes = coded[index], kept[index]
        if encoded.codec_id != codecs.HISTORY or changes is None:
            return encoded
        before = blocks[index].read(old)
        after = before.copy()
        after[changes.positions] = changes.values
        return encode_proved(blocks[index], before, after, codec=codec)[0]

    plain = list(ordered_map(without, range(len(coded)), threads))
    return min(made, _assemble(old_digest.root, target, plain, kept, None, records), key=_nbytes)


def _nbytes(built: BuiltPatch) -> int:
    return built.nbytes


def build_fold(
    log: UndoLog, state: State, digest: StateDigest, *, codec: str = codecs.AUTO, threads: int | None = None
) -> BuiltPatch:
    """The patch from the version that ``log`` leads back to, to ``state`` with its tree ``digest``. Hashes nothing."""
    codecs.check_codec(codec)
    blocks = cut(state.specs)

    def run(index: int) -> codecs.Encoded:
        after = blocks[index].read(state)
        return encode_proved(blocks[index], log.rewind(index, after), after, codec=codec)[0]

    coded = list(ordered_map(run, range(len(blocks)), threads))
    return _assemble(log.base_root, digest, coded, [None] * len(coded))


def encode_proved(
    block: Block,
    before: UIntArray,
    after: UIntArray,
    past: codecs.Past = (),
    *,
    codec: str = codecs.AUTO,
    stride: int = 1,
) -> tuple[codecs.Encoded, Changes | None]:
    """One block, proved by decoding it, and its changes; None where there are none. Raises IntegrityError.

    What is decoded is compared with what the encoder saw, where it kept that, and with ``after`` as it is by then; of
    many changes at one in ``stride``, since ``after`` is in no cache any more.
    """
    layout = block.layout._replace(past=past)
    try:
        encoded = codecs.encode_block(before, after, layout, codec=codec, prove=True)
        if encoded.codec_id == codecs.SAME:
            return encoded, None
        changes = encoded.decoded
        if changes is None:
            changes = codecs.decode_block(encoded.codec_id, memoryview(encoded.payload), before, layout)
        proved = _is_proved(encoded, changes, after, stride)
    except CorruptPatch:
        proved = False
    if not proved:
        raise IntegrityError(
            f"{block} does not decode to what was encoded", hint="Do not modify tensors during publish()."
        )
    return encoded._replace(found=None, decoded=None), changes


def to_keep(changes: Changes, block: Block) -> Changes:
    """A block's changes as they wait for their commit: without the old bits where these are many."""
    return changes._replace(before=None) if _DENSE * len(changes.positions) > block.elements else changes


def _is_proved(encoded: codecs.Encoded, changes: Changes, after: UIntArray, stride: int) -> bool:
    found = encoded.found
    if len(changes.positions) != encoded.changed:
        return False
    if found and not all(map(np.array_equal, changes[:2], found[:2])):
        return False
    if found is None or encoded.changed < _FEW:
        stride = 1
    looked_at, values = (np.ascontiguousarray(part[::stride]) for part in changes[:2])
    return bits.held(after, looked_at, values)


def _assemble(
    base_root: str,
    target: StateDigest,
    coded: list[codecs.Encoded],
    kept: list[Changes | None],
    history: HistoryName | None = None,
    records: Mapping[int, Records] | None = None,
) -> BuiltPatch:
    entries = tuple(map(entry_of, coded))
    header = PatchHeader(base_root, target.root, all_of(target.specs), entries, history)
    return BuiltPatch(header, (header.to_bytes(), *(e.payload for e in coded)), target, tuple(kept), records)


def entry_of(encoded: codecs.Encoded) -> BlockEntry:
    """What a header says of a block."""
    return BlockEntry(encoded.codec_id, encoded.changed, len(encoded.payload), check_of(encoded.payload))
