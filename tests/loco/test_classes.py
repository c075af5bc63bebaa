"""The classes that messages are coded by are kept from round to round, and never used for another theta."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from pulse_rl._native import shared_octaves, sparse_outer_step
from pulse_rl.loco import PulseLoCo
from pulse_rl.loco.gate import rounding_of
from pulse_rl.loco.parameters import Floats
from pulse_rl.loco.wire import Classes, Entries, KnownClasses, Unit, Wire
from tests.support.entries_oracle import Rounding, class_of
from tests.support.loco_reference import Job, pulse_loco

BF16 = rounding_of(torch.bfloat16)


def classified(theta: Floats, momentum: Floats, octaves: tuple[int, int]) -> KnownClasses:
    """By the outer step, which is the library's own way; of an outer rate of 0, so that nothing changes."""
    classes, scratch, counts = (np.empty(len(theta), t) for t in (np.uint8, np.float32, np.int64))
    now = theta.copy(), momentum.copy(), scratch, 0.0, scratch
    sparse_outer_step(*now, 0, [], 1.0, 0.0, 1.0, 0, 1, counts, BF16, octaves, classes)
    return classes, octaves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 64, 1000, 20_000])
def test_known_classes_change_no_byte(size: int, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Of a payload whose octaves are theirs; one of other octaves is coded, and read, without them."""
    wire = Wire(dtype)
    theta, momentum = (rng.normal(0, scale, size).astype(np.float32) for scale in (0.05, 2e-5))
    positions = np.union1d(np.flatnonzero(rng.random(size) < 0.2), [0]).astype(np.uint32)
    entries: Entries = positions, wire.round(rng.normal(0, 1e-4, len(positions)).astype(np.float32))
    payload = wire.encode(theta, momentum, BF16, entries)
    head = payload[next(i for i, byte in enumerate(payload) if byte < 128) + 1 :]
    own = head[0], head[1]
    assert wire.encode(theta, momentum, BF16, entries, classified(theta, momentum, own)) == payload
    for octaves in (own, shared_octaves(momentum), (own[0] + 4, own[1]), (0, 0)):
        known = classified(theta, momentum, octaves)
        coded = wire.encode(theta, momentum, BF16, entries, known)
        for data in (payload, coded):
            for given in (None, known):
                ((found, values),) = wire.decode([data], theta, momentum, BF16, given)
                assert np.array_equal(found, positions)
                assert np.array_equal(values.view(np.uint32), entries[1].view(np.uint32))


def test_octaves_without_momentum() -> None:
    assert shared_octaves(np.zeros(100, np.float32)) == (0, 0)


@contextmanager
def seen_by_messages(loop: PulseLoCo) -> Iterator[list[bool]]:
    """Whether classes are known, for each block of each round; where they are, they are those of theta and momentum."""
    seen: list[bool] = []
    encode = Wire.encode

    def checked(
        wire: Wire,
        theta: Floats,
        momentum: Floats,
        rounding: tuple[int, ...],
        entries: Entries,
        known: KnownClasses | None,
    ) -> bytes:
        seen.append(known is not None)
        if known is not None:
            bits = (array.view(np.uint32).tolist() for array in (theta, momentum))
            expected = [class_of(x, m, Rounding(*rounding), *known[1]) for x, m in zip(*bits, strict=True)]
            assert known[0].tolist() == expected
        return encode(wire, theta, momentum, rounding, entries, known)  # type: ignore[arg-type]

    with mock.patch.object(Wire, "encode", checked):
        yield seen


@pytest.mark.slow
def test_classes_are_those_of_theta_through_rounds_rewinds_and_checkpoints() -> None:
    job = Job()
    loop = pulse_loco(job.model, job.optimizer, sync_every=1)
    with seen_by_messages(loop) as seen:
        with loop:
            for _ in range(3):
                job.step(0)
            saved = loop.state_dict()
            job.step(0)
            assert seen == [False, True, True, True]
            loop.rewind()
            job.step(0)
            assert seen.pop()
            loop.load_state_dict(saved)
            job.step(0)
            assert not seen.pop(), "they were another theta's"
            job.step(0)
            assert seen.pop()
            loop.rejoin()
            job.step(0)
            assert not seen.pop(), "theta may be the leader's"
        with loop:
            job.step(0)
            assert not seen.pop()


def test_classes_of_a_unit_are_a_part_of_its_blocks() -> None:
    job = Job()
    (block,) = pulse_loco(job.model, job.optimizer, sync_every=1).parameters.blocks
    classes = Classes([block])
    part = Unit(block, 100, 300)
    assert classes.of(part) is None
    flat, octaves = classes.renewed(block, np.full(block.stop, 2.0**-20, np.float32))
    flat[:] = np.arange(block.stop) % 251
    known = classes.of(part)
    assert known is not None
    assert known[1] == octaves
    assert np.array_equal(known[0], flat[100:300])
    classes.forget()
    assert classes.of(part) is None
