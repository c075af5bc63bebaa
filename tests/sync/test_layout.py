"""Who publishes what: boxes of elements, segments, blocks and leaves, against plain arrays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl.errors import StateMismatch
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.header import slices_of
from pulse_rl.sharding.layout import (
    PublishLayout,
    RankTensor,
    SliceSpec,
    held_from_bytes,
    held_to_bytes,
    layout_from_bytes,
    layout_to_bytes,
    make_layout,
    whole_leaves,
)
from pulse_rl.state.digest import LEAF_BYTES
from pulse_rl.state.tensors import DTYPES, TensorSpec


@st.composite
def boxes(draw: st.DrawFn) -> SliceSpec:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    of = []
    for n in shape:
        ends = sorted(draw(st.sets(st.integers(0, n), max_size=4)))
        of.append(tuple(pairwise(ends))[::2])
    return SliceSpec(tuple(of), shape)


def places(box: SliceSpec) -> np.ndarray:
    """The box's elements in the flattened tensor, by numpy."""
    index = np.arange(int(np.prod(box.shape))).reshape(box.shape)
    for axis, runs in enumerate(box.of):
        chosen = [k for start, stop in runs for k in range(start, stop)]
        index = np.take(index, chosen, axis)
    return index.reshape(-1)


@given(box=boxes())
def test_a_box_is_where_its_elements_are(box: SliceSpec) -> None:
    expected = places(box)
    assert box.elements == len(expected)
    if box.elements:
        np.testing.assert_array_equal(box.take(np.arange, 0, box.elements), expected)
    for flat in range(int(np.prod(box.shape)) + 1):
        assert box.below(flat) == np.count_nonzero(expected < flat)
    flat_range = box.flat()
    contiguous = len(expected) == 0 or np.array_equal(
        expected, np.arange(expected[0], expected[0] + len(expected))
    )
    if flat_range is not None:
        assert contiguous
        assert not box.elements or flat_range == (expected[0], expected[-1] + 1)
    elif contiguous:  # two ranges of indices that touch are not seen as one
        assert any(len(runs) > 1 for runs in box.of)


@given(one=boxes(), data=st.data())
def test_boxes_meet_where_they_share_an_element(one: SliceSpec, data: st.DataObject) -> None:
    other = (
        data.draw(boxes().filter(lambda box: box.shape == one.shape)) if len(one.shape) < 2 else one
    )
    assert one.meets(other) == bool(set(places(one)) & set(places(other)))


@given(box=boxes(), data=st.data())
def test_what_arrives_is_put_in_its_place(box: SliceSpec, data: st.DataObject) -> None:
    size = int(np.prod(box.shape))
    if not box.elements or not box.shape:
        return
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    low, high = box.below(start), box.below(stop)
    if low == high:
        return
    values = np.arange(size, dtype=np.uint16) + 1
    whole = np.zeros(stop - start, np.uint16)
    box.put(values[places(box)][low:high], low, whole, start)
    inside = np.zeros(size, np.uint16)
    inside[places(box)] = values[places(box)]
    np.testing.assert_array_equal(whole, inside[start:stop])
    np.testing.assert_array_equal(
        box.take(lambda a, b: values[a:b], low, high), values[places(box)][low:high]
    )


def rows(spec: TensorSpec, *ends: int) -> list[SliceSpec]:
    tail = tuple(((0, n),) for n in spec.shape[1:])
    return [
        SliceSpec((((start, stop),) if start < stop else (), *tail), spec.shape)
        for start, stop in pairwise((0, *ends))
    ]


def layout_of(*tensors: list[tuple[TensorSpec, SliceSpec]]) -> PublishLayout:
    return make_layout([[RankTensor(spec, box, None) for spec, box in mine] for mine in tensors])


BF16 = DTYPES["BF16"]
SMALL = [TensorSpec(f"small.{k}", BF16, (600, 1000)) for k in range(9)]
LARGE = TensorSpec("large", DTYPES["F32"], (5000, 1001))


def four_ranks() -> PublishLayout:
    """Small tensors and a large one, cut unevenly; one rank has no row of it."""
    of = [rows(spec, 100 + 10 * k, 300, 310, 600) for k, spec in enumerate(SMALL)]
    large = rows(LARGE, 1234, 1234, 4000, 5000)
    return layout_of(
        *(
            [*((s, box[rank]) for s, box in zip(SMALL, of, strict=True)), (LARGE, large[rank])]
            for rank in range(4)
        )
    )


def test_blocks_tile_and_join_what_is_joined_in_the_whole_state() -> None:
    layout = four_ranks()
    parts = [cut(layout.specs, layout.segments(rank)) for rank in range(4)]
    slices = sorted(
        one for rank in range(4) for one in slices_of(layout.specs, layout.segments(rank))
    )
    assert [0, *(stop for _, stop in slices)] == [*(start for start, _ in slices), layout.elements]
    whole = [{s.spec.name for s in block.segments} for block in cut(layout.specs)]
    for blocks in parts:
        for block in blocks:
            assert any({s.spec.name for s in block.segments} <= names for names in whole)
    assert max(len(block.segments) for block in parts[0]) > 1


def test_each_leaf_ends_on_one_rank_and_shared_ones_are_whole() -> None:
    layout = four_ranks()
    ended = [leaf for rank in range(4) for leaf in whole_leaves(layout, rank)]
    every = [(spec.name, k) for spec in layout.specs for k in range(-(-spec.nbytes // LEAF_BYTES))]
    assert sorted(ended) == sorted(every)
    shared = list(layout.shared.values())
    assert len(shared) == layout.shares > 0
    for fragments in shared:
        assert len(fragments) > 1
        assert all(a.segment.stop == b.segment.start for a, b in pairwise(fragments))
        last = fragments[-1]
        width, nbytes = last.segment.spec.dtype.width, last.segment.spec.nbytes
        assert fragments[0].segment.start * width == last.leaf * LEAF_BYTES
        assert last.segment.stop * width == min((last.leaf + 1) * LEAF_BYTES, nbytes)
        assert (last.segment.spec.name, last.leaf) in list(whole_leaves(layout, last.rank))


def test_a_rank_is_told_what_it_needs() -> None:
    """Its segments, the leaves that it shares, all of a tensor that it moves; nothing of what other
    ranks have."""
    matrix = TensorSpec("matrix", BF16, (90, 40))
    columns = [
        SliceSpec((((0, 90),), ((start, stop),)), matrix.shape)
        for start, stop in ((0, 30), (30, 40))
    ]
    layout = layout_of(
        [(SMALL[0], rows(SMALL[0], 300, 600)[0]), (matrix, columns[0])],
        [(SMALL[0], rows(SMALL[0], 300, 600)[1]), (matrix, columns[1])],
        [(LARGE, SliceSpec.whole(LARGE.shape))],
    )
    for rank in range(3):
        told = layout_from_bytes(layout_to_bytes(layout.of_rank(rank)))
        assert told == layout.of_rank(rank)
        assert told.segments(rank) == layout.segments(rank)
        assert told.specs == layout.specs
        assert told.shares == layout.shares
        assert told.digest == layout.digest
        assert set(told.moved) == ({"matrix"} if rank < 2 else set())
        assert told.published.get("matrix") == (layout.published["matrix"] if rank < 2 else None)
        assert set(told.published) == ({"small.0", "matrix"} if rank < 2 else {"large"})
        mine = {k: of for k, of in layout.shared.items() if any(f.rank == rank for f in of)}
        assert told.shared == mine
    held = [
        RankTensor(matrix, columns[0], 3),
        RankTensor(LARGE, SliceSpec.whole(LARGE.shape), None),
    ]
    assert held_from_bytes(held_to_bytes(held)) == held


@pytest.mark.slow
def test_what_a_rank_is_told_does_not_grow_with_the_ranks() -> None:
    def told(ranks: int) -> tuple[int, int]:
        specs = [TensorSpec(f"layers.{k}.weight", BF16, (64 << 10, 1024)) for k in range(40)]
        ends = [(64 << 10) * (rank + 1) // ranks for rank in range(ranks)]
        boxes = rows(specs[0], *ends)
        layout = layout_of(*([(spec, boxes[rank]) for spec in specs] for rank in range(ranks)))
        return len(layout_to_bytes(layout.of_rank(1))), len(layout_to_bytes(layout))

    few, many = told(4), told(256)
    assert many[0] < 2 * few[0]  # with leaves that it shares with the next one
    assert many[1] > 20 * many[0]


@pytest.mark.parametrize(
    ("ends", "words"),
    [((2000, 4000), "is on no rank"), ((2000, 5000, 5000), None), ((5000, 5000), None)],
)
def test_each_element_is_on_a_rank(ends: tuple[int, ...], words: str | None) -> None:
    ranks = [[(LARGE, box)] for box in rows(LARGE, *ends)]
    if words is None:
        layout_of(*ranks)
        return
    with pytest.raises(StateMismatch, match=words):
        layout_of(*ranks)


def test_elements_on_two_ranks_are_refused_unless_the_slices_are_equal() -> None:
    first, second = rows(LARGE, 3000, 5000)
    overlapping = SliceSpec((((2000, 5000),), ((0, 1001),)), LARGE.shape)
    with pytest.raises(StateMismatch, match="alone"):
        layout_of([(LARGE, first)], [(LARGE, overlapping)])
    left = SliceSpec((((0, 5000),), ((0, 600),)), LARGE.shape)
    with pytest.raises(StateMismatch, match="same elements"):
        layout_of([(LARGE, left)], [(LARGE, first)])
    with pytest.raises(StateMismatch, match="on no rank"):
        layout_of(
            [(LARGE, left)], [(LARGE, SliceSpec((((0, 5000),), ((601, 1001),)), LARGE.shape))]
        )
    replicas = layout_of([(LARGE, first)], [(LARGE, first)], [(LARGE, second)], [(LARGE, second)])
    assert list(replicas.published["large"]) == [0, 2]
