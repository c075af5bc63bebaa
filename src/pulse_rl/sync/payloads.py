"""What a version is stored as, before a manifest names it (docs/protocol.md, section 3): each
rank's file of the patch, and its shards of an anchor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from .._native import sha256_messages
from .._util.threads import default_threads, ordered_map
from ..events import Listener, progress_to
from ..patch.blocks import runs_of
from ..state.tensors import Segment
from ..stream.anchor import in_file_order, sliced_header
from ..stream.manifest import AnchorRef, PatchRef, Payload
from ..stream.names import PATCH, SHARD
from ..stream.stream import Stream
from .history_policy import Note
from .pending import PublishState

_AT_ONCE = 2
"""So many shards are stored at once while a state is filled: one is on its way while the other is
hashed."""
_SIDE_BY_SIDE = 4
"""So many shards are hashed at once by a thread: the SHA-256 of one is a chain of steps."""


class Stored(NamedTuple):
    """What one rank has stored: its file of the patch and its shards; and what it says of a
    history."""

    parts: list[Payload]
    shards: list[Payload]
    changed: int
    note: Note

    def to_message(self) -> bytes:
        payloads = [[[p.sha256, p.bytes] for p in some] for some in (self.parts, self.shards)]
        return json.dumps([*payloads, self.changed, self.note]).encode()

    @classmethod
    def from_message(cls, message: bytes) -> Stored:
        parts, shards, changed, note = json.loads(message)
        return cls(
            [Payload(*p) for p in parts], [Payload(*p) for p in shards], changed, Note(*note)
        )


def store_patch(stream: Stream, chunks: Sequence[bytes]) -> Payload:
    """Stores a file of a patch, given in chunks. Raises StoreError."""
    payload = _hashed(chunks)
    stream.put_payload(payload, PATCH, chunks)
    return payload


def store_while_filled(
    stream: Stream,
    draft: PublishState,
    filled: Iterator[Sequence[Segment]],
    *,
    shard_bytes: int,
    threads: int | None,
    listener: Listener | None,
) -> list[Payload]:
    """`store_anchor` of a state that is only being filled: ``filled`` gives what of it is there,
    and each shard is hashed and stored meanwhile as soon as all of its elements are. Raises
    StoreError, and what ``filled`` raises."""
    groups = _groups(draft.segments, shard_bytes)
    progress = progress_to(listener, "upload", sum(segment.nbytes for segment in draft.segments))
    of = {segment.spec.name: number for number, group in enumerate(groups) for segment in group}
    missing = [sum(segment.elements for segment in group) for group in groups]

    def complete() -> Iterator[int]:
        yield from (number for number, count in enumerate(missing) if not count)
        for segments in filled:
            for segment in segments:
                number = of[segment.spec.name]
                missing[number] -= segment.elements
                if not missing[number]:
                    yield number

    def put(number: int) -> tuple[int, Payload]:
        payload = _hashed(_chunks(draft, groups[number]))
        stream.put_payload(payload, SHARD, _chunks(draft, groups[number]))
        return number, payload

    payloads: dict[int, Payload] = {}
    with closing(
        ordered_map(put, complete(), min(_AT_ONCE, threads or default_threads()))
    ) as stored:
        for number, payload in stored:
            payloads[number] = payload
            if progress:
                progress(sum(segment.nbytes for segment in groups[number]))
    return [payloads[number] for number in range(len(groups))]


def store_anchor(
    stream: Stream,
    draft: PublishState,
    *,
    shard_bytes: int,
    threads: int | None,
    listener: Listener | None,
) -> list[Payload]:
    """Stores this rank's shards of an anchor, of about ``shard_bytes`` each. Raises StoreError."""
    groups = _groups(draft.segments, shard_bytes)
    progress = progress_to(listener, "upload", sum(segment.nbytes for segment in draft.segments))
    # What is not the baseline's own memory is made chunk by chunk: several shards of that at once
    # would take memory.
    together = (
        1 if draft.base else min(_SIDE_BY_SIDE, -(-len(groups) // (threads or default_threads())))
    )
    payloads: list[Payload] = []

    def hashed(some: Sequence[tuple[Segment, ...]]) -> list[Payload]:
        if len(some) == 1:
            return [_hashed(_chunks(draft, some[0]))]
        files = [
            [np.frombuffer(chunk, np.uint8) for chunk in _chunks(draft, group)] for group in some
        ]
        digests = sha256_messages(files)
        return [
            Payload(digests[32 * k :][:32].hex(), sum(map(len, file)))
            for k, file in enumerate(files)
        ]

    tasks = [groups[k : k + together] for k in range(0, len(groups), max(together, 1))]
    with closing(ordered_map(hashed, tasks, threads)) as found:
        for some, of in zip(tasks, found, strict=True):
            for group, payload in zip(some, of, strict=True):
                stream.put_payload(payload, SHARD, _chunks(draft, group))
                payloads.append(payload)
                if progress:
                    progress(sum(segment.nbytes for segment in group))
    return payloads


def uploaded(
    stored: Sequence[Stored], base: tuple[int, str] | None
) -> tuple[PatchRef | None, AnchorRef | None]:
    """What a manifest says of the payloads of all ranks, of a patch from ``base``, (version, root),
    if there is one."""
    parts = tuple(payload for of in stored for payload in of.parts)
    shards = tuple(payload for of in stored for payload in of.shards)
    changed = sum(of.changed for of in stored)
    patch = PatchRef(base[0], base[1], changed, parts) if base else None
    return patch, AnchorRef(shards) if shards else None


def _hashed(chunks: Iterable[bytes | memoryview]) -> Payload:
    running, length = sha256(), 0
    for chunk in chunks:
        running.update(chunk)
        length += len(chunk)
    return Payload(running.hexdigest(), length)


def _groups(segments: Sequence[Segment], shard_bytes: int) -> list[tuple[Segment, ...]]:
    """The segments of each shard: about ``shard_bytes`` of them; a larger segment has a shard to
    itself. One without tensors, where there are none."""
    groups: list[list[Segment]] = [[]]
    room = shard_bytes
    for segment in segments:
        if segment.nbytes > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        groups[-1].append(segment)
        room -= segment.nbytes
    return [tuple(group) for group in groups]


def _chunks(draft: PublishState, group: tuple[Segment, ...]) -> Iterator[bytes | memoryview]:
    ordered = in_file_order(group)
    yield sliced_header(ordered)
    for segment in ordered:
        if segment.elements:
            for run in runs_of(segment):
                yield draft.elements(run).view(np.uint8).data
