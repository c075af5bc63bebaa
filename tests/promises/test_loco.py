"""PULSELoCo: trainers that exchange what the forward pass can see hold the same bits after every
round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.loco import PulseLoCo
from tests.support.trainers import Trainer as Rank
from tests.support.trainers import together

ROUNDS, STEPS = 4, 3


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 5, bias=False))


def trained(net: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 12, generator=generator)
        net(x).square().mean().backward()
        optimizer.step()


def rounds(rank: Rank, settings: dict[str, Any]) -> list[bytes]:
    """The bits of all weights after each round."""
    rank.connect("world")
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    seen: list[bytes] = []
    with PulseLoCo(net, optimizer, sync_every=STEPS, **settings) as loop:
        for number in range(ROUNDS):
            trained(net, optimizer, 10 * number + rank.rank, STEPS)
            assert loop.last_round.trainers == rank.size
            seen.append(loop.last_round.root.encode())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lookahead": 0.0}], ids=str)
def test_trainers_agree_to_the_bit_after_every_round(settings: dict[str, Any]) -> None:
    results = together(rounds, 3, settings)
    assert results == [results[0]] * 3
    assert len(set(results[0])) == ROUNDS, "and their weights move"


def test_a_lone_trainer_moves_as_its_outer_optimizer_says() -> None:
    """One trainer, outer learning rate 1, no momentum, no lookahead."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with PulseLoCo(
        net, optimizer, sync_every=STEPS, outer_lr=1.0, outer_momentum=0.0, lookahead=0.0
    ) as loop:
        trained(net, optimizer, 0, STEPS)
        assert loop.last_round.number == 1
        assert 0 < loop.last_round.entries <= loop.last_round.parameters
    assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
