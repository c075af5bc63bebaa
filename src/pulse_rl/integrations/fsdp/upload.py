"""Stores one rank's part of a patch, and its shards of an anchor, before the commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from ..._util.threads import ordered_map
from ...patch.blocks import runs_of
from ...state.slices import Segment
from ...stream.manifest import AnchorRef, PatchRef, Payload
from ...stream.names import PATCH, SHARD
from ...stream.slices import in_file_order, sliced_header
from ...stream.stream import Stream
from ...sync.upload import Uploaded
from .draft import Draft


class Stored(NamedTuple):
    """What one rank has stored: its part of the patch and its shards."""

    parts: list[Payload]
    shards: list[Payload]
    changed: int

    def to_message(self) -> bytes:
        payloads = [[[p.sha256, p.bytes] for p in some] for some in (self.parts, self.shards)]
        return json.dumps([*payloads, self.changed]).encode()

    @classmethod
    def from_message(cls, message: bytes) -> Stored:
        parts, shards, changed = json.loads(message)
        return cls([Payload(*p) for p in parts], [Payload(*p) for p in shards], changed)


def store(
    stream: Stream, draft: Draft, root: str, rank: int, *, with_anchor: bool, shard_bytes: int, threads: int | None
) -> Stored:
    """Stores this rank's part, if there is a base, and its shards, if there is none or ``with_anchor``. Raises
    StoreError."""
    parts = []
    segments = draft.state.segments
    sole = draft.layout.sole
    if draft.base and (segments or sole == rank):
        header = draft.header(root)
        chunks = (header.to_bytes(), *(encoded.payload for encoded in draft.coded))
        payload = Payload(digest_of(chunks), sum(map(len, chunks)))
        stream.put_payload(payload, PATCH, chunks)
        parts.append(payload)
    shards = []
    if with_anchor or draft.base is None:
        groups = _groups(segments, shard_bytes)
        if not segments and sole == rank:
            groups = [()]

        def hashed(group: tuple[Segment, ...]) -> Payload:
            running, length = sha256(), 0
            for chunk in _chunks(draft, group):
                running.update(chunk)
                length += len(chunk)
            return Payload(running.hexdigest(), length)

        with closing(ordered_map(hashed, groups, threads)) as payloads:
            for group, payload in zip(groups, payloads, strict=True):
                stream.put_payload(payload, SHARD, _chunks(draft, group))
                shards.append(payload)
    return Stored(parts, shards, draft.changed)


def uploaded(stored: Sequence[Stored], base: tuple[int, str] | None) -> Uploaded:
    """What a manifest says of the payloads of all ranks, of a patch from ``base``, (version, root), if there is one."""
    parts = tuple(payload for of in stored for payload in of.parts)
    shards = tuple(payload for of in stored for payload in of.shards)
    changed = sum(of.changed for of in stored)
    patch = PatchRef(base[0], base[1], changed, parts) if base else None
    return Uploaded(patch, AnchorRef(shards) if shards else None)


def _groups(segments: Sequence[Segment], shard_bytes: int) -> list[tuple[Segment, ...]]:
    """The segments of each shard: about ``shard_bytes`` of them; a larger segment has a shard to itself."""
    groups: list[list[Segment]] = []
    room = 0
    for segment in segments:
        if not groups or (segment.nbytes > room and groups[-1]):
            groups.append([])
            room = shard_bytes
        groups[-1].append(segment)
        room -= segment.nbytes
    return [tuple(group) for group in groups]


def _chunks(draft: Draft, group: tuple[Segment, ...]) -> Iterator[bytes | memoryview]:
    ordered = in_file_order(group)
    yield sliced_header(ordered)
    for segment in ordered:
        if segment.elements:
            for run in runs_of(segment):
                yield draft.elements(run).view(np.uint8).data


def digest_of(chunks: Sequence[bytes]) -> str:
    """The SHA-256 of the chunks one after another, 64 hexadecimal digits."""
    running = sha256()
    for chunk in chunks:
        running.update(chunk)
    return running.hexdigest()
