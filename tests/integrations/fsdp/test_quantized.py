"""Codes and scales of ranks that have parts of blocks are, to the last bit, those of the gathered
state."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pulse_rl import LocalStore, MemoryStore, Publisher, Store, Subscriber
from pulse_rl.errors import InputError
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.frameworks.shards import FlatShard
from tests.support.sharded import policy, step
from tests.support.trainers import Trainer, together

pytestmark = pytest.mark.slow
GIVEN: dict[str, Any] = {"dtype": "BF16", "files": {"config.json": b"{}"}}

MODELOPT = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["head"]}


@cache
def weights(seed: int) -> dict[str, torch.Tensor]:
    """300 rows: a border between two ranks lies in a block, and the last blocks are short."""
    state = policy(width=224, rows=300, dtype=torch.float32).state_dict()
    with torch.no_grad():
        state["blocks.0.up.weight"][150, 7] = float("nan")
        state["blocks.1.down.weight"][:, :200] = 0
    for number in range(seed):
        step(state, number)
    # Two layers of which ModelOpt has one scale, with the largest element in the second.
    fused = {name.replace("up.w", "gate_proj.w"): 3 * tensor for name, tensor in state.items()}
    return fused | {name.replace("up.w", "up_proj.w"): tensor for name, tensor in state.items()}


def parts(trainer: Trainer, how: str, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a rank has: rows, as FSDP2 cuts; columns; ranges of elements, as ZeRO-3 does; whole
    tensors of its own."""
    if how == "stages":
        return {
            name: t for k, (name, t) in enumerate(state.items()) if k % trainer.size == trainer.rank
        }
    mesh, found = init_device_mesh("cpu", (trainer.size,)), dict[str, Any]()
    for name, tensor in state.items():
        cuts = tuple(tensor.numel() * k // trainer.size for k in range(trainer.size + 1))
        if tensor.ndim < 2:
            found[name] = tensor
        elif how == "ranges":
            mine = tensor.reshape(-1)[cuts[trainer.rank] : cuts[trainer.rank + 1]].clone()
            found[name] = FlatShard(mine, tuple(tensor.shape), cuts, None)
        else:
            found[name] = distribute_tensor(tensor, mesh, [Shard(0 if how == "rows" else 1)])
    return found


def config(store: Store) -> Any:
    with Subscriber(store, stream="policy") as subscriber:
        subscriber.sync()
        return subscriber.files()["config.json"]


def as_one(trainer: Trainer, wanted: Any) -> None:
    trainer.connect("ranks")
    given, other = {**GIVEN, "quantize": wanted}, MemoryStore()
    with Publisher(other, stream="policy", threads=1) as alone:
        roots = [alone.publish(weights(seed), **given).root for seed in range(2)]
    for how in ("rows", "columns", "ranges", "stages"):
        store = LocalStore(trainer.folder / how)
        with ShardedPublisher(store, stream="policy", threads=1) as ranks:
            for seed in range(2):
                mine = parts(trainer, how, weights(seed))
                done = (
                    ranks.publish(mine, **given) if seed else ranks.submit(mine, **given).result()
                )
                assert done.root == roots[seed], (how, seed)
                assert seed == 0 or done.changed
        if trainer.rank == 0:  # what is left out is named, whichever rank has it
            assert config(store) == config(other), how


@pytest.mark.parametrize(("size", "wanted"), [(2, MODELOPT), (3, "fp8_block")])
def test_ranks_quantize_as_one(size: int, wanted: Any) -> None:
    together(as_one, size, wanted)


def refused(trainer: Trainer) -> None:
    trainer.connect("ranks")
    with ShardedPublisher(LocalStore(trainer.folder / "store"), stream="policy") as publisher:
        with pytest.raises(InputError, match="part of a group of 32 elements"):
            publisher.publish(parts(trainer, "columns", weights(0)), quantize="mxfp8")
        with pytest.raises(InputError, match="by a function"):
            publisher.publish(
                parts(trainer, "rows", weights(0)), quantize=lambda name, weight: None
            )
        with pytest.raises(InputError, match="quantize is"):
            publisher.publish(
                parts(trainer, "rows", weights(0)), quantize=("mxfp8", "fp8_block")[trainer.rank]
            )
        assert publisher.publish(parts(trainer, "rows", weights(0)), quantize="mxfp8").version == 0
        given: dict[str, Any] = {"quantize": {"quant_method": "mxfp4"}}
        experts = {
            "experts.up_proj": torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(1))
        }
        with pytest.raises(InputError, match="part of a matrix"):
            publisher.publish(parts(trainer, "columns", experts), **given)
        done = publisher.publish(parts(trainer, "rows", experts), **given)
        with Publisher(MemoryStore(), stream="policy") as alone:
            assert done.root == alone.publish(experts, **given).root


def test_what_ranks_cannot_quantize_is_refused_on_all() -> None:
    together(refused, 2)
