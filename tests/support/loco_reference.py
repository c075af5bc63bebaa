"""PULSE's Algorithm 2 in dense torch operations, which PulseLoCo must equal bit for bit; and a
small job to train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pulse_rl.loco import DiLoCo, Exchange, PulseLoCo, Round, gate, parameters
from pulse_rl.loco.gate import GATE_SUMS_FROM, GATE_SWEPT_SUMS_FROM
from pulse_rl.loco.group import TrainerGroup
from pulse_rl.loco.group_rounds import GroupRounds
from pulse_rl.loco.loop import OuterLoop
from tests.support.states import present

Flat = torch.Tensor


def flat(tensors: Mapping[str, torch.Tensor]) -> Flat:
    """A copy as one FP32 vector, in the order of the names."""
    return torch.cat([tensors[name].detach().float().reshape(-1) for name in sorted(tensors)])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def rounded(x: Flat, wire: str) -> Flat:
    """The nearer of the numbers around each with so many bits of mantissa; of two as near that with
    an even pattern."""
    dropped = 23 - {"FP32": 23, "BF16": 7, "int4": 2, "int2": 0}[wire]
    below = bits(x) >> dropped << dropped  # towards 0
    above = below + (1 << dropped)
    down, up = ((side.view(torch.float32).double() - x.double()).abs() for side in (below, above))
    odd = (below >> dropped & 1).bool()
    return torch.where((up < down) | (up == down) & odd, above, below).view(torch.float32)


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and torch.equal(bits(x), bits(y))


def added(summands: list[Flat]) -> Flat:
    """The sum in this order, from 0."""
    total = torch.zeros_like(summands[0])
    for one in summands:
        total += one
    return total


class Reference:
    """Theta, residual and momentum of one trainer as flat vectors."""

    def __init__(
        self,
        theta: Flat,
        *,
        gate_dtype: torch.dtype = torch.bfloat16,
        wire: str = "FP32",
        model_dtype: torch.dtype = torch.float32,
        lr: float = 0.7,
        momentum: float = 0.9,
        lookahead: float | None = None,
        gate_sums: bool = False,
        sweep: int | None = None,
        rank: int = 0,
    ) -> None:
        self.theta = nn.Parameter(theta.clone())
        self.residual = torch.zeros_like(theta)
        self.includes_sent = False  # it has what a gate lets through
        self.gate_dtype, self.wire, self.model_dtype = gate_dtype, wire, model_dtype
        # In the end a sent entry moves theta by the whole of it: 1 + mu at once, then mu of that,
        # and so on.
        ahead = lr / (1 - momentum) if lookahead is None else lookahead
        self.lookahead = torch.tensor(ahead)
        self.gate_sums, self.rank = gate_sums, rank
        self.sweep, self.number = sweep, 0
        self.summed = torch.zeros_like(theta)
        self.blocks: list[int] = []  # their elements; empty: one block
        # Where shares are not one for each trainer: how many there are, and which this one sums.
        self.shares, self.owns = 0, list[int]()
        self.outer = torch.optim.SGD([self.theta], lr=lr, momentum=momentum, nesterov=True)

    @torch.no_grad()
    def select(self, now: Flat) -> tuple[Flat, Flat]:
        """(s, what is sent: zero where the gate is closed) for local weights ``now``; updates the
        residual."""
        s = (self.start().float() - now) + self.residual
        sent = self.gated(s)
        self.residual, self.includes_sent = s - sent, False
        return s, sent

    def gated(self, s: Flat) -> Flat:
        """What is sent of ``s``."""
        before = self.theta.to(self.gate_dtype)
        after = (self.theta - s).to(self.gate_dtype)
        open_ = (bits(before) != bits(after)) | self.swept()
        return torch.where(open_, rounded(s, self.wire), torch.zeros(()))

    @torch.no_grad()
    def start(self) -> Flat:
        """What the inner steps start from, in the model's dtype."""
        start = self.theta - self.lookahead * self.residual
        if self.includes_sent and self.lookahead:
            start += (self.lookahead - 1) * self.gated(self.residual)
        return start.to(self.model_dtype)

    @torch.no_grad()
    def outer_step(self, sent: list[Flat]) -> None:
        """The outer step along the mean of what all sent, summed in rank order. With ``gate_sums``
        sums whose mean the gate holds back, and what the wire takes from the others, go to the
        residual of the owner."""
        owners = self.owners(self.shares or len(sent))
        total = added(sent)
        if self.gate_sums:
            passed = self.passed(total, len(sent))
            self.keep(total - passed, torch.isin(owners, torch.tensor(self.owns or [self.rank])))
            total = passed
        self.summed = total
        mean, swept = total / len(sent), self.swept()
        self.theta -= torch.where(swept, self.lookahead * mean, torch.zeros(()))
        self.theta.grad = torch.where(swept, torch.zeros(()), mean)
        self.outer.step()
        self.number += 1

    def passed(self, sums: Flat, trainers: int) -> Flat:
        """The sums whose mean passes the gate, as the wire has them; 0 elsewhere."""
        moved = self.theta - sums / trainers
        before, after = self.theta.to(self.gate_dtype), moved.to(self.gate_dtype)
        open_ = (bits(before) != bits(after)) | self.swept()
        return torch.where(open_, rounded(sums, self.wire), torch.zeros(()))

    def swept(self) -> torch.Tensor:
        """Where the gates are open because it is the turn of a block."""
        blocks = self.blocks or [len(self.summed)]
        turns = [
            bool(self.sweep) and (number + self.number) % self.sweep == 0
            for number in range(len(blocks))
        ]
        return torch.repeat_interleave(torch.tensor(turns), torch.tensor(blocks))

    def keep(self, rest: Flat, mine: torch.Tensor) -> None:
        self.residual = torch.where(mine & (rest != 0), self.residual + rest, self.residual)

    def owners(self, trainers: int) -> torch.Tensor:
        """Who sums each parameter: an equal part of every block, or of all where ``shares`` says
        how many."""
        owners, everything = [], [len(self.summed)]
        for count in everything if self.shares else self.blocks or everything:
            bounds = [count * owner // trainers for owner in range(trainers + 1)]
            owners += [
                torch.full((last - first,), owner)
                for owner, (first, last) in enumerate(pairwise(bounds))
            ]
        return torch.cat(owners)

    def momentum(self) -> Flat:
        return self.outer.state[self.theta]["momentum_buffer"]

    def check(self, loop: Any) -> None:
        """``loop`` holds the same theta, residual and momentum, bit for bit, and its model the
        start as cast."""
        assert same(flat(loop.global_state()), self.theta.data)
        assert same(flat(loop.residual()), self.residual)
        # -0 and 0 are one momentum: torch's first step copies the gradient, others add it to 0.
        torch.testing.assert_close(
            flat(loop.state_dict()["momentum"]), self.momentum(), rtol=0, atol=0
        )
        at, start = 0, self.start()
        for name in loop.global_state():
            p = loop.parameters.tensors[name].detach()
            assert same(p.reshape(-1), start[at : at + p.numel()])
            at += p.numel()


class Job:
    """A small regression: a model, AdamW, and steps whose data depend on who takes them and on
    their number."""

    def __init__(
        self, seed: int = 0, *, dtype: torch.dtype = torch.float32, lr: float = 3e-4
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 7)
        ).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.steps = 0

    def backward(self, who: int) -> None:
        data = torch.Generator().manual_seed(1000 * who + self.steps)
        self.steps += 1
        p = next(self.model.parameters())
        x = torch.randn(16, 24, generator=data).to(p.dtype)
        y = torch.randn(16, 7, generator=data).to(p.dtype)
        self.optimizer.zero_grad()
        (self.model(x) - y).square().mean().backward()

    def step(self, who: int) -> None:
        self.backward(who)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]

    def weights(self) -> Flat:
        return flat(dict(self.model.named_parameters()))


_OF_EXCHANGE = ("group", "wire", "sweep", "timeout_seconds")


def pulse_loco(model: Any, optimizers: Any, **settings: Any) -> PulseLoCo:
    """A PulseLoCo with those of the ``settings`` that belong to its exchange in there, and its
    ``threads``."""
    return made(PulseLoCo, model, optimizers, **settings)


def diloco(model: Any, optimizers: Any, **settings: Any) -> DiLoCo:
    return made(DiLoCo, model, optimizers, **settings)


def made(
    kind: Any, model: Any, optimizers: Any, *, threads: int | None = None, **settings: Any
) -> Any:
    exchange = Exchange(**{name: settings.pop(name) for name in _OF_EXCHANGE if name in settings})
    loop = kind(model, optimizers, over=exchange, **settings)
    loop.threads = threads
    return loop


def cut_blocks(elements: int) -> None:
    """From now on the parameters of a loop that is made in this process are cut into blocks of so
    many."""
    parameters.BLOCK_ELEMENTS = elements


def force_gated(gated: bool | None) -> None:
    """From now on the sums of two trainers or more in this process are gated, or none are, or
    (None) the rule decides. Without a lookahead none are."""
    forced = None if gated is None else 2 if gated else 1 << 30
    gate.GATE_SUMS_FROM = forced or GATE_SUMS_FROM
    gate.GATE_SWEPT_SUMS_FROM = forced or GATE_SWEPT_SUMS_FROM


def group_of(loop: OuterLoop) -> TrainerGroup:
    """The group in which its trainer has met the others."""
    assert isinstance(loop.meeting, GroupRounds)
    assert loop.meeting.group is not None
    return loop.meeting.group


def last_round(loop: OuterLoop) -> Round:
    return present(loop.last_round)


def outer_state(loop: Any) -> list[Flat]:
    """Theta, momentum and residual."""
    state = loop.state_dict()
    return [flat(state[key]) for key in ("theta", "momentum", "residual")]


def all_same(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    return all(same(x, y) for x, y in zip(one, other, strict=True))


def root_of(loop: OuterLoop) -> str:
    """The root of theta as it is now, whatever the last round reported."""
    from pulse_rl import state_root

    return state_root(dict(loop.global_state()))
