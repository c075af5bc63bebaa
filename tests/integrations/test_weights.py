"""The policy's weights of a model in training, without any trainer: names, shards, and the density
to expect."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pulse_rl import MemoryStore, Publisher, State, Subscriber, state_root
from pulse_rl.errors import InputError, UnsupportedTensor
from pulse_rl.frameworks.weights import expected_density, is_sharded, policy_weights


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, dtype=dtype)
        self.module = nn.Linear(32, 32, dtype=dtype)
        self.head = nn.Linear(32, 64, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(self.embed(tokens)))


class Compiled(nn.Module):
    """The shape of what torch.compile returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


class Shard(torch.Tensor):
    """A part that knows how to become whole, as a DTensor does."""

    def full_tensor(self) -> torch.Tensor:
        part = self.as_subclass(torch.Tensor)
        return torch.cat([part, part])


def sharded(model: nn.Module) -> nn.Module:
    model.embed.weight = nn.Parameter(torch.randn(4, 8).as_subclass(Shard))
    model.head.weight = model.embed.weight
    return model


def test_wrappers_leave_no_trace() -> None:
    model = Model()
    names = list(model.state_dict())
    assert list(policy_weights(Compiled(model))) == names
    model.embed = Compiled(model.embed)
    assert list(policy_weights(model)) == names
    assert "module.weight" in names, "a part of the model that is called as DDP's wrapper is"


def test_what_is_whole_is_the_model_s_own_memory() -> None:
    model = Model()
    weights = policy_weights(model, "BF16")
    assert {n: t.data_ptr() for n, t in weights.items()} == {
        n: t.data_ptr() for n, t in model.state_dict().items()
    }
    assert not any(tensor.requires_grad for tensor in weights.values())


def test_shards_are_gathered_once_cast_and_still_tied() -> None:
    model = sharded(Model())
    assert is_sharded(model)
    assert not is_sharded(Model())
    weights = policy_weights(model, "bf16")
    whole = model.embed.weight.full_tensor()
    assert torch.equal(weights["embed.weight"], whole.to(torch.bfloat16))
    assert weights["head.weight"] is not model.head.weight
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    assert policy_weights(model)["embed.weight"].dtype == torch.float32
    assert policy_weights(model, keep=False) == {}


@pytest.mark.slow
def test_what_fsdp2_has_left_whole_is_still_sharded() -> None:
    """The root keeps its parameters whole after a forward pass that no backward pass follows."""
    from torch.distributed.fsdp import fully_shard  # a second, which a quick run has not

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Model()
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fully_shard(model)
        with torch.no_grad():
            model(torch.arange(3))
        assert not hasattr(model.module.weight, "full_tensor")
        assert is_sharded(model)
        weights = policy_weights(model)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    finally:
        dist.destroy_process_group()


def test_pieces_that_look_whole_are_refused() -> None:
    model = Model()
    model.module.weight.ds_id = 7
    with pytest.raises(UnsupportedTensor, match="ZeRO-3"):
        policy_weights(model)


def test_an_unknown_compute_dtype_is_refused() -> None:
    with pytest.raises(InputError):
        policy_weights(Model(), "F32")


@pytest.mark.parametrize("lr", [1e-7, 1e-6, 1e-5, 1e-3, 1.0])
def test_the_density_to_expect_is_that_of_random_updates(lr: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(512, 512)
    nn.init.normal_(model.weight, std=0.02)
    nn.init.normal_(model.bias, std=0.02)
    before = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    expected = expected_density(model, lr)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += lr * torch.randn_like(parameter).sign()
    after = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    elements = sum(t.numel() for t in before.values())
    assert changed / elements == pytest.approx(expected, rel=0.1, abs=2e-4)


def test_frozen_parameters_are_expected_to_stay_and_narrow_ones_to_absorb() -> None:
    model = nn.Linear(100, 100, bias=False)
    nn.init.constant_(model.weight, 1.5)
    assert expected_density(model, 1.0) == 1.0
    model.bfloat16()
    half = torch.finfo(torch.bfloat16).eps / 2  # half a rounding step of weights from 1 to 2
    assert expected_density(model, half * 0.9) == 0.0
    assert expected_density(model, half) == 1.0
    model.requires_grad_(False)
    assert expected_density(model, 1.0) == 0.0


def test_a_publisher_takes_a_module_by_the_names_and_ties_of_its_checkpoint() -> None:
    """Also behind a wrapper, and by `submit`; a state is what it was at the call."""
    model, store = Model(), MemoryStore()
    with Publisher(MemoryStore(), stream="s") as publisher:
        expected = publisher.publish(policy_weights(model), dtype="BF16").root
    with Publisher(store, stream="s") as publisher, Subscriber(store, stream="s") as worker:
        assert publisher.publish(model, dtype=torch.bfloat16).root == expected
        done = publisher.submit(Compiled(model), dtype="BF16").result()
        assert (done.root, done.changed) == (expected, 0)
        worker.sync()
        assert worker.root == expected
        assert worker.state.aliases == {"head.weight": "embed.weight"}
    assert state_root(model) == state_root(model.state_dict())
    assert State.of(model).read("embed.weight").ctypes.data == model.embed.weight.data_ptr()


def test_a_publisher_refuses_a_sharded_module() -> None:
    with pytest.raises(UnsupportedTensor, match="sharded over ranks") as caught:
        Publisher(MemoryStore(), stream="s").publish(sharded(Model()))
    assert "PulseCallback" in caught.value.hint
