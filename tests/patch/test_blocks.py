"""The cut of a state into blocks: every element once, in order, leaves never torn; and patches in
parts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import Bits, State
from pulse_rl.errors import CorruptPatch, DigestMismatch, PulseError, WrongBase
from pulse_rl.ops.diff import build_patch
from pulse_rl.patch import BLOCK_ELEMENTS, apply_patch, parse_patch
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.header import (
    MAX_SLICES,
    Base,
    BlockEntry,
    PatchHeader,
    Room,
    all_of,
    closed_header,
    open_header,
    parse_header,
    slices_of,
)
from pulse_rl.state.bits import pageable
from pulse_rl.state.digest import LEAF_BYTES, StateDigest, state_digest
from pulse_rl.state.tensors import DTYPES, Segment, TensorSpec
from tests.support.parts import part
from tests.support.parts import slices_of as cut_among
from tests.support.states import Rng, all_dtypes, bits, mutated, weights

UNIT = 1 << 20
sizes = st.one_of(st.integers(0, 50), st.integers(UNIT - 2, UNIT + 2), st.integers(1, 6 * UNIT))
tensor_sets = st.lists(st.tuples(st.sampled_from(["U8", "BF16", "F32", "F64"]), sizes), max_size=12)


def specs_of(tensors: list[tuple[str, int]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"w{k:02}", DTYPES[dtype], (size,)) for k, (dtype, size) in enumerate(tensors)
    )


@given(tensor_sets, st.sampled_from([UNIT, 2 * UNIT, 4 * UNIT]))
def test_blocks_tile_the_state(tensors: list[tuple[str, int]], block_elements: int) -> None:
    specs = specs_of(tensors)
    blocks = cut(specs, most=block_elements)
    at = {spec.name: 0 for spec in specs}
    order: dict[str, list[str]] = {}
    for block in blocks:
        assert 0 < block.elements <= block_elements
        assert block.nbytes == block.elements * block.dtype.width
        for segment in block.segments:
            assert segment.spec.dtype == block.dtype
            assert segment.start == at[segment.spec.name] < segment.stop
            assert segment.start * block.dtype.width % LEAF_BYTES == 0
            at[segment.spec.name] = segment.stop
            order.setdefault(block.dtype.name, []).append(segment.spec.name)
        if len(block.segments) > 1:
            assert all((s.start, s.stop) == (0, s.spec.elements) for s in block.segments)
    assert at == {spec.name: spec.elements for spec in specs}
    assert all(names == sorted(names) for names in order.values())


@given(st.integers(UNIT + 1, 20 * UNIT))
def test_a_large_tensor_is_cut_into_the_fewest_runs(elements: int) -> None:
    blocks = cut(specs_of([("BF16", elements)]), most=UNIT)
    assert len(blocks) == -(-elements // UNIT)


def test_small_tensors_of_one_dtype_share_a_block() -> None:
    """So that the scales of a quantized checkpoint, one behind each weight, are one block and not
    thousands."""
    tensors = [
        ("BF16", 5),
        ("BF16", 0),
        ("BF16", 7),
        ("F32", 3),
        ("BF16", 2),
        ("F32", 1),
        ("BF16", UNIT),
    ]
    blocks = cut(specs_of(tensors), most=UNIT)
    assert [[s.spec.name for s in b.segments] for b in blocks] == [
        ["w00", "w02", "w04"],
        ["w03", "w05"],
        ["w06"],
    ]
    assert str(blocks[0]) == "w00 … w04"
    assert str(blocks[2]) == "w06[0:1048576]"


def test_the_cut_is_pinned() -> None:
    """Both sides compute it: a changed cut makes every stored patch unreadable."""
    tensors = [("BF16", 3 * UNIT + 7), ("BF16", 10), ("F64", 2 * UNIT), ("U8", 2 * UNIT + 1)]
    found = [
        [(s.spec.name, s.start, s.stop) for s in b.segments]
        for b in cut(specs_of(tensors), most=UNIT)
    ]
    assert found == [
        [("w00", 0, 1048576)],
        [("w00", 1048576, 2097152)],
        [("w00", 2097152, 3145728)],
        [("w00", 3145728, 3145735)],
        [("w02", 0, 1048576)],
        [("w02", 1048576, 2097152)],
        [("w03", 0, 1048576)],
        [("w03", 1048576, 2097152)],
        [("w03", 2097152, 2097153)],
        [("w01", 0, 10)],
    ]
    assert [b.segments[0].stop for b in cut(specs_of([("F32", 5 * UNIT)]))] == [2621440, 5242880]


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
    gap = State.empty(
        tuple(TensorSpec(f"w{k}", DTYPES["BF16"], (5,)) for k in range(3))
    )  # lines of 64 bytes between
    other = State.of({f"w{k}": np.zeros(32, np.uint16) for k in range(3)})
    for state in (gap, other):
        (block,) = cut(state.specs)
        read = block.read(state)
        assert block.read_into(state, pageable)[1]
        assert not any(np.shares_memory(read, state.read(name)) for name in state)


@given(tensor_sets, st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_the_blocks_of_parts_tile_the_state_and_stay_within_its_groups(
    tensors: list[tuple[str, int]], places: list[float]
) -> None:
    """However the state is cut into ranges. Whoever has the tensors of a whole block can decode its
    parts."""
    specs = specs_of(tensors)
    total = sum(spec.elements for spec in specs)
    ends = sorted({int(place * total) for place in places} | {0, total})
    state, found = Base(specs), list[tuple[str, int, int]]()
    groups = [{s.spec.name for s in block.segments} for block in cut(specs)]
    for start, stop in pairwise(ends):
        blocks = state.cut([(start, stop)], Room())
        held = sorted(
            (s for block in blocks for s in block.segments), key=lambda s: (s.spec.name, s.start)
        )
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
    assert all_of(specs) == ((0, 12),)
    assert slices_of(specs, [Segment(spec, 0, spec.elements) for spec in specs]) == ((0, 12),)
    assert slices_of(specs, [Segment(specs[0], 1, 2), Segment(specs[2], 0, 3)]) == ((1, 2), (5, 8))
    assert all_of(specs[1:2]) == ()


# -- parts


def pair(rng: Rng) -> tuple[State, State]:
    """Small tensors of all dtypes, and some that span leaves and blocks."""
    tensors = all_dtypes(rng) | {
        "large": weights(rng, 5000, 1000),
        "long": bits(rng, "F32", 700_001),
    }
    return State.of(tensors).copy(), State.of(mutated(rng, tensors, 0.01)).copy()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_parts_lead_to_what_a_whole_patch_leads_to(ranks: int, rng: Rng) -> None:
    old, new = pair(rng)
    base = state_digest(old)
    patch = parse_patch([part(old, new, segments) for segments in cut_among(old, rng, ranks)], base)
    whole = build_patch(old, new, base)
    assert patch.header.is_whole == (ranks == 1)
    assert sum(entry.changed for entry in patch.header.blocks) == whole.header.changed
    state, other = old.copy(), old.copy()
    applied = apply_patch(patch, state, base, threads=2)
    expected = apply_patch(parse_patch([whole.to_bytes()], base), other, base)
    assert applied.digest.leaves == expected.digest.leaves
    assert applied.digest.root == state_digest(new).root == state_digest(state).root
    assert applied.changes.keys() == expected.changes.keys()
    for name, found in applied.changes.items():
        np.testing.assert_array_equal(found.indices, expected.changes[name].indices)
        np.testing.assert_array_equal(found.values, expected.changes[name].values)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_changes_nothing(rng: Rng) -> None:
    old, new = pair(rng)
    slices, base = cut_among(old, rng, 3), state_digest(old)
    parts = [part(old, new, segments) for segments in slices]
    for wrong, words in (
        (parts[:2], "in no file|not in one file"),
        ([*parts, parts[1]], "not in one file"),
        (
            [parts[0], parts[1], part(old, new, slices[2], target_root="0" * 64)],
            "same base and target",
        ),
        ([parts[0], build_patch(old, new, base).to_bytes()], "not in one file"),
        ([parts[0][:-1], *parts[1:]], "its header implies"),
    ):
        with pytest.raises(CorruptPatch, match=words):
            parse_patch(wrong, base)
    for state, files in (
        (new, parts),
        (old, [parts[0], parts[1], part(old, new, slices[2], base_root="0" * 64)]),
        (State.of({"other": weights(rng, 3)}), parts),
    ):
        with pytest.raises((WrongBase, CorruptPatch)):
            parse_patch(files, state_digest(state))
    state = old.copy()
    flipped = bytearray(parts[1])
    flipped[-1] ^= 1
    with pytest.raises(CorruptPatch, match="checksum"):
        apply_patch(parse_patch([parts[0], bytes(flipped), parts[2]], base), state, base)
    false = [part(old, new, segments, target_root="0" * 64) for segments in slices]
    with pytest.raises(DigestMismatch):
        apply_patch(parse_patch(false, base), state, base)
    assert state_digest(state).leaves == base.leaves


@pytest.mark.slow
def test_a_damaged_header_is_refused_or_another_one(rng: Rng) -> None:
    """Whatever its bytes: an error of the library, in bounded time and memory, or a header that is
    consistent."""
    old = State.of(
        {"a": weights(rng, 40, 50), "b": weights(rng, 7), "c": bits(rng, "F32", 30)}
    ).copy()
    new = State.of(
        {spec.name: bits(rng, spec.dtype.name, *spec.shape) for spec in old.specs}
    ).copy()
    data = part(old, new, cut_among(old, rng, 2)[0])
    plain, end = open_header(memoryview(data))
    parsed, base = 0, Base(old.specs)
    for _ in range(3000):
        damaged = bytearray(plain)
        for place in rng.integers(0, len(plain), rng.integers(1, 4)):
            damaged[place] = rng.integers(0, 256)
        if rng.random() < 0.2:
            del damaged[int(rng.integers(0, len(damaged))) :]
        try:
            found = parse_header(memoryview(closed_header(bytes(damaged)) + data[end:]), base)
        except PulseError:
            continue
        parsed += 1
        assert found.cuts is not None
        assert len(found.cuts) == len(found.header.blocks)
        for block in found.cuts:
            assert 0 < block.elements <= BLOCK_ELEMENTS
            assert all(0 <= s.start < s.stop <= s.spec.elements for s in block.segments)
    assert 0 < parsed < 3000


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((1, 0, 0), "empty"),
        ((2, 0, 5, 0, 3), "touches"),
        ((2, 0, 5, 3, 3), "more than"),
        ((1, 0, 11), "more than"),
        ((1, 0, 10, 0), "lists 0 blocks"),
        ((1, 0, 10, 2, 0, 0), "lists 2 blocks"),
        ((0, 1, 0), "lists 1 blocks"),
        ((1, 0, 10, 1, 0, 0), "follow the header"),
        ((1, 0, 10, 1), "too early|more than"),
    ],
)
def test_counts_that_cannot_be(numbers: tuple[int, ...], words: str) -> None:
    """A tensor of ten bytes, no history, then the slices and the blocks."""
    base = Base(State.of({"a": Bits(np.zeros(10, np.uint8), "U8")}).specs)
    good = parse_header(memoryview(closed_header(bytes(65) + bytes([1, 0, 10, 1, 0]))), base)
    assert good.header.slices == ((0, 10),)
    with pytest.raises(CorruptPatch, match=words):
        parse_header(memoryview(closed_header(bytes(65) + bytes(numbers))), base)


def test_parts_share_one_budget() -> None:
    """What is small as a file may list as much as a patch is allowed to; several such files
    together may not."""
    specs = State.of({f"w{k:03}": Bits(np.zeros(1, np.uint8), "U8") for k in range(300)}).specs
    small = memoryview(
        PatchHeader("0" * 64, "1" * 64, all_of(specs), (BlockEntry(0, 0, 0),)).to_bytes()
    )
    assert Room().left == MAX_SLICES
    room = Room(1000)
    for _ in range(3):
        assert parse_header(small, Base(specs), room=room).header.elements == 300
    with pytest.raises(CorruptPatch, match="more than 1048576 slices"):
        parse_header(small, Base(specs), room=room)


def test_many_files_that_claim_the_whole_state_cost_one_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is some bytes, and would unfold to all tensors."""
    monkeypatch.setattr(Room.__init__, "__defaults__", (1 << 15,))
    specs = tuple(TensorSpec(f"w{k:05}", DTYPES["U8"], (3,)) for k in range(1 << 10))
    file = PatchHeader("0" * 64, "1" * 64, all_of(specs), (BlockEntry(0, 0, 0),)).to_bytes()
    with pytest.raises(CorruptPatch, match="more than"):
        parse_patch([file] * 1000, _Claimed(specs, {}))


class _Claimed(StateDigest):
    @property
    def root(self) -> str:  # type: ignore[override]
        return "0" * 64
