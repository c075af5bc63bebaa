"""Anchors: a full state as safetensors shards, written and read in ranges (docs/format.md, 4).

A publisher of one process writes every tensor whole in one shard, so any engine loads a shard as an
ordinary safetensors file. Ranks write slices of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from .._native import sha256_messages
from .._util.files import MAX_BYTES, RangeReader, ranges, read_head
from .._util.threads import ordered_map
from ..errors import CorruptCheckpoint, DigestMismatch, InputError, PulseError, StoreError
from ..state.bits import UIntArray
from ..state.digest import LEAF_BYTES, StateDigest, leaves_of, state_digest
from ..state.header import header_bytes, header_length, parse_header
from ..state.tensors import Empty, Segment, State, TensorSpec
from .manifest import Payload

#: SHA-256 is one chain of steps, so one large shard hashes on one core. Several small ones are
#: hashed in parallel.
DEFAULT_SHARD_BYTES = 1 << 27
#: The safetensors metadata that lists which tensors are slices, and where each slice starts.
SLICES_KEY = "pulse.slices"
# One request of 64 KiB reads most headers whole.
_FIRST_READ = 1 << 16
_NAMED_SHARDS = 16
# JSON takes up to 28 times its bytes as Python objects, in each thread. A larger header is parsed
# only if the shard's SHA-256 is right.
_LARGE_HEADER = 1 << 17


def restore(
    shards: Sequence[tuple[Payload, RangeReader]],
    *,
    root: str,
    elements: int,
    dense_bytes: int,
    empty: Empty = State.empty,
    there: StateDigest | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[State, StateDigest, int]:
    """Read an anchor into memory and verify it; return state, tree, and the bytes that were read.

    The root proves names, dtypes, shapes and bits, so the digests of shards need not be computed.

    Args:
        shards: The payloads with readers of their ranges.
        root: The root of the state.
        elements: The number of elements that the manifest promises. No more memory is allocated.
        dense_bytes: The bytes that the manifest promises.
        empty: Allocates the state. It may return memory that holds a part of the state already.
        there: The tree with this root. Leaves that the memory has already are not read.
        threads: The maximum number of threads. Default: one per core.
        progress: Gets the bytes that were read since its last call.
    Raises:
        CorruptCheckpoint: A shard is damaged, or the shards do not tile the tensors.
        DigestMismatch: The state does not have the root.
    """
    # 1. The headers, before any memory is allocated: a manifest is small, its claims may be large.
    files = AnchorFiles(shards, threads=threads)
    if (sum(s.elements for s in files.specs), sum(s.nbytes for s in files.specs)) != (
        elements,
        dense_bytes,
    ):
        raise CorruptCheckpoint(
            f"the anchor's shards do not hold the manifest's {dense_bytes} bytes of tensors"
        )
    # 2. The elements to read: all, or the leaves that an interrupted restore has not written.
    state = empty(files.specs, None)
    found: dict[str, bytes] = {}
    wanted = [Segment(spec, 0, spec.elements) for spec in state.specs]
    if there and there.specs == state.specs:
        found = state_digest(state, threads=threads).leaves
        wanted = [*_unlike(found, there)]
    nbytes = dense_bytes - sum(segment.nbytes for segment in wanted)
    if progress and nbytes:
        progress(nbytes)
    # 3. Read and hash. Only on a mismatch are the shards hashed one by one, to name the damaged
    # one.
    tree = StateDigest(state.specs, files.hashed(state, wanted, progress, found))
    if tree.root != root:
        raise files.mismatch(state)
    return state, tree, sum(payload.bytes for payload, _ in shards) - nbytes


class ShardHeader(NamedTuple):
    """The header of a shard, whose own bytes are ``data``.

    ``segments`` are in the order in which their bytes tile the shard after the header.
    """

    segments: list[Segment]
    data: UIntArray


class _Piece(NamedTuple):
    """Elements within one leaf, ``segment``: bytes [``start``, ``stop``) of the shard with this
    number."""

    shard: int
    start: int
    stop: int
    segment: Segment


class AnchorFiles:
    """The shards of an anchor. Headers are read at once, elements on demand.

    ``specs`` are the tensors of the state in name order. Raises CorruptCheckpoint and StoreError.
    """

    def __init__(
        self,
        shards: Sequence[tuple[Payload, RangeReader]],
        first_read: int = _FIRST_READ,
        *,
        threads: int | None = None,
    ) -> None:
        self._shards = shards
        self._threads = threads
        self._headers = list(
            ordered_map(lambda shard: _read_shard_header(shard, first_read), shards, threads)
        )
        try:
            self.specs = _whole_tensors(self._headers)
        except CorruptCheckpoint as error:  # one of the shards is damaged
            names = ", ".join(_named(payload) for payload, _ in shards[:_NAMED_SHARDS])
            raise CorruptCheckpoint(f"{error}: of {names}", hint=error.hint) from None
        self._places: dict[str, list[_Piece]] = {}
        for number, header in enumerate(self._headers):
            at = len(header.data)
            for segment in header.segments:
                place = _Piece(number, at, at + segment.nbytes, segment)
                self._places.setdefault(segment.spec.name, []).append(place)
                at += segment.nbytes

    def read(
        self,
        state: State,
        wanted: Sequence[Segment],
        done: Callable[[list[Segment]], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Read the elements ``wanted`` into ``state``.

        ``done`` gets each piece that is there, in any thread. Pieces lie within leaves, and are
        whole leaves if the shards have these. One request reads many tensors: on most networks a
        request for each would cost more time than its bytes.
        """
        # 1. Pieces in file order, joined into requests of neighboring bytes.
        pieces = sorted(piece for segment in wanted for piece in self._pieces(segment))
        by_shard = [list(of) for _, of in groupby(pieces, lambda piece: piece.shard)]
        requests = [
            [of[number] for number in run]
            for of in by_shard
            for run in ranges((piece.start, piece.stop) for piece in of)
        ]

        # 2. Requests in parallel, each scattered into its places in the state.
        def fill(request: list[_Piece]) -> int:
            payload, read = self._shards[request[0].shard]
            begin, end = request[0].start, request[-1].stop
            chunk = np.frombuffer(read(begin, end), np.uint8)
            if len(chunk) != end - begin:
                raise CorruptCheckpoint(f"{_named(payload)} ends too early")
            for _, start, stop, segment in request:
                state.read(*segment.place).view(np.uint8)[:] = chunk[start - begin : stop - begin]
            # The buffer is freed before the hashing of the pieces.
            del chunk
            if done:
                done([piece.segment for piece in request])
            return sum(piece.segment.nbytes for piece in request)

        with closing(ordered_map(fill, requests, self._threads)) as filled:
            for nbytes in filled:
                if progress:
                    progress(nbytes)

    def hashed(
        self,
        state: State,
        wanted: Sequence[Segment],
        progress: Callable[[int], None] | None = None,
        there: Mapping[str, bytes] | None = None,
    ) -> dict[str, bytes]:
        """Read the whole leaves ``wanted`` into a state of whole tensors; return its leaves by
        name.

        Leaves are hashed while others are being fetched. ``there`` has the known leaves of the
        memory; those that are wanted are replaced.
        """
        # 1. Tensors in one piece are hashed leaf by leaf as they arrive.
        cut_up = {
            s.spec.name for header in self._headers for s in header.segments if not s.is_whole
        }
        found: dict[str, list[bytes]] = {}
        for spec in state.specs:
            if spec.name not in cut_up:
                digests = (there or {}).get(spec.name, bytes(32 * -(-spec.nbytes // LEAF_BYTES)))
                found[spec.name] = [digests[at : at + 32] for at in range(0, len(digests), 32)]

        def leaves(pieces: list[Segment]) -> None:
            whole = [piece for piece in pieces if piece.spec.name in found]
            for (spec, start, _), leaf in zip(
                whole, leaves_of([state.read(*p.place) for p in whole]), strict=True
            ):
                found[spec.name][start * spec.dtype.width // LEAF_BYTES] = leaf

        self.read(state, wanted, leaves, progress)
        # 2. Slices end within leaves, so sliced tensors are hashed when everything is there.
        specs = tuple(spec for spec in state.specs if spec.name in cut_up)
        rest = State(specs, {spec.name: state.read(spec.name) for spec in specs})
        joined = {name: b"".join(digests) for name, digests in found.items()}
        return joined | state_digest(rest, threads=self._threads).leaves

    def holding(self, name: str) -> str:
        """The shards that have elements of a tensor, for an error message."""
        return ", ".join(
            _named(self._shards[place.shard][0]) for place in self._places[name][:_NAMED_SHARDS]
        )

    def mismatch(self, state: State) -> DigestMismatch:
        """The error for a state with a wrong root; it names the damaged shard."""
        for (payload, _), header in zip(self._shards, self._headers, strict=True):
            read = [
                header.data,
                *(state.read(*segment.place).view(np.uint8) for segment in header.segments),
            ]
            if sha256_messages([read]).hex() != payload.sha256:
                return DigestMismatch(f"{_named(payload)} does not match its SHA-256")
        return DigestMismatch(
            "the anchor's root is not its manifest's, though its shards are those that it names"
        )

    def _pieces(self, wanted: Segment) -> Iterator[_Piece]:
        spec, width = wanted.spec, wanted.spec.dtype.width
        leaf = LEAF_BYTES // width
        # `held` is the shard's slice of the tensor, whose bytes begin at `at`. Its overlap with
        # `wanted` is cut at leaf boundaries, so each piece can be hashed alone.
        for shard, at, _, held in self._places[spec.name]:
            start, last = max(wanted.start, held.start), min(wanted.stop, held.stop)
            while start < last:
                stop = min(last, (start // leaf + 1) * leaf)
                begin = at + (start - held.start) * width
                yield _Piece(
                    shard, begin, begin + (stop - start) * width, Segment(spec, start, stop)
                )
                start = stop


def _unlike(leaves: Mapping[str, bytes], tree: StateDigest) -> Iterator[Segment]:
    """The leaves of a state that differ from those of ``tree``, as segments."""
    for spec in tree.specs:
        step = LEAF_BYTES // spec.dtype.width
        mine, right = leaves[spec.name], tree.leaves[spec.name]
        for at in range(0, len(right), 32):
            if mine[at : at + 32] != right[at : at + 32]:
                start = at // 32 * step
                yield Segment(spec, start, min(start + step, spec.elements))


def _named(payload: Payload) -> str:
    return f"the anchor's shard {payload.sha256[:16]}…"


def _whole_tensors(headers: list[ShardHeader]) -> tuple[TensorSpec, ...]:
    """The tensors of the state in name order.

    Raises CorruptCheckpoint unless each of their elements is in exactly one shard.
    """
    found: dict[str, list[Segment]] = {}
    for header in headers:
        for segment in header.segments:
            found.setdefault(segment.spec.name, []).append(segment)
    # Sorted slices of a tensor must tile it: no overlap, no gap, and no whole copy next to slices.
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
    return tuple(
        sorted((segments[0].spec for segments in found.values()), key=lambda s: s.name.encode())
    )


def _read_shard_header(shard: tuple[Payload, RangeReader], first_read: int) -> ShardHeader:
    """Read the header of a shard. Raises CorruptCheckpoint and StoreError."""
    payload, read = shard

    def end_of(head: bytes) -> int:
        end = 8 + header_length(head, payload.bytes)
        if end > _LARGE_HEADER:  # only of a whole shard with the SHA-256 of its name
            running = sha256()
            for start in range(0, payload.bytes, MAX_BYTES):
                running.update(read(start, min(start + MAX_BYTES, payload.bytes)))
            if running.hexdigest() != payload.sha256:
                raise CorruptCheckpoint("its header is large, and it does not match its SHA-256")
        return end

    try:
        head = read_head(read, payload.bytes, first_read, end_of)
        # Padding may be cut off: the JSON would still parse.
        if 8 + header_length(head, payload.bytes) > len(head):
            raise CorruptCheckpoint("its header ends too early")
        placed, metadata, start = parse_header(head, payload.bytes)
        segments = _segments_of([spec for spec, _ in placed], metadata)
    except StoreError:
        raise
    except PulseError as error:
        raise CorruptCheckpoint(f"{_named(payload)}: {error}") from error
    return ShardHeader(segments, np.frombuffer(head[:start], np.uint8))


def in_file_order(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Wider types first, as `checkpoint.serialize` orders them."""
    return tuple(sorted(segments, key=lambda segment: -segment.spec.dtype.width))


def sliced_header(segments: Sequence[Segment]) -> bytes:
    """Length prefix and header of a safetensors file that holds ``segments`` in this order.

    It has at most one segment of a tensor.
    """
    entries, slices = [], {}
    for segment in segments:
        spec = segment.spec
        if not segment.is_whole:
            slices[spec.name] = {"shape": list(spec.shape), "start": segment.start}
            spec = TensorSpec(spec.name, spec.dtype, (segment.elements,))
        entries.append(spec)
    text = json.dumps(slices, separators=(",", ":"), ensure_ascii=False)
    return header_bytes(tuple(entries), {SLICES_KEY: text} if slices else None)


def _segments_of(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> list[Segment]:
    """The segments of whole tensors that the entries ``specs`` of a file stand for.

    Raises CorruptCheckpoint.
    """
    try:
        slices = json.loads(metadata.get(SLICES_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{SLICES_KEY} is not JSON: {error}") from None
    if not isinstance(slices, dict):
        raise CorruptCheckpoint(f"{SLICES_KEY} is not an object")
    segments = []
    for spec in specs:
        whole = Segment(spec, 0, spec.elements)
        segments.append(_segment(spec, slices.pop(spec.name)) if spec.name in slices else whole)
    for name in slices:
        raise CorruptCheckpoint(
            f"{SLICES_KEY} speaks of tensor {name[:100]!r}, which the file does not hold"
        )
    return segments


def _segment(entry: TensorSpec, said: Any) -> Segment:
    # A slice is stored as a 1-D tensor [elements]; the metadata has its whole shape and its start.
    try:
        shape, start = said["shape"], said["start"]
        if set(said) != {"shape", "start"} or type(start) is not int or not isinstance(shape, list):
            raise ValueError("another type, or an unknown key")
        spec = TensorSpec(entry.name, entry.dtype, tuple(shape))
    except (TypeError, KeyError, ValueError, InputError) as error:
        raise CorruptCheckpoint(
            f"the slice of tensor {entry.name!r} is malformed: {error}"
        ) from None
    if len(entry.shape) != 1 or not 0 <= start < start + entry.elements <= spec.elements:
        raise CorruptCheckpoint(
            f"the slice of tensor {entry.name!r} is empty or does not lie in the tensor"
        )
    return Segment(spec, start, start + entry.elements)
