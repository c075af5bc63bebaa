"""The header of a patch: its base, its target, and its blocks (docs/format.md, section 3).

File: a 56-byte prelude, the header (one zstd frame), the blocks' payloads one after another to the end of the file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from .._util import zstd as _zstd
from ..codec import HISTORY, MAX_BLOCK_ELEMENTS, SAME
from ..errors import CorruptPatch, FormatError, InputError
from ..state.tensors import DTYPE_BY_ID, MAX_DIMS, MAX_NAME_BYTES, MAX_TENSORS, TensorSpec
from .blocks import DEFAULT_BLOCK_ELEMENTS, Block, cut
from .history import MAX_SPAN, MAX_STRETCHES, HistoryName

MAGIC = b"\x89PULSE\r\n"
FORMAT = 1
FORMAT_OF_PARTS = 2
"""Of a part of a patch, which holds slices of tensors (`parts`)."""
FORMAT_WITH_HISTORY = 3
"""Of a patch that names what changed before (`history`)."""
MAX_HEADER_BYTES = 128 << 20
MAX_BLOCKS = 1 << 20
MAX_NAMES_BYTES = 1 << 25
"""Of all names together, before front-coding: a small header must not unfold into gigabytes."""
BLOCK_UNIT = 1 << 20
"""``block_elements`` is a multiple of this: of a digest leaf's elements for every dtype."""
_PRELUDE = struct.Struct("<8sIIII32s")  # magic, format, flags (0), stored bytes, plain bytes, SHA-256 of stored
PRELUDE_BYTES = _PRELUDE.size
_LEVEL = 9
_NUMBER_BYTES = 10
_MAX_BLOCK_BYTES = 1 << 40
_NO_DIGEST = sha256(b"").digest()


class BlockEntry(NamedTuple):
    """One block in the header. Blocks without changes (codec `SAME`) have no bytes and no digest in the file."""

    codec_id: int
    changed: int
    length: int
    sha256: bytes = _NO_DIGEST


@dataclass(frozen=True, slots=True)
class PatchHeader:
    """Roots are 64 hexadecimal digits; ``specs`` are in name order; ``blocks`` follow `cut`'s order. ``history``: what
    a reader must remember to decode them, None if nothing."""

    base_root: str
    target_root: str
    block_elements: int
    specs: tuple[TensorSpec, ...]
    blocks: tuple[BlockEntry, ...]
    history: HistoryName | None = None

    @property
    def body_bytes(self) -> int:
        return sum(b.length for b in self.blocks)

    @property
    def elements(self) -> int:
        return sum(s.elements for s in self.specs)

    @property
    def dense_bytes(self) -> int:
        """Bytes of a full sync: the plain tensors."""
        return sum(s.nbytes for s in self.specs)

    @property
    def changed(self) -> int:
        return sum(b.changed for b in self.blocks)

    def cut(self) -> list[Block]:
        return cut(self.specs, self.block_elements)

    def to_bytes(self) -> bytes:
        """Prelude and header; raises InputError past the caps."""
        check_block_elements(self.block_elements)
        if len(self.blocks) > MAX_BLOCKS or sum(len(s.name.encode()) for s in self.specs) > MAX_NAMES_BYTES:
            raise InputError(f"a patch holds at most {MAX_BLOCKS} blocks and {MAX_NAMES_BYTES} bytes of names")
        if self.history:
            self._check_history(self.history.spans)
        return closed_header(self._plain(), FORMAT_WITH_HISTORY if self.history else FORMAT)

    def _check_history(self, spans: Sequence[int]) -> None:
        if not 0 < len(spans) <= MAX_STRETCHES or not all(0 < span <= MAX_SPAN for span in spans):
            raise InputError(
                f"a history has 1 to {MAX_STRETCHES} stretches of 1 to {MAX_SPAN} versions, not {[*spans]}"
            )
        if self.block_elements != DEFAULT_BLOCK_ELEMENTS:
            raise InputError(f"a patch with a history has blocks of {DEFAULT_BLOCK_ELEMENTS} elements")

    def _plain(self) -> bytes:
        out = bytearray(bytes.fromhex(self.base_root) + bytes.fromhex(self.target_root))
        if self.history:
            put_number(out, len(self.history.spans))
            for span in self.history.spans:
                put_number(out, span)
            out += self.history.digest
        put_number(out, self.block_elements // BLOCK_UNIT)
        put_specs(out, self.specs)
        put_entries(out, self.blocks)
        return bytes(out)


def check_block_elements(block_elements: int) -> None:
    if not 0 < block_elements <= MAX_BLOCK_ELEMENTS or block_elements % BLOCK_UNIT:
        raise InputError(f"block_elements must be a multiple of {BLOCK_UNIT} up to {MAX_BLOCK_ELEMENTS}")


def parse_header(
    data: memoryview, specs: Sequence[TensorSpec] | None = None, *, elements: int | None = None
) -> tuple[PatchHeader, int]:
    """(header, bytes of prelude and header) from the start of a patch file; raises CorruptPatch.

    A reader that knows the ``specs`` of its state, or how many ``elements`` it has, says so: a header that is longer
    than any for these tensors, or speaks of more elements, is then refused before it takes memory.
    """
    if format_of(data) == FORMAT_OF_PARTS:
        raise CorruptPatch(
            "this is a part of a patch: it holds slices of tensors",
            hint="Read the stream with a Subscriber or `pulse follow`: they follow all parts of a version.",
        )
    version = format_of(data)
    plain, end = open_header(data, version, None if specs is None else most_bytes(specs))
    with malformed():
        expected = elements if specs is None else sum(s.elements for s in specs)
        header = HeaderReader(plain).header(expected, with_history=version == FORMAT_WITH_HISTORY)
    return header, end


def format_of(data: bytes | memoryview) -> int:
    """The number of the format of a patch file, from its start; raises CorruptPatch."""
    if len(data) < PRELUDE_BYTES:
        raise CorruptPatch(f"a patch has at least {PRELUDE_BYTES} bytes, this one has {len(data)}")
    magic, version, flags, *_ = _PRELUDE.unpack_from(data)
    if magic != MAGIC:
        raise CorruptPatch("not a pulse patch: it does not start with the magic bytes")
    if version not in (FORMAT, FORMAT_OF_PARTS, FORMAT_WITH_HISTORY) or flags != 0:
        raise CorruptPatch(f"patch format {version} (flags {flags}) is unknown", hint="Upgrade pulse-rl to read it.")
    return int(version)


def open_header(data: memoryview, version: int, most: int | None = None) -> tuple[bytes, int]:
    """(the plain header, bytes of prelude and header) of a patch file of format ``version``, checked against its
    SHA-256. Raises CorruptPatch, also where it claims more than ``most`` bytes."""
    if format_of(data) != version:
        raise CorruptPatch(f"the patch has format {format_of(data)}, not {version}")
    _, _, _, stored, plain, digest = _PRELUDE.unpack_from(data)
    if stored > MAX_HEADER_BYTES or plain > MAX_HEADER_BYTES:
        raise CorruptPatch(f"the header claims {max(stored, plain)} bytes, more than {MAX_HEADER_BYTES}")
    if most is not None and plain > most:
        raise CorruptPatch(f"the header claims {plain} bytes, more than one for these tensors can have")
    body = data[PRELUDE_BYTES : PRELUDE_BYTES + stored]
    if len(body) != stored or sha256(body).digest() != digest:
        raise CorruptPatch("the header is truncated or does not match its SHA-256")
    with malformed():
        return _zstd.decompress(body, plain), PRELUDE_BYTES + stored


def closed_header(plain: bytes, version: int) -> bytes:
    """Prelude and stored header of a patch file of format ``version``. Raises InputError past the cap."""
    if len(plain) > MAX_HEADER_BYTES:
        raise InputError(f"the patch header has {len(plain)} bytes, more than {MAX_HEADER_BYTES}")
    stored = _zstd.compress(plain, _LEVEL)
    return _PRELUDE.pack(MAGIC, version, 0, len(stored), len(plain), sha256(stored).digest()) + stored


@contextmanager
def malformed() -> Iterator[None]:
    """Within it, what is wrong with a header's values is a CorruptPatch."""
    try:
        yield
    except (FormatError, InputError) as error:
        raise CorruptPatch(f"the header is malformed: {error}") from error


def header_end(prelude: bytes) -> int:
    """Bytes of prelude and header of a patch file, of which ``prelude`` are the first; raises CorruptPatch."""
    if len(prelude) < PRELUDE_BYTES:
        raise CorruptPatch(f"a patch has at least {PRELUDE_BYTES} bytes, this one has {len(prelude)}")
    stored: int = _PRELUDE.unpack_from(prelude)[3]
    if stored > MAX_HEADER_BYTES:
        raise CorruptPatch(f"the header claims {stored} bytes, more than {MAX_HEADER_BYTES}")
    return PRELUDE_BYTES + stored


def most_bytes(specs: Sequence[TensorSpec]) -> int:
    """An upper bound of the plain header of a patch for these tensors."""
    names = sum(len(spec.name.encode()) + _NUMBER_BYTES * (3 + len(spec.shape)) + 1 for spec in specs)
    blocks = sum(spec.elements // BLOCK_UNIT + 1 for spec in specs)
    history = _NUMBER_BYTES * (1 + MAX_STRETCHES) + 32
    return 64 + 2 * _NUMBER_BYTES + history + names + blocks * (1 + 2 * _NUMBER_BYTES + 32)


class HeaderReader:
    """Reads a plain header strictly: nothing may be missing, out of its caps, unsorted or left over."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def header(self, elements: int | None, *, with_history: bool = False) -> PatchHeader:
        base, target = self.take(32).hex(), self.take(32).hex()
        history = self.history() if with_history else None
        block_elements = self.number(MAX_BLOCK_ELEMENTS // BLOCK_UNIT) * BLOCK_UNIT
        if block_elements == 0:
            raise CorruptPatch("block_elements is 0")
        specs = self.specs()
        if elements is not None and sum(s.elements for s in specs) != elements:
            raise CorruptPatch(f"the patch is for {sum(s.elements for s in specs)} elements, not for {elements}")
        # A block takes at least a byte of the header: shapes that claim terabytes end here, before they are cut.
        fewest = sum(s.elements // block_elements for s in specs)
        if fewest > min(MAX_BLOCKS, len(self._data) - self._at):
            raise CorruptPatch(f"the shapes need at least {fewest} blocks, more than the header lists")
        cuts = cut(specs, block_elements)
        if len(cuts) > MAX_BLOCKS:
            raise CorruptPatch(f"the shapes need {len(cuts)} blocks, more than {MAX_BLOCKS}")
        blocks = self.entries(cuts)
        self.end()
        if history and block_elements != DEFAULT_BLOCK_ELEMENTS:
            raise CorruptPatch(f"a patch with a history has blocks of {block_elements} elements")
        if any(entry.codec_id == HISTORY for entry in blocks) and not history:
            raise CorruptPatch("a block is coded by a history that the patch does not name")
        return PatchHeader(base, target, block_elements, specs, blocks, history)

    def history(self) -> HistoryName:
        count = self.number(MAX_STRETCHES)
        if count == 0:
            raise CorruptPatch("the history has no stretches")
        spans = tuple(self.number(MAX_SPAN) for _ in range(count))
        if 0 in spans:
            raise CorruptPatch("a stretch of the history spans no version")
        return HistoryName(spans, self.take(32))

    def specs(self, most: int = MAX_TENSORS) -> tuple[TensorSpec, ...]:
        names: list[bytes] = []
        previous, total = b"", 0
        for _ in range(self.number(most)):
            shared, length = self.number(len(previous)), self.number(MAX_NAME_BYTES)
            if shared + length > MAX_NAME_BYTES:
                raise CorruptPatch(f"a tensor name has {shared + length} bytes, more than {MAX_NAME_BYTES}")
            name = previous[:shared] + self.take(length)
            if names and name <= previous:
                raise CorruptPatch("tensor names are not sorted")
            names.append(name)
            previous = name
            total += len(name)
            if total > MAX_NAMES_BYTES:
                raise CorruptPatch(f"the names have more than {MAX_NAMES_BYTES} bytes")
        ids = self.take(len(names))
        specs = []
        for name, dtype_id in zip(names, ids, strict=True):
            if dtype_id not in DTYPE_BY_ID:
                raise CorruptPatch(f"dtype {dtype_id} is unknown", hint="Upgrade pulse-rl to read it.")
            shape = tuple(self.number((1 << 64) - 1) for _ in range(self.number(MAX_DIMS)))
            try:
                specs.append(TensorSpec(name.decode(), DTYPE_BY_ID[dtype_id], shape))
            except UnicodeDecodeError:
                raise CorruptPatch(f"tensor name {name!r} is not UTF-8") from None
        return tuple(specs)

    def entries(self, cuts: list[Block]) -> tuple[BlockEntry, ...]:
        ids = self.take(len(cuts))
        entries = [BlockEntry(codec_id, 0, 0) for codec_id in ids]
        coded = [k for k, codec_id in enumerate(ids) if codec_id != SAME]
        for k in coded:
            changed, length = self.number(cuts[k].elements), self.number(_MAX_BLOCK_BYTES)
            if changed == 0 or length == 0:
                raise CorruptPatch(f"block {k} is listed as changed but is empty")
            entries[k] = BlockEntry(ids[k], changed, length)
        for k in coded:
            entries[k] = entries[k]._replace(sha256=self.take(32))
        return tuple(entries)

    def end(self) -> None:
        if self._at != len(self._data):
            raise CorruptPatch(f"{len(self._data) - self._at} bytes follow the header's end")

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise CorruptPatch("the header ends too early")
        self._at += count
        return part

    def number(self, most: int) -> int:
        """An unsigned LEB128 number of at most ten bytes and at most ``most``."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > most or (byte == 0 and shift):
                    raise CorruptPatch(f"a number in the header is {value}, more than {most} or padded")
                return value
        raise CorruptPatch("a number in the header is too long")


def put_number(out: bytearray, value: int) -> None:
    """Appends an unsigned LEB128 number."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def put_specs(out: bytearray, specs: Sequence[TensorSpec]) -> None:
    """Appends the tensors as a plain header has them: their number, front-coded names, dtypes, shapes."""
    put_number(out, len(specs))
    previous = b""
    for spec in specs:
        name = spec.name.encode()
        shared = len(os.path.commonprefix([previous, name]))  # noqa: RUF071 (bytes of a name, not a path)
        put_number(out, shared)
        put_number(out, len(name) - shared)
        out += name[shared:]
        previous = name
    out += bytes(spec.dtype.id for spec in specs)
    for spec in specs:
        put_number(out, len(spec.shape))
        for dim in spec.shape:
            put_number(out, dim)


def put_entries(out: bytearray, blocks: Sequence[BlockEntry]) -> None:
    """Appends the blocks' entries, which end a plain header."""
    out += bytes(entry.codec_id for entry in blocks)
    for entry in blocks:
        if entry.codec_id != SAME:
            put_number(out, entry.changed)
            put_number(out, entry.length)
    for entry in blocks:
        if entry.codec_id != SAME:
            out += entry.sha256
