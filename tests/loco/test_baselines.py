"""What PULSELoCo is compared with must itself be right: DiLoCo, DDP, top-k and the ablations, against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pulse_rl.errors import InputError, NonFinite
from pulse_rl.loco import CastDifference, Ddp, DiLoCo, PulseLoCo, TopK, WithoutFeedback
from tests.support.loco_reference import Job, Reference, bits, flat, same
from tests.support.trainers import Trainer, together

SIZE = 3


pytestmark = pytest.mark.usefixtures("one_thread")


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return found


def diloco(trainer: Trainer) -> str:
    """The outer step along the mean of theta - w, by hand."""
    job = Job(trainer.rank)
    locally: list[torch.Tensor] = []
    job.optimizer.register_step_post_hook(lambda *_: locally.append(job.weights()))
    with DiLoCo(job.model, job.optimizer, sync_every=2, timeout_seconds=10) as loop:
        theta = nn.Parameter(flat(loop.theta()))
        outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
        for _ in range(3):
            job.step(trainer.rank)
            job.step(trainer.rank)
            total = theta.detach() - locally[-1]
            dist.all_reduce(total)  # in gloo's order of summing
            theta.grad = total / SIZE
            outer.step()
            torch.testing.assert_close(flat(loop.theta()), theta.detach(), rtol=0, atol=1e-8)
            assert same(job.weights(), flat(loop.theta()))
        assert loop.last_round is not None
        assert loop.last_round.entries == loop.last_round.parameters
        assert loop.last_round.payload_bytes == 4 * loop.last_round.parameters
        assert 2 * 2 / 3 * 4 * loop.last_round.parameters <= loop.last_round.sent_bytes < 6 * loop.last_round.parameters
        before = flat(loop.theta())
        job.step(trainer.rank)
        job.backward(trainer.rank)
        if trainer.rank == 1:
            job.model[2].bias.data[0] = float("nan")
        with pytest.raises(NonFinite, match=r"2\.bias"):
            job.optimizer.step()
        assert same(flat(loop.theta()), before)
        return loop.last_round.root


def ddp(trainer: Trainer) -> None:
    """One process on the joined batch, up to rounding."""
    job, alone = Job(trainer.rank), Job(0)
    with Ddp(job.model, job.optimizer, timeout_seconds=10) as loop:
        assert same(job.weights(), alone.weights()), "all begin with trainer 0's weights"
        for step in range(4):
            job.step(trainer.rank)
            means = [torch.zeros_like(p) for p in alone.model.parameters()]
            for rank in range(SIZE):
                alone.steps = step
                alone.backward(rank)
                for mean, p in zip(means, alone.model.parameters(), strict=True):
                    mean += p.grad / SIZE
            for mean, p, own in zip(means, alone.model.parameters(), job.model.parameters(), strict=True):
                torch.testing.assert_close(own.grad, mean, rtol=1e-4, atol=1e-7)
                p.grad = mean
            alone.optimizer.step()
        torch.testing.assert_close(job.weights(), alone.weights(), rtol=0, atol=2e-5)
        count = sum(p.numel() for p in job.model.parameters())
        assert loop.payload_bytes == 4 * 4 * count
        assert loop.sent_bytes >= 4 * 4 * count * 4 // 3 - 16
    steps = loop.payload_bytes
    job.step(trainer.rank)
    assert loop.payload_bytes == steps, "the hook is gone"


def top_k(trainer: Trainer) -> str:
    job = Job(trainer.rank)
    seen: list[Any] = []
    loop = TopK(job.model, job.optimizer, sync_every=1, fraction=0.02, timeout_seconds=10)
    job.optimizer.register_step_post_hook(
        lambda *_: seen.append((flat(loop.theta()) - job.weights()) + flat(loop.residual()))
    )
    with loop:
        reference = Reference(flat(loop.theta()), lookahead=0.0)
        for _ in range(3):
            job.step(trainer.rank)
            s, kept = seen[-1], round(0.02 * reference.theta.numel())
            sent = s - flat(loop.residual())
            # Adam's first steps are equal in size: which of the equals are sent is the sender's choice.
            assert s[sent == 0].abs().max() <= s[sent != 0].abs().min()
            assert torch.count_nonzero(sent) == kept
            assert same(sent[sent != 0], s[sent != 0])
            reference.residual = s - sent
            reference.outer_step(gathered(sent))
            reference.check(loop)
            assert loop.last_round is not None
            assert loop.last_round.entries == kept
        return loop.last_round.root


def ablation(trainer: Trainer, kind: type[PulseLoCo]) -> str:
    job = Job(trainer.rank)
    seen: list[Any] = []
    loop = kind(job.model, job.optimizer, sync_every=1, timeout_seconds=10)
    job.optimizer.register_step_post_hook(
        lambda *_: seen.append((flat(loop.theta()), job.weights(), flat(loop.residual())))
    )
    with loop:
        reference = Reference(flat(loop.theta()), lookahead=0.0)
        for _ in range(3):
            job.step(trainer.rank)
            theta, now, residual = seen[-1]
            s = (theta - now) + (0 if kind is WithoutFeedback else residual)
            before, after = theta.bfloat16(), (theta - s).bfloat16()
            opened, zero = bits(before) != bits(after), torch.zeros(())
            if kind is WithoutFeedback:
                sent = torch.where(opened, s, zero)
                reference.residual = s - sent  # what was held back in this round, and is dropped
            else:
                sent = torch.where(opened, before.float() - after.float(), zero)
                reference.residual = torch.where(opened, zero, s)
            reference.outer_step(gathered(sent))
            reference.check(loop)
        assert loop.last_round is not None
        return loop.last_round.root


def ablations(trainer: Trainer) -> list[str]:
    return [ablation(trainer, kind) for kind in (WithoutFeedback, CastDifference)]


def every(trainer: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for program in (diloco, ddp, top_k, ablations):
        trainer.connect(program.__name__)
        found[program.__name__] = program(trainer)
    return found


@pytest.mark.slow
def test_they_equal_plain_torch() -> None:
    found = together(every, SIZE)
    assert found[0] == found[1] == found[2]


def test_ddp_can_be_closed_and_entered_again() -> None:
    job = Job()
    loop = Ddp(job.model, job.optimizer)
    loop.close()  # before it was entered: nothing to do
    for entered in (1, 2):
        loop.__enter__()
        job.step(0)
        assert loop.payload_bytes == entered * 4 * 2927
        loop.close()
        loop.close()
        job.step(0)
        assert loop.payload_bytes == entered * 4 * 2927, "the hook is gone"


@pytest.mark.parametrize("fraction", [0, -1, 1.5, float("nan")])
def test_a_fraction_is_a_fraction(fraction: float) -> None:
    job = Job()
    with pytest.raises(InputError, match="fraction"):
        TopK(job.model, job.optimizer, sync_every=1, fraction=fraction)


def test_top_k_sends_at_least_one_entry_and_at_most_all() -> None:
    for fraction, entries in ((1e-9, 1), (1.0, 2927)):
        job = Job()
        with TopK(job.model, job.optimizer, sync_every=1, fraction=fraction) as loop:
            job.step(0)
        assert loop.last_round is not None
        assert loop.last_round.entries == entries
        assert loop.last_round.parameters == 2927


@pytest.mark.parametrize("kind", [PulseLoCo, DiLoCo, WithoutFeedback, CastDifference])
def test_alone_a_round_is_a_step_along_ones_own_progress(kind: Any) -> None:
    """With outer_lr 1 and no momentum theta becomes what was sent of w; for DiLoCo, w."""
    job = Job(lr=1e-2)
    loop = kind(job.model, job.optimizer, sync_every=4, outer_lr=1, outer_momentum=0)
    before = flat(loop.theta())
    plain = copy.deepcopy(job)
    with loop:
        for _ in range(4):
            job.step(0)
            plain.step(0)
    moved = flat(loop.theta())
    if kind is DiLoCo:
        torch.testing.assert_close(moved, plain.weights(), rtol=0, atol=1e-7)
    near = (moved - plain.weights()).abs() <= torch.maximum(before.abs(), plain.weights().abs()) / 64 + 1e-7
    assert near.all()
    assert np.count_nonzero((moved != before).numpy()) > 2000
