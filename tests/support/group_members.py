"""Trainers of one group, in threads beside the dense reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.loco.threads import as_threads
from tests.support.loco_reference import Flat, Reference, group_of, pulse_loco
from tests.support.states import present

SIZE = 3000


class Member:
    """A trainer in a thread beside the dense reference; its inner steps are random."""

    def __init__(
        self,
        rank: int,
        size: int,
        seen: dict[tuple[int, int], Flat],
        **settings: Any,
    ) -> None:
        self.rank, self.size, self.seen, self.settings = rank, size, seen, settings
        self.random = torch.Generator().manual_seed(100 + rank)
        start = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) / 50
        self.weight = nn.Parameter(start.clone())
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.optimizer.register_step_post_hook(lambda *_: self._select())
        self.loop = pulse_loco(
            {"w": self.weight}, self.optimizer, sync_every=1, threads=1, **settings
        )
        self.reference = Reference(start, **settings)

    def _select(self) -> None:
        """Before the loop's own hook: what this trainer is about to send."""
        _, self.seen[self.loop.round, self.rank] = self.reference.select(
            self.weight.detach().clone()
        )

    @property
    def group(self) -> Any:
        """What carries its messages."""
        return group_of(self.loop)

    def step(self, size: float = 3e-5) -> None:
        self.weight.grad = size * torch.randn(SIZE, generator=self.random)
        self.optimizer.step()

    def round(self) -> None:
        """A round in which all goes well."""
        number = self.loop.round
        self.step()
        self.reference.outer_step([self.seen[number, rank] for rank in range(self.size)])
        self.reference.check(self.loop)
        done = present(self.loop.last_round)
        assert done.summed == int(self.reference.summed.count_nonzero())
        assert done.entries == int(self.seen[number, self.rank].count_nonzero())


def members(size: int, work: Callable[[Member], None], **settings: Any) -> list[Member]:
    """``work`` of every member, each in a thread, after they have met."""
    seen: dict[tuple[int, int], Flat] = {}
    everyone = [Member(rank, size, seen, **settings) for rank in range(size)]

    def run(rank: int) -> None:
        with everyone[rank].loop:
            work(everyone[rank])

    as_threads(run, len(everyone))
    return everyone
