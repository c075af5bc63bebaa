"""A patch in parts: each part is a file that holds slices of tensors, as one rank of a sharded trainer has them
(docs/format.md, section 3.9)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from ..codec import HISTORY, MAX_BLOCK_ELEMENTS
from ..errors import CorruptPatch, InputError
from ..state.digest import StateDigest
from ..state.slices import Segment
from ..state.tensors import MAX_TENSORS, State, TensorSpec
from .blocks import DEFAULT_BLOCK_ELEMENTS, Block
from .header import (
    FORMAT_OF_PARTS,
    MAX_BLOCKS,
    MAX_NAMES_BYTES,
    BlockEntry,
    HeaderReader,
    closed_header,
    malformed,
    most_bytes,
    open_header,
    put_entries,
    put_number,
    put_specs,
)

MAX_SEGMENTS = 1 << 20
_SEGMENT_BYTES = 20


@dataclass(frozen=True, slots=True)
class PartHeader:
    """The header of one part. Roots are 64 hexadecimal digits. ``specs`` are the whole tensors, in name order, of which
    the part has slices, or that have no elements; ``cuts`` are its blocks and ``blocks`` their entries."""

    base_root: str
    target_root: str
    specs: tuple[TensorSpec, ...]
    cuts: tuple[Block, ...]
    blocks: tuple[BlockEntry, ...]

    @property
    def body_bytes(self) -> int:
        return sum(entry.length for entry in self.blocks)

    @property
    def changed(self) -> int:
        return sum(entry.changed for entry in self.blocks)

    def cut(self) -> list[Block]:
        """The part's blocks."""
        return list(self.cuts)

    def to_bytes(self) -> bytes:
        """Prelude and header; raises InputError past the caps."""
        segments = [segment for block in self.cuts for segment in block.segments]
        names = sum(len(spec.name.encode()) for spec in self.specs)
        if len(segments) > MAX_SEGMENTS or len(self.cuts) > MAX_BLOCKS or names > MAX_NAMES_BYTES:
            raise InputError(f"a part holds at most {MAX_BLOCKS} blocks and {MAX_NAMES_BYTES} bytes of names")
        out = bytearray(bytes.fromhex(self.base_root) + bytes.fromhex(self.target_root))
        put_specs(out, self.specs)
        of: dict[str, list[Segment]] = {spec.name: [] for spec in self.specs}
        for segment in segments:
            of[segment.spec.name].append(segment)
        for spec in self.specs:
            put_number(out, len(of[spec.name]))
            at = 0
            for segment in of[spec.name]:
                put_number(out, segment.start - at)
                put_number(out, segment.stop - segment.start)
                at = segment.stop
        put_number(out, len(self.cuts))
        for block in self.cuts:
            put_number(out, len(block.segments))
        put_entries(out, self.blocks)
        return closed_header(bytes(out), FORMAT_OF_PARTS)


class Room:
    """What the headers of all parts of a patch may list together: tensors, each time, and slices."""

    def __init__(self) -> None:
        self.left = MAX_SEGMENTS

    def take(self, count: int) -> None:
        """Raises CorruptPatch."""
        self.left -= count
        if self.left < 0:
            raise CorruptPatch(f"the parts of the patch list more than {MAX_SEGMENTS} tensors and slices")


def parse_part_header(
    data: memoryview, specs: Sequence[TensorSpec] | None = None, *, room: Room | None = None
) -> tuple[PartHeader, int]:
    """(header, bytes of prelude and header) from the start of a part; raises CorruptPatch. ``specs``, where given, are
    the tensors of the state: a header that is longer than any for these is refused before it takes memory. ``room`` is
    that of all parts of the patch."""
    most = None if specs is None else most_bytes(specs) + _SEGMENT_BYTES * MAX_SEGMENTS
    plain, end = open_header(data, FORMAT_OF_PARTS, most)
    with malformed():
        return _read(HeaderReader(plain), room or Room()), end


def _read(reader: HeaderReader, room: Room) -> PartHeader:
    base, target = reader.take(32).hex(), reader.take(32).hex()
    specs = reader.specs(min(MAX_TENSORS, room.left))
    room.take(len(specs))
    segments: list[Segment] = []
    for spec in specs:
        at = 0
        count = reader.number(room.left)
        room.take(count)
        if (count == 0) != (spec.elements == 0):
            raise CorruptPatch(f"tensor {spec.name!r} of {spec.elements} elements has {count} slices")
        for _ in range(count):
            start = at + reader.number(spec.elements - at)
            at = start + reader.number(min(MAX_BLOCK_ELEMENTS, spec.elements - start))
            if at == start:
                raise CorruptPatch(f"a slice of tensor {spec.name!r} is empty")
            segments.append(Segment(spec, start, at))
    counts = [reader.number(len(segments)) for _ in range(reader.number(min(MAX_BLOCKS, len(segments))))]
    if 0 in counts or sum(counts) != len(segments):
        raise CorruptPatch(f"the blocks have {sum(counts)} slices, but there are {len(segments)}")
    cuts = []
    for first, last in pairwise(accumulate(counts, initial=0)):
        block = Block(segments[first].spec.dtype, tuple(segments[first:last]))
        if block.elements > MAX_BLOCK_ELEMENTS or any(s.spec.dtype != block.dtype for s in block.segments):
            raise CorruptPatch(f"the block of {block} is of several dtypes or of {block.elements} elements")
        cuts.append(block)
    entries = reader.entries(cuts)
    reader.end()
    if any(entry.codec_id == HISTORY for entry in entries):
        raise CorruptPatch("a block of a part is coded by a history, which a part cannot name")
    return PartHeader(base, target, specs, tuple(cuts), entries)


@dataclass(frozen=True)
class PartsHeader:
    """The headers of all ``parts`` of a patch, as one: ``specs`` are the tensors of the state, each element of which is
    in one block of one part."""

    base_root: str
    target_root: str
    specs: tuple[TensorSpec, ...]
    parts: tuple[PartHeader, ...]
    block_elements = DEFAULT_BLOCK_ELEMENTS
    """Of the cut by which old bits are kept (`UndoLog`): that of whole tensors."""
    history = None
    """Slices are coded without one."""

    @classmethod
    def of(cls, parts: Sequence[PartHeader]) -> PartsHeader:
        """Raises CorruptPatch unless the parts belong together and hold each element once."""
        if len({(part.base_root, part.target_root) for part in parts}) != 1:
            raise CorruptPatch("the parts of the patch do not have the same base and target")
        specs: dict[str, TensorSpec] = {}
        for part in parts:
            for spec in part.specs:
                if specs.setdefault(spec.name, spec) != spec:
                    raise CorruptPatch(f"the parts of the patch differ in tensor {spec.name!r}")
        ordered = tuple(sorted(specs.values(), key=lambda s: s.name.encode()))
        require_tiled([block for part in parts for block in part.cuts], ordered)
        return cls(parts[0].base_root, parts[0].target_root, ordered, tuple(parts))

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec in self.specs)

    @cached_property
    def blocks(self) -> tuple[BlockEntry, ...]:
        """The entries of all parts' blocks, in the parts' order."""
        return tuple(entry for part in self.parts for entry in part.blocks)

    def cut(self) -> list[Block]:
        """The blocks of all parts, in the parts' order."""
        return [block for part in self.parts for block in part.cuts]


@dataclass(frozen=True, slots=True)
class PartsPatch:
    """A parsed patch in parts: the checked headers, and each part's bytes behind its header, not yet decoded."""

    header: PartsHeader
    bodies: tuple[memoryview, ...]

    @classmethod
    def parse(cls, parts: Iterable[bytes | memoryview], specs: Sequence[TensorSpec] | None = None) -> PartsPatch:
        """Checks all that `Patch.parse` does of each part, and that the parts belong together. Raises CorruptPatch."""
        headers, bodies, room = [], [], Room()
        for data in parts:
            view = memoryview(data)
            header, size = parse_part_header(view, specs, room=room)
            if size + header.body_bytes != len(view):
                raise CorruptPatch(f"the part has {len(view)} bytes, its header implies {size + header.body_bytes}")
            headers.append(header)
            bodies.append(view[size:])
        return cls(PartsHeader.of(headers), tuple(bodies))

    @property
    def tensors(self) -> bytes:
        """No digests: the receiver computes all of them."""
        return b""

    def payloads(self) -> dict[int, memoryview]:
        """The blocks' bytes by index."""
        found: dict[int, memoryview] = {}
        for part, body in zip(self.header.parts, self.bodies, strict=True):
            for start, end in pairwise(accumulate((entry.length for entry in part.blocks), initial=0)):
                found[len(found)] = body[start:end]
        return found

    def require(self, state: State, digest: StateDigest) -> None:
        """Raises StateMismatch unless the patch is for the tensors of ``state``, with the tree ``digest``."""
        state.require_specs(self.header.specs, "the patch")


def require_tiled(blocks: Iterable[Block], specs: Iterable[TensorSpec]) -> None:
    """Raises CorruptPatch unless ``blocks`` hold each element of the tensors ``specs`` once; others are not looked
    at."""
    of: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in specs}
    for block in blocks:
        for segment in block.segments:
            if segment.spec.name in of:
                of[segment.spec.name].append((segment.start, segment.stop))
    for spec in specs:
        at = 0
        for start, stop in sorted(of[spec.name]):
            if start != at:
                raise CorruptPatch(f"element {min(start, at)} of tensor {spec.name!r} is not in one part alone")
            at = stop
        if at != spec.elements:
            raise CorruptPatch(f"element {at} of tensor {spec.name!r} is in no part of the patch")
