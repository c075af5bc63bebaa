"""When rounds are scattered by themselves, and that nothing but the bytes on the network depends on
it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.loco import PulseLoCo, Round
from tests.support.loco_reference import (
    Job,
    cut_blocks,
    flat,
    force_gated,
    group_of,
    pulse_loco,
    same,
)
from tests.support.trainers import Trainer, force_scattered, together

pytestmark = pytest.mark.slow


def looped(job: Job, rounds: list[Round], **settings: Any) -> PulseLoCo:
    fixed: dict[str, Any] = {"sync_every": 2, "timeout_seconds": 20, "on_round": rounds.append}
    return pulse_loco(job.model, job.optimizer, **(fixed | settings))


def by_itself(trainer: Trainer, settings: dict[str, Any]) -> list[list[tuple[bool, str]]]:
    """(scattered, root) of each round: gathered, and as the rule has it, with a meeting in
    between."""
    found = []
    trainer.connect("start")
    for scattered in (False, None):
        force_scattered(scattered)
        job, rounds = Job(trainer.rank, lr=1e-3), list[Round]()
        with looped(job, rounds, **settings) as loop:
            for _ in range(6):
                job.step(trainer.rank)
            loop.rejoin()
            for _ in range(4):
                job.step(trainer.rank)
        found.append([(r.scattered, r.root) for r in rounds])
    return found


@pytest.mark.parametrize(
    ("size", "settings", "by_default"),
    [
        (2, {}, False),
        (3, {}, False),
        (4, {}, True),
        (4, {"wire": "BF16"}, True),
        (4, {"wire": "int4"}, False),
        (7, {"wire": "int2"}, False),
        (8, {"wire": "int2", "lookahead": 0.0}, True),  # or its sums would be gated
    ],
)
def test_rounds_are_scattered_where_less_is_sent(
    size: int, settings: dict[str, Any], *, by_default: bool
) -> None:
    for gathered, chosen in together(by_itself, size, settings, seconds=90):
        assert [root for _, root in gathered] == [root for _, root in chosen]
        assert [scattered for scattered, _ in gathered] == [False] * 5
        assert [scattered for scattered, _ in chosen] == [by_default] * 5


def skewed(seed: int) -> Job:
    """Its first layer hardly moves, so that equal shares are not even."""
    job = Job(seed)
    first, *rest = job.model
    groups = [
        {"params": first.parameters(), "lr": 1e-6},
        {"params": nn.Sequential(*rest).parameters(), "lr": 1e-3},
    ]
    job.optimizer = torch.optim.AdamW(groups)
    return job


def resumed(trainer: Trainer, stop: int, gated: bool) -> None:
    """From a checkpoint of all trainers, in mid-round or at a boundary, to the same bits, shares
    included: trainers that meet cut them alike."""
    force_scattered(True)
    force_gated(gated)

    def run(job: Job, loop: PulseLoCo, steps: int) -> None:
        with loop:
            for _ in range(steps):
                job.step(trainer.rank)

    def held(job: Job, loop: PulseLoCo) -> list[torch.Tensor]:
        state = loop.state_dict()
        return [job.weights(), *(flat(state[key]) for key in ("theta", "momentum", "residual"))]

    trainer.connect("start")
    settings = {"sync_every": 3, "wire": "BF16", "lookahead": 7.0}
    job, rounds = skewed(trainer.rank), list[Round]()
    loop = looped(job, rounds, **settings)
    run(job, loop, 11)
    first = skewed(trainer.rank)
    half = looped(first, rounds, **settings)
    run(first, half, stop)
    saved = copy.deepcopy((first.state_dict(), half.state_dict()))
    again = skewed(trainer.rank + 7)
    other = looped(again, rounds, **settings)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    run(again, other, 11 - stop)
    assert all(same(a, b) for a, b in zip(held(job, loop), held(again, other), strict=True))
    assert all(r.scattered for r in rounds)


@pytest.mark.parametrize("stop", [5, 6])
@pytest.mark.parametrize("gated", [False, True])
def test_resume_is_exact(stop: int, *, gated: bool) -> None:
    together(resumed, 3, stop, gated, seconds=60)


def tied(trainer: Trainer) -> None:
    """Tied weights are one parameter; buffers and frozen parameters stay as they are."""
    trainer.connect("start")
    roots = []
    for scattered in (False, True):
        force_scattered(scattered)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 20), nn.Linear(20, 20)
        )
        model[1].eval()
        model[2].weight = model[0].weight
        model[3].weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer, rounds = torch.optim.AdamW(trained, lr=1e-3), list[Round]()
        loop = pulse_loco(
            model, optimizer, sync_every=2, timeout_seconds=20, on_round=rounds.append
        )
        data = torch.Generator().manual_seed(trainer.rank)
        with loop:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 20, generator=data)).square().mean().backward()
                optimizer.step()
            assert "2.weight" not in loop.global_state()
            assert model[2].weight is model[0].weight
        assert [r.scattered for r in rounds] == [scattered] * 3
        roots.append([r.root for r in rounds])
    assert roots[0] == roots[1]


def test_tied_weights_and_buffers() -> None:
    together(tied, 4, seconds=60)


def at_the_limit(trainer: Trainer) -> None:
    """A sum that no message takes is gathered: its trainers' values are within the limit, and so is
    theta. Nothing is withheld then."""
    trainer.connect("start")
    found = []
    for scattered, gated in ((False, False), (True, False), (False, True)):
        force_scattered(scattered)
        force_gated(gated)
        cut_blocks(1 << 10)
        w = nn.Parameter(torch.zeros(3000).index_fill(0, torch.tensor(11), 1.0))
        optimizer = torch.optim.SGD([w], lr=1.0)
        with pulse_loco({"w": w}, optimizer, sync_every=1, timeout_seconds=20) as loop:
            w.grad = torch.zeros_like(w)
            w.grad[2500] = 1.5e19
            w.grad[7] = 1.0 if trainer.rank else -1.0
            w.grad[11] = (
                0.0 if trainer.rank else 0.0025
            )  # passes the trainer's gate; a third of it does not
            optimizer.step()
            done = loop.last_round
            assert done is not None
            assert not done.scattered
            assert done.summed == 3
            assert not flat(loop.residual()).any()
            w.grad = torch.full_like(w, 1e-3)
            optimizer.step()
            assert loop.last_round is not None
            assert loop.last_round.scattered == (scattered or gated)
        found.append(flat(loop.global_state()))
    assert same(*found[:2])
    assert same(found[0], found[2])
    assert found[0][2500] < -1e19


def test_a_sum_that_no_message_takes_is_gathered() -> None:
    together(at_the_limit, 3, seconds=60)


def cancelled(trainer: Trainer) -> None:
    """Entries that add up to 0 leave theta where it is, and are no part of the sum."""
    trainer.connect("start")
    force_scattered(True)
    w = nn.Parameter(torch.ones(600))
    optimizer = torch.optim.SGD([w], lr=1.0)
    with pulse_loco({"w": w}, optimizer, sync_every=1, timeout_seconds=20) as loop:
        w.grad = torch.full_like(w, (0.25, -0.25, 0.0)[trainer.rank])
        optimizer.step()
        assert loop.last_round is not None
        assert loop.last_round.entries == (600, 600, 0)[trainer.rank]
        assert loop.last_round.summed == 0
        assert same(flat(loop.global_state()), torch.ones(600))


def test_entries_that_cancel() -> None:
    together(cancelled, 3, seconds=60)


def elsewhere(trainer: Trainer) -> None:
    trainer.connect("start")
    job = Job()
    with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=5) as loop:
        exchange = group_of(loop)
        with torch.device("meta"):
            arrived = exchange.all_to_all(
                [bytes([trainer.rank, to]) for to in range(2)], max_bytes=[9, 9]
            )
        assert arrived == [bytes([source, trainer.rank]) for source in range(2)]


def test_wherever_the_program_makes_its_tensors_messages_are_the_hosts() -> None:
    together(elsewhere, 2, seconds=60)
