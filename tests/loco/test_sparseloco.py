"""The SparseLoCo baseline against its algorithm in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pulse_rl.errors import CorruptMessage, InputError, NonFinite, TrainerLost
from pulse_rl.loco import Round, SparseLoCo, parameters, sparseloco
from pulse_rl.loco.sparseloco import quantize
from tests.support.loco_reference import Job, flat, same
from tests.support.trainers import Trainer, together

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, CHUNK, FRACTION = 1700, 300, 0.05


def select(s: torch.Tensor, blocks: list[tuple[int, int]]) -> torch.Tensor:
    """What is sent of one trainer's accumulated pseudo-gradient: zero elsewhere."""
    sent = torch.zeros_like(s)
    for first, stop in blocks:
        block = s[first:stop]
        kept = torch.zeros_like(block, dtype=torch.bool)
        for at in range(0, len(block), CHUNK):
            chunk = block[at : at + CHUNK]
            kept[at + chunk.abs().topk(max(1, round(FRACTION * len(chunk)))).indices] = True
        values = block[kept].double()
        bounds = values.mean() + 1.5 * values.std(correction=0) * torch.tensor([-1.0, 0.0, 1.0])
        ranges = torch.bucketize(values, bounds, right=True)
        means = torch.stack([values[ranges == r].mean().float() for r in range(4)]).nan_to_num()
        sent[first:stop][kept] = means[ranges]
    return sent


def small() -> None:
    parameters.BLOCK_ELEMENTS, sparseloco.CHUNK = BLOCK, CHUNK


def as_published(trainer: Trainer) -> list[Round]:
    small()
    trainer.connect("start")
    job, rounds = Job(trainer.rank, lr=1e-3), list[Round]()
    locally: list[torch.Tensor] = []
    job.optimizer.register_step_post_hook(lambda *_: locally.append(job.weights()))
    loop = SparseLoCo(job.model, job.optimizer, sync_every=2, fraction=FRACTION, decay=0.9, on_round=rounds.append)
    with loop:
        theta, residual = flat(loop.theta()), torch.zeros(loop.parameters.count)
        for _ in range(4):
            job.step(trainer.rank)
            job.step(trainer.rank)
            s = torch.tensor(0.9) * residual + (theta - locally[-1])
            sent = select(s, [(block.start, block.stop) for block in loop.parameters.blocks])
            residual = s - sent
            received = [torch.empty_like(sent) for _ in range(trainer.size)]
            dist.all_gather(received, sent)
            total = torch.zeros_like(sent)
            for one in received:
                total += one
            theta = theta - total / trainer.size
            assert same(flat(loop.theta()), theta)
            assert same(flat(loop.state_dict()["residual"]), residual)
            assert same(job.weights(), theta)
            assert rounds[-1].entries == int(sent.count_nonzero())
            assert rounds[-1].summed == int(total.count_nonzero())
    return rounds


@pytest.mark.slow
def test_every_round_equals_the_plain_algorithm() -> None:
    for rounds in zip(*together(as_published, 3, seconds=60), strict=True):
        assert len({r.root for r in rounds}) == 1
        bits = 8 * (rounds[0].payload_bytes - 8 - 16 * 2) / rounds[0].entries
        assert 14 <= bits < 15, "two blocks"
        assert rounds[0].density == pytest.approx(FRACTION, abs=0.002)


def damaged(trainer: Trainer) -> None:
    """One trainer's pseudo-gradient is not finite; then one's message is of another length."""
    small()
    trainer.connect("start")
    job = Job(trainer.rank)
    with SparseLoCo(job.model, job.optimizer, sync_every=1, fraction=FRACTION) as loop:
        before = flat(loop.theta())
        job.backward(trainer.rank)
        if trainer.rank == 1:
            job.model[2].bias.data[0] = float("nan")
        with pytest.raises(NonFinite, match=r"2\.bias" if trainer.rank == 1 else "trainer 1"):
            job.optimizer.step()
        loop.rewind()
        select_block = loop._select_block
        if trainer.rank == 0:
            loop._select_block = lambda block: select_block(block)[:-1]  # type: ignore[method-assign]
        with pytest.raises(CorruptMessage):
            job.step(trainer.rank)
        assert same(flat(loop.theta()), before)
        loop.rewind()
        loop._select_block = select_block  # type: ignore[method-assign]
        job.step(trainer.rank)
        assert loop.round == 1


@pytest.mark.slow
def test_what_cannot_be_added_changes_nothing() -> None:
    together(damaged, 2, seconds=60)


def missed(trainer: Trainer) -> None:
    """Trainer 1 misses the end of a round in which its message counted, then one that nobody ended."""
    small()
    trainer.connect("a")
    job = Job(trainer.rank, lr=1e-3)
    with SparseLoCo(job.model, job.optimizer, sync_every=1, fraction=FRACTION, timeout_seconds=5) as loop:
        job.step(trainer.rank)
        exchange = loop._exchange
        assert exchange is not None
        all_gather = exchange.all_gather_fixed

        def cut_off(message: bytes) -> list[bytes]:
            found = all_gather(message)
            raise TrainerLost("the line went dead") if len(message) == 1 else AssertionError(found)

        if trainer.rank == 1:
            exchange.all_gather_fixed = cut_off  # type: ignore[method-assign]
        with pytest.raises(TrainerLost):
            job.step(trainer.rank)
        assert loop.round == 2 - trainer.rank
        expected = flat(loop.parameters.by_name(loop._next_residual))
        trainer.connect("b")
        loop.rejoin()
        assert loop.round == 2
        assert same(flat(loop.theta()), job.weights())
        if trainer.rank == 1:
            assert same(flat(loop.parameters.by_name(loop.residual_flat)), expected)
        job.step(trainer.rank)
        assert loop.round == 3


@pytest.mark.slow
def test_a_message_that_counted_is_not_sent_again() -> None:
    together(missed, 2, seconds=60)


def test_values_become_the_means_of_four_ranges(rng: np.random.Generator) -> None:
    values = rng.normal(0.1, 1, 4000).astype(np.float32)
    levels, means = quantize(values)
    assert sorted(set(levels.tolist())) == [0, 1, 2, 3]
    assert (np.diff(means) > 0).all()
    for level in range(4):
        assert means[level] == pytest.approx(values[levels == level].mean(), rel=1e-5)
    assert np.abs(values - means[levels]).mean() < 0.5 * np.abs(values).mean()
    same_levels, same_means = quantize(np.full(5, 0.25, np.float32))
    np.testing.assert_array_equal(same_means[same_levels], np.full(5, 0.25, np.float32))


@pytest.mark.parametrize(("name", "value"), [("fraction", 0.0), ("fraction", 1.5), ("decay", 1.0), ("decay", -0.1)])
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    job = Job()
    with pytest.raises(InputError, match=name):
        SparseLoCo(job.model, job.optimizer, sync_every=1, **({"fraction": 0.1} | {name: value}))
