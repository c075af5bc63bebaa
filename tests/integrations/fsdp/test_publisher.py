"""Ranks of a sharded trainer publish together: what a subscriber holds is what the ranks would have
gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pulse_rl import LocalStore, Published
from pulse_rl.errors import InputError, RankLost, StateMismatch, UnsupportedTensor
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.frameworks.torch import apply_
from tests.support.sharded import bits, followed, gathered, local, policy, require_equal, step
from tests.support.states import present
from tests.support.trainers import Trainer, all_pass, together

pytestmark = pytest.mark.slow

State = Mapping[str, torch.Tensor]
COLUMNS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def followed_for(
    trainer: Trainer,
    name: str,
    state: Callable[[], State],
    whole: Callable[[State], State] = gathered,
    *,
    versions: int = 3,
    train: Callable[[State, int], None] = step,
    **settings: Any,
) -> list[Published]:
    """Publishes some steps of ``state``; a subscriber that follows, on the first rank, and one that
    comes new, on the last, hold ``whole`` of it. What is sharded alike takes each update: a rank
    the elements that it has."""
    store = LocalStore(trainer.folder / f"store-of-{name}")
    follower, watcher = followed(store), followed(store)
    live = (
        {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        if whole is gathered
        else {}
    )
    done = []
    with ShardedPublisher(store, stream="policy", threads=2) as publisher:
        for seed in range(versions):
            now = state()
            train(now, seed)
            done.append(publisher.publish(now, metadata={"step": seed}, **settings))
            assert done[-1].version == seed
            assert (done[-1].changed is None) == (seed == 0)
            expected = whole(now)
            if trainer.rank == 0:
                require_equal(follower, expected, done[-1])
            if trainer.rank == trainer.size - 1:
                require_equal(followed(store), expected, done[-1])
            if live and not settings:
                update = present(watcher.sync())
                apply_(live, update)
                assert all(
                    torch.equal(bits(local(live[name])), bits(local(now[name]))) for name in live
                )
    return done


def sharded(mesh: Any, **settings: Any) -> nn.Module:
    model = policy(**settings)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2(trainer: Trainer) -> None:
    followed_for(trainer, "fsdp2", sharded(init_device_mesh("cpu", (trainer.size,))).state_dict)


def leaves_that_ranks_share(trainer: Trainer) -> None:
    """Two tensors of 1501 rows of 700 FP32 numbers: the ranks' borders lie within leaves, and some
    leaves are of one rank alone."""
    model = sharded(
        init_device_mesh("cpu", (trainer.size,)),
        rows=1501,
        width=700,
        blocks=0,
        dtype=torch.float32,
    )
    followed_for(trainer, "leaves_that_ranks_share", model.state_dict, versions=2)


def replicas(trainer: Trainer) -> None:
    model = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    followed_for(trainer, "replicas", model.state_dict)


def columns(trainer: Trainer) -> None:
    mesh = init_device_mesh("cpu", (trainer.size,))
    model = policy()
    for block in model.blocks:
        parallelize_module(block, mesh, COLUMNS)
    followed_for(trainer, "columns", model.state_dict)


def columns_and_rows(trainer: Trainer) -> None:
    """Both along each of the dimensions: FSDP2 over tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = policy()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], COLUMNS)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    followed_for(trainer, "columns_and_rows", model.state_dict)


def ranks_without_a_row(trainer: Trainer) -> None:
    """FSDP2 over tensor parallelism with so few rows that some ranks of one tensor-parallel rank
    have none."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    model = nn.ModuleList(nn.Linear(5, rows) for rows in (1, 7, 9, 13, 37)).bfloat16()
    parallelize_module(model, mesh["tp"], {str(k): ColwiseParallel() for k in range(len(model))})
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])

    def train(state: State, seed: int) -> None:  # DTensor cannot distribute such a tensor
        for tensor in state.values():
            local(tensor).view(torch.int16)[..., seed % 5 :] += 1

    followed_for(trainer, "ranks_without_a_row", model.state_dict, versions=3, train=train)


def any_placement(trainer: Trainer) -> None:
    """Tensors of one, two and three dimensions, some larger than a block, cut in every way."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = {
        "rows": ((7, 30), (Shard(0), Replicate())),
        "columns": ((30, 7), (Replicate(), Shard(1))),
        "both": ((30, 7), (Shard(0), Shard(1))),
        "twice": ((30, 7), (Shard(1), Shard(1))),
        "middle": ((5, 9, 4), (Replicate(), Shard(1))),
        "last": ((5, 9, 4), (Shard(2), Shard(0))),
        "few": ((3,), (Shard(0), Shard(0))),
        "none": ((0, 4), (Shard(0), Shard(1))),
        "nowhere": ((2, 2), (Replicate(), Replicate())),
        "large": ((1100, 4099), (Shard(1), Replicate())),
    }
    torch.manual_seed(3)
    state = {
        name: distribute_tensor(torch.randn(shape).to(torch.bfloat16), mesh, placement)
        for name, (shape, placement) in placements.items()
    }
    followed_for(trainer, "any_placement", lambda: state, versions=2)


def stages_and_experts(trainer: Trainer) -> None:
    """Plain tensors that some ranks have: a stage each, experts by twos, what all have."""
    torch.manual_seed(5)
    whole = {f"stages.{k}.weight": torch.randn(30, 20) for k in range(trainer.size)}
    whole |= {f"experts.{k}.weight": torch.randn(9, 20) for k in range(2)} | {
        "norm": torch.randn(20)
    }
    mine = {f"stages.{trainer.rank}.weight", f"experts.{trainer.rank % 2}.weight", "norm"}

    def state() -> State:
        return whole

    store = LocalStore(trainer.folder / "store-of-stages")
    with ShardedPublisher(store, stream="policy", threads=1) as publisher:
        for seed in range(3):
            step(whole, seed)
            published = publisher.publish({name: whole[name] for name in state() if name in mine})
            require_equal(followed(store), whole, published)


def a_tensor_that_moves(trainer: Trainer) -> None:
    """Other slices than of the version before, other tensors: an anchor, and then patches again."""
    state = {"expert": torch.arange(300.0), "norm": torch.ones(20)}
    store = LocalStore(trainer.folder / "store-of-moves")
    follower = followed(store)
    with ShardedPublisher(store, stream="policy", threads=1) as publisher:
        for seed, (rank, more, reason) in enumerate(
            [
                (0, 0, ""),
                (0, 0, ""),
                (1, 0, "other slices"),
                (1, 0, ""),
                (1, 1, "'more'"),
                (1, 1, ""),
            ]
        ):
            step(state, seed)
            whole = state | ({"more": torch.zeros(5)} if more else {})
            mine = {
                name: tensor
                for name, tensor in whole.items()
                if name != "expert" or trainer.rank == rank
            }
            published = publisher.publish(mine)
            assert (published.changed is None) == (seed == 0 or bool(reason))
            assert reason in published.reason
            require_equal(follower, whole, published)


def ties(trainer: Trainer) -> None:
    """A head that is the embedding: stored once, whatever the number of rows that a rank has."""
    model = sharded(init_device_mesh("cpu", (trainer.size,)), rows=3, tied=True)

    def whole(state: State) -> State:
        gathered_ones = gathered(state)
        return gathered_ones | {"head.weight": gathered_ones["embed.weight"]}

    published = followed_for(trainer, "ties", model.state_dict, whole)[-1]
    assert published.elements == sum(p.numel() for p in policy(rows=3, tied=True).parameters()) + 1


def a_compute_dtype(trainer: Trainer) -> None:
    """FP32 parameters are published as BF16, those that are moved, too."""

    def cast(state: State) -> State:
        return {
            n: t.bfloat16() if t.dtype == torch.float32 else t for n, t in gathered(state).items()
        }

    mesh = init_device_mesh("cpu", (trainer.size,))
    model = policy(dtype=torch.float32)
    parallelize_module(model.blocks[0], mesh, COLUMNS)
    fully_shard(model.blocks[1], mesh=mesh)
    followed_for(trainer, "a_compute_dtype", model.state_dict, cast, dtype="BF16")


def refusals(trainer: Trainer) -> None:
    """What cannot be published is refused on all ranks, in words, and the next call works."""
    mesh = init_device_mesh("cpu", (trainer.size,))
    mine = {"mine": torch.ones(3 + trainer.rank), "all": torch.ones(4)}
    half = DTensor.from_local(
        torch.ones(2, 4), mesh, [Shard(0)], shape=(5, 4), stride=(4, 1), run_check=False
    )
    store = LocalStore(trainer.folder / "store-of-refusals")
    with ShardedPublisher(store, stream="policy", threads=1) as publisher:
        for state, error, words in (
            (mine, StateMismatch, "'mine' is F32"),
            (
                {"sum": DTensor.from_local(torch.ones(2), mesh, [Partial()])},
                UnsupportedTensor,
                r"Partial\(sum\)",
            ),
            ({"half": half}, UnsupportedTensor, "'half'"),
            ({"strings": "no tensor"} if trainer.rank else {}, UnsupportedTensor, "'strings'"),
            ("no mapping" if trainer.rank == 0 else {}, InputError, "not a mapping"),
        ):
            with pytest.raises(error, match=words):
                publisher.publish(state)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="metadata"):
            publisher.publish({}, metadata={"a": object()} if trainer.rank == 1 else {})  # type: ignore[dict-item]
        published = publisher.publish({"all": mine["all"]})
        require_equal(followed(store), {"all": mine["all"]}, published)
    with pytest.raises(RankLost, match="closed"):
        publisher.publish({"all": mine["all"]})


def test_two_ranks() -> None:
    together(
        all_pass,
        2,
        fsdp2,
        columns,
        ties,
        stages_and_experts,
        a_tensor_that_moves,
        refusals,
        seconds=60,
    )


def test_four_ranks() -> None:
    cases = (
        leaves_that_ranks_share,
        replicas,
        columns_and_rows,
        any_placement,
        ties,
        a_compute_dtype,
    )
    together(all_pass, 4, *cases, seconds=90)


def test_six_ranks() -> None:
    together(all_pass, 6, ranks_without_a_row, seconds=60)


def test_one_rank_writes_what_a_publisher_does() -> None:
    together(all_pass, 1, fsdp2)
