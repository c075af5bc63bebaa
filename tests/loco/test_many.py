"""More trainers than a machine has cores for, as threads of one process that meet through memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.loco.threads import as_threads
from tests.support.loco_reference import flat, pulse_loco

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, ROUNDS, STEP = 6000, 3, 1e-4
IN_THE_END = 0.7 / (1 - 0.9)


class Member:
    """A trainer whose every inner step is random."""

    def __init__(self, number: int, **settings: Any) -> None:
        self.random = torch.Generator().manual_seed(100 + number)
        self.weight = nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) / 50)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.loop = pulse_loco({"w": self.weight}, self.optimizer, sync_every=1, threads=1, **settings)
        self.learnt = torch.zeros(SIZE, dtype=torch.float64)

    def meet(self) -> None:
        if self.loop._hooks:
            self.loop.rejoin()
        else:
            self.loop.__enter__()

    def rounds(self) -> None:
        self.learnt.zero_()
        for _ in range(ROUNDS):
            self.weight.grad = STEP * torch.randn(SIZE, generator=self.random)
            self.learnt += self.weight.grad
            self.optimizer.step()


def virtual(members: list[Member]) -> torch.Tensor:
    """The iterate that only what is learnt moves (docs/design/0029)."""
    held = torch.stack([flat(member.loop.residual()).double() for member in members]).mean(0)
    momentum = flat(members[0].loop.state_dict()["momentum"]).double()
    return flat(members[0].loop.global_state()).double() - IN_THE_END * (held + 0.81 * momentum)


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_gated_while_there_are_eight(wire_dtype: torch.dtype) -> None:
    """One leaves, and comes back: who meets agrees on the gate, and nothing is lost or counted twice."""
    everyone = [Member(number, wire_dtype=wire_dtype) for number in range(8)]
    for members in (everyone, everyone[:7], everyone):

        def meet(rank: int, members: list[Member] = members) -> None:
            members[rank].meet()

        def work(rank: int, members: list[Member] = members) -> None:
            members[rank].meet()
            members[rank].rounds()

        as_threads(meet, len(members))
        before = virtual(members)
        as_threads(work, len(members))
        done = [member.loop.last_round for member in members]
        assert len({(r.root, r.summed, r.scattered) for r in done if r}) == 1
        assert done[0] is not None
        assert done[0].scattered
        assert (0 < done[0].summed < max(r.entries for r in done if r)) == (len(members) == 8)
        learnt = torch.stack([member.learnt for member in members]).mean(0)
        torch.testing.assert_close(virtual(members), before - IN_THE_END * learnt, rtol=0, atol=2e-6)
    for member in everyone:
        member.loop.close()
