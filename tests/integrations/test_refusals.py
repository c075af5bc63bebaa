"""Targets that no update can be written into are told before the first write; odd ones that can be
are written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pulse_rl import Bits, PulseError, State, Update
from pulse_rl.errors import InputError, StateMismatch, UnsupportedTensor
from pulse_rl.frameworks import torch as integration
from pulse_rl.frameworks.torch import apply_, to_torch
from tests.integrations.test_torch import updates
from tests.support.arrays import misaligned
from tests.support.states import Rng, bits, mutated, snapshot

SHAPE = (3, 4)


class Wrapper(torch.Tensor):
    """A tensor that is made of another one, as quantization libraries make them; it has no memory
    itself."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.held if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))


def freed() -> torch.Tensor:
    """As sharded training frees a gathered parameter."""
    tensor = torch.zeros(SHAPE)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut() -> torch.Tensor:
    tensor = torch.zeros(SHAPE)
    tensor.untyped_storage().resize_(4 * 11)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(SHAPE)


def quiet(make: Callable[[], Any]) -> Any:
    """Some kinds of tensors warn that they are new, or old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


TARGETS: dict[str, tuple[type[PulseError], Callable[[], Any]]] = {
    "expanded": (StateMismatch, lambda: torch.zeros(1, 4).expand(SHAPE)),
    "expanded scalar": (StateMismatch, lambda: torch.zeros(()).expand(SHAPE)),
    "overlapping": (StateMismatch, lambda: torch.zeros(20).as_strided(SHAPE, (1, 1))),
    "overlapping windows": (StateMismatch, lambda: torch.zeros(20).unfold(0, 4, 3)[:3]),
    "meta": (UnsupportedTensor, lambda: torch.zeros(SHAPE, device="meta")),
    "sparse": (UnsupportedTensor, lambda: torch.zeros(SHAPE).to_sparse()),
    "compressed rows": (UnsupportedTensor, lambda: quiet(lambda: torch.eye(4)[:3].to_sparse_csr())),
    "quantized": (
        UnsupportedTensor,
        lambda: quiet(lambda: torch.quantize_per_tensor(torch.zeros(SHAPE), 1.0, 0, torch.qint8)),
    ),
    "nested": (
        UnsupportedTensor,
        lambda: quiet(lambda: torch.nested.nested_tensor([torch.zeros(4)] * 3)),
    ),
    "fake": (UnsupportedTensor, fake),
    "wrapper": (UnsupportedTensor, lambda: Wrapper(torch.zeros(SHAPE))),
    "freed": (UnsupportedTensor, freed),
    "cut": (UnsupportedTensor, cut),
    "lazy": (UnsupportedTensor, lambda: nn.LazyLinear(3).weight),
    "numpy": (UnsupportedTensor, lambda: np.zeros(SHAPE, np.float32)),
}


@pytest.fixture(params=["full", "patch"])
def update(request: pytest.FixtureRequest, rng: Rng) -> Update:
    """Of three tensors, of which "b" comes second."""
    old = {"a": bits(rng, "F32", 6), "b": bits(rng, "F32", *SHAPE), "c": bits(rng, "F32", 5)}
    full, patch = updates(old, mutated(rng, old, 0.5))
    return full if request.param == "full" else patch


def refused(update: Update, target: Any, error: type[PulseError]) -> PulseError:
    others = {"a": torch.zeros(6), "c": torch.zeros(5)}
    with pytest.raises(error, match="'b'") as caught:
        apply_({"a": others["a"], "b": target, "c": others["c"]}, update)
    assert type(caught.value) is error
    assert not any(t.any() for t in others.values())
    return caught.value


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_without_memory_of_its_own_is_told_before_the_first_write(
    name: str, update: Update
) -> None:
    error, make = TARGETS[name]
    refused(update, make(), error)


def test_what_is_no_model_and_what_is_no_update(update: Update) -> None:
    for model in (None, 1, [("b", torch.zeros(SHAPE))], "b"):
        with pytest.raises(InputError, match="neither a module nor a mapping"):
            apply_(model, update)  # type: ignore[arg-type]
    for other in (None, {}, update.tensors):
        with pytest.raises(InputError, match="not an Update"):
            apply_({}, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["nowhere", "", None, 1.5, True, [], 1 << 70])
def test_what_is_no_device(device: Any) -> None:
    """A number was taken for a dtype: the tensors were cast."""
    with pytest.raises(InputError, match="not a device"):
        to_torch(State.of({"w": np.zeros(3, np.float32)}), device=device)


def test_what_is_no_state_has_no_tensors() -> None:
    with pytest.raises(InputError, match="not a State"):
        to_torch({"w": torch.zeros(3)})  # type: ignore[arg-type]


def test_a_lazy_module_is_told_what_to_do(rng: Rng) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)
            self.b = nn.LazyLinear(3)

    trained, policy = Policy(), Policy()
    trained.b(torch.zeros(1, 5))
    (full,) = updates(trained.state_dict())
    before = snapshot(policy.a.state_dict())
    with pytest.raises(UnsupportedTensor, match=r"'b\.(bias|weight)' is not initialized") as caught:
        apply_(policy, full)
    assert "forward pass" in caught.value.hint
    assert snapshot(policy.a.state_dict()) == before
    policy.b(torch.zeros(1, 5))
    apply_(policy, full)
    assert snapshot(policy.state_dict()) == snapshot(trained.state_dict())


def test_a_tensor_without_elements_shares_nothing(rng: Rng) -> None:
    old = {"a": bits(rng, "F32", 6), "none": bits(rng, "F32", 3, 0)}
    full, _ = updates(old, mutated(rng, old, 0.5))
    model = {"a": torch.zeros(6), "none": torch.zeros(1, 0).expand(3, 0)}
    apply_(model, full)
    assert snapshot(model) == snapshot(old)


def in_inference_mode(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return make()


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "inference": lambda: in_inference_mode(lambda: torch.zeros(SHAPE)),
    "inference, transposed": lambda: in_inference_mode(lambda: torch.zeros(SHAPE[::-1]).T),
    "parameter": lambda: nn.Parameter(torch.zeros(SHAPE)),
    "channels last": lambda: torch.zeros(1, *SHAPE, 1).to(memory_format=torch.channels_last)[
        0, :, :, 0
    ],
    "a subclass": lambda: torch.zeros(SHAPE).as_subclass(type("Own", (torch.Tensor,), {})),
    "copied on write": lambda: torch._lazy_clone(torch.zeros(SHAPE)),
    "at an odd address": lambda: torch.frombuffer(
        misaligned(np.zeros(48, np.uint8)), dtype=torch.float32
    ).view(SHAPE),
    "negated": lambda: torch._neg_view(torch.zeros(SHAPE)),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inside inference mode"])
@pytest.mark.parametrize("name", ODD)
def test_odd_targets_are_written(name: str, inference: bool, rng: Rng) -> None:
    old = {"b": bits(rng, "F32", *SHAPE)}
    new = mutated(rng, old, 0.5)
    target = ODD[name]()
    for update, state in zip(updates(old, new), (old, new), strict=True):
        with torch.inference_mode(inference):
            apply_({"b": target}, update)
        assert snapshot({"b": target.detach().as_subclass(torch.Tensor)}) == snapshot(state)


def test_a_conjugate_view_gets_the_bits_that_it_shows(rng: Rng) -> None:
    values = rng.standard_normal((2, 3, 4), np.float32)
    old, new = ((v[:, :2] + 1j * v[:, 2:]).astype(np.complex64) for v in values.reshape(2, 3, 4))
    target = torch.zeros(3, 2, dtype=torch.complex64).conj()
    for update, state in zip(updates({"w": old}, {"w": new}), (old, new), strict=True):
        apply_({"w": target}, update)
        assert snapshot({"w": target}) == snapshot({"w": state})


def test_read_only_memory_is_written_where_the_system_lets_it() -> None:
    """torch does not know that numpy would refuse; `apply_` says so in its documentation."""
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    target = quiet(lambda: torch.from_numpy(array))
    (full,) = updates({"w": np.float32([1, 2, 3])})
    apply_({"w": target}, full)
    assert array.tolist() == [1, 2, 3]


def test_a_dtype_that_torch_lacks(monkeypatch: pytest.MonkeyPatch, rng: Rng) -> None:
    """An older torch has not all of them."""
    state = {"w": Bits(np.zeros(3, np.uint8), "F8_E8M0")}
    (full,) = updates(state)
    model = to_torch(State.of(state))
    monkeypatch.delitem(integration._TORCH, "F8_E8M0")
    with pytest.raises(StateMismatch, match="F8_E8M0"):
        apply_(model, full)
    with pytest.raises(UnsupportedTensor, match="F8_E8M0"):
        to_torch(State.of(state))
