"""Build a patch from two states (docs/format.md, section 3).

One pass over the blocks compares, encodes, verifies and hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import NamedTuple

import numpy as np

from .. import codec as codecs
from .._util.threads import ordered_map
from ..codec import Changes
from ..errors import CorruptPatch, IntegrityError
from ..state import bits
from ..state.bits import SpareMemory, UIntArray
from ..state.tensors import State
from .blocks import Block
from .header import BlockEntry, check_of
from .history import Blocks, History, Recorder
from .tree import ChangedBlock, Leaves, changed_inner_leaves

# If more than one element in this many changed, old bits are not kept: their memory costs more than
# to read them again.
_DENSE = 4
# Of _FEW changes or more, one in _STRIDE is compared with the trainer's tensors.
_STRIDE, _FEW = 16, 4096


class CodedBlock(NamedTuple):
    """One coded block and its changes, as `to_keep` keeps them; None if nothing changed."""

    number: int
    encoded: codecs.Encoded
    changes: Changes | None


class CodedGroup(NamedTuple):
    """The blocks of a group, and their changed leaves that lie wholly in one block."""

    coded: list[CodedBlock]
    leaves: Leaves


def code_blocks(
    blocks: Blocks,
    old: State,
    tasks: Iterable[tuple[range, State]],
    *,
    codec: str = codecs.AUTO,
    history: History | None = None,
    recorder: Recorder | None = None,
    check: Callable[[range], None] | None = None,
    threads: int | None = None,
) -> Generator[CodedGroup, None, None]:
    """Compare, encode, prove and hash ``blocks`` of the state ``old``, group by group in order.

    Args:
        blocks: The cut of the state.
        old: The state to code against.
        tasks: Groups of neighboring blocks of one dtype (`hashed_together`), each with a state that
            has their new elements.
        codec: One of `pulse_rl.codec.CODECS`.
        history: The changes that led to ``old``. Default: none.
        recorder: Gets what a history remembers of the changes.
        check: Called with each group before it is read. Default: nothing.
        threads: The maximum number of threads. Default: one per core.
    Raises:
        IntegrityError: A block does not decode to the new elements, because they changed meanwhile.
    """
    known = (history or History()).of(blocks)
    spare = SpareMemory()

    def run(task: tuple[range, State]) -> CodedGroup:
        group, new = task
        coded: list[CodedBlock] = []
        changed: list[ChangedBlock] = []
        if check:
            check(group)
        with spare.borrow() as copies:
            # 1. Block by block, while its elements are in the cache: compare, encode, decode again.
            for index in group:
                block = blocks[index]
                before, (after, copied) = block.read(old), block.read_into(new, copies)
                past, stride = known.past(index), 1 if copied else _STRIDE
                encoded, changes = encode_verified(
                    block, before, after, past, codec=codec, stride=stride
                )
                if changes is None:
                    coded.append(CodedBlock(index, encoded, None))
                    continue
                if recorder:
                    recorder.add(index, block.dtype, changes, before)
                # The hash covers what the patch leads to, not what the tensors hold by now: a
                # trainer may write to them during the call.
                changed.append(ChangedBlock(block, after if copied else before, changes, copied))
                coded.append(CodedBlock(index, encoded, to_keep(changes, block)))
            # 2. Hash the group's changed leaves in one call: several chains of SHA-256 keep a core
            # busy.
            return CodedGroup(coded, changed_inner_leaves(changed))

    with closing(ordered_map(run, tasks, threads)) as groups:
        yield from groups


def encode_verified(
    block: Block,
    before: UIntArray,
    after: UIntArray,
    past: codecs.Past = (),
    *,
    codec: str = codecs.AUTO,
    stride: int = 1,
) -> tuple[codecs.Encoded, Changes | None]:
    """Encode one block and prove it by decoding; return it with its changes, or None.

    The decoded changes are compared with those that the encoder saw, if it kept them, and with the
    current elements ``after``. Of many changes only one in ``stride`` is compared with ``after``,
    which has left the cache by then. Raises IntegrityError.
    """
    # A payload that does not decode would break the stream for every reader from here on. This
    # check finds it before the upload: a defect of a codec or of memory, or a trainer that writes
    # to its tensors during the call.
    layout = block.layout._replace(past=past)
    try:
        encoded = codecs.encode_block(before, after, layout, codec=codec, prove=True)
        if encoded.codec_id == codecs.SAME:
            return encoded, None
        changes = encoded.decoded
        if changes is None:
            changes = codecs.decode_block(
                encoded.codec_id, memoryview(encoded.payload), before, layout
            )
        proved = _is_proved(encoded, changes, after, stride)
    except CorruptPatch:
        proved = False
    if not proved:
        raise IntegrityError(
            f"{block} does not decode to what was encoded",
            hint="Do not modify tensors during publish().",
        )
    return encoded._replace(found=None, decoded=None), changes


def to_keep(changes: Changes, block: Block) -> Changes:
    """The changes of a block as they wait for the commit.

    Old bits are dropped if there are many.
    """
    if _DENSE * len(changes.positions) > block.elements:
        return changes._replace(before=None)
    return changes


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


def entry_of(encoded: codecs.Encoded) -> BlockEntry:
    """The header entry of a coded block."""
    return BlockEntry(
        encoded.codec_id, encoded.changed, len(encoded.payload), check_of(encoded.payload)
    )
