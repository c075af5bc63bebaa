"""How ranks find their baseline in an existing stream: each reads its slices of the head
(docs/protocol.md, 10)."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .. import codec as codecs
from .._util.collective import RankGroup
from .._util.threads import ordered_map
from ..errors import ChainGap, StateMismatch
from ..follow.patch_files import PatchFiles
from ..patch.apply import decode_block, scatter
from ..patch.blocks import BLOCK_ELEMENTS, Block, cut
from ..patch.history import History, Recorder, Records, Window
from ..patch.tree import inner_leaves
from ..state.bits import UIntArray
from ..state.tensors import Segment, State, TensorSpec
from ..stream.anchor import AnchorFiles
from ..stream.manifest import Link, Manifest, Payload
from ..stream.stream import Stream
from ..sync.host_state import most_remembered
from ..sync.pending import Baseline
from ..sync.planner import BROKEN_LINK, Planner
from .exchange import gather_tree, hash_shared
from .layout import Runs, ShardedLayout, SlicedState, union

_BATCH_BYTES = 64 << 20
_LINKS_AT_ONCE = 4

# Elements of tensors by name: ascending ranges [start, stop) that do not touch.
_Ranges = dict[str, Runs]


def restore_baseline(
    stream: Stream, ranks: RankGroup, layout: ShardedLayout, head: Manifest, *, threads: int | None
) -> Baseline | str:
    """What this rank publishes of ``head``, read from the store, once all ranks have theirs and
    these have its root; or why that fails. A collective: raises what `RankGroup.each` does,
    StoreUnavailable, say."""

    def restore() -> Baseline:
        segments = layout.segments(ranks.rank)
        state, history = _restore_slices(stream, path, layout.specs, segments, threads=threads)
        blocks = cut(layout.specs, segments)
        leaves = inner_leaves(blocks, lambda segment: state.read(*segment.place))
        return Baseline(
            head.version, head.root, layout, segments, blocks, state, leaves, history.of(blocks)
        )

    try:
        # 1. Rank 0 plans one path for all.
        path = ranks.from_first(
            lambda: _path_to(stream, head.version), _path_to_message, _path_from_message
        )
        # 2. Each rank reads its slices.
        baseline = ranks.together(restore)
    except BROKEN_LINK as error:  # on all ranks alike
        ranks.common_error = None  # it would keep what was restored
        return str(error)
    windows = ranks.each(lambda: len(baseline.history.windows), lambda n: b"%d" % n, int)

    # 3. Together they must have the root.
    def elements(segment: Segment) -> UIntArray:
        return baseline.state.read(*segment.place)

    with ranks.isolated():
        leaves = baseline.leaves | hash_shared(
            list(layout.shared.values()), ranks, elements, threads
        )
        tree = gather_tree(layout, ranks, leaves)
    root = ranks.from_first(lambda: tree.root if tree else "", str.encode, bytes.decode)
    if root != head.root:
        return "what was restored has another root"
    # A rank whose records took too much memory remembers less: a patch names one history for all of
    # them.
    return baseline._replace(leaves=leaves, history=baseline.history.last(min(windows)))


class _Step(NamedTuple):
    """A link of a path, and what is remembered at its end."""

    link: Link
    remembers: int


def _path_to(stream: Stream, version: int) -> list[_Step]:
    """The steps from an anchor to ``version``, with the payloads of each link. Raises ChainGap."""
    planner = Planner(stream, version)
    while True:
        path: list[_Step] = []
        for planned in planner.plan(None):
            try:
                link, manifest = stream.resolved(planned), stream.manifest(planned.version)
            except BROKEN_LINK as error:
                planner.avoid(planned, planned, error)
                break
            path.append(_Step(link, manifest.remembers))
        else:
            return path


def _path_to_message(path: list[_Step]) -> bytes:
    return json.dumps(
        [
            [of.base, of.version, [[p.sha256, p.bytes] for p in of.payloads or ()], of.is_fold, n]
            for of, n in path
        ]
    ).encode()


def _path_from_message(message: bytes) -> list[_Step]:
    found = []
    for base, version, said, is_fold, remembers in json.loads(message):
        payloads = tuple(Payload(*payload) for payload in said)
        nbytes = sum(payload.bytes for payload in payloads)
        found.append(_Step(Link(base, version, nbytes, payloads, is_fold=is_fold), remembers))
    return found


def _restore_slices(
    stream: Stream,
    path: Sequence[_Step],
    specs: tuple[TensorSpec, ...],
    segments: Sequence[Segment],
    *,
    threads: int | None = None,
) -> tuple[SlicedState, History]:
    """``segments`` of the version to which ``path`` leads, a path from an anchor with the payloads
    of each link, and what is remembered there of the blocks that were read.

    ``specs`` are the tensors of the state. A block is decoded as a whole, so some elements around
    the segments are read, and dropped. Each block is checked against its SHA-256; the caller
    compares the root. Raises StateMismatch where the version has other tensors, ChainGap, and
    what reading raises.
    """
    if not path or path[0].link.base is not None:
        raise ChainGap("no anchor leads to the version")
    anchor = AnchorFiles(stream.shards(path[0].link.payloads or (), threads), threads=threads)
    if anchor.specs != specs:
        raise StateMismatch("the version before has other tensors")
    path = path[1:]
    patches = list(
        ordered_map(lambda step: PatchFiles(stream.parts(step.link), specs), path, _LINKS_AT_ONCE)
    )
    most = most_remembered(sum(spec.nbytes for spec in specs))
    state, histories = SlicedState.allocate(segments), list[History]()
    for batch in _batches(specs, state.segments):
        # 1. Backwards: which blocks of each patch have to be read for these elements.
        # What a patch needs of the version before is known from its end.
        wanted: _Ranges = {s.spec.name: ((s.start, s.stop),) for s in batch}
        touched: list[list[int]] = []
        for patch in reversed(patches):
            touched.append(_touching(patch, wanted))
            wanted = _joined(wanted, [patch.header.cuts[k] for k in touched[-1]])
        pieces = _Pieces(
            [Segment(spec, *place) for spec in specs for place in wanted.get(spec.name, ())]
        )
        # 2. Forwards: from the anchor, patch by patch.
        history = History()
        anchor.read(pieces, pieces.segments)
        for step, patch, chosen in zip(path, patches, reversed(touched), strict=True):
            records = _apply(patch, chosen, pieces, history, most if step.remembers else 0, threads)
            window = None
            if records is not None:
                window = Window(patch.header.base_root, records, patch.header.cuts)
            history = history.after(window, step.remembers, most)
        # 3. The segments are kept; what lay around them in their blocks is dropped.
        histories.append(history)
        for segment in batch:
            state.read(*segment.place)[:] = pieces.read(*segment.place)
    # 4. What all of the histories, each of some blocks of a state, remember together.
    count = min(len(history.windows) for history in histories)
    joined: list[Window] = []
    for of in zip(*(history.last(count).windows for history in histories), strict=True):
        records = {index: found for window in of for index, found in window.records.items()}
        joined.append(of[0]._replace(records=records))
    return state, History(tuple(joined))


def _batches(specs: tuple[TensorSpec, ...], segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """The segments in batches of bounded size, one at least. Small tensors that share a block stay
    together."""
    mine = {segment.spec.name: segment for segment in segments if segment.elements}
    batch: list[Segment] = []
    size = 0
    for block in cut(specs):
        held = [mine.pop(s.spec.name) for s in block.segments if s.spec.name in mine]
        # Around a segment about a block is read, too.
        cost = sum(s.nbytes for s in held) + (BLOCK_ELEMENTS * block.dtype.width if held else 0)
        if batch and size + cost > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch += held
        size += cost
    yield batch


def _touching(patch: PatchFiles, wanted: _Ranges) -> list[int]:
    """The blocks in which something changed that have elements of what is wanted."""
    return [
        k
        for k, (block, entry) in enumerate(zip(patch.header.cuts, patch.header.blocks, strict=True))
        if entry.changed
        and any(_meets(wanted.get(s.spec.name, ()), s.start, s.stop) for s in block.segments)
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
    return {name: union(ranges) for name, ranges in found.items()}


def _apply(
    patch: PatchFiles,
    chosen: list[int],
    pieces: _Pieces,
    history: History,
    most: int,
    threads: int | None,
) -> Mapping[int, Records] | None:
    """Makes the changes of the ``chosen`` blocks; what a history is to remember of them, in
    ``most`` bytes."""
    header, payloads = patch.header, patch.payloads(chosen)
    by_history = any(header.blocks[k].codec_id == codecs.HISTORY for k in chosen)
    needed = header.history if by_history else None
    known, recorder = history.named(needed, header.cuts), Recorder(most)

    def run(index: int) -> None:
        block = header.cuts[index]
        before = block.read(pieces)
        changes = decode_block(
            index, block, header.blocks[index], payloads[index], before, known.past(index)
        )
        if most:
            recorder.add(index, block.dtype, changes, before)
        scatter(block, pieces, changes)

    for _ in ordered_map(run, chosen, threads):
        pass
    return recorder.records


class _Pieces(State):
    """Several segments of each of some tensors, in new host memory; `read` takes places in the
    whole tensors."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__((), {})
        self.segments = segments
        self._of: dict[str, list[tuple[Segment, UIntArray]]] = {}
        for segment in segments:
            array = np.empty(segment.elements, segment.spec.dtype.uint)
            self._of.setdefault(segment.spec.name, []).append((segment, array))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> UIntArray:
        for segment, array in self._of[name]:
            if stop is not None and segment.start <= start <= stop <= segment.stop:
                return array[start - segment.start : stop - segment.start]
        raise IndexError(f"elements {start} to {stop} of tensor {name!r} are not held")
