"""FSDP1 on real ranks: what is published, gathered by one parameter at a time or not at all, is the
whole state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from pulse_rl import LocalStore, Publisher, state_root
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.frameworks.weights import is_sharded, policy_weights
from tests.support.sharded import Block, followed, policy, require_equal
from tests.support.trainers import Trainer, together

PREFIX = "_fsdp_wrapped_module."
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **settings
    )


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, seed: int) -> None:
    """A real step, of which each rank has other examples."""
    torch.manual_seed(10 * seed + rank)
    model(torch.randint(0, 37, (4, 8))).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state in BF16, by FSDP's own gather."""
    found: dict[str, torch.Tensor] = {}
    cast: dict[int, torch.Tensor] = {}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(),
        ]:
            dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
            found[name.replace(PREFIX, "")] = cast.setdefault(
                id(tensor), tensor.detach().to(dtype, copy=True)
            )
    return found


def steps_of_fsdp1(trainer: Trainer, settings: dict[str, Any], tied: bool) -> None:
    """Three steps, a restart of the publishers, and a step more."""
    trainer.connect("ranks")
    if settings.get("sharding_strategy") == ShardingStrategy.HYBRID_SHARD:
        settings |= {
            "device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        }
    model = wrapped(policy(dtype=torch.float32, tied=tied), **settings)
    assert is_sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    first = trainer.rank == 0
    stores = [LocalStore(trainer.folder / name) for name in ("slices", "gathered")]
    followers = [followed(store) for store in stores]
    for seeds in ((0, 1, 2), (3,)):
        publisher = Publisher(stores[1], stream="policy") if first else None
        with ShardedPublisher(stores[0], stream="policy", threads=1) as ranks:
            for seed in seeds:
                trained(model, optimizer, trainer.rank, seed)
                whole = gathered(model)
                done = ranks.publish(model, dtype="BF16", metadata={"step": seed})
                assert (done.changed is None) == (seed == 0)
                weights = policy_weights(model, "BF16", keep=first)
                assert bool(weights) == first
                if publisher:
                    require_equal(followers[0], whole, done)
                    require_equal(followers[1], whole, publisher.publish(weights, dtype="BF16"))
        if publisher:
            publisher.close()
    trainer.barrier("done", tuple(range(trainer.size)))


@pytest.mark.parametrize(
    ("ranks", "settings", "tied"),
    [
        (2, {"use_orig_params": True}, False),
        (2, {"use_orig_params": False}, True),
        (3, {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, True),
        (2, {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}, False),
        (2, {"sharding_strategy": ShardingStrategy.NO_SHARD}, False),
        (4, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, False),
    ],
    ids=[
        "original parameters",
        "flat parameters, tied",
        "three ranks",
        "mixed precision",
        "replicas",
        "replicas of shards",
    ],
)
def test_followed_bits_are_those_of_the_gathered_state(
    ranks: int, settings: dict[str, Any], tied: bool
) -> None:
    together(steps_of_fsdp1, ranks, settings, tied)


def parts_of_zero3(trainer: Trainer) -> None:
    """What DeepSpeed makes of parameters, without DeepSpeed: `tests.trainers.zero` has the real
    one."""
    trainer.connect("ranks")
    model = policy(tied=True)
    expected = state_root(dict(model.state_dict()))
    for parameter in model.parameters():
        size = -(-parameter.numel() // trainer.size)
        part = torch.zeros(size, dtype=parameter.dtype)
        own = parameter.detach().flatten()[trainer.rank * size :][:size]
        part[: own.numel()] = own
        part.ds_numel, part.status = size, SimpleNamespace(name="AVAILABLE")  # type: ignore[attr-defined]
        vars(parameter).update(
            ds_id=0, ds_numel=parameter.numel(), ds_shape=parameter.shape, ds_tensor=part
        )
        vars(parameter).update(ds_process_group=dist.group.WORLD)
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    with ShardedPublisher(
        LocalStore(trainer.folder / "store"), stream="policy", threads=1
    ) as ranks:
        assert ranks.publish(model).root == expected
        assert state_root(policy_weights(model)) == expected
        model.embed.weight.ds_tensor.status.name = "NOT_AVAILABLE"  # type: ignore[attr-defined]
        with pytest.raises(UnsupportedTensor, match="not in memory"):
            ranks.publish(model)


def test_parts_of_zero3_are_published_and_gathered() -> None:
    together(parts_of_zero3, 3)
