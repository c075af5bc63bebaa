"""Leaves of neighbouring blocks are hashed at once: the trees, the patches and what is undone are the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pulse_rl import Bits, State
from pulse_rl.errors import CorruptPatch
from pulse_rl.patch import apply_patch, build_patch, parse_patch
from pulse_rl.patch.blocks import Block, cut
from pulse_rl.patch.tree import block_leaves, changed_leaves, hashed_together
from pulse_rl.state.digest import state_digest
from tests.support.states import Rng, Tensors, bits, snapshot, weights

SMALLEST = 1 << 20
LANES = 16


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks of a leaf's bytes, so that small states have several."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pulse_rl.patch.blocks.BLOCK_ELEMENTS", SMALLEST)
        yield


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is to do."""
    monkeypatch.setattr("pulse_rl.patch.tree._ROUNDS", 0)


def many_blocks(rng: Rng) -> Tensors:
    """Blocks of one leaf and of several, of two dtypes; some blocks have many tensors."""
    large = {"a": weights(rng, 9 * SMALLEST), "c": bits(rng, "F32", 3 * SMALLEST)}
    small = {f"b{k}": weights(rng, SMALLEST - 7 * k) for k in range(5)}
    return large | small | {f"d{k}": weights(rng, 1000) for k in range(5)}


def stepped(rng: Rng, tensors: Tensors) -> Tensors:
    """With other bits in one of 128 elements."""
    mask = rng.integers(0, 128, max(t.array.size for t in tensors.values()), np.uint8) == 0
    return {name: Bits(t.array ^ mask[: t.array.size], t.dtype) for name, t in tensors.items()}


def leaves_of(block: Block) -> int:
    return sum(-(-(s.stop - s.start) * s.spec.dtype.width // (1 << 20)) for s in block.segments)


def test_groups_are_neighbours_of_one_dtype_that_fill_the_lanes(rng: Rng, always: None) -> None:
    blocks = cut(State.of(many_blocks(rng)).specs)
    groups = hashed_together(blocks, 2)
    assert [index for group in groups for index in group] == list(range(len(blocks)))
    assert {len({blocks[k].dtype for k in group}) for group in groups} == {1}
    filled = [sum(leaves_of(blocks[k]) for k in group) for group in groups]
    assert max(filled) >= LANES
    for group, found, behind in zip(groups, filled, groups[1:], strict=False):
        assert found >= LANES or blocks[group[0]].dtype != blocks[behind[0]].dtype
        assert found - leaves_of(blocks[group[-1]]) < LANES
    assert hashed_together([], 2) == []


def test_with_little_to_do_each_block_is_alone(rng: Rng) -> None:
    blocks = cut(State.of(many_blocks(rng)).specs)
    assert hashed_together(blocks, 1) == [range(k, k + 1) for k in range(len(blocks))]


def test_with_much_to_do_they_are_not() -> None:
    blocks = cut(State.of({"w": Bits(np.zeros(32 * SMALLEST, np.uint16), "BF16")}).specs)
    assert [len(group) for group in hashed_together(blocks, 1)] == [LANES // 2] * 4
    assert len(hashed_together(blocks, 2)) == 32


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_patch_as_block_by_block(
    rng: Rng, copied: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks in which nothing changed among them. A trainer's tensors lie anywhere (``copied``, for blocks of
    several), those of a state in one piece."""
    old = many_blocks(rng)
    new = stepped(rng, old) | {name: old[name] for name in ("b1", "b2", "b4", "c")}
    before = State.of(old).copy()
    after = State.of(new) if copied else State.of(new).copy()
    digest = state_digest(before)
    alone = build_patch(before, after, digest, threads=threads)
    monkeypatch.setattr("pulse_rl.patch.tree._ROUNDS", 0)
    made = build_patch(before, after, digest, threads=threads)
    assert made.to_bytes() == alone.to_bytes()
    assert made.target == alone.target == state_digest(State.of(new))
    applied = apply_patch(parse_patch([made.to_bytes()], digest), before, digest, threads=threads)
    assert applied.digest == made.target
    assert snapshot(before) == snapshot(new)


def test_a_damaged_block_in_the_middle_of_a_group_is_undone(rng: Rng, always: None) -> None:
    old = many_blocks(rng)
    state = State.of(old).copy()
    digest = state_digest(state)
    made = build_patch(state, State.of(stepped(rng, old)), digest)
    payload = sum(len(chunk) for chunk in made.chunks[:6])
    data = bytearray(made.to_bytes())
    data[payload - 1] ^= 1
    with pytest.raises(CorruptPatch, match="block 4"):
        apply_patch(parse_patch([bytes(data)], digest), state, digest, threads=2)
    assert snapshot(state) == snapshot(old)


def test_as_they_are_and_with_changes(rng: Rng) -> None:
    """Blocks that are hashed as they are beside blocks that are hashed as they will be."""
    old = {f"w{k}": weights(rng, SMALLEST) for k in range(3)}
    new = stepped(rng, old)
    state, after = State.of(old).copy(), State.of(new).copy()
    blocks = cut(state.specs)
    made = build_patch(state, after, state_digest(state))
    elements = [blocks[0].read(state), blocks[1].read(after), blocks[2].read(state)]
    found = changed_leaves(blocks, elements, [made.changes[0], None, made.changes[2]])
    assert found == [[made.target.leaves[name]] for name in sorted(new)]
    assert changed_leaves(blocks[1:2], elements[1:2], [None]) == found[1:2]
    assert changed_leaves([], [], []) == block_leaves([], state) == []
    assert block_leaves(blocks, after) == found
