"""Sharded models for tests: small ones, their steps, and what a subscriber must hold of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pulse_rl import Published, Store, Subscriber, state_root
from pulse_rl.frameworks.torch import to_torch


class Block(nn.Module):
    """Two layers and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x + self.down(torch.relu(self.up(x))))
        return result


class Policy(nn.Module):
    """A small policy: an embedding of ``rows`` rows, which a ``tied`` head shares, blocks, a
    buffer."""

    def __init__(
        self, width: int = 16, rows: int = 37, blocks: int = 2, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, rows, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def policy(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Policy:
    """The same weights on every rank."""
    torch.manual_seed(7)
    return Policy(tied=tied, **sizes).to(dtype)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def step(state: Mapping[str, torch.Tensor], seed: int) -> None:
    """Changes about one element in 20 of each tensor, the same wherever it lies."""
    for name, tensor in state.items():
        whole = full(tensor).clone(memory_format=torch.contiguous_format)
        generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, name)))
        if not whole.is_floating_point():
            whole += 1
        elif count := whole.numel():
            chosen = torch.randint(count, (-(-count // 20),), generator=generator).unique()
            noise = torch.randn(len(chosen), generator=generator).to(whole.dtype) * 0.01
            whole.view(-1)[chosen] += noise
        if isinstance(tensor, DTensor):
            from torch.distributed.tensor import distribute_tensor

            tensor.to_local().copy_(
                distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
            )
        else:
            tensor.copy_(whole)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def gathered(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole state; a collective."""
    return {name: full(tensor) for name, tensor in state.items()}


def require_equal(
    subscriber: Subscriber, whole: Mapping[str, torch.Tensor], published: Published
) -> None:
    """The subscriber's newest version is ``published``, and has the bits of ``whole``."""
    subscriber.sync()
    assert subscriber.version == published.version
    assert subscriber.root == published.root == state_root(dict(whole))
    held: dict[str, Any] = to_torch(subscriber.state)
    assert held.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(bits(held[name]), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def followed(store: Store, **settings: Any) -> Subscriber:
    return Subscriber(store, stream="policy", **settings)
