"""What PULSELoCo is compared with must itself be right: DiLoCo, DDP and the ablations, against
plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.loco.baselines import (
    CastDifferenceGate,
    Ddp,
    NoFeedbackGate,
    from_few_bits,
    gated,
    quantized_diloco,
    sparse_loco,
    to_few_bits,
)
from pulse_rl.errors import CorruptMessage, NonFinite
from tests.support.loco_reference import Job, diloco, flat, last_round, same
from tests.support.trainers import Trainer, together

SIZE = 3
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
pytestmark = pytest.mark.slow


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return found


def by_hand(trainer: Trainer) -> str:
    """The outer step along the mean of theta - w, by hand."""
    trainer.connect("start")
    job = Job(trainer.rank)
    locally: list[torch.Tensor] = []
    job.optimizer.register_step_post_hook(lambda *_: locally.append(job.weights()))
    with diloco(job.model, job.optimizer, sync_every=2, timeout_seconds=10) as loop:
        theta = nn.Parameter(flat(loop.global_state()))
        outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
        for _ in range(3):
            job.step(trainer.rank)
            job.step(trainer.rank)
            total = theta.detach() - locally[-1]
            dist.all_reduce(total)  # in gloo's order of summing
            theta.grad = total / SIZE
            outer.step()
            torch.testing.assert_close(flat(loop.global_state()), theta.detach(), rtol=0, atol=1e-8)
            assert same(job.weights(), flat(loop.global_state()))
        assert last_round(loop).entries == last_round(loop).parameters
        assert last_round(loop).payload_bytes == 4 * last_round(loop).parameters
        assert last_round(loop).sent_bytes >= 2 * 2 / 3 * 4 * last_round(loop).parameters
        assert last_round(loop).sent_bytes < 6 * last_round(loop).parameters
        before = flat(loop.global_state())
        job.step(trainer.rank)
        job.backward(trainer.rank)
        if trainer.rank == 1:
            job.model[2].bias.data[0] = float("nan")
        with pytest.raises(NonFinite, match=r"2\.bias"):
            job.optimizer.step()
        assert same(flat(loop.global_state()), before)
        return last_round(loop).root


def ddp(trainer: Trainer) -> None:
    """One process on the joined batch, up to rounding."""
    trainer.connect("start")
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
            for mean, p, own in zip(
                means, alone.model.parameters(), job.model.parameters(), strict=True
            ):
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


def test_diloco_takes_the_mean() -> None:
    assert len(set(together(by_hand, SIZE, seconds=60))) == 1


def test_ddp_is_one_process_on_the_joined_batch() -> None:
    together(ddp, SIZE, seconds=60)


def compared(trainer: Trainer) -> list[str]:
    """What PULSELoCo is compared with runs, and keeps theta the same on all."""
    roots = []
    for number, make in enumerate(
        (
            lambda job: gated(
                NoFeedbackGate(torch.bfloat16), job.model, job.optimizer, sync_every=1
            ),
            lambda job: gated(
                CastDifferenceGate(torch.bfloat16), job.model, job.optimizer, sync_every=1
            ),
            lambda job: sparse_loco(job.model, job.optimizer, sync_every=1, fraction=0.1),
            lambda job: quantized_diloco(
                job.model, job.optimizer, sync_every=1, code="int8", **OUTER
            ),
            lambda job: quantized_diloco(
                job.model, job.optimizer, sync_every=1, code="FP4", **OUTER
            ),
        )
    ):
        trainer.connect(f"case {number}")
        job = Job(trainer.rank, lr=1e-3)
        before = None
        with make(job) as loop:
            for _ in range(3):
                job.step(trainer.rank)
                assert last_round(loop).root != before
                before = last_round(loop).root
        roots.append(before)
    return roots


def test_values_of_few_bits() -> None:
    """Each value is as near as its code allows: half a step of the largest one, half an octave."""
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(0)).numpy()
    values[:5000] *= np.float32(1e-20)
    values[7] = 0
    for code, nbytes in (("int8", 10_001), ("FP4", 5001)):
        message = to_few_bits(values, code)
        assert len(message) == nbytes + 4 * 3
        found = from_few_bits(message, len(values), code)
        for chunk, seen in ((values[:4096], found[:4096]), (values[8192:], found[8192:])):
            most = np.abs(chunk).max()
            if code == "int8":
                assert np.abs(chunk - seen).max() <= most / 254 * 1.001
            else:
                large = np.abs(chunk) > most / 64
                assert (np.abs(np.log2(seen[large] / chunk[large])) <= 0.501).all()
                assert np.abs(seen[~large]).max() <= most / 64
    assert not from_few_bits(to_few_bits(np.zeros(3, np.float32), "FP4"), 3, "FP4").any()
    with pytest.raises(CorruptMessage):
        from_few_bits(message[:-1], len(values), "FP4")


def test_the_others_run_in_the_same_loop() -> None:
    first, *others = together(compared, SIZE, seconds=60)
    assert all(roots == first for roots in others)
