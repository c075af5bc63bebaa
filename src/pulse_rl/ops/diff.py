"""The patch between two whole states (`pulse diff`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .. import codec as codecs
from ..codec import Changes
from ..patch.blocks import cut
from ..patch.build import code_blocks, entry_of
from ..patch.header import PatchHeader, all_of
from ..patch.history import History, Recorder, Records
from ..patch.tree import Leaves, hashed_together, with_leaves
from ..state.digest import StateDigest
from ..state.tensors import State


@dataclass(frozen=True, slots=True)
class BuiltPatch:
    """A patch as chunks of bytes in file order (header, then a payload a block), and the digest
    tree of the state that it produces. ``changes`` holds the decoded blocks, for `advance_state`;
    None where nothing changed. ``records``: what the codec that needs a history is to remember of
    it, by index of the block; None for other codecs, and where that is too much."""

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


def build_patch(
    old: State,
    new: State,
    old_digest: StateDigest,
    *,
    codec: str = codecs.AUTO,
    history: History | None = None,
    max_records: int = 0,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> BuiltPatch:
    """The patch that turns ``old`` into ``new``, whole states in host memory. ``old_digest`` is the
    tree of ``old``.

    Raises StateMismatch unless both hold the same tensors, and what `code_blocks` raises.
    ``history``: what changed up to ``old``. ``max_records``: the bytes of the records that are to
    be kept for the next patch, at most. ``progress`` is called with the bytes of model that were
    worked through since its last call.
    """
    new.require_specs(old.specs, "the base state")
    codecs.check_codec(codec)
    blocks = cut(old.specs)
    recorder = Recorder(max_records) if max_records else None
    coded, kept, leaves = [], [], Leaves()
    tasks = ((group, new) for group in hashed_together(blocks, threads))
    groups = code_blocks(
        blocks, old, tasks, codec=codec, history=history, recorder=recorder, threads=threads
    )
    for group in groups:
        leaves |= group.leaves
        for index, encoded, changes in group.coded:
            coded.append(encoded)
            kept.append(changes)
            if progress:
                progress(blocks[index].nbytes)
    target = with_leaves(old_digest, leaves)

    named = any(encoded.codec_id == codecs.HISTORY for encoded in coded)
    name = history.name if history and named else None
    entries = tuple(map(entry_of, coded))
    chosen = PatchHeader(old_digest.root, target.root, all_of(old.specs), entries, name)
    chunks = (chosen.to_bytes(), *(encoded.payload for encoded in coded))
    return BuiltPatch(chosen, chunks, target, tuple(kept), recorder.records if recorder else None)
