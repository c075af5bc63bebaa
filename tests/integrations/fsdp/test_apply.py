"""Sharded models follow a stream: evaluators, reference models, rollouts that share one model."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pulse_rl import LocalStore, MemoryStore, Publisher, Subscriber
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.frameworks import torch as torch_integration
from pulse_rl.frameworks.torch import apply_
from tests.support.sharded import bits, gathered, policy, step
from tests.support.states import present
from tests.support.trainers import Trainer, each, together

pytestmark = pytest.mark.slow
VERSIONS = 6


def followed_by(trainer: Trainer, name: str, model: nn.Module) -> None:
    """Each of the versions that rank 0 publishes is in the model, whole, and its outputs are those
    of a plain one."""
    store, plain = LocalStore(trainer.folder / f"store-of-{name}"), policy()
    publisher = Publisher(store, stream="policy") if trainer.rank == 0 else None
    subscriber = Subscriber(store, stream="policy")
    ids = torch.arange(8).reshape(2, 4)
    for version in range(VERSIONS):
        step(plain.state_dict(), version)
        if publisher:
            publisher.publish(plain.state_dict(), anchor=version == 3)
        trainer.barrier(f"{name} published {version}", tuple(range(trainer.size)))
        update = present(subscriber.sync())
        assert update.version == version
        # Every other one, the first and whole one too, as on a GPU: the CPU is a stand-in.
        with patch.object(torch_integration, "_is_on_cuda", lambda _, even=version % 2 == 0: even):
            apply_(model, update)
        whole, expected = gathered(model.state_dict()), plain.state_dict()
        assert all(torch.equal(bits(whole[key]), bits(expected[key])) for key in expected)
        with torch.no_grad():  # which leaves the parameters of an FSDP2 root whole
            torch.testing.assert_close(whole_output(model(ids)), plain(ids), rtol=0.05, atol=0.05)
    assert update.acknowledged


def whole_output(output: Any) -> torch.Tensor:
    return output.full_tensor() if isinstance(output, DTensor) else output


def fsdp2(trainer: Trainer) -> None:
    model = policy()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    followed_by(trainer, "fsdp2", model)


def tensor_parallel(trainer: Trainer) -> None:
    mesh, model = init_device_mesh("cpu", (trainer.size,)), policy()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    followed_by(trainer, "tensor_parallel", model)


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_models_follow(size: int) -> None:
    cases = [fsdp2, tensor_parallel]
    assert together(each, size, cases, size) == [[]] * size


def sums_are_refused(trainer: Trainer) -> None:
    """A rank cannot write its part of a sum that is still to be made."""
    store = MemoryStore()
    with Publisher(store, stream="policy") as publisher:
        publisher.publish({"w": torch.zeros(4)})
    update = present(Subscriber(store, stream="policy").sync())
    partial = DTensor.from_local(
        torch.ones(4), DeviceMesh("cpu", list(range(trainer.size))), [Partial()]
    )
    with pytest.raises(UnsupportedTensor, match="Partial"):
        apply_({"w": partial}, update)
    assert torch.equal(partial.to_local(), torch.ones(4))


def test_sums_are_refused() -> None:
    assert together(each, 2, [sums_are_refused], 2) == [[]] * 2
