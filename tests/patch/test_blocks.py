"""The cut of a state into blocks: every element once, in order, leaves never torn."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import State
from pulse_rl.patch.blocks import BLOCK_ELEMENTS, Block, cut
from pulse_rl.patch.header import Base, Room, all_of, slices_of
from pulse_rl.state.cast import CastState
from pulse_rl.state.digest import LEAF_BYTES
from pulse_rl.state.memory import pageable
from pulse_rl.state.slices import Segment
from pulse_rl.state.tensors import DTYPES, TensorSpec

UNIT = 1 << 20

sizes = st.one_of(st.integers(0, 50), st.integers(UNIT - 2, UNIT + 2), st.integers(1, 6 * UNIT))
tensor_sets = st.lists(st.tuples(st.sampled_from(["U8", "BF16", "F32", "F64"]), sizes), max_size=12)


def specs_of(tensors: list[tuple[str, int]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"w{k:02}", DTYPES[dtype], (size,)) for k, (dtype, size) in enumerate(tensors))


@given(tensor_sets, st.sampled_from([UNIT, 2 * UNIT, 4 * UNIT]))
def test_blocks_tile_the_state(tensors: list[tuple[str, int]], block_elements: int) -> None:
    specs = specs_of(tensors)
    blocks = cut(specs, most=block_elements)
    at = {spec.name: 0 for spec in specs}
    order = []
    for block in blocks:
        assert 0 < block.elements <= block_elements
        assert block.nbytes == block.elements * block.dtype.width
        for segment in block.segments:
            assert segment.spec.dtype == block.dtype
            assert segment.start == at[segment.spec.name] < segment.stop
            assert segment.start * block.dtype.width % LEAF_BYTES == 0
            at[segment.spec.name] = segment.stop
            order.append(segment.spec.name)
        if len(block.segments) > 1:
            assert all((s.start, s.stop) == (0, s.spec.elements) for s in block.segments)
    assert at == {spec.name: spec.elements for spec in specs}
    assert order == sorted(order)


@given(st.integers(UNIT + 1, 20 * UNIT))
def test_a_large_tensor_is_cut_into_the_fewest_runs(elements: int) -> None:
    blocks = cut(specs_of([("BF16", elements)]), most=UNIT)
    assert len(blocks) == -(-elements // UNIT)


def test_the_number_of_blocks_is_never_below_what_a_header_is_held_to() -> None:
    for elements in (UNIT - 1, UNIT, UNIT + 1, 5 * UNIT, 5 * UNIT + 1):
        assert len(cut(specs_of([("F64", elements)]), most=UNIT)) >= elements // UNIT


def test_small_neighbours_of_one_dtype_share_a_block() -> None:
    blocks = cut(specs_of([("BF16", 5), ("BF16", 0), ("BF16", 7), ("F32", 3), ("BF16", 2), ("BF16", UNIT)]), most=UNIT)
    assert [[s.spec.name for s in b.segments] for b in blocks] == [["w00", "w02"], ["w03"], ["w04"], ["w05"]]
    assert str(blocks[0]) == "w00 … w02"
    assert str(blocks[1]) == "w03[0:3]"


def test_the_cut_is_pinned() -> None:
    """Both sides compute it: a changed cut makes every stored patch unreadable."""
    tensors = [("BF16", 3 * UNIT + 7), ("BF16", 10), ("F64", 2 * UNIT), ("U8", 2 * UNIT + 1)]
    found = [[(s.spec.name, s.start, s.stop) for s in b.segments] for b in cut(specs_of(tensors), most=UNIT)]
    assert found == [
        [("w00", 0, 1048576)],
        [("w00", 1048576, 2097152)],
        [("w00", 2097152, 3145728)],
        [("w00", 3145728, 3145735)],
        [("w01", 0, 10)],
        [("w02", 0, 1048576)],
        [("w02", 1048576, 2097152)],
        [("w03", 0, 1048576)],
        [("w03", 1048576, 2097152)],
        [("w03", 2097152, 2097153)],
    ]
    assert [b.segments[0].stop for b in cut(specs_of([("F32", 5 * UNIT)]))] == [2621440, 5242880]


def test_a_block_reads_its_segments_one_after_another() -> None:
    state = State.of({"a": np.arange(3, dtype=np.int16), "b": np.arange(3, 7, dtype=np.int16)})
    (block,) = cut(state.specs)
    assert block.read(state).tolist() == list(range(7))
    alone = Block(block.dtype, (block.segments[1]._replace(start=1, stop=3),))
    assert alone.read(state).tolist() == [4, 5]
    assert np.shares_memory(alone.read(state), state.read("b"))


def test_a_state_in_one_piece_is_read_without_a_copy() -> None:
    specs = tuple(TensorSpec(f"w{k}", DTYPES["BF16"], (32 * (k + 1),)) for k in range(4))
    state = State.empty(specs)
    for spec in specs:
        state.read(spec.name)[:] = np.arange(spec.elements, dtype=np.uint16)
    (block,) = cut(specs)
    whole = block.read(state)
    np.testing.assert_array_equal(whole, np.concatenate([state.read(s.name) for s in specs]))
    assert not whole.flags.owndata
    whole[40] = 7
    assert state.read("w1")[8] == 7
    frozen = block.read(state.readonly())
    assert not frozen.flags.writeable
    assert np.shares_memory(frozen, whole)


def test_what_lies_apart_is_copied() -> None:
    gap = State.empty(tuple(TensorSpec(f"w{k}", DTYPES["BF16"], (5,)) for k in range(3)))  # lines of 64 bytes between
    other = State.of({f"w{k}": np.zeros(32, np.uint16) for k in range(3)})
    for state in (gap, other):
        (block,) = cut(state.specs)
        read = block.read(state)
        assert block.read_into(state, pageable)[1]
        assert not any(np.shares_memory(read, state.read(name)) for name in state)


def test_what_a_state_casts_is_a_copy() -> None:
    state = CastState(State.of({"w": np.zeros(5, np.float32)}), DTYPES["BF16"])
    (block,) = cut(state.specs)
    assert block.read_into(state, pageable)[1]
    assert not block.read_into(state.copy(), pageable)[1]


@given(tensor_sets, st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_the_blocks_of_parts_tile_the_state_and_stay_within_its_groups(
    tensors: list[tuple[str, int]], places: list[float]
) -> None:
    """However the state is cut into ranges. Whoever has the tensors of a whole block can decode its parts."""
    specs = specs_of(tensors)
    total = sum(spec.elements for spec in specs)
    ends = sorted({int(place * total) for place in places} | {0, total})
    state, found = Base(specs), list[tuple[str, int, int]]()
    groups = [{s.spec.name for s in block.segments} for block in cut(specs)]
    for start, stop in pairwise(ends):
        blocks = state.cut([(start, stop)], Room())
        held = [segment for block in blocks for segment in block.segments]
        assert slices_of(specs, held) == ((start, stop),)
        found += [segment.place for segment in held]
        for block in blocks:
            assert 0 < block.elements <= BLOCK_ELEMENTS
            assert {s.spec.dtype for s in block.segments} == {block.dtype}
            assert any({s.spec.name for s in block.segments} <= group for group in groups)
    assert sorted(found) == found
    assert sum(stop - start for _, start, stop in found) == total


def test_slices_are_whole_tensors_where_they_can_be() -> None:
    specs = specs_of([("BF16", 5), ("BF16", 0), ("F32", 7)])
    assert all_of(specs) == ((0, 12),) == slices_of(specs, [Segment(spec, 0, spec.elements) for spec in specs])
    assert slices_of(specs, [Segment(specs[0], 1, 2), Segment(specs[2], 0, 3)]) == ((1, 2), (5, 8))
    assert all_of(specs[1:2]) == ()
