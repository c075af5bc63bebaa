"""Patches in parts: applied as one, undone as one, and refused where they do not fit together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pulse_rl import Bits, State
from pulse_rl.codec import HISTORY
from pulse_rl.errors import CorruptPatch, DigestMismatch, PulseError, WrongBase
from pulse_rl.patch import BLOCK_ELEMENTS, apply_patch, build_patch, parse_patch
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
)
from pulse_rl.patch.history import History, Window
from pulse_rl.patch.undo import by_whole_blocks
from pulse_rl.state.digest import StateDigest, state_digest
from pulse_rl.state.tensors import DTYPES, TensorSpec
from tests.support.parts import part, slices_of
from tests.support.states import Rng, all_dtypes, bits, mutated, weights


def pair(rng: Rng) -> tuple[State, State]:
    """Small tensors of all dtypes, and some that span leaves and blocks."""
    tensors = all_dtypes(rng) | {"large": weights(rng, 5000, 1000), "long": bits(rng, "F32", 700_001)}
    return State.of(tensors).copy(), State.of(mutated(rng, tensors, 0.01)).copy()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_parts_lead_to_what_a_whole_patch_leads_to(ranks: int, rng: Rng) -> None:
    old, new = pair(rng)
    base = state_digest(old)
    patch = parse_patch([part(old, new, segments) for segments in slices_of(old, rng, ranks)], base)
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
    undo = by_whole_blocks(patch.header, applied.undo)
    assert undo.keys() == expected.undo.keys()
    for index, old_bits in undo.items():
        np.testing.assert_array_equal(old_bits.positions, expected.undo[index].positions)
        np.testing.assert_array_equal(old_bits.values, expected.undo[index].values)


def test_what_does_not_fit_is_refused_and_changes_nothing(rng: Rng) -> None:
    old, new = pair(rng)
    slices, base = slices_of(old, rng, 3), state_digest(old)
    parts = [part(old, new, segments) for segments in slices]
    for wrong, words in (
        (parts[:2], "in no file|not in one file"),
        ([*parts, parts[1]], "not in one file"),
        ([parts[0], parts[1], part(old, new, slices[2], target_root="0" * 64)], "same base, target and history"),
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


def test_a_part_alone_is_not_the_patch(rng: Rng) -> None:
    old, new = pair(rng)
    with pytest.raises(CorruptPatch, match=r"in no file|not in one file"):
        parse_patch([part(old, new, slices_of(old, rng, 2)[0])], state_digest(old))


def test_a_part_has_no_blocks_that_need_a_history(rng: Rng) -> None:
    old, new = pair(rng)
    files = [part(old, new, segments) for segments in slices_of(old, rng, 2)]
    known = History((Window(1, "0" * 64, {}),))
    for k, data in enumerate(files):
        header, _, end = parse_header(memoryview(data))
        entries = tuple(e._replace(codec_id=HISTORY) if e.codec_id else e for e in header.blocks)
        files[k] = replace(header, blocks=entries, history=known.name).to_bytes() + data[end:]
    with pytest.raises(CorruptPatch, match="not known of parts"):
        parse_patch(files, state_digest(old))


def test_a_damaged_header_is_refused_or_another_one(rng: Rng) -> None:
    """Whatever its bytes: an error of the library, in bounded time and memory, or a header that is consistent."""
    old = State.of({"a": weights(rng, 40, 50), "b": weights(rng, 7), "c": bits(rng, "F32", 30)}).copy()
    new = State.of({spec.name: bits(rng, spec.dtype.name, *spec.shape) for spec in old.specs}).copy()
    data = part(old, new, slices_of(old, rng, 2)[0])
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
    """What is small as a file may list as much as a patch is allowed to; several such files together may not."""
    specs = State.of({f"w{k:03}": Bits(np.zeros(1, np.uint8), "U8") for k in range(300)}).specs
    small = memoryview(PatchHeader("0" * 64, "1" * 64, all_of(specs), (BlockEntry(0, 0, 0),)).to_bytes())
    assert Room().left == MAX_SLICES
    room = Room(1000)
    for _ in range(3):
        assert parse_header(small, Base(specs), room=room).header.elements == 300
    with pytest.raises(CorruptPatch, match="more than 1048576 slices"):
        parse_header(small, Base(specs), room=room)


def test_many_files_that_claim_the_whole_state_cost_one_budget() -> None:
    """Each is some bytes, and would unfold to all tensors."""
    specs = tuple(TensorSpec(f"w{k:05}", DTYPES["U8"], (3,)) for k in range(1 << 15))
    file = PatchHeader("0" * 64, "1" * 64, all_of(specs), (BlockEntry(0, 0, 0),)).to_bytes()
    with pytest.raises(CorruptPatch, match="more than"):
        parse_patch([file] * 1000, _Claimed(specs, {}))


class _Claimed(StateDigest):
    @property
    def root(self) -> str:  # type: ignore[override]
        return "0" * 64
