"""The files of a patch as a reader gets them: all of their bytes, or the ranges that some tensors
need (docs/format.md, sections 3 and 7)."""

from __future__ import annotations

from collections.abc import Sequence

from .. import codec as codecs
from .._util.files import RangeReader, ranges, read_head
from .._util.threads import ordered_map
from ..errors import CorruptPatch
from ..patch.apply import places_of, require_bytes
from ..patch.header import (
    Base,
    JoinedHeader,
    ParsedHeader,
    PatchHeader,
    Room,
    check_of,
    header_end,
    parse_header,
)
from ..state.tensors import TensorSpec

_FIRST_READ = 1 << 12
_MIN_READ = 1 << 9
_PART_READ = 256  # a header is about so small a part of its patch
_TRIES = 2
_FILES_AT_ONCE = 8


class PatchFiles:
    """A patch for a state of ``specs``, of which the headers are read at once and blocks when they
    are asked for. ``files`` are its files, one for each part, as their readers and lengths;
    ``nbytes`` counts what was read. Raises CorruptPatch, and StateMismatch where it is for another
    state."""

    def __init__(
        self, files: Sequence[tuple[RangeReader, int]], specs: tuple[TensorSpec, ...]
    ) -> None:
        base, room = Base(specs), Room()
        heads = ordered_map(lambda file: _read_head(*file), files, _FILES_AT_ONCE)
        parsed = [parse_header(memoryview(head), base, room=room) for head in heads]
        self.nbytes = 0
        for found, (_, nbytes) in zip(parsed, files, strict=True):
            require_bytes(found, nbytes)
            self.nbytes += max(found.end, min(_first_read(nbytes), nbytes))
        self._files = [(read, found) for (read, _), found in zip(files, parsed, strict=True)]
        self.header = JoinedHeader.of(parsed, base)

    def payloads(self, chosen: Sequence[int]) -> dict[int, memoryview]:
        """The bytes of the ``chosen`` blocks by index, in ascending order; empty where nothing
        changed. What is damaged is asked for once more. Raises CorruptPatch."""
        found: dict[int, memoryview] = {}
        tasks = []
        before = 0
        for read, parsed in self._files:
            after = before + len(parsed.header.blocks)
            of_file = [k - before for k in chosen if before <= k < after]
            tasks.append((before, read, parsed, of_file))
            before = after
        results = ordered_map(lambda task: _read_blocks(*task[1:]), tasks, _FILES_AT_ONCE)
        for (first, *_), (held, nbytes) in zip(tasks, results, strict=True):
            found |= {first + k: block for k, block in held.items()}
            self.nbytes += nbytes
        return found


def read_header(read: RangeReader, nbytes: int, *, elements: int, room: Room) -> PatchHeader:
    """The header of a patch file of ``nbytes`` for a state of so many elements. Raises
    CorruptPatch."""
    return parse_header(memoryview(_read_head(read, nbytes)), elements=elements, room=room).header


def _read_head(read: RangeReader, nbytes: int) -> bytes:
    """At least the prelude and header of a patch file of ``nbytes``."""

    def end_of(head: bytes) -> int:
        if (end := header_end(head)) > nbytes:
            raise CorruptPatch(f"the header ends at byte {end} of {nbytes}")
        return end

    return read_head(read, nbytes, _first_read(nbytes), end_of)


def _first_read(nbytes: int) -> int:
    return min(_FIRST_READ, max(_MIN_READ, nbytes // _PART_READ))


def _read_blocks(
    read: RangeReader, parsed: ParsedHeader, chosen: Sequence[int]
) -> tuple[dict[int, memoryview], int]:
    """The bytes of the ``chosen`` blocks of a file, and the number of bytes read for them."""
    blocks, places = parsed.header.blocks, places_of(parsed)
    found = {k: memoryview(b"") for k in chosen}
    total = 0
    changed = [k for k in chosen if blocks[k].codec_id != codecs.SAME]
    for run in ranges((places[k], places[k + 1]) for k in changed):
        wanted = [changed[number] for number in run]
        begin, end = places[wanted[0]], places[wanted[-1] + 1]
        # A range has no digest of its own, so each block's check stands for it.
        for again in reversed(range(_TRIES)):
            data = memoryview(read(begin, end))
            total += len(data)
            pieces = {k: data[places[k] - begin : places[k + 1] - begin] for k in wanted}
            bad = [k for k, piece in pieces.items() if check_of(piece) != blocks[k].check]
            if not bad:
                found |= pieces
                break
            if not again:
                assert parsed.cuts is not None
                raise CorruptPatch(
                    f"block {bad[0]} ({parsed.cuts[bad[0]]}) does not match its checksum"
                )
    return found, total
