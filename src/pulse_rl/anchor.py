"""Anchors: a full state as safetensors shards, written and read as streams (docs/format.md, section 4).

Every tensor is whole in one shard, so that any engine loads a shard as an ordinary safetensors file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from ._pool import ordered_map
from .checkpoint import header_length, parse_header, serialize
from .errors import CorruptCheckpoint, DigestMismatch, PulseError
from .manifest import Payload
from .tensors import State, TensorSpec

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


def plan_shards(state: State, shard_bytes: int = DEFAULT_SHARD_BYTES, workers: int | None = None) -> list[Shard]:
    """Cuts a state into shards of about ``shard_bytes`` (a larger tensor has one to itself) and hashes them."""
    groups: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for spec in state.specs:
        if spec.nbytes > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        groups[-1].append(spec)
        room -= spec.nbytes

    def run(group: list[TensorSpec]) -> Shard:
        digest, length = sha256(), 0
        for chunk in serialize(state, tuple(group)):
            digest.update(chunk)
            length += len(chunk)
        return Shard(tuple(group), Payload(digest.hexdigest(), length))

    return list(ordered_map(run, groups, workers))


def restore(
    shards: Sequence[tuple[Payload, RangeReader]],
    *,
    elements: int,
    dense_bytes: int,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> State:
    """The state of an anchor, read in ranges into its final place.

    ``elements`` and ``dense_bytes`` are what the manifest promises; memory is only allocated for that much. Every
    shard's SHA-256 is checked (DigestMismatch); the caller still has to compare the state's root.
    Raises CorruptCheckpoint.
    """
    headers = list(ordered_map(_read_header, shards, workers))
    specs = [spec for placed, _, _ in headers for spec, _ in placed]
    if len({s.name for s in specs}) != len(specs):
        raise CorruptCheckpoint("the anchor's shards hold the same tensor twice")
    if (sum(s.elements for s in specs), sum(s.nbytes for s in specs)) != (elements, dense_bytes):
        raise CorruptCheckpoint(f"the anchor's shards hold other tensors than the manifest's {dense_bytes} bytes")
    state = State.empty(tuple(specs))

    def fill(item: tuple[tuple[Payload, RangeReader], tuple[list[tuple[TensorSpec, int]], bytes, int]]) -> None:
        (payload, read), (placed, head, start) = item
        digest = sha256(head)
        for spec, offset in placed:
            into = state.read(spec.name).view(np.uint8).data
            for at in range(0, spec.nbytes, _CHUNK_BYTES):
                stop = min(at + _CHUNK_BYTES, spec.nbytes)
                chunk = read(start + offset + at, start + offset + stop)
                digest.update(chunk)
                into[at:stop] = chunk
                if progress:
                    progress(stop - at)
        if digest.hexdigest() != payload.sha256:
            raise DigestMismatch(f"the anchor's shard {payload.sha256[:16]}… does not match its SHA-256")

    for _ in ordered_map(fill, list(zip(shards, headers, strict=True)), workers):
        pass
    return state


def _read_header(shard: tuple[Payload, RangeReader]) -> tuple[list[tuple[TensorSpec, int]], bytes, int]:
    """(specs with offsets, the header's bytes, start of the data)."""
    payload, read = shard
    try:
        head = read(0, min(_FIRST_READ, payload.bytes))
        end = 8 + header_length(head, payload.bytes)
        if end > len(head):
            head += read(len(head), end)
        placed, _, start = parse_header(head, payload.bytes)
    except PulseError as error:
        if not isinstance(error, CorruptCheckpoint):
            raise
        raise CorruptCheckpoint(f"the anchor's shard {payload.sha256[:16]}…: {error}") from error
    return placed, head[:start], start
