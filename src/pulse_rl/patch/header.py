"""The header of a patch file: base, target, slices and blocks (docs/format.md, section 3).

A file is a 28-byte prelude, the header in one zstd frame, and the payloads of the blocks up to the
end of the file. Names, dtypes and shapes are those of the base, whose root proves them. So a header
repeats none of them, and gives its slices as ranges of elements.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import NamedTuple

from ..codec import HISTORY, SAME, compress, decompress
from ..errors import CorruptPatch, FormatError, InputError, WrongBase
from ..state.tensors import Segment, TensorSpec
from .blocks import BLOCK_ELEMENTS, Block, cut, cut_whole
from .history import MAX_WINDOWS, HistoryName

MAGIC = b"\x89PULSE\r\n"
FORMAT = 1
MAX_HEADER_BYTES = 128 << 20
MAX_BLOCKS = 1 << 20
#: The limit for all files of a patch together, counted by tensor.
MAX_SLICES = 1 << 20
#: The bytes of a SHA-256 that a header keeps. They find accidental damage; only the root proves a
#: version.
CHECK_BYTES = 8
# Magic, format, stored bytes, plain bytes, check of the stored header.
_PRELUDE = struct.Struct("<8sIII8s")
PRELUDE_BYTES = _PRELUDE.size
_LEVEL = 9
_NUMBER_BYTES = 10
_MAX_ELEMENTS = 1 << 62
_MAX_BLOCK_BYTES = 1 << 40
_NO_CHECK = sha256(b"").digest()[:CHECK_BYTES]

#: Elements [start, stop) of a state, counted through all its tensors in name order.
Slice = tuple[int, int]


class BlockEntry(NamedTuple):
    """One block in the header. A block without changes (codec `SAME`) has no bytes and no
    ``check``."""

    codec_id: int
    changed: int
    length: int
    check: bytes = _NO_CHECK


def check_of(data: bytes | memoryview) -> bytes:
    """The first 8 bytes of the SHA-256 of ``data``."""
    return sha256(data).digest()[:CHECK_BYTES]


@dataclass(frozen=True, slots=True)
class PatchHeader:
    """The header of one file.

    Roots are 64 hexadecimal digits. ``slices`` are the parts of the state that the file holds; they
    ascend and do not touch. ``blocks`` are in the order of `cut`. ``history`` names the earlier
    changes that a reader needs for decoding; None if it needs none.
    """

    base_root: str
    target_root: str
    slices: tuple[Slice, ...]
    blocks: tuple[BlockEntry, ...]
    history: HistoryName | None = None

    @property
    def body_bytes(self) -> int:
        return sum(b.length for b in self.blocks)

    @property
    def elements(self) -> int:
        """Elements that the file covers, changed or not."""
        return sum(stop - start for start, stop in self.slices)

    @property
    def changed(self) -> int:
        return sum(b.changed for b in self.blocks)

    def to_bytes(self) -> bytes:
        """Prelude and header; raises InputError past the caps."""
        if len(self.blocks) > MAX_BLOCKS or len(self.slices) > MAX_SLICES:
            raise InputError(
                f"a patch file holds at most {MAX_BLOCKS} blocks and {MAX_SLICES} slices"
            )
        # 1. The roots, and the history that the reader needs.
        out = bytearray(bytes.fromhex(self.base_root) + bytes.fromhex(self.target_root))
        if self.history and not 0 < self.history.windows <= MAX_WINDOWS:
            raise InputError(
                f"a history has 1 to {MAX_WINDOWS} windows, not {self.history.windows}"
            )
        put_number(out, self.history.windows if self.history else 0)
        if self.history:
            out += self.history.check
        # 2. The slices, as gaps and lengths: small numbers take one byte.
        put_number(out, len(self.slices))
        at = 0
        for start, stop in self.slices:
            put_number(out, start - at)
            put_number(out, stop - start)
            at = stop
        # 3. The blocks, column by column.
        put_number(out, len(self.blocks))
        out += bytes(entry.codec_id for entry in self.blocks)
        # Columns compress better than rows, and random checks would separate them.
        coded = [entry for entry in self.blocks if entry.codec_id != SAME]
        for entry in coded:
            put_number(out, entry.changed)
            put_number(out, entry.length)
        out += b"".join(entry.check for entry in coded)
        return closed_header(bytes(out))


def all_of(specs: Sequence[TensorSpec]) -> tuple[Slice, ...]:
    """The slices of a file that covers a whole state."""
    total = sum(spec.elements for spec in specs)
    return ((0, total),) if total else ()


def slices_of(specs: Sequence[TensorSpec], segments: Sequence[Segment]) -> tuple[Slice, ...]:
    """The slices of a file that holds these ``segments`` of the tensors ``specs``, both in
    order."""
    begins, at = dict[str, int](), 0
    for spec in specs:
        begins[spec.name] = at
        at += spec.elements
    found: list[Slice] = []
    for segment in segments:
        if segment.elements:
            begin = begins[segment.spec.name]
            start, stop = begin + segment.start, begin + segment.stop
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
    return tuple(found)


class Room:
    """The slices that the headers of all files of a patch may still list.

    A slice counts once for every tensor of which it has elements.
    """

    def __init__(self, left: int = MAX_SLICES) -> None:
        self.left = left

    def take(self, count: int) -> None:
        """Use up ``count`` slices; raise CorruptPatch if there are not as many left."""
        self.left -= count
        if self.left < 0:
            raise CorruptPatch(f"the files of the patch list more than {MAX_SLICES} slices")


class Base:
    """The state that a patch is for: its tensors in name order, and its root ("": any root)."""

    def __init__(self, specs: Sequence[TensorSpec], root: str = "") -> None:
        self.specs = tuple(specs)
        self.root = root
        self._held = [spec for spec in specs if spec.elements]
        self._ends = [*accumulate(spec.elements for spec in self._held)]
        self.elements = self._ends[-1] if self._ends else 0

    @property
    def max_header_bytes(self) -> int:
        """An upper bound for the plain header of a patch file for these tensors."""
        slices = min(MAX_SLICES, self.elements // 2 + 1)
        blocks = min(MAX_BLOCKS, self.elements // BLOCK_ELEMENTS + len(self._held) + 2 * slices)
        # Two roots, the history's name, both counts and the slices; then the blocks.
        start = 64 + _NUMBER_BYTES + CHECK_BYTES + _NUMBER_BYTES * (2 + 2 * slices)
        return start + blocks * (1 + 2 * _NUMBER_BYTES + CHECK_BYTES)

    def cut(self, slices: Sequence[Slice], room: Room) -> tuple[Block, ...]:
        """The blocks of a file with these ``slices``. Raises CorruptPatch."""
        if [*slices] == [(0, self.elements)]:
            room.take(len(self._held))
            return cut_whole(self.specs)
        segments: list[Segment] = []
        # A slice may span tensors: each of them gets a segment.
        for start, stop in slices:
            if stop > self.elements:
                raise CorruptPatch(f"a slice ends at element {stop} of {self.elements}")
            first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1)
            room.take(last - first + 1)
            for k in range(first, last + 1):
                spec, end = self._held[k], self._ends[k]
                begin = end - spec.elements
                segments.append(Segment(spec, max(start, begin) - begin, min(stop, end) - begin))
        return cut(self.specs, segments)


class ParsedHeader(NamedTuple):
    """The header of a file, its blocks, and the bytes of prelude and header.

    ``cuts`` is None if the reader does not know the tensors.
    """

    header: PatchHeader
    cuts: tuple[Block, ...] | None
    end: int


def parse_header(
    data: memoryview,
    state: Base | None = None,
    *,
    elements: int | None = None,
    room: Room | None = None,
) -> ParsedHeader:
    """Parse the header at the start of a patch file.

    A reader that knows the base ``state``, or only its number of ``elements``, passes it. A header
    that is too long for that state, or that names elements beyond it, is then refused before it
    takes memory. ``room`` is shared by all files of the patch. Raises CorruptPatch, and WrongBase
    if the file is for another state.
    """
    plain, end = open_header(data, None if state is None else state.max_header_bytes)
    most = state.elements if state is not None else _MAX_ELEMENTS if elements is None else elements
    return _Reader(plain).header(state, most, room or Room(), end)


def open_header(data: memoryview, most: int | None = None) -> tuple[bytes, int]:
    """(plain header, bytes of prelude and stored header) of a patch file, after its checksum is
    checked.

    Raises CorruptPatch, also if the header claims more than ``most`` bytes.
    """
    end = header_end(data)
    _, _, stored, plain, check = _PRELUDE.unpack_from(data)
    if most is not None and plain > most:
        raise CorruptPatch(
            f"the header claims {plain} bytes, more than one for these tensors can have"
        )
    body = data[PRELUDE_BYTES:end]
    if len(body) != stored or check_of(body) != check:
        raise CorruptPatch("the header is truncated or does not match its checksum")
    try:
        return decompress(body, plain), end
    except FormatError as error:
        raise CorruptPatch(f"the header is malformed: {error}") from error


def closed_header(plain: bytes) -> bytes:
    """Prelude and stored header of a patch file. Raises InputError past the cap."""
    if len(plain) > MAX_HEADER_BYTES:
        raise InputError(f"the patch header has {len(plain)} bytes, more than {MAX_HEADER_BYTES}")
    stored = compress(plain, _LEVEL)
    return _PRELUDE.pack(MAGIC, FORMAT, len(stored), len(plain), check_of(stored)) + stored


def header_end(prelude: bytes | memoryview) -> int:
    """Bytes of prelude and header of a patch file that begins with ``prelude``; raises
    CorruptPatch."""
    if len(prelude) < PRELUDE_BYTES:
        raise CorruptPatch(
            f"a patch has at least {PRELUDE_BYTES} bytes, this one has {len(prelude)}"
        )
    magic, version, stored, plain, _ = _PRELUDE.unpack_from(prelude)
    if magic != MAGIC:
        raise CorruptPatch("not a pulse patch: it does not start with the magic bytes")
    if version != FORMAT:
        raise CorruptPatch(
            f"patch format {version} is unknown", hint="Upgrade pulse-rl to read it."
        )
    if stored > MAX_HEADER_BYTES or plain > MAX_HEADER_BYTES:
        raise CorruptPatch(
            f"the header claims {max(stored, plain)} bytes, more than {MAX_HEADER_BYTES}"
        )
    return PRELUDE_BYTES + int(stored)


class _Reader:
    """A strict parser of a plain header.

    It refuses missing, unsorted and remaining bytes, and numbers beyond their caps.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def header(self, state: Base | None, elements: int, room: Room, end: int) -> ParsedHeader:
        # 1. The roots. A patch for another state is refused first, since its other numbers mean
        # nothing here.
        base, target = self._take(32).hex(), self._take(32).hex()
        if state is not None and state.root and base != state.root:
            raise WrongBase(
                f"the patch applies to root {base[:16]}…, the state has {state.root[:16]}…"
            )
        # 2. The slices that the file covers. The cut follows from them.
        history = self._history()
        slices = self._slices(elements, room.left)
        cuts = None if state is None else state.cut(slices, room)
        # 3. The blocks. Their count is bounded by the bytes that are left: one id byte each.
        count = self._number(min(MAX_BLOCKS, len(self._data) - self._at))
        if cuts is not None and count != len(cuts):
            raise CorruptPatch(
                f"the header lists {count} blocks, but there are {len(cuts)} in its slices"
            )
        blocks = self._entries(count, cuts)
        if self._at != len(self._data):
            raise CorruptPatch(f"{len(self._data) - self._at} bytes follow the header's end")
        if history is None and any(entry.codec_id == HISTORY for entry in blocks):
            raise CorruptPatch("a block is coded by a history that the patch does not name")
        return ParsedHeader(PatchHeader(base, target, slices, blocks, history), cuts, end)

    def _history(self) -> HistoryName | None:
        windows = self._number(MAX_WINDOWS)
        return HistoryName(windows, self._take(CHECK_BYTES)) if windows else None

    def _slices(self, elements: int, most: int) -> tuple[Slice, ...]:
        found: list[Slice] = []
        at = 0
        for k in range(self._number(most)):
            gap = self._number(elements - at)
            length = self._number(elements - at - gap)
            if not length or (k and not gap):
                raise CorruptPatch("a slice is empty, or touches the one before")
            found.append((at + gap, at + gap + length))
            at += gap + length
        return tuple(found)

    def _entries(self, count: int, cuts: Sequence[Block] | None) -> tuple[BlockEntry, ...]:
        ids = self._take(count)
        # The columns of `PatchHeader.to_bytes`: ids, then numbers, then checks.
        entries = [BlockEntry(codec_id, 0, 0) for codec_id in ids]
        coded = [k for k, codec_id in enumerate(ids) if codec_id != SAME]
        for k in coded:
            changed = self._number(BLOCK_ELEMENTS if cuts is None else cuts[k].elements)
            length = self._number(_MAX_BLOCK_BYTES)
            if changed == 0 or length == 0:
                raise CorruptPatch(f"block {k} is listed as changed but is empty")
            entries[k] = BlockEntry(ids[k], changed, length)
        for k in coded:
            entries[k] = entries[k]._replace(check=self._take(CHECK_BYTES))
        return tuple(entries)

    def _take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise CorruptPatch("the header ends too early")
        self._at += count
        return part

    def _number(self, most: int) -> int:
        """Read an unsigned LEB128 number of at most ten bytes and at most ``most``."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > most or (byte == 0 and shift):
                    raise CorruptPatch(
                        f"a number in the header is {value}, more than {most} or padded"
                    )
                return value
        raise CorruptPatch("a number in the header is too long")


def put_number(out: bytearray, value: int) -> None:
    """Append an unsigned LEB128 number."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


@dataclass(frozen=True)
class JoinedHeader:
    """The headers of all ``files`` of a patch as one, for the tensors ``specs``.

    ``blocks`` has the entries of all files in order, and ``cuts`` their blocks.
    """

    specs: tuple[TensorSpec, ...]
    files: tuple[PatchHeader, ...]
    cuts: tuple[Block, ...]
    blocks: tuple[BlockEntry, ...]

    @classmethod
    def of(cls, parsed: Sequence[ParsedHeader], state: Base) -> JoinedHeader:
        """Join headers; raise CorruptPatch unless the files belong together and cover each element
        once."""
        files = tuple(each.header for each in parsed)
        if len({(file.base_root, file.target_root) for file in files}) != 1:
            raise CorruptPatch("the files of the patch do not have the same base and target")
        if len({file.history for file in files if file.history}) > 1:
            raise CorruptPatch("the files of the patch name different histories")
        # Sorted slices must tile the state: an overlap or a gap shows at the first start that is
        # not `at`.
        at = 0
        for start, stop in sorted(one for file in files for one in file.slices):
            if start != at:
                raise CorruptPatch(
                    f"element {min(start, at)} of the state is not in one file of the patch alone"
                )
            at = stop
        if at != state.elements:
            raise CorruptPatch(f"element {at} of the state is in no file of the patch")
        cuts = tuple(block for each in parsed for block in each.cuts or ())
        return cls(
            state.specs, files, cuts, tuple(entry for file in files for entry in file.blocks)
        )

    @property
    def base_root(self) -> str:
        return self.files[0].base_root

    @property
    def target_root(self) -> str:
        return self.files[0].target_root

    @property
    def history(self) -> HistoryName | None:
        """The history that the files need; None if none of them needs one."""
        return next((file.history for file in self.files if file.history), None)

    @property
    def is_whole(self) -> bool:
        """Whether one file covers the whole state, so that its blocks are those of whole
        tensors."""
        return len(self.files) == 1
