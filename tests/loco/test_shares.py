"""Who sums what, and when: arithmetic that every trainer must compute alike."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from pulse_rl._native import sparse_outer_step
from pulse_rl.loco import parameters
from pulse_rl.loco.gate import rounding_of
from pulse_rl.loco.parameters import FlatBlock, Parameters, parts
from pulse_rl.loco.shares import (
    GRANULE,
    Known,
    Unit,
    cut_shares,
    estimated_sums,
    granules,
    granules_of,
    scatters,
    whole,
)
from pulse_rl.loco.wire import Wire

SHAPES = [(700, 9), (33,), (5, 1000), (1,), (40, 40, 3), (2500,)]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[FlatBlock]:
    """Blocks of one tensor and of several, of a few thousand parameters."""
    monkeypatch.setattr(parameters, "BLOCK_ELEMENTS", 1 << 12)
    tensors = {f"p{i}": torch.nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(SHAPES)}
    found = Parameters(tensors, torch.optim.SGD(tensors.values(), lr=1.0)).blocks
    assert len(found) > 3
    return found


def known(*, scattered: bool, longest: int, sums: int) -> Known:
    return Known(scattered, longest, sums)


@pytest.mark.parametrize("trainers", [2, 3, 5, 64, 200])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_shares_tile_the_parameters_in_order(blocks: list[FlatBlock], trainers: int, seed: int | None) -> None:
    count = granules(blocks[-1].stop)
    counts = None if seed is None else np.random.default_rng(seed).integers(0, 200, count) ** 2
    shares = cut_shares(blocks, trainers, counts)
    assert len(shares) == trainers
    places = [(u.block.start + u.start, u.block.start + u.stop) for units in shares for u in units]
    assert places[0][0] == 0
    assert places[-1][1] == blocks[-1].stop
    assert all(before[1] == after[0] and after[0] < after[1] for before, after in pairwise(places))


def test_shares_are_balanced_by_what_the_last_sum_held(blocks: list[FlatBlock]) -> None:
    """All entries are in one half: every owner gets a part of it, within two granules."""
    count = granules(blocks[-1].stop)
    counts = np.where(np.arange(count) < count // 2, 100, 0)
    shares = cut_shares(blocks, 4, counts)
    weights = np.repeat(counts + 1, GRANULE)[: blocks[-1].stop] / GRANULE
    held = [sum(float(u.of(weights).sum()) for u in units) for units in shares]
    assert max(held) - min(held) <= 2 * 101
    assert sum(u.stop - u.start for u in shares[3]) > blocks[-1].stop // 2


def test_a_block_in_units_is_the_whole(blocks: list[FlatBlock]) -> None:
    flat = np.arange(blocks[-1].stop, dtype=np.float32)
    for block, unit in zip(blocks, whole(blocks), strict=True):
        assert unit.of(flat).tolist() == block.of(flat).tolist()
        edges = sorted({0, unit.stop // 3, unit.stop // 2, unit.stop})
        pieces = [Unit(block, first, last) for first, last in pairwise(edges)]
        assert np.concatenate([piece.of(flat) for piece in pieces]).tolist() == block.of(flat).tolist()


def test_entries_come_through_their_units(blocks: list[FlatBlock]) -> None:
    """What a unit takes of a block, codes and places back are the block's own entries."""
    rng = np.random.default_rng(0)
    block = blocks[-1]
    length = block.stop - block.start
    theta, momentum = (rng.standard_normal(length).astype(np.float32) for _ in range(2))
    positions = np.flatnonzero(rng.random(length) < 0.2).astype(np.uint32)
    entries = (positions, rng.standard_normal(len(positions)).astype(np.float32))
    wire, rounding = Wire(torch.float32), rounding_of(torch.bfloat16)
    found = []
    for unit in (Unit(block, 0, 100), Unit(block, 100, 101), Unit(block, 101, length)):
        part = slice(unit.start, unit.stop)
        payload = wire.encode(theta[part], momentum[part], rounding, unit.take(entries))
        (decoded,) = wire.decode([payload], theta[part], momentum[part], rounding)
        found.append(unit.place(decoded))
    for whole_array, pieces in zip(entries, zip(*found, strict=True), strict=True):
        assert np.array_equal(whole_array, np.concatenate(pieces))


def test_sums_are_counted_where_they_are(blocks: list[FlatBlock]) -> None:
    """By granules that blocks share, and by the tensors of a block."""
    flat = np.zeros(blocks[-1].stop, np.float32)
    places = np.random.default_rng(0).choice(len(flat), 300, replace=False)
    flat[places] = 1.0
    counts = np.zeros(granules(len(flat)), np.int64)
    arrays = [np.zeros_like(flat) for _ in range(4)]
    for block in blocks:
        first, before, touched = granules_of(block)
        assert GRANULE * first + before == block.start
        assert GRANULE * (first + touched - 1) < block.stop <= GRANULE * (first + touched)
        found, entries = np.zeros(touched, np.int64), np.flatnonzero(block.of(flat)).astype(np.uint32)
        for part, _ in parts(block):
            theta, momentum, residual, start = (block.of(array)[part] for array in arrays)
            summands = [(entries, block.of(flat)[entries])]
            how = (1.0, 0.7, 0.9, before + part.start, GRANULE)
            classified = rounding_of(torch.bfloat16), (120, 104), np.empty(len(theta), np.uint8)
            sparse_outer_step(theta, momentum, residual, 1.0, start, part.start, summands, *how, found, *classified)
        counts[first : first + touched] += found
    assert np.array_equal(counts, np.bincount(places // GRANULE, minlength=len(counts)))
    assert np.array_equal(np.flatnonzero(arrays[0]), np.sort(places))


# -- the rule


def test_with_nothing_known_rounds_are_scattered_from_four_trainers_on() -> None:
    assert [scatters(trainers, None) for trainers in (1, 2, 3, 4, 64)] == [False, False, False, True, True]


@pytest.mark.parametrize("trainers", [2, 3, 4, 8, 64])
def test_the_way_with_fewer_bytes_is_taken(trainers: int) -> None:
    """Per process: R - 1 messages, or 1 - 1/R of one and R - 1 of sums; a sixteenth either way changes nothing."""
    longest = 1 << 20
    for sums in (longest, 2 * longest, 3 * longest, 10 * longest, 100 * longest):
        gathered = (trainers - 1) * longest
        scattered = (trainers - 1) * longest / trainers + (trainers - 1) * sums / trainers
        for now in (False, True):
            found = scatters(trainers, known(scattered=now, longest=longest, sums=sums))
            if abs(scattered / gathered - 1) > 1 / 15:
                assert found == (scattered < gathered)
    at_the_border = (trainers - 1) * longest
    for now in (False, True):
        assert scatters(trainers, known(scattered=now, longest=longest, sums=at_the_border)) == now


def test_two_trainers_never_scatter_what_differs_and_nothing_is_not_scattered() -> None:
    assert not scatters(2, known(scattered=False, longest=1000, sums=1000))
    assert not scatters(64, known(scattered=False, longest=0, sums=0))


def test_sums_are_estimated_from_messages() -> None:
    assert estimated_sums(3000, 1000, 400, bf16=False) == 1200
    assert estimated_sums(1500, 1000, 400, bf16=True) == 1000
    assert estimated_sums(100, 0, 0, bf16=False) == 0
