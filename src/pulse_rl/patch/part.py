"""Part of a patch: the blocks of some tensors, for a receiver that holds no others (docs/format.md, section 7)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .. import codec as codecs
from .._util.threads import ordered_map
from ..errors import CorruptPatch, StateMismatch
from ..state.digest import PartDigest, StateDigest
from ..state.tensors import State, TensorSpec
from .blocks import cut
from .header import Base, JoinedHeader, ParsedHeader, PatchHeader, Room, check_of, header_end, parse_header

_FIRST_READ = 1 << 12
_LEAST_READ = 1 << 9
_PART_READ = 256  # a header is about so small a part of its patch
_GAP_BYTES = 1 << 12
_MOST_AT_ONCE = 8 << 20
_TRIES = 2
_FILES_AT_ONCE = 8

Read = Callable[[int, int], bytes]
"""Returns bytes [start, stop) of a patch file."""


@dataclass(frozen=True, slots=True)
class SelectedPatch:
    """The whole ``header`` of a patch, the bytes of ``held`` blocks by index (empty where nothing changed), the digests
    of all ``tensors`` of the target, 32 bytes each, and the number of bytes that were ``read``."""

    header: JoinedHeader
    held: dict[int, memoryview]
    tensors: bytes
    read: int

    def payloads(self) -> dict[int, memoryview]:
        """The held blocks' bytes by index."""
        return self.held

    def require(self, state: State, digest: StateDigest) -> None:
        """Raises StateMismatch unless the patch is for the tensors of which ``state`` is a part, and has all blocks of
        that part."""
        whole = digest.whole if isinstance(digest, PartDigest) else digest.specs
        blocks = self.header.cuts
        covered = {segment.spec for index in self.held for segment in blocks[index].segments}
        if whole != self.header.specs or covered != {spec for spec in state.specs if spec.elements}:
            raise StateMismatch("the patch is for other tensors, or cut in another way, than the part that is held")


def widened(specs: tuple[TensorSpec, ...], names: Collection[str]) -> tuple[TensorSpec, ...]:
    """The tensors ``names``, and the small ones that share a block with one of them: a block is decoded as a whole."""
    held = set(names)
    for block in cut(specs):
        together = {segment.spec.name for segment in block.segments}
        if held & together:
            held |= together
    return tuple(spec for spec in specs if spec.name in held)


class PatchFiles:
    """A patch for a state of ``specs``, of which the headers are read at once and blocks when they are asked for.
    ``files`` are its files, one for each part, as their readers and lengths; ``read`` counts the bytes that were read.
    Raises CorruptPatch, and StateMismatch where it is for another state."""

    def __init__(self, files: Sequence[tuple[Read, int]], specs: tuple[TensorSpec, ...]) -> None:
        base, room = Base(specs), Room()
        heads = ordered_map(lambda file: _read_head(*file), files, _FILES_AT_ONCE)
        parsed = [parse_header(memoryview(head), base, room=room) for head in heads]
        self.read = 0
        for found, (_, nbytes) in zip(parsed, files, strict=True):
            if found.end + found.header.body_bytes != nbytes:
                raise CorruptPatch(
                    f"the patch has {nbytes} bytes, its header implies {found.end + found.header.body_bytes}"
                )
            self.read += max(found.end, min(_first_read(nbytes), nbytes))
        self._files = [(read, found) for (read, _), found in zip(files, parsed, strict=True)]
        self.header = JoinedHeader.of(parsed, base)
        self.blocks = self.header.cuts

    def payloads(self, chosen: Sequence[int]) -> dict[int, memoryview]:
        """The bytes of the ``chosen`` blocks by index, in ascending order; empty where nothing changed. What is damaged
        is asked for once more. Raises CorruptPatch."""
        found: dict[int, memoryview] = {}
        tasks = []
        before = 0
        for file in self._files:
            blocks = len(file[1].header.blocks)
            tasks.append((before, file, [k - before for k in chosen if before <= k < before + blocks]))
            before += blocks
        for (first, _, _), (held, nbytes) in zip(
            tasks, ordered_map(lambda task: _read_blocks(*task[1], task[2]), tasks, _FILES_AT_ONCE), strict=True
        ):
            found |= {first + k: block for k, block in held.items()}
            self.read += nbytes
        return found


def _read_head(read: Read, nbytes: int) -> bytes:
    """At least the prelude and header of a patch file of ``nbytes``."""
    head = read(0, min(_first_read(nbytes), nbytes))
    end = header_end(head)
    if end > nbytes:
        raise CorruptPatch(f"the header ends at byte {end} of {nbytes}")
    if end > len(head):
        head += read(len(head), end)
    return head


def _first_read(nbytes: int) -> int:
    return min(_FIRST_READ, max(_LEAST_READ, nbytes // _PART_READ))


def _read_blocks(read: Read, parsed: ParsedHeader, chosen: Sequence[int]) -> tuple[dict[int, memoryview], int]:
    """The bytes of the ``chosen`` blocks of a file, and the number of bytes read for them."""
    blocks = parsed.header.blocks
    places = list(accumulate((entry.length for entry in blocks), initial=parsed.end))
    found = {k: memoryview(b"") for k in chosen}
    total = 0
    for run in _runs([k for k in chosen if blocks[k].codec_id != codecs.SAME], parsed.header, places):
        begin, end = places[run[0]], places[run[-1]] + blocks[run[-1]].length
        for again in reversed(range(_TRIES)):
            data = memoryview(read(begin, end))
            total += len(data)
            pieces = {k: data[places[k] - begin :][: blocks[k].length] for k in run}
            bad = [k for k, piece in pieces.items() if check_of(piece) != blocks[k].check]
            if not bad:
                found |= pieces
                break
            if not again:
                assert parsed.cuts is not None
                raise CorruptPatch(f"block {bad[0]} ({parsed.cuts[bad[0]]}) does not match its checksum")
    return found, total


def _runs(chosen: list[int], header: PatchHeader, places: list[int]) -> Iterator[list[int]]:
    """The blocks that are read together: what lies between them is less than another request costs."""
    run: list[int] = []
    for k in chosen:
        end = places[k] + header.blocks[k].length
        if run and (
            places[k] - places[run[-1]] - header.blocks[run[-1]].length > _GAP_BYTES
            or end - places[run[0]] > _MOST_AT_ONCE
        ):
            yield run
            run = []
        run.append(k)
    if run:
        yield run
