"""Slices of a version from the store: what a rank of a sharded trainer needs of it, and nothing else
(docs/protocol.md, section 10)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._util.threads import ordered_map
from ..errors import ChainGap, CorruptCheckpoint, StateMismatch, WrongHistory
from ..patch.apply import decode_block, scatter
from ..patch.blocks import BLOCK_ELEMENTS, Block, cut
from ..patch.part import PatchFiles
from ..state.tensors import Segment, SlicedState, State, TensorSpec, UIntArray
from ..stream.anchor import RangeReader, read_shard_header, whole_tensors
from ..stream.manifest import Link, Payload
from ..stream.names import PATCH
from ..stream.stream import Stream

_BATCH_BYTES = 64 << 20
_CHUNK_BYTES = 8 << 20
_FILES_AT_ONCE = 8
_LINKS_AT_ONCE = 4

_Ranges = dict[str, list[tuple[int, int]]]
"""Elements of tensors by name: ascending ranges [start, stop) that do not touch."""


def restore_slices(
    stream: Stream,
    path: Sequence[Link],
    specs: tuple[TensorSpec, ...],
    segments: Sequence[Segment],
    *,
    threads: int | None = None,
) -> SlicedState:
    """``segments`` of the version to which ``path`` leads, a path from an anchor with the payloads of each link.

    ``specs`` are the tensors of the state. A block is decoded as a whole, so some elements beside the segments are
    read, and forgotten. Each block is checked against its SHA-256; whoever calls this compares the root. Raises
    StateMismatch where the version has other tensors, ChainGap, and what reading raises.
    """
    if not path or path[0].base is not None:
        raise ChainGap("no anchor leads to the version")
    shards = path[0].payloads or ()
    readers = ordered_map(stream.shard_reader, shards, _FILES_AT_ONCE)
    anchor = _AnchorFiles(list(zip(shards, readers, strict=True)), threads)
    if anchor.specs != specs:
        raise StateMismatch("the version before has other tensors")
    patches = list(ordered_map(lambda link: _patch_files(stream, link, specs), path[1:], _LINKS_AT_ONCE))
    state = SlicedState.allocate(segments)
    for batch in _batches(specs, state.segments):
        wanted: _Ranges = {s.spec.name: [(s.start, s.stop)] for s in batch}
        touched: list[list[int]] = []
        for patch in reversed(patches):
            touched.append(_touching(patch, wanted))
            wanted = _joined(wanted, [patch.blocks[k] for k in touched[-1]])
        pieces = _Pieces([Segment(spec, *place) for spec in specs for place in wanted.get(spec.name, ())])
        for _ in ordered_map(anchor.fill, [(pieces, *place) for place in pieces.chunks()], threads):
            pass
        for patch, chosen in zip(patches, reversed(touched), strict=True):
            _apply(patch, chosen, pieces, threads)
        for segment in batch:
            state.read(*segment.place)[:] = pieces.read(*segment.place)
    return state


def _patch_files(stream: Stream, link: Link, specs: tuple[TensorSpec, ...]) -> PatchFiles:
    payloads = link.payloads or ()
    readers = list(ordered_map(lambda payload: stream.part_reader(payload, PATCH), payloads, _FILES_AT_ONCE))
    patch = PatchFiles([(read, payload.bytes) for read, payload in zip(readers, payloads, strict=True)], specs)
    if patch.header.history:
        raise WrongHistory(f"{link} needs a history, and slices are read without one")
    return patch


def _batches(specs: tuple[TensorSpec, ...], segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """The segments in batches of bounded size. Small tensors that share a block stay together."""
    mine = {segment.spec.name: segment for segment in segments if segment.elements}
    batch: list[Segment] = []
    size = 0
    for block in cut(specs):
        held = [mine.pop(s.spec.name) for s in block.segments if s.spec.name in mine]
        # Beside a segment about a block is read, too.
        cost = sum(s.nbytes for s in held) + (BLOCK_ELEMENTS * block.dtype.width if held else 0)
        if batch and size + cost > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch += held
        size += cost
    if batch:
        yield batch


def _touching(patch: PatchFiles, wanted: _Ranges) -> list[int]:
    """The blocks in which something changed that have elements of what is wanted."""
    return [
        k
        for k, (block, entry) in enumerate(zip(patch.blocks, patch.header.blocks, strict=True))
        if entry.changed and any(_meets(wanted.get(s.spec.name, ()), s.start, s.stop) for s in block.segments)
    ]


def _meets(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    at = bisect_right(ranges, start, key=lambda place: place[1])
    return at < len(ranges) and ranges[at][0] < stop


def _joined(wanted: _Ranges, blocks: Sequence[Block]) -> _Ranges:
    """The ranges with all elements of ``blocks``."""
    found = {name: list(ranges) for name, ranges in wanted.items()}
    for block in blocks:
        for spec, start, stop in block.segments:
            found.setdefault(spec.name, []).append((start, stop))
    for name, ranges in found.items():
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        found[name] = merged
    return found


def _apply(patch: PatchFiles, chosen: list[int], pieces: _Pieces, threads: int | None) -> None:
    payloads = patch.payloads(chosen)

    def run(index: int) -> None:
        block = patch.blocks[index]
        changes = decode_block(index, block, patch.header.blocks[index], payloads[index], block.read(pieces))
        scatter(block, pieces, changes)

    for _ in ordered_map(run, chosen, threads):
        pass


class _Pieces(State):
    """Several segments of each of some tensors, in new host memory; `read` takes places in the whole tensors."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__((), {})
        self._of: dict[str, list[tuple[Segment, UIntArray]]] = {}
        for segment in segments:
            array = np.empty(segment.elements, segment.spec.dtype.uint)
            self._of.setdefault(segment.spec.name, []).append((segment, array))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> UIntArray:
        for segment, array in self._of[name]:
            if stop is not None and segment.start <= start <= stop <= segment.stop:
                return array[start - segment.start : stop - segment.start]
        raise IndexError(f"elements {start} to {stop} of tensor {name!r} are not held")

    def chunks(self) -> list[tuple[str, int, int]]:
        """All of it, as arguments of `read`, a request of bounded size each."""
        found = []
        for name, of in self._of.items():
            for segment, _ in of:
                step = _CHUNK_BYTES // segment.spec.dtype.width
                found += [(name, k, min(k + step, segment.stop)) for k in range(segment.start, segment.stop, step)]
        return found


class _Placed(NamedTuple):
    """A segment of an anchor, which begins at byte ``at`` of a shard."""

    segment: Segment
    read: RangeReader
    at: int


class _AnchorFiles:
    """The shards of an anchor, of which the headers are read at once and elements when they are asked for."""

    def __init__(self, shards: Sequence[tuple[Payload, RangeReader]], threads: int | None) -> None:
        headers = list(ordered_map(read_shard_header, shards, threads))
        self.specs = whole_tensors(headers)
        self._of: dict[str, list[_Placed]] = {}
        for (_, read), header in zip(shards, headers, strict=True):
            at = len(header.data)
            for segment in header.segments:
                self._of.setdefault(segment.spec.name, []).append(_Placed(segment, read, at))
                at += segment.nbytes

    def fill(self, task: tuple[_Pieces, str, int, int]) -> None:
        """Reads elements [start, stop) of a tensor into their place."""
        pieces, name, start, stop = task
        into = pieces.read(name, start, stop)
        for segment, read, at in self._of[name]:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                width = segment.spec.dtype.width
                data = read(at + (low - segment.start) * width, at + (high - segment.start) * width)
                if len(data) != (high - low) * width:
                    raise CorruptCheckpoint(f"a shard of the anchor ends within tensor {name!r}")
                into[low - start : high - start] = np.frombuffer(data, into.dtype)
