"""A trainer of several processes: FSDP2 or DDP inside, one trainer to the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pulse_rl import LocalStore, MemoryStore, PulseLoCo
from pulse_rl.errors import (
    InputError,
    NonFinite,
    RankLost,
    StateMismatch,
    StoreUnavailable,
    UnsupportedTensor,
)
from pulse_rl.loco import Round, StoreExchange
from tests.support.stores import FaultyStore
from tests.support.trainers import Group, Trainer, side_by_side, together

pytestmark = pytest.mark.slow
ROUNDS = 4
#: For what comes; nothing waits for it to pass.
SECONDS = 120.0


class Net(nn.Module):
    """Tensors of odd sizes, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down, self.frozen = nn.Linear(7, 26), nn.Linear(26, 5), nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))


def shard(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        fully_shard(model.get_submodule("up"))
        fully_shard(model)
    elif how == "replicas":
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        )
    elif how == "tensor parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model


class Descent(torch.optim.Optimizer):
    """The same bits for an element wherever it is in memory."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(p.float() - p.grad.float() * group["lr"])


def descent(model: nn.Module) -> Descent:
    return Descent([p for p in model.parameters() if p.requires_grad], {"lr": 3e-3})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, who: int, number: int) -> None:
    """The same gradients whether the model is sharded or not."""
    generator = torch.Generator().manual_seed(1000 * who + number)
    for p in model.parameters():
        if p.requires_grad:
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = (
                distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
                if isinstance(p, DTensor)
                else grad
            )
    optimizer.step()


def weights(model: nn.Module) -> bytes:
    whole = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in model.named_parameters()
    }
    return bits_of(whole)


def bits_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return b"".join(
        tensors[name].detach().view(torch.uint8).numpy().tobytes() for name in sorted(tensors)
    )


@dataclass
class Seen:
    """What a process saw: roots and weights by round, weights after each step, what the outer state
    was at the end."""

    roots: list[str] = field(default_factory=list)
    shown: list[bytes] = field(default_factory=list)
    weights: list[bytes] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


def run(trainer: Trainer, how: str, dtype: torch.dtype) -> Seen:
    """All processes but the last are one trainer, and the last one is another; without a way to
    shard each is one."""
    who = int(trainer.rank == trainer.size - 1)
    model, seen = Net().to(dtype), Seen()
    if how and not who:
        trainer.connect("site", tuple(range(trainer.size - 1)))
        model = shard(model, how)
    optimizer = descent(model)
    over = StoreExchange(
        str(trainer.folder / "run"),
        trainer="ab"[who],
        grace_seconds=SECONDS,
        timeout_seconds=SECONDS,
    )

    def on_round(done: Round) -> None:
        seen.roots.append(done.root)
        seen.shown.append(weights(model))

    with PulseLoCo(model, optimizer, sync_every=2, exchange=over, on_round=on_round) as loop:
        for number in range(2 * ROUNDS):
            step(model, optimizer, who, number)
            seen.weights.append(weights(model))
        with loop.global_weights():
            seen.weights.append(weights(model))
        state = loop.state_dict()
        random = ("run", "messages")  # an ID, and digests of what has a number at random in it
        seen.state = {
            k: bits_of(v) if isinstance(v, dict) else v for k, v in state.items() if k not in random
        }
        seen.shown.append(bits_of(loop.averaged_state()))
    seen.weights.append(weights(model))
    return seen


#: How a trainer is sharded, and the processes of it and of another one.
WAYS = {"": 2, "fsdp": 3, "ddp": 3, "replicas": 5, "tensor parallel": 5}


@pytest.mark.parametrize(
    ("dtype", "hows"),
    [(torch.float32, list(WAYS)), (torch.bfloat16, ["", "fsdp", "tensor parallel"])],
    ids=["fp32", "bf16"],
)
def test_a_sharded_trainer_is_one_trainer(dtype: torch.dtype, hows: list[str]) -> None:
    ways = {how: WAYS[how] for how in hows}
    found = side_by_side({how: Group(run, size, how, dtype) for how, size in ways.items()})
    plain = found.pop("")
    assert len(set(plain[0].roots)) == ROUNDS
    for how, processes in found.items():
        for process in processes[:-1]:
            expected = plain[0]
            if process is not processes[0]:  # these know how far they are
                expected = replace(
                    expected,
                    state={key: expected.state[key] for key in ("round", "inner_step")},
                    shown=[*expected.shown[:-1], b""],
                )
            assert process == expected, how
        assert processes[-1] == plain[1], how


def resumed(trainer: Trainer, folder: str) -> list[Any]:
    """Ranks 0 and 1 are a trainer that fails, rewinds, saves, ends, and comes back; rank 2 never
    fails."""
    who = int(trainer.rank == 2)
    found: list[Any] = []
    if not who:
        trainer.connect("site", (0, 1))

    def made() -> tuple[nn.Module, torch.optim.Optimizer, PulseLoCo]:
        model = Net()
        if not who:
            shard(model, "fsdp")
        optimizer = descent(model)
        over = StoreExchange(
            folder, trainer="ab"[who], grace_seconds=SECONDS, timeout_seconds=SECONDS
        )
        return model, optimizer, PulseLoCo(model, optimizer, sync_every=1, exchange=over)

    model, optimizer, loop = made()
    with loop:
        step(model, optimizer, who, 0)
        found.append(weights(model))
        if not who:
            before = weights(model)
            # One shard of one tensor is NaN: all ranks are told, and the trainer is as it was.
            with torch.no_grad():
                model.get_parameter("up.bias").to_local()[0] = (
                    torch.nan if trainer.rank == 1 else 0.0
                )  # type: ignore[operator]
            with pytest.raises(NonFinite, match=r"up\.bias"):
                step(model, optimizer, who, 1)
            loop.rewind()
            assert weights(model) == before
            state, optimizer_state = loop.state_dict(), optimizer.state_dict()
    if not who:
        model, optimizer, loop = made()
        loop.load_state_dict(state)
        optimizer.load_state_dict(optimizer_state)
    with loop:
        assert loop.round == 1
        trainer.barrier("back", (0, 1, 2))  # who has left is not waited for
        step(model, optimizer, who, 2)
        found.append(weights(model))
        with loop.global_weights():
            found.append(weights(model))
        if trainer.rank == 1:
            for call in (loop.global_state, loop.residual):
                with pytest.raises(InputError, match="first rank"):
                    call()
        else:
            assert bits_of(loop.global_state())[:8] in found[-1]
    return found


def test_errors_and_restarts_are_those_of_all_ranks(tmp_path: Path) -> None:
    one, two, other = together(resumed, 3, str(tmp_path / "run"))
    assert one == two
    assert one[-1] == other[-1], "all hold one theta"


def ended(trainer: Trainer, folder: str, how: str) -> str:
    """What a rank leaves with if, between two rounds, one of the two dies, fails, or makes a call
    alone."""
    trainer.connect("site")
    model = Net()
    shard(model, "fsdp")
    optimizer = descent(model)
    over = StoreExchange(folder, min_trainers=1, grace_seconds=0, timeout_seconds=SECONDS)
    try:
        with PulseLoCo(model, optimizer, sync_every=1, exchange=over) as loop:
            step(model, optimizer, 0, 0)
            if trainer.rank == 1 and how == "dies":
                os._exit(1)
            if trainer.rank == 1 and how == "fails":
                raise ZeroDivisionError
            if trainer.rank == 0 and how == "calls":
                with loop.global_weights():
                    pass
            step(model, optimizer, 0, 1)
    except (ZeroDivisionError, RankLost) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_dies_is_no_hang(tmp_path: Path) -> None:
    found = together(ended, 2, str(tmp_path / "run"), "dies", lost=(1,))
    assert "died" in found[0]


def test_a_rank_that_fails_alone_ends_the_others(tmp_path: Path) -> None:
    """And raises its own error."""
    one, other = together(ended, 2, str(tmp_path / "run"), "fails")
    assert one.startswith("RankLost")
    assert other.startswith("ZeroDivisionError")


def test_a_call_on_some_ranks_alone_ends_all(tmp_path: Path) -> None:
    for found in together(ended, 2, str(tmp_path / "run"), "calls"):
        assert "different calls" in found


def evaluated(trainer: Trainer, folder: str) -> None:
    trainer.connect("site")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(1, 4))  # FSDP2 keeps the weights of the outer module
    over = StoreExchange(folder, min_trainers=1, grace_seconds=0, timeout_seconds=SECONDS)

    def computes_with_its_weights() -> bool:
        (up, up_bias), (down, down_bias) = (
            [p.full_tensor() for p in layer.parameters()] for layer in model
        )
        expected = (torch.ones(1, 4) @ up.T + up_bias) @ down.T + down_bias
        return torch.allclose(model(torch.ones(1, 4)), expected, rtol=0, atol=1e-6)

    seen = []

    def on_round(done: Round) -> None:
        with torch.no_grad():
            seen.append(computes_with_its_weights())

    with PulseLoCo(model, optimizer, sync_every=1, exchange=over, on_round=on_round):
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(computes_with_its_weights())
    assert seen == [True] * 6


def test_the_next_forward_pass_has_the_weights_that_were_written(tmp_path: Path) -> None:
    """Also where FSDP2 has kept those of an evaluation."""
    together(evaluated, 2, str(tmp_path / "run"))


def apart(trainer: Trainer, folder: str) -> list[Any]:
    """What only some of the ranks hold: plain parameters beside shards, buffers, counters,
    errors."""
    trainer.connect("site")
    store, found = FaultyStore(LocalStore(folder)), list[Any]()

    def made() -> tuple[nn.Module, Descent, PulseLoCo]:
        model = Net()
        fully_shard(model.get_submodule("up"))
        optimizer = descent(model)
        over = StoreExchange(
            store, trainer="a", min_trainers=1, grace_seconds=0, timeout_seconds=SECONDS
        )
        return model, optimizer, PulseLoCo(model, optimizer, sync_every=2, exchange=over)

    model, optimizer, loop = made()
    with loop:
        step(model, optimizer, 0, 0)
        # 1. A round that the store does not take: the same error on all ranks, which go on
        # together.
        store.fail_on("put", "posts")
        with pytest.raises(StoreUnavailable):
            step(model, optimizer, 0, 1)
        found.append((loop.round, loop.inner_step))
        loop.rejoin()
        found.append((loop.round, loop.inner_step, weights(model)))
        step(model, optimizer, 0, 2)
        state = loop.state_dict()
        there = {name: t.clone() for name, t in model.state_dict().items()}
    # 2. Left in mid-round: all tensors keep their local steps, sharded or not.
    found.append(weights(model))
    model, optimizer, loop = made()
    model.load_state_dict(there)
    loop.load_state_dict(state)
    found.append(weights(model))
    # 3. Entered again, by all, after an error of the program.
    with suppress(ZeroDivisionError), loop:
        raise ZeroDivisionError
    with loop:
        step(model, optimizer, 0, 3)
        found.append((loop.round, weights(model)))
    # 4. Buffers must be the same on all ranks.
    model.get_buffer("scale").fill_(3 + trainer.rank)
    with pytest.raises(StateMismatch, match="scale"), loop:
        pass
    return [*found, there["scale"].tolist()]


def test_what_some_ranks_hold_is_that_of_all(tmp_path: Path) -> None:
    one, two = together(apart, 2, str(tmp_path / "run"))
    assert one == two
    failed, went_on, left, resumed_there, (entered, _), _ = one
    assert failed == (0, 2)
    assert went_on[:2] == (1, 0)
    assert left == resumed_there != went_on[2]
    assert entered == 2


def refused(trainer: Trainer) -> list[str]:
    trainer.connect("site")
    found = []

    def attempt(model: nn.Module, **settings: Any) -> None:
        optimizer = descent(model)
        with pytest.raises((UnsupportedTensor, StateMismatch)) as caught:
            PulseLoCo(model, optimizer, sync_every=1, **settings)
        found.append(str(caught.value))

    store = {"exchange": MemoryStore()}
    model = nn.Linear(6, 4)
    fully_shard(model)
    attempt(model)  # in a group, where each rank would be a trainer
    # Each rank has other experts under the same names.
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    with torch.no_grad():
        model[1].weight += trainer.rank
    fully_shard(model[0])
    attempt(model, **store)
    with pytest.raises(InputError, match="part of the model"):
        attempt(nn.Sequential(DistributedDataParallel(nn.Linear(6, 4)), nn.Linear(4, 4)), **store)
    attempt(FullyShardedDataParallel(nn.Linear(6, 4), device_id=torch.device("cpu")), **store)
    return found


def test_what_is_no_slice_of_one_model_is_refused() -> None:
    for found in together(refused, 2):
        assert ["sharded" in found[0], "1.weight" in found[1], "FSDP1" in found[2]] == [True] * 3, (
            found
        )
