"""Patches in parts: applied as one, undone as one, and refused where they do not fit together."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl import State, codec
from pulse_rl.errors import CorruptPatch, DigestMismatch, PulseError, StateMismatch, WrongBase
from pulse_rl.patch import Patch, apply_patch, build_patch, parse_patch
from pulse_rl.patch.header import closed_header, open_header, put_number
from pulse_rl.patch.parts import MAX_SEGMENTS, PartsPatch, Room, parse_part_header
from pulse_rl.patch.undo import by_whole_blocks
from pulse_rl.state.digest import state_digest
from tests.support.parts import part, slices_of
from tests.support.states import Rng, all_dtypes, bits, mutated, weights


def pair(rng: Rng) -> tuple[State, State]:
    """Small tensors of all dtypes, and some that span leaves and blocks."""
    tensors = all_dtypes(rng) | {"large": weights(rng, 5000, 1000), "long": bits(rng, "F32", 700_001)}
    return State.of(tensors).copy(), State.of(mutated(rng, tensors, 0.01)).copy()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_parts_lead_to_what_a_whole_patch_leads_to(ranks: int, rng: Rng) -> None:
    old, new = pair(rng)
    slices = slices_of(old, rng, ranks)
    patch = parse_patch([part(old, new, segments) for segments in slices], old.specs)
    whole = build_patch(old, new, state_digest(old))
    assert isinstance(patch, PartsPatch)
    assert patch.header.specs == old.specs
    assert sum(entry.changed for entry in patch.header.blocks) == whole.header.changed
    state, other = old.copy(), old.copy()
    applied = apply_patch(patch, state, state_digest(state), threads=2)
    expected = apply_patch(parse_patch([whole.to_bytes()]), other, state_digest(other))
    assert applied.digest.leaves == expected.digest.leaves
    assert applied.digest.root == state_digest(new).root == state_digest(state).root
    assert applied.changes.keys() == expected.changes.keys()
    for name, found in applied.changes.items():
        np.testing.assert_array_equal(found.indices, expected.changes[name].indices)
        np.testing.assert_array_equal(found.values, expected.changes[name].values)
    undo = by_whole_blocks(patch.header, applied.undo)
    assert undo.keys() == expected.undo.keys()
    for index, old_bits in undo.items():
        np.testing.assert_array_equal(old_bits.positions, expected.undo[index].positions)
        np.testing.assert_array_equal(old_bits.values, expected.undo[index].values)


def test_what_does_not_fit_is_refused_and_changes_nothing(rng: Rng) -> None:
    old, new = pair(rng)
    slices = slices_of(old, rng, 3)
    parts = [part(old, new, segments) for segments in slices]
    for wrong, words in (
        (parts[:2], "in no part|not in one part"),
        ([*parts, parts[1]], "not in one part"),
        ([parts[0], parts[1], part(old, new, slices[2], target_root="0" * 64)], "same base and target"),
        ([parts[0], parts[1], part(old, new, slices[2], base_root="0" * 64)], "same base and target"),
        ([parts[0], build_patch(old, new, state_digest(old)).to_bytes()], "format 1, not 2"),
        ([parts[0][:-1], *parts[1:]], "its header implies"),
    ):
        with pytest.raises(CorruptPatch, match=words):
            parse_patch(wrong, old.specs)
    state, digest = old.copy(), state_digest(old)
    with pytest.raises(WrongBase):
        apply_patch(parse_patch(parts), new.copy(), state_digest(new))
    elsewhere = State.of({"other": weights(rng, 3)}).copy()
    lies = [part(old, new, segments, base_root=state_digest(elsewhere).root) for segments in slices]
    with pytest.raises(StateMismatch):
        apply_patch(parse_patch(lies), elsewhere, state_digest(elsewhere))
    flipped = bytearray(parts[1])
    flipped[-1] ^= 1
    with pytest.raises(CorruptPatch, match="SHA-256"):
        apply_patch(parse_patch([parts[0], bytes(flipped), parts[2]]), state, digest)
    false = [part(old, new, segments, target_root="0" * 64) for segments in slices]
    with pytest.raises(DigestMismatch):
        apply_patch(parse_patch(false), state, digest)
    assert state_digest(state).leaves == digest.leaves


def test_a_part_alone_says_what_it_is(rng: Rng) -> None:
    old, new = pair(rng)
    data = part(old, new, slices_of(old, rng, 2)[0])
    with pytest.raises(CorruptPatch, match="part of a patch"):
        Patch.parse(data)


def test_a_damaged_header_is_refused_or_another_one(rng: Rng) -> None:
    """Whatever its bytes: an error of the library, in bounded time and memory, or a header that is consistent."""
    old = State.of({"a": weights(rng, 40, 50), "b": weights(rng, 7), "c": bits(rng, "F32", 30)}).copy()
    new = State.of({spec.name: bits(rng, spec.dtype.name, *spec.shape) for spec in old.specs}).copy()
    data = part(old, new, slices_of(old, rng, 2)[0])
    plain, end = open_header(memoryview(data), 2)
    parsed = 0
    for _ in range(3000):
        damaged = bytearray(plain)
        for place in rng.integers(0, len(plain), rng.integers(1, 4)):
            damaged[place] = rng.integers(0, 256)
        if rng.random() < 0.2:
            del damaged[int(rng.integers(0, len(damaged))) :]
        try:
            header, _ = parse_part_header(memoryview(closed_header(bytes(damaged), 2) + data[end:]))
        except PulseError:
            continue
        parsed += 1
        assert len(header.cuts) == len(header.blocks)
        for block in header.cuts:
            assert 0 < block.elements <= codec.MAX_BLOCK_ELEMENTS
            assert all(0 <= s.start < s.stop <= s.spec.elements for s in block.segments)
    assert 0 < parsed < 3000


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((1, 0, 0), "empty"),
        ((0,), "0 slices"),
        ((2, 0, 5, 3, 3), "more than"),
        ((1, 0, 10, 0), "0 slices"),
        ((1, 0, 10, 2), "more than"),
    ],
)
def test_counts_that_cannot_be(counts: tuple[int, ...], words: str) -> None:
    """A tensor of ten bytes, then the numbers of its slices and of the blocks."""
    plain = bytes(64) + bytes([1, 0, 1]) + b"a" + bytes([2]) + bytes([1, 10]) + bytes(counts)
    with pytest.raises(CorruptPatch, match=words):
        parse_part_header(memoryview(closed_header(plain, 2)))


def number(value: int) -> bytes:
    out = bytearray()
    put_number(out, value)
    return bytes(out)


def test_parts_share_one_budget() -> None:
    """What is small as a file may list as much as a patch is allowed to; several such files together may not."""
    count = number(300)
    slices = b"\x00\x01" * 300
    plain = bytes(64) + bytes([1, 0, 1]) + b"a" + bytes([2, 1]) + count + count + slices + number(1) + count + b"\0"
    small = memoryview(closed_header(plain, 2))
    assert Room().left == MAX_SEGMENTS
    room = Room()
    room.left = 1000
    for _ in range(3):
        assert len(parse_part_header(small, room=room)[0].cuts) == 1
    with pytest.raises(CorruptPatch, match="more than 96"):
        parse_part_header(small, room=room)
