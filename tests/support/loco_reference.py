"""PULSE's Algorithm 2 in dense torch operations, which PulseLoCo must equal bit for bit; and a
small job to train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pulse_rl.loco import DiLoCo, GroupExchange, PulseLoCo, Round, parameters
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


def rounded(x: Flat, compression: str) -> Flat:
    """The nearer of the numbers around each with so many bits of mantissa; of two as near that with
    an even pattern."""
    dropped = 23 - {"fp32": 23, "bf16": 7, "e8m2": 2, "e8m0": 0}[compression]
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
        compression: str = "fp32",
        model_dtype: torch.dtype = torch.float32,
        lr: float = 0.7,
        momentum: float = 0.9,
        lookahead: float | None = None,
    ) -> None:
        self.theta = nn.Parameter(theta.clone())
        self.residual = torch.zeros_like(theta)
        self.gate_dtype, self.compression = gate_dtype, compression
        self.model_dtype = model_dtype
        # In the end a sent entry moves theta by the whole of it: 1 + mu at once, then mu of that,
        # and so on.
        ahead = lr / (1 - momentum) if lookahead is None else lookahead
        self.lookahead = torch.tensor(ahead)
        self.summed = torch.zeros_like(theta)
        self.outer = torch.optim.SGD([self.theta], lr=lr, momentum=momentum, nesterov=True)

    @torch.no_grad()
    def select(self, now: Flat) -> tuple[Flat, Flat]:
        """(s, what is sent: zero where the gate is closed) for local weights ``now``; updates the
        residual."""
        s = (self.start().float() - now) + self.residual
        before = self.theta.to(self.gate_dtype)
        after = (self.theta - s).to(self.gate_dtype)
        open_ = bits(before) != bits(after)
        sent = torch.where(open_, rounded(s, self.compression), torch.zeros(()))
        self.residual = s - sent
        return s, sent

    @torch.no_grad()
    def start(self) -> Flat:
        """What the inner steps start from, in the model's dtype."""
        return (self.theta - self.lookahead * self.residual).to(self.model_dtype)

    @torch.no_grad()
    def outer_step(self, sent: list[Flat]) -> None:
        """The outer step along the mean of what all sent, summed in rank order."""
        self.summed = added(sent)
        self.theta.grad = self.summed / len(sent)
        self.outer.step()

    @torch.no_grad()
    def close(self) -> Flat:
        """All of the residual, as it is sent in a closing round."""
        sent = rounded(self.residual, self.compression)
        self.residual = self.residual - sent
        return sent

    @torch.no_grad()
    def closing_step(self, sent: list[Flat]) -> None:
        """The end of a closing round: theta moves, the momentum rests."""
        self.theta -= self.lookahead * (added(sent) / len(sent))

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


_OF_EXCHANGE = ("group", "timeout_seconds")


def pulse_loco(model: Any, optimizers: Any, **settings: Any) -> PulseLoCo:
    """A PulseLoCo with those of the ``settings`` that belong to its exchange in there, and its
    ``threads``. Values travel exactly, unless a setting says otherwise."""
    return made(PulseLoCo, model, optimizers, **({"compression": "fp32"} | settings))


def diloco(model: Any, optimizers: Any, **settings: Any) -> DiLoCo:
    return made(DiLoCo, model, optimizers, **settings)


def made(
    kind: Any, model: Any, optimizers: Any, *, threads: int | None = None, **settings: Any
) -> Any:
    exchange = GroupExchange(
        **{name: settings.pop(name) for name in _OF_EXCHANGE if name in settings}
    )
    loop = kind(model, optimizers, exchange=exchange, **settings)
    loop.threads = threads
    return loop


def cut_blocks(elements: int) -> None:
    """From now on the parameters of a loop that is made in this process are cut into blocks of so
    many."""
    parameters.BLOCK_ELEMENTS = elements


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
    return [flat(state[key]) for key in ("global", "momentum", "residual")]


def all_same(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    return all(same(x, y) for x, y in zip(one, other, strict=True))


def root_of(loop: OuterLoop) -> str:
    """The root of theta as it is now, whatever the last round reported."""
    from pulse_rl import state_root

    return state_root(dict(loop.global_state()))
