"""Thirty versions of a stream whose trainers change: 2, 4 and 1 ranks, replicas, columns; a rank is
killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pulse_rl import LocalStore, Subscriber, verify_stream
from pulse_rl.errors import RankLost
from pulse_rl.events import BaselineRestored, Event, Synced
from pulse_rl.integrations.fsdp import ShardedPublisher
from pulse_rl.patch import build
from tests.support.sharded import followed, gathered, require_equal
from tests.support.trainers import Group, Trainer

pytestmark = pytest.mark.slow

SHAPE = (2102, 1024)  # more than half a block, so that none shares one; its rows do not divide by 4
LAYERS = 8
DENSITY = 0.04

# Where the versions end that a trainer publishes, how it is sharded, and whether it loses a rank at
# the one after.
RUNS = (
    (9, "fsdp2", 2, False),
    (13, "fsdp2", 4, True),
    (17, "fsdp2", 4, False),
    (20, "hsdp", 4, False),
    (23, "columns", 2, False),
    (26, "both", 4, False),
    (30, "fsdp2", 1, False),
)


class Stack(nn.Module):
    """Layers of one size, and small tensors beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(SHAPE[1], SHAPE[0], bias=False) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(37)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def initial() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = {
        f"layers.{k}.weight": torch.randn(SHAPE, generator=generator) * 0.02 for k in range(LAYERS)
    }
    state |= {"norm.weight": torch.ones(37), "norm.bias": torch.zeros(37)}
    return {name: tensor.bfloat16() for name, tensor in state.items()} | {
        "steps": torch.zeros((), dtype=torch.int64)
    }


def train(whole: Mapping[str, torch.Tensor], seed: int) -> None:
    """Some weights move by one step of their format, as an optimizer's small update has it."""
    for k, tensor in enumerate(whole.values()):
        generator = torch.Generator().manual_seed(1000 * seed + k)
        flat = (
            tensor.reshape(-1).view(torch.int16)
            if tensor.dtype == torch.bfloat16
            else tensor.reshape(-1)
        )
        flat[
            torch.randint(len(flat), (max(1, int(len(flat) * DENSITY)),), generator=generator)
        ] += 1


def sharded(how: str, size: int) -> nn.Module:
    model = Stack().bfloat16()
    names = {"hsdp": ("replicas", "shards"), "both": ("dp", "tp")}.get(how)
    mesh = init_device_mesh("cpu", (2, size // 2) if names else (size,), mesh_dim_names=names)
    if how in ("columns", "both"):
        plan = {str(k): ColwiseParallel() if k % 2 else RowwiseParallel() for k in range(LAYERS)}
        parallelize_module(model.layers, mesh["tp"] if names else mesh, plan)
    if how != "columns":
        over = mesh["dp"] if how == "both" else mesh
        for layer in model.layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
    return model


@torch.no_grad()
def load(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Each rank takes its own."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor):
            mine = distribute_tensor(
                whole[name], tensor.device_mesh, tensor.placements, src_data_rank=None
            )
            tensor.to_local().copy_(mine.to_local())
        else:
            tensor.copy_(whole[name])


def published(
    trainer: Trainer, address: str, first: int, last: int, how: str, loses: bool
) -> list[str]:
    """The roots of the versions ``first`` to ``last`` - 1, which are those of what the ranks would
    have gathered."""
    trainer.connect("run")
    store, whole, events, roots = LocalStore(Path(address)), initial(), list[Event](), list[str]()
    for seed in range(first):
        train(whole, seed)
    model, follower = sharded(how, trainer.size), followed(store)
    with ShardedPublisher(
        store, stream="policy", threads=1, timeout_seconds=30, on_event=events.append
    ) as publisher:
        for seed in range(first, last):
            train(whole, seed)
            load(model, whole)
            done = publisher.publish(model.state_dict(), metadata={"step": seed})
            assert (done.version, done.changed is None) == (seed, seed == 0)
            state = gathered(model.state_dict())
            if trainer.rank == 0:
                require_equal(follower, state, done)  # which computes the root of what was gathered
            roots.append(done.root)
        if loses:
            train(whole, last)
            load(model, whole)
            if trainer.rank == 2:
                die_in_the_middle()
            with pytest.raises(RankLost):
                publisher.publish(model.state_dict())
    assert [event.how for event in events if isinstance(event, BaselineRestored)] == (
        ["restored"] if first else []
    )
    return roots


def die_in_the_middle() -> None:
    """At the third block that is coded."""
    encode, left = build.encode_proved, [2]

    def deadly(*arguments: Any, **options: Any) -> Any:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return encode(*arguments, **options)

    build.encode_proved = deadly


def fetched(reader: Subscriber, events: list[Event], version: int) -> int:
    reader.sync(version)
    assert reader.version == version
    return next(event.fetched_bytes for event in reversed(events) if isinstance(event, Synced))


def test_thirty_versions_by_changing_trainers(tmp_path: Path) -> None:
    """Two subscribers, of all and of an eighth, go through all of them; the second reads and holds
    an eighth."""
    store = LocalStore(tmp_path / "store")
    told: tuple[list[Event], list[Event]] = ([], [])
    plain = followed(store, on_event=told[0].append)
    some = followed(store, on_event=told[1].append, select="layers.3.weight")
    first, roots = 0, list[str]()
    bytes_of_all, bytes_of_some = [], []
    for last, how, size, loses in RUNS:
        group = Group(
            published,
            size,
            str(tmp_path / "store"),
            first,
            last,
            how,
            loses,
            seconds=120,
            lost=(2,) if loses else (),
        )
        roots += group.results()[0]
        for version in range(first, last):
            bytes_of_all.append(fetched(plain, told[0], version))
            bytes_of_some.append(fetched(some, told[1], version))
            assert plain.root == some.root == roots[version]
            assert bytes(some.state.read("layers.3.weight")) == bytes(
                plain.state.read("layers.3.weight")
            )
        first = last
    assert len(roots) == len(set(roots)) == 30
    assert sum(bytes_of_some) <= 1.05 / LAYERS * sum(bytes_of_all)
    assert sum(bytes_of_some[1:]) <= 1.05 / LAYERS * sum(bytes_of_all[1:])
    assert some.state.nbytes <= plain.state.nbytes / LAYERS
    assert all(report.ok for report in verify_stream(store, "policy"))
