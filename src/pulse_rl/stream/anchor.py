"""Anchors: a full state as safetensors shards, written and read as streams (docs/format.md, section 4).

Every tensor is whole in one shard, so that any engine loads a shard as an ordinary safetensors file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from .._native import sha256_messages
from .._util.threads import ordered_map
from ..errors import CorruptCheckpoint, DigestMismatch, PulseError, StoreError
from ..state.checkpoint import header_length, parse_header
from ..state.digest import LEAF_BYTES, StateDigest, leaves_of, state_digest
from ..state.tensors import Segment, State, TensorSpec, UIntArray
from .manifest import Payload
from .slices import segments_of

DEFAULT_SHARD_BYTES = 1 << 27
"""A shard is named by its SHA-256, which is one chain of steps: several small shards are hashed side by side."""
_SIDE_BY_SIDE = 4
_CHUNK_BYTES = 8 << 20
_FIRST_READ = 1 << 16
_NAMED_SHARDS = 16
_FIRST_READ_OF_A_PART = 1 << 12
_LARGE_HEADER = 1 << 17
"""Junk that is JSON takes 28 times its bytes as Python objects, in each thread. A larger header is parsed only in a
shard whose SHA-256 is right."""

RangeReader = Callable[[int, int], bytes]
"""Returns bytes [start, stop) of one shard."""


def restore(
    shards: Sequence[tuple[Payload, RangeReader]],
    *,
    root: str,
    elements: int,
    dense_bytes: int,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[State, StateDigest]:
    """The state of an anchor and its tree, verified by its ``root``: read in ranges, each put into its final place and
    hashed there while others are on their way.

    ``elements`` and ``dense_bytes`` are what the manifest promises; memory is only allocated for that much. The root
    proves names, dtypes, shapes and bits (DigestMismatch), so that the shards' own digests need not be computed.
    Raises CorruptCheckpoint.
    """
    headers = list(ordered_map(read_shard_header, shards, threads))
    specs = _whole_tensors_of(shards, headers)
    if (sum(s.elements for s in specs), sum(s.nbytes for s in specs)) != (elements, dense_bytes):
        raise CorruptCheckpoint(f"the anchor's shards do not hold the manifest's {dense_bytes} bytes of tensors")
    state, sliced = State.empty(specs), _sliced(headers)

    def fill(part: _Range) -> list[bytes]:
        chunk = np.frombuffer(part.read(part.start, part.stop), np.uint8)
        if len(chunk) != part.stop - part.start:
            raise CorruptCheckpoint(f"the anchor's shard {part.shard[:16]}… ends too early")
        placed, at = [], 0
        for piece in part.pieces:
            placed.append(state.read(*piece).view(np.uint8))
            placed[-1][:] = chunk[at : at + len(placed[-1])]
            at += len(placed[-1])
        names = [name for name, _, _ in part.pieces]
        whole = iter(leaves_of([array for name, array in zip(names, placed, strict=True) if name not in sliced]))
        return [b"" if name in sliced else next(whole) for name in names]

    ranges = [part for shard, header in zip(shards, headers, strict=True) for part in _ranges(*shard, header)]
    leaves: dict[str, list[bytes]] = {spec.name: [] for spec in specs}
    with closing(ordered_map(fill, ranges, threads)) as filled:
        for part, digests in zip(ranges, filled, strict=True):
            for (name, _, _), digest in zip(part.pieces, digests, strict=True):
                leaves[name].append(digest)
            if progress:
                progress(part.stop - part.start)
    joined = {name: b"".join(digests) for name, digests in leaves.items()}
    tree = StateDigest(state.specs, joined | _leaves_of_slices(state, headers, threads))
    if tree.root != root:
        raise _mismatch(state, [payload for payload, _ in shards], headers)
    return state, tree


def restore_part(
    shards: Sequence[tuple[Payload, RangeReader]],
    tree: StateDigest,
    held: tuple[TensorSpec, ...],
    *,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> State:
    """The tensors ``held`` of an anchor, of which nothing else is read but the shards' headers. ``tree`` is the whole
    state's, proved by its root; each leaf is compared with it (DigestMismatch). Raises CorruptCheckpoint."""
    headers = list(ordered_map(lambda shard: read_shard_header(shard, _FIRST_READ_OF_A_PART), shards, threads))
    if _whole_tensors_of(shards, headers) != tree.specs:
        raise CorruptCheckpoint("the anchor's shards do not hold the tensors of the version's digest tree")
    state, names = State.empty(held), {spec.name for spec in held}
    sliced = _sliced(headers)

    def fill(part: _Range) -> int:
        chunk = np.frombuffer(part.read(part.start, part.stop), np.uint8)
        if len(chunk) != part.stop - part.start:
            raise CorruptCheckpoint(f"the anchor's shard {part.shard[:16]}… ends too early")
        at = 0
        for name, start, stop in part.pieces:
            placed = state.read(name, start, stop).view(np.uint8)
            placed[:] = chunk[at : at + len(placed)]
            at += len(placed)
            if name in sliced:
                continue
            first = start * state.spec(name).dtype.width // LEAF_BYTES
            found = leaves_of([placed])[0]
            if found != tree.leaves[name][32 * first :][: len(found)]:
                raise DigestMismatch(f"tensor {name!r} of the anchor's shard {part.shard[:16]}… is not the version's")
        return len(chunk)

    parts = [part for shard, header in zip(shards, headers, strict=True) for part in _ranges(*shard, header, names)]
    with closing(ordered_map(fill, parts, threads)) as filled:
        for nbytes in filled:
            if progress:
                progress(nbytes)
    for name, found in _leaves_of_slices(state, headers, threads).items():
        if found != tree.leaves[name]:
            raise DigestMismatch(f"tensor {name!r} of the anchor, which is in several shards, is not the version's")
    return state


def _whole_tensors_of(
    shards: Sequence[tuple[Payload, RangeReader]], headers: list[ShardHeader]
) -> tuple[TensorSpec, ...]:
    """As `whole_tensors`; its error names the shards, one of which is not what it should be."""
    try:
        return whole_tensors(headers)
    except CorruptCheckpoint as error:
        names = ", ".join(f"{payload.sha256[:16]}…" for payload, _ in shards[:_NAMED_SHARDS])
        raise CorruptCheckpoint(f"{error}: of {names}", hint=error.hint) from None


def whole_tensors(headers: list[ShardHeader]) -> tuple[TensorSpec, ...]:
    """The tensors of the state, in the order of their names. Raises CorruptCheckpoint unless each element of each is in
    one shard."""
    found: dict[str, list[Segment]] = {}
    for header in headers:
        for segment in header.segments:
            found.setdefault(segment.spec.name, []).append(segment)
    for name, segments in found.items():
        ends = 0
        for segment in sorted(segments, key=lambda s: s.start):
            if segment.spec != segments[0].spec:
                raise CorruptCheckpoint(f"the anchor's shards differ in tensor {name!r}")
            if segment.start < ends or (len(segments) > 1 and segment.is_whole):
                raise CorruptCheckpoint(f"the anchor's shards hold the same tensor twice, {name!r}")
            if segment.start > ends:
                break
            ends = segment.stop
        if ends != segments[0].spec.elements:
            raise CorruptCheckpoint(f"the anchor's shards lack element {ends} of tensor {name!r}")
    return tuple(sorted((segments[0].spec for segments in found.values()), key=lambda s: s.name.encode()))


def _sliced(headers: list[ShardHeader]) -> set[str]:
    return {segment.spec.name for header in headers for segment in header.segments if not segment.is_whole}


def _leaves_of_slices(state: State, headers: list[ShardHeader], threads: int | None) -> dict[str, bytes]:
    """The leaves of the tensors of ``state`` that came in slices: these end within leaves."""
    sliced = _sliced(headers)
    specs = tuple(spec for spec in state.specs if spec.name in sliced)
    return state_digest(State(specs, {spec.name: state.read(spec.name) for spec in specs}), threads=threads).leaves


def _mismatch(state: State, payloads: list[Payload], headers: list[ShardHeader]) -> DigestMismatch:
    """The error that names the damaged shard, of a state that has another root than its manifest says."""
    for payload, header in zip(payloads, headers, strict=True):
        read = [header.data, *(state.read(*segment.place).view(np.uint8) for segment in header.segments)]
        if sha256_messages([read]).hex() != payload.sha256:
            return DigestMismatch(f"the anchor's shard {payload.sha256[:16]}… does not match its SHA-256")
    return DigestMismatch("the anchor's root is not its manifest's, though its shards are those that it names")


class ShardHeader(NamedTuple):
    """``segments`` in the order in which their bytes tile the shard behind the header, whose own bytes are ``data``."""

    segments: list[Segment]
    data: UIntArray


class _Range(NamedTuple):
    """Bytes [``start``, ``stop``) of a shard: those of ``pieces``, whole leaves of tensors as arguments of
    `State.read`."""

    shard: str
    read: RangeReader
    start: int
    stop: int
    pieces: list[tuple[str, int, int]]


def read_shard_header(shard: tuple[Payload, RangeReader], first_read: int = _FIRST_READ) -> ShardHeader:
    """The header of a shard. Raises CorruptCheckpoint and StoreError."""
    payload, read = shard
    try:
        head = read(0, min(first_read, payload.bytes))
        end = 8 + header_length(head, payload.bytes)
        if end > _LARGE_HEADER:
            _require_digest(payload, read)
        if end > len(head):
            head += read(len(head), end)
        if end > len(head):  # without its last spaces it would still make sense
            raise CorruptCheckpoint("its header ends too early")
        placed, metadata, start = parse_header(head, payload.bytes)
        segments = segments_of([spec for spec, _ in placed], metadata)
    except StoreError:
        raise
    except PulseError as error:
        raise CorruptCheckpoint(f"the anchor's shard {payload.sha256[:16]}…: {error}") from error
    return ShardHeader(segments, np.frombuffer(head[:start], np.uint8))


def _require_digest(payload: Payload, read: RangeReader) -> None:
    """Raises CorruptCheckpoint unless the whole shard has the SHA-256 that its name promises."""
    running = sha256()
    for start in range(0, payload.bytes, _CHUNK_BYTES):
        running.update(read(start, min(start + _CHUNK_BYTES, payload.bytes)))
    if running.hexdigest() != payload.sha256:
        raise CorruptCheckpoint("its header is large, and it does not match its SHA-256")


def _ranges(
    payload: Payload, read: RangeReader, header: ShardHeader, names: Collection[str] | None = None
) -> Iterator[_Range]:
    """The shard's bytes behind the header, or those of the tensors ``names``, in ranges over many tensors: one request
    per tensor would cost more time than its bytes on most networks."""
    start = at = len(header.data)
    pieces: list[tuple[str, int, int]] = []
    for segment in header.segments:
        spec, width = segment.spec, segment.spec.dtype.width
        done, end = segment.start * width, segment.stop * width
        if names is not None and spec.name not in names:
            if pieces:
                yield _Range(payload.sha256, read, start, at, pieces)
            at += segment.nbytes
            start, pieces = at, []
            continue
        while done < end:
            room = start + _CHUNK_BYTES - at
            nbytes = end - done if end - done <= room else (done + room) // LEAF_BYTES * LEAF_BYTES - done
            if nbytes <= 0:
                yield _Range(payload.sha256, read, start, at, pieces)
                start, pieces = at, []
                continue
            pieces.append((spec.name, done // width, (done + nbytes) // width))
            done += nbytes
            at += nbytes
    if pieces:
        yield _Range(payload.sha256, read, start, at, pieces)
