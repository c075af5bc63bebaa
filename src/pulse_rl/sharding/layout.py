"""Who publishes what of a sharded state: a pure function of what each rank says that it has. And
both as messages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from ..errors import StateMismatch
from ..state.bits import UIntArray
from ..state.digest import LEAF_BYTES
from ..state.tensors import DType, Segment, State, TensorSpec, dtype_of
from ..sync.pending import PublishLayout

#: Indices of one dimension: ascending ranges [start, stop).
Runs = tuple[tuple[int, int], ...]


def union(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same indices in as few ranges."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


@dataclass(frozen=True)
class SliceSpec:
    """The elements of a tensor that one rank has: of each dimension some indices, in row-major
    order. ``of`` has the ranges of indices of each dimension, or of the flattened tensor's only
    one; ``shape`` is the whole tensor's.

    Of a tensor of shape (6, 8) whose columns two ranks share, rank 1 has ``((0, 6),), ((4, 8),)``.
    Its local shape is (6, 4). It is no range of the flattened tensor (`flat` is None): 4 of its
    elements are below element 8, the start of row 1, and its pieces are 6 rows of 4 elements that
    lie 4 elements apart in the box and 8 apart in the tensor."""

    of: tuple[Runs, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> SliceSpec:
        return cls(tuple(((0, n),) if n else () for n in shape), shape)

    @classmethod
    def range(cls, start: int, stop: int, shape: tuple[int, ...]) -> SliceSpec:
        """Elements [start, stop) of the flattened tensor."""
        return cls((((start, stop),) if start < stop else (),), shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the dimensions whose indices ``of`` has."""
        return self.shape if len(self.of) == len(self.shape) else (math.prod(self.shape),)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in runs) for runs in self.of)

    @property
    def elements(self) -> int:
        return math.prod(self.local_shape)

    def flat(self) -> tuple[int, int] | None:
        """The range [start, stop) of the flattened tensor that the box is; None if it is not
        one."""
        if not self.elements:
            return (0, 0)
        # From the outermost dimension on: a single index each (``open_``), then one dimension of
        # which one run of indices is held, then only whole dimensions.
        start, stride, open_ = 0, math.prod(self.shape), True
        for runs, size, local in zip(self.of, self.sizes, self.local_shape, strict=True):
            stride //= size
            if not open_ and local != size:
                return None
            if len(runs) != 1 and local != size:
                return None
            start += runs[0][0] * stride
            open_ = open_ and local == 1
        return start, start + self.elements

    def below(self, flat: int) -> int:
        """How many elements of the box are in front of element ``flat`` of the flattened tensor.
        They are the first ones of the box, since both are in row-major order."""
        count, stride, inner = 0, math.prod(self.shape), self.elements
        if flat >= stride or not inner:
            return inner
        # Per dimension: indices of the box below that of ``flat`` are in front, with all of their
        # ``inner`` elements. If the index of ``flat`` is in the box, the next dimension decides.
        for runs, size, local in zip(self.of, self.sizes, self.local_shape, strict=True):
            stride //= size
            inner //= local
            index, flat = divmod(flat, stride)
            count += inner * sum(max(0, min(stop, index) - start) for start, stop in runs)
            if not any(start <= index < stop for start, stop in runs):
                break
        return count

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """The box's elements [``first``, ``last``) as few rectangles."""
        if first >= last:
            return
        if (run := self.flat()) is not None:
            yield Piece(first, run[0] + first, 1, last - first, last - first, last - first)
            return
        # Rectangles of the last dimension, in each of the rows that the outer dimensions have.
        here, columns = self.local_shape[-1], self.sizes[-1]
        outer = SliceSpec(self.of[:-1], self.sizes[:-1])
        # A part of a row, whole rows, and a part of a row.
        whole = min(-(-first // here) * here, last), max(last // here * here, first)
        for low, high in pairwise(sorted({first, *whole, last})):
            left, right, at = low % here, (high - 1) % here + 1, 0
            for start, stop in self.of[-1]:
                begin, end = max(left, at), min(right, at + stop - start)
                if begin < end:
                    skip = start + begin - at
                    for rows in outer.pieces(low // here, -(-high // here)):
                        for k in range(rows.rows):
                            number = (rows.number + k * rows.step) * here + begin
                            place = (rows.place + k * rows.pitch) * columns + skip
                            yield Piece(number, place, rows.length, end - begin, here, columns)
                at += stop - start

    def put(self, part: UIntArray, first: int, flat: UIntArray, place: int) -> None:
        """Writes ``part``, the box's elements from number ``first``, into ``flat``, the flattened
        tensor's elements from ``place``."""
        for piece in self.pieces(first, first + len(part)):
            rows = piece.of(part, piece.number - first, piece.step)
            piece.of(flat, piece.place - place, piece.pitch)[:] = rows

    def take(
        self, read: Callable[[int, int], npt.NDArray[Any]], first: int, last: int
    ) -> npt.NDArray[Any]:
        """The box's elements [``first``, ``last``). ``read`` returns the flattened tensor's [start,
        stop)."""
        if (run := self.flat()) is not None:
            return read(run[0] + first, run[0] + last)
        found = np.empty(last - first, read(0, 0).dtype)
        for piece in self.pieces(first, last):
            seen = read(piece.place, piece.place + (piece.rows - 1) * piece.pitch + piece.length)
            piece.of(found, piece.number - first, piece.step)[:] = piece.of(seen, 0, piece.pitch)
        return found

    def within(
        self, places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Which of these ``places`` in the flattened tensor are in the box, and the numbers there
        of those that are."""
        inside, numbers = np.ones(len(places), np.bool_), np.zeros(len(places), np.int64)
        stride = math.prod(self.shape)
        for runs, size, local in zip(self.of, self.sizes, self.local_shape, strict=True):
            stride //= size
            index = places // stride % size
            numbers *= local
            if local == size:
                numbers += index
                continue
            of_this, before = np.zeros(len(places), np.bool_), 0
            for start, stop in runs:
                here = (start <= index) & (index < stop)
                numbers += np.where(here, index - start + before, 0)
                of_this |= here
                before += stop - start
            inside &= of_this
        return inside, numbers[inside]

    def meets(self, other: SliceSpec) -> bool:
        """Whether the two have an element in common."""
        return all(
            any(a < d and c < b for a, b in mine for c, d in theirs)
            for mine, theirs in zip(self.of, other.of, strict=True)
        )


class Piece(NamedTuple):
    """``rows`` of ``length`` elements of a box: the first one's ``number`` in the box and ``place``
    in the flattened tensor. The next row is ``step`` elements on in the box, and ``pitch`` in the
    tensor."""

    number: int
    place: int
    rows: int
    length: int
    step: int
    pitch: int

    def of(self, flat: npt.NDArray[Any], at: int, step: int) -> npt.NDArray[Any]:
        """The rows as a view of ``flat``, from ``at`` and ``step`` elements apart."""
        width = flat.itemsize
        return as_strided(flat[at:], (self.rows, self.length), (step * width, width))


@dataclass(frozen=True, slots=True)
class Assembled:
    """A tensor of ``dtype`` as its ``parts``, each a box and what its elements are read of; all
    others are 0."""

    dtype: DType
    parts: Sequence[tuple[SliceSpec, Callable[[int, int], UIntArray]]]

    def read(self, start: int, stop: int) -> UIntArray:
        found = np.zeros(stop - start, self.dtype.uint)
        for box, read in self.parts:
            low, high = box.below(start), box.below(stop)
            if low < high:
                box.put(read(low, high), low, found, start)
        return found


class RankTensor(NamedTuple):
    """What a rank has of the tensor ``spec``. Names with one ``storage`` are tied on this rank;
    None tells nothing, because the rank has no element of it."""

    spec: TensorSpec
    box: SliceSpec
    storage: int | None


class SharedLeaf(NamedTuple):
    """Elements of the leaf with number ``leaf`` of its tensor that ``rank`` publishes."""

    rank: int
    leaf: int
    segment: Segment


@dataclass(frozen=True)
class ShardedLayout(PublishLayout):
    """Who of several ranks publishes what.

    ``published`` has the segment of each tensor that a rank publishes, by the tensor's name and the
    rank, in the order of their places. ``moved`` are the tensors whose boxes are no such segments,
    with the boxes of the ranks from which their elements come. ``shared`` are the leaves of which
    several ranks publish a piece, by their numbers of ``shares`` in all.
    """

    published: dict[str, dict[int, Segment]] = field(default_factory=dict)
    moved: dict[str, dict[int, SliceSpec]] = field(default_factory=dict)
    shared: dict[int, tuple[SharedLeaf, ...]] = field(default_factory=dict)
    shares: int = 0

    def segments(self, rank: int) -> tuple[Segment, ...]:
        return tuple(of[rank] for of in self.published.values() if rank in of)

    def has_file(self, rank: int) -> bool:
        return any(rank in of for of in self.published.values()) or (rank == 0 and not self.specs)

    def of_rank(self, rank: int) -> ShardedLayout:
        """What ``rank`` needs of it: its own segments, and all of what it moves and shares with
        others."""
        moved = {name: boxes for name, boxes in self.moved.items() if rank in boxes}
        published = {
            name: of if name in moved else {rank: of[rank]}
            for name, of in self.published.items()
            if rank in of or name in moved
        }
        shared = {
            k: of for k, of in self.shared.items() if any(fragment.rank == rank for fragment in of)
        }
        return replace(self, published=published, moved=moved, shared=shared)


class SlicedState(State):
    """One segment of each of some tensors. ``specs`` are those of the whole tensors; `read` takes
    places in these, and raises IndexError outside of the segment.

    ``source`` holds the segments' elements under the tensors' names; where it lacks one, nothing of
    it can be read.
    """

    def __init__(self, segments: Sequence[Segment], source: State) -> None:
        super().__init__(tuple(segment.spec for segment in segments), {})
        self.segments = tuple(sorted(segments, key=lambda s: s.spec.name.encode()))
        self._at = {segment.spec.name: segment for segment in segments}
        self._source = source

    @classmethod
    def allocate(cls, segments: Sequence[Segment]) -> SlicedState:
        """Segments in new host memory, with uninitialized values."""
        flat = tuple(TensorSpec(s.spec.name, s.spec.dtype, (s.elements,)) for s in segments)
        return cls(segments, State.empty(flat, None))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> UIntArray:
        """Elements [``start``, ``stop``) of the whole tensor, as `State.read`."""
        segment = self._at[name]
        stop = segment.spec.elements if stop is None else stop
        if not segment.start <= start <= stop <= segment.stop:
            raise IndexError(f"elements {start} to {stop} of tensor {name!r} are not held")
        return self._source.read(name, start - segment.start, stop - segment.start)

    def _is_view(self, name: str) -> bool:
        return self._source._is_view(name)


def make_layout(
    ranks: Sequence[Sequence[RankTensor]], known: Collection[str] = ()
) -> ShardedLayout:
    """The layout of the state of which ``ranks`` have what they say, in the order of their names.

    Of several ranks with the same slice the lowest publishes it. ``known``: the names under which
    the version before stores its tensors; a tied tensor keeps its name. Raises StateMismatch where
    the ranks disagree, or do not have each element once.
    """
    holders: dict[str, dict[int, RankTensor]] = {}
    for rank, tensors in enumerate(ranks):
        for held in tensors:
            holders.setdefault(held.spec.name, {})[rank] = held
    stored: dict[object, list[str]] = {}
    for name, of in holders.items():
        one = next(iter(of.values()))
        for rank, held in of.items():
            if held.spec != one.spec:
                raise StateMismatch(
                    f"tensor {name!r} is {held.spec.dtype.name} {list(held.spec.shape)} on rank "
                    f"{rank}, but "
                    f"{one.spec.dtype.name} {list(one.spec.shape)} on rank {next(iter(of))}"
                )
        # Tied are names that share their memory on every rank that has them, with the same dtype,
        # shape and place.
        storages = tuple(
            (rank, held.storage) for rank, held in of.items() if held.storage is not None
        )
        places = tuple((rank, held.box) for rank, held in of.items())
        key = (one.spec.dtype, one.spec.shape, places, storages) if storages else name
        stored.setdefault(key, []).append(name)
    aliases: dict[str, str] = {}
    names = []
    for group in stored.values():
        old = [name for name in group if name in known]
        # The name of the version before, unless two of its tensors were tied since.
        chosen = old[0] if len(old) == 1 else group[0]
        names.append(chosen)
        aliases |= {name: chosen for name in group if name != chosen}
    specs = sorted(
        (next(iter(holders[name].values())).spec for name in names), key=lambda s: s.name.encode()
    )
    published: dict[str, dict[int, Segment]] = {}
    moved: dict[str, dict[int, SliceSpec]] = {}
    for spec in specs:
        # Each box once, at the lowest rank that has it; empty ones are left out, but for one of an
        # empty tensor.
        first: dict[SliceSpec, int] = {}
        for rank, held in holders[spec.name].items():
            if held.box.elements or (not math.prod(held.box.shape) and not first):
                first.setdefault(held.box, rank)
        boxes = {rank: box for box, rank in first.items()}
        published[spec.name] = _as_they_are(spec, boxes) or _in_rows(spec, boxes)
        if any(box.flat() is None for box in boxes.values()):
            moved[spec.name] = boxes
    # The leaves of which several ranks publish a piece, as their fragments in order.
    shared: list[tuple[SharedLeaf, ...]] = []
    for spec in specs:
        if len(published[spec.name]) < 2:
            continue
        width, leaves = spec.dtype.width, dict[int, list[SharedLeaf]]()
        for rank, segment in published[spec.name].items():
            # Only the first and the last leaf of a segment can reach into another one.
            ends = {segment.start * width // LEAF_BYTES, (segment.stop * width - 1) // LEAF_BYTES}
            for leaf in sorted(ends):
                start = max(segment.start, leaf * LEAF_BYTES // width)
                stop = min(segment.stop, (leaf + 1) * LEAF_BYTES // width)
                fragment = SharedLeaf(rank, leaf, Segment(spec, start, stop))
                leaves.setdefault(leaf, []).append(fragment)
        shared += [tuple(fragments) for fragments in leaves.values() if len(fragments) > 1]
    said = _to_message([_of_segments(of.items()) for of in published.values()])
    digest = sha256(said).hexdigest()
    of_shared = dict(enumerate(shared))
    return ShardedLayout(tuple(specs), aliases, digest, published, moved, of_shared, len(shared))


def _as_they_are(spec: TensorSpec, boxes: dict[int, SliceSpec]) -> dict[int, Segment]:
    """The boxes as segments in the order of their places; {} if one is no segment. Raises
    StateMismatch."""
    ranges = [(rank, box.flat()) for rank, box in boxes.items()]
    segments = {rank: Segment(spec, *place) for rank, place in ranges if place is not None}
    if len(segments) < len(ranges):
        return {}
    ordered = dict(sorted(segments.items(), key=lambda item: item[1].start))
    at = 0
    for rank, segment in ordered.items():
        if segment.start != at:
            what = "is on no rank" if segment.start > at else f"is not on rank {rank} alone"
            raise StateMismatch(
                f"element {min(at, segment.start)} of tensor {spec.name!r} {what}", hint=_HINT
            )
        at = segment.stop
    if at != spec.elements:
        raise StateMismatch(f"element {at} of tensor {spec.name!r} is on no rank", hint=_HINT)
    return ordered


def _in_rows(spec: TensorSpec, boxes: dict[int, SliceSpec]) -> dict[int, Segment]:
    """The same ranks with equal numbers of rows of the last dimension, the rank with the first
    element first. Raises StateMismatch."""
    items = list(boxes.items())
    for k, (rank, box) in enumerate(items):
        if any(len(box.of) != len(other.of) for _, other in items[:k]):
            raise StateMismatch(
                f"tensor {spec.name!r} is flattened on some ranks only, of which {rank} is one "
                "or is not"
            )
        if any(box.meets(other) for _, other in items[:k]):
            raise StateMismatch(
                f"rank {rank} and a lower one have the same elements of {spec.name!r}", hint=_HINT
            )
    if sum(box.elements for box in boxes.values()) != spec.elements:
        raise StateMismatch(f"tensor {spec.name!r} has elements that are on no rank", hint=_HINT)
    ordered = sorted(items, key=lambda item: next(item[1].pieces(0, 1)).place)
    rows = spec.elements // spec.shape[-1]
    ends = [rows * (k + 1) // len(ordered) * spec.shape[-1] for k in range(len(ordered))]
    segments = {
        rank: Segment(spec, start, stop)
        for (rank, _), start, stop in zip(ordered, [0, *ends], ends, strict=False)
    }
    return {rank: segment for rank, segment in segments.items() if segment.elements}


def whole_leaves(layout: ShardedLayout, rank: int) -> Iterable[tuple[str, int]]:
    """The leaves whose last byte ``rank`` publishes, by the tensor's name and the leaf's number, in
    order."""
    for segment in layout.segments(rank):
        width = segment.spec.dtype.width
        # A leaf that another rank continues ends there; a tensor's last leaf may be short.
        ends = segment.stop == segment.spec.elements
        last = (
            -(-segment.stop * width // LEAF_BYTES) if ends else segment.stop * width // LEAF_BYTES
        )
        for leaf in range(segment.start * width // LEAF_BYTES, last):
            yield segment.spec.name, leaf


_HINT = (
    "Each rank passes its own shards as DTensors; plain tensors are whole, on one rank or on "
    "several."
)


def held_to_bytes(held: Sequence[RankTensor]) -> bytes:
    """What a rank has."""
    return _to_message([(*_of_spec(of.spec), of.box.of, of.storage) for of in held])


def held_from_bytes(message: bytes) -> list[RankTensor]:
    """What `held_to_bytes` said."""
    found = []
    for name, dtype, shape, of, storage in json.loads(message):
        spec = _to_spec(name, dtype, shape)
        found.append(RankTensor(spec, _to_box(of, spec), storage))
    return found


def layout_to_bytes(layout: ShardedLayout) -> bytes:
    """A layout, whole or what one rank needs of it."""
    published = {name: _of_segments(of.items()) for name, of in layout.published.items()}
    moved = {
        name: [(rank, box.of) for rank, box in boxes.items()]
        for name, boxes in layout.moved.items()
    }
    shared = [
        (k, of[0].segment.spec.name, of[0].leaf, _of_segments((f.rank, f.segment) for f in of))
        for k, of in layout.shared.items()
    ]
    specs = [_of_spec(spec) for spec in layout.specs]
    return _to_message(
        (specs, layout.aliases, published, moved, shared, layout.shares, layout.digest)
    )


def layout_from_bytes(message: bytes) -> ShardedLayout:
    """What `layout_to_bytes` said."""
    said, aliases, published, moved, shared, shares, digest = json.loads(message)
    specs = {name: _to_spec(name, dtype, shape) for name, dtype, shape in said}
    for name, segments in published.items():
        published[name] = {rank: Segment(specs[name], *place) for rank, *place in segments}
    for name, boxes in moved.items():
        moved[name] = {rank: _to_box(of, specs[name]) for rank, of in boxes}
    leaves = {}
    for k, name, leaf, of in shared:
        places = [(rank, Segment(specs[name], *place)) for rank, *place in of]
        leaves[k] = tuple(SharedLeaf(rank, leaf, segment) for rank, segment in places)
    tensors = tuple(specs.values())
    return ShardedLayout(tensors, aliases, digest, published, moved, leaves, shares)


def _to_message(what: Any) -> bytes:
    return json.dumps(what, separators=(",", ":")).encode()


def _of_spec(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.dtype.name, spec.shape


def _of_segments(segments: Iterable[tuple[int, Segment]]) -> list[tuple[int, int, int]]:
    return [(rank, segment.start, segment.stop) for rank, segment in segments]


def _to_spec(name: str, dtype: str, shape: list[int]) -> TensorSpec:
    return TensorSpec(name, dtype_of(dtype), tuple(shape))


def _to_box(of: list[list[list[int]]], spec: TensorSpec) -> SliceSpec:
    return SliceSpec(tuple(tuple((start, stop) for start, stop in runs) for runs in of), spec.shape)
