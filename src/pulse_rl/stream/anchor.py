"""Anchors: a full state as safetensors shards, written and read as streams (docs/format.md, section 4).

Every tensor is whole in one shard, so that any engine loads a shard as an ordinary safetensors file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from .._util.threads import ordered_map
from ..errors import CorruptCheckpoint, DigestMismatch, IntegrityError, PulseError, StoreError
from ..state.checkpoint import header_length, parse_header, serialize
from ..state.digest import StateDigest, leaf_digests
from ..state.tensors import State, TensorSpec
from .manifest import Payload

DEFAULT_SHARD_BYTES = 1 << 30
_CHUNK_BYTES = 16 << 20
_FIRST_READ = 1 << 16

RangeReader = Callable[[int, int], bytes]
"""Returns bytes [start, stop) of one shard."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Some tensors of a state as one safetensors file; ``payload`` tells its digest and length before it is stored."""

    specs: tuple[TensorSpec, ...]
    payload: Payload


def plan_shards(
    state: State, digest: StateDigest, shard_bytes: int = DEFAULT_SHARD_BYTES, threads: int | None = None
) -> list[Shard]:
    """Cuts a state into shards of about ``shard_bytes`` (a larger tensor has one to itself) and hashes them.

    ``digest`` is what the state's tree must be: an anchor that is read later than its root was computed would be
    useless if a trainer had written to the tensors in between (IntegrityError).
    """
    groups: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for spec in state.specs:
        if spec.nbytes > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        groups[-1].append(spec)
        room -= spec.nbytes

    def run(group: list[TensorSpec]) -> Shard:
        for spec in group:
            if leaf_digests(state.read(spec.name)) != digest.leaves[spec.name]:
                raise _changed(spec.name)
        running, length = sha256(), 0
        for chunk in serialize(state, tuple(group)):
            running.update(chunk)
            length += len(chunk)
        return Shard(tuple(group), Payload(running.hexdigest(), length))

    return list(ordered_map(run, groups, threads))


def verified_chunks(state: State, shard: Shard) -> Iterator[bytes | memoryview]:
    """The shard's chunks, for one pass. Raises IntegrityError at the end unless they are what was planned."""
    running = sha256()
    for chunk in serialize(state, shard.specs):
        running.update(chunk)
        yield chunk
    if running.hexdigest() != shard.payload.sha256:
        raise _changed(shard.specs[0].name)


def _changed(name: str) -> IntegrityError:
    return IntegrityError(f"{name} changed while it was published", hint="Do not modify tensors during publish().")


def restore(
    shards: Sequence[tuple[Payload, RangeReader]],
    *,
    elements: int,
    dense_bytes: int,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> State:
    """The state of an anchor, read in ranges into its final place.

    ``elements`` and ``dense_bytes`` are what the manifest promises; memory is only allocated for that much. Every
    shard's SHA-256 is checked (DigestMismatch); the caller still has to compare the state's root.
    Raises CorruptCheckpoint.
    """
    headers = list(ordered_map(_read_header, shards, threads))
    specs = [spec for header in headers for spec in header.specs]
    if len({s.name for s in specs}) != len(specs):
        raise CorruptCheckpoint("the anchor's shards hold the same tensor twice")
    if (sum(s.elements for s in specs), sum(s.nbytes for s in specs)) != (elements, dense_bytes):
        raise CorruptCheckpoint(f"the anchor's shards do not hold the manifest's {dense_bytes} bytes of tensors")
    state = State.empty(tuple(specs))

    def fill(shard: tuple[tuple[Payload, RangeReader], _ShardHeader]) -> None:
        (payload, read), header = shard
        tensors = _Buffers(state.read(spec.name).view(np.uint8).data for spec in header.specs)
        digest = sha256(header.data)
        for chunk in _chunks(payload, read, len(header.data)):
            digest.update(chunk)
            tensors.write(chunk)
            if progress:
                progress(len(chunk))
        if digest.hexdigest() != payload.sha256:
            raise DigestMismatch(f"the anchor's shard {payload.sha256[:16]}… does not match its SHA-256")

    for _ in ordered_map(fill, list(zip(shards, headers, strict=True)), threads):
        pass
    return state


class _ShardHeader(NamedTuple):
    """``specs`` in the order in which their bytes tile the shard behind the header, whose own bytes are ``data``."""

    specs: list[TensorSpec]
    data: bytes


def _read_header(shard: tuple[Payload, RangeReader]) -> _ShardHeader:
    payload, read = shard
    try:
        head = read(0, min(_FIRST_READ, payload.bytes))
        end = 8 + header_length(head, payload.bytes)
        if end > len(head):
            head += read(len(head), end)
        if end > len(head):  # without its last spaces it would still make sense
            raise CorruptCheckpoint("its header ends too early")
        placed, _, start = parse_header(head, payload.bytes)
    except StoreError:
        raise
    except PulseError as error:
        raise CorruptCheckpoint(f"the anchor's shard {payload.sha256[:16]}…: {error}") from error
    return _ShardHeader([spec for spec, _ in placed], head[:start])


def _chunks(payload: Payload, read: RangeReader, start: int) -> Iterator[memoryview]:
    """The shard's bytes from ``start`` on, in ranges over many tensors: one request per tensor would cost more time
    than its bytes on most networks."""
    for at in range(start, payload.bytes, _CHUNK_BYTES):
        stop = min(at + _CHUNK_BYTES, payload.bytes)
        chunk = memoryview(read(at, stop))
        if len(chunk) != stop - at:
            raise CorruptCheckpoint(f"the anchor's shard {payload.sha256[:16]}… ends too early")
        yield chunk


class _Buffers:
    """Buffers that are filled one after another from chunks of any size, which together have their length."""

    def __init__(self, buffers: Iterator[memoryview]) -> None:
        self._buffers = buffers
        self._room = memoryview(b"")

    def write(self, chunk: memoryview) -> None:
        while len(chunk):
            if not len(self._room):
                self._room = next(self._buffers)
            nbytes = min(len(chunk), len(self._room))
            self._room[:nbytes] = chunk[:nbytes]
            self._room, chunk = self._room[nbytes:], chunk[nbytes:]
