"""States as trainers have them at hand: tied in another order, wrapped, wider than what the workers
compute in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pulse_rl import Bits, MemoryStore, Publisher, Subscriber, state_root, unwrapped
from pulse_rl.errors import InputError, StateMismatch, UnsupportedTensor
from pulse_rl.events import BaselineRestored, Event, Hint
from pulse_rl.frameworks.torch import apply_
from tests.support.publishers import FoldingPublisher
from tests.support.states import Rng, mutated, present, publish_each, snapshot, taken, weights
from tests.support.stores import FaultyStore


def notices(events: list[Event]) -> list[str]:
    return [event.kind for event in events if isinstance(event, Hint)]


# -- lazy modules


@pytest.mark.parametrize(
    "module", [nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)], ids=["parameter", "buffer"]
)
def test_a_lazy_module_is_refused_with_what_to_do(module: nn.Module) -> None:
    publisher = Publisher(MemoryStore(), stream="s")
    with pytest.raises(
        UnsupportedTensor, match=r"'(weight|running_mean)' is not initialized"
    ) as caught:
        publisher.publish(module.state_dict())
    assert "forward pass" in caught.value.hint
    module(torch.zeros(2, 5))
    assert publisher.publish(module.state_dict()).version == 0


def test_an_object_with_a_state_dict_is_told_to_give_it() -> None:
    optimizer: Any = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(InputError, match="not a state") as caught:
        Publisher(MemoryStore(), stream="s").publish(optimizer)
    assert "state_dict()" in caught.value.hint


# -- ties


def tied(tensor: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, tensor)


def test_the_order_of_tied_names_makes_no_anchor(rng: Rng) -> None:
    store, first, other = MemoryStore(), weights(rng, 500), weights(rng, 40)
    publisher, subscriber = Publisher(store, stream="s"), Subscriber(store, stream="s")
    publisher.publish(tied(first, "embed", "head") | {"norm": other})
    taken(subscriber)
    second, third = (Bits(first.array ^ np.uint16(bit), "BF16") for bit in (1, 2))
    for tensor, names in (
        (second, ("head", "embed")),
        (third, ("embed", "head")),
        (first, ("head", "embed")),
    ):
        done = publisher.publish({"norm": other} | tied(tensor, *names))
        update = taken(subscriber)
        assert (done.changed, done.anchored, done.reason) == (500, False, "")
        assert update is not None
        assert update.aliases == {"head": "embed"}
        assert update.changed == 500
        assert snapshot(subscriber.state) == snapshot(
            {"norm": other} | tied(tensor, "embed", "head")
        )


def test_a_new_alias_that_comes_first_makes_no_anchor(rng: Rng) -> None:
    store, tensor = MemoryStore(), weights(rng, 50)
    publisher = Publisher(store, stream="s")
    publisher.publish({"b": tensor})
    assert publisher.publish(tied(tensor, "a", "b", "c")).changed == 0
    assert publisher.publish(tied(tensor, "c", "b")).changed == 0
    assert Subscriber(store, stream="s").sync().aliases == {"c": "b"}  # type: ignore[union-attr]
    saved = publisher.publish({"b": tensor})  # as safetensors names it
    assert (saved.changed, saved.reason) == (0, "")


def test_ties_that_change_are_an_anchor_that_says_why(rng: Rng) -> None:
    tensor = weights(rng, 50)
    publisher = Publisher(MemoryStore(), stream="s")
    assert publisher.publish(tied(tensor, "embed", "head")).reason == ""
    untied = publisher.publish({"embed": tensor, "head": Bits(tensor.array.copy(), "BF16")})
    assert untied.anchored
    assert untied.reason == "anchor: tensor 'head' is not tied to 'embed' any more"
    again = publisher.publish(tied(tensor, "head", "embed"))
    assert again.anchored
    assert again.reason == "anchor: tensor 'embed' is tied to 'head' now"
    assert (
        "'norm' is not in the version before"
        in publisher.publish({"head": tensor, "norm": weights(rng, 3)}).reason
    )
    assert (
        "BF16 [50]"
        in publisher.publish({"head": weights(rng, 5, 10), "norm": weights(rng, 3)}).reason
    )


def test_a_restarted_trainer_with_another_order_of_tied_names_matches(rng: Rng) -> None:
    store, tensor = FaultyStore(MemoryStore()), weights(rng, 50)
    Publisher(store, stream="s").publish(tied(tensor, "embed", "head"))
    events: list[Event] = []
    store.calls.clear()
    done = Publisher(store, stream="s", on_event=events.append).publish(
        tied(tensor, "head", "embed")
    )
    assert [event.how for event in events if isinstance(event, BaselineRestored)] == ["matched"]
    assert done.changed == 0
    assert not [name for call, name in store.calls if call == "get" and "payloads" in name]


# -- wrappers


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 2)])


@pytest.mark.slow  # the first torch.compile imports much
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrapped_modules_are_published_and_applied_under_plain_names(store: MemoryStore) -> None:
    trained, policy = Policy(), Policy()
    for model in (trained, policy):
        model.layers[0] = torch.compile(model.layers[0])  # type: ignore[assignment]
    wrapped = nn.DataParallel(torch.compile(trained))  # type: ignore[arg-type]
    names = list(wrapped.state_dict())
    assert "module._orig_mod.layers.0._orig_mod.weight" in names
    plain = unwrapped(wrapped.state_dict())
    assert list(plain) == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    Publisher(store, stream="s").publish(plain)
    update = present(Subscriber(store, stream="s").sync())
    before = snapshot(policy.state_dict())
    with pytest.raises(StateMismatch, match="no tensor") as caught:
        apply_(policy, update)
    assert "pulse_rl.unwrapped" in caught.value.hint
    assert snapshot(policy.state_dict()) == before
    apply_(unwrapped(policy.state_dict()), update)
    assert snapshot(unwrapped(policy.state_dict())) == snapshot(plain)


def test_what_is_no_wrapper_keeps_its_name(rng: Rng) -> None:
    names = ["module.a", "head.module.b", "_orig_mod", "module_list.c"]
    assert list(unwrapped(dict.fromkeys(names, 0))) == names
    assert list(unwrapped({"module.module.a": 0, "module.b": 0})) == ["module.a", "b"]
    assert unwrapped({}) == {}
    with pytest.raises(InputError, match=r"two tensors would be called 'a\.w'"):
        unwrapped({"a.w": 0, "a._orig_mod.w": 1})
    with pytest.raises(InputError, match="mapping"):
        unwrapped(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be a string"):
        unwrapped({1: 0})  # type: ignore[dict-item]


def test_wrapped_names_are_told_to_both_sides_once(rng: Rng) -> None:
    store, events, tensor = MemoryStore(), list[Event](), weights(rng, 6)
    publisher = Publisher(store, stream="s", on_event=events.append)
    for _ in range(3):
        publisher.publish({"_orig_mod.weight": tensor})
    assert notices(events) == ["wrapped_names"]
    update = present(Subscriber(store, stream="s").sync())
    with pytest.raises(StateMismatch) as caught:
        apply_({"weight": torch.zeros(6, dtype=torch.bfloat16)}, update)
    assert "let it publish pulse_rl.unwrapped" in caught.value.hint
    events.clear()
    Publisher(MemoryStore(), stream="s", on_event=events.append).publish(
        {"weight": tensor, "module.b": tensor}
    )
    assert notices(events) == []


def test_fused_experts_are_named_once(rng: Rng) -> None:
    """A plain state_dict of a mixture model in transformers 5."""
    events: list[Event] = []
    experts = torch.zeros(2, 4, 3, dtype=torch.bfloat16)
    apart = {
        "mlp.experts.0.up_proj.weight": experts[0],
        "mlp.experts.conv": experts[0],
        "experts": experts,
    }
    with Publisher(MemoryStore(), stream="apart", on_event=events.append) as publisher:
        publisher.publish(apart)
    assert notices(events) == []
    with Publisher(MemoryStore(), stream="fused", on_event=events.append) as publisher:
        for _ in range(2):
            publisher.publish({"layers.0.mlp.experts.gate_up_proj": experts, "norm": experts[0, 0]})
    (notice,) = [event for event in events if isinstance(event, Hint)]
    assert notice.kind == "fused_names"
    assert "'layers.0.mlp.experts.gate_up_proj'" in notice.reason
    assert "checkpoint_weights(model)" in notice.hint


# -- compute dtypes


def test_dense_patches_of_fp32_are_told_once(rng: Rng) -> None:
    events: list[Event] = []
    publisher = Publisher(MemoryStore(), stream="s", on_event=events.append)
    for _ in range(3):
        publisher.publish({"w": rng.standard_normal(100, np.float32)})
    (notice,) = [event for event in events if isinstance(event, Hint)]
    assert (notice.kind, notice.version) == ("wide_dtype", 1)
    assert "100%" in notice.reason
    assert 'dtype="BF16"' in notice.hint


def test_no_other_patch_is_told_to_narrow(rng: Rng) -> None:
    small, dense, sparse = np.zeros(10, np.float32), weights(rng, 100), np.zeros(100, np.float32)
    for states in (
        [{"b": small + i, "w": dense} for i in range(2)],  # a small FP32 part
        [{"w": Bits(dense.array ^ np.uint16(i), "BF16")} for i in range(2)],
        [{"w": np.where(np.arange(100) < 50 * i, np.float32(1), sparse)} for i in range(2)],
        [{"w": np.arange(100) + i} for i in range(2)],
    ):
        events: list[Event] = []
        publish_each(Publisher(MemoryStore(), stream="s", on_event=events.append), states)
        assert "wide_dtype" not in notices(events)


@pytest.mark.parametrize("dtype", ["BF16", "f16"])
def test_a_state_is_cast_on_the_way(dtype: str, store: MemoryStore) -> None:
    model = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 40)).double()
    model[0].float()
    with torch.no_grad():
        model[0].bias[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e30])
    model.register_buffer("steps", torch.arange(3))
    model.tied = model[0].weight  # type: ignore[assignment]
    torch_dtype = {"BF16": torch.bfloat16, "f16": torch.float16}[dtype]
    publisher, subscriber = Publisher(store, stream="s"), Subscriber(store, stream="s")
    for step in range(3):
        done = publisher.publish(model.state_dict(), dtype=dtype)
        subscriber.sync()
        assert done.anchored == (step == 0)
        assert subscriber.state.aliases
        state = subscriber.state
        for name, tensor in model.state_dict().items():
            expected = tensor.to(torch_dtype) if tensor.is_floating_point() else tensor
            bits = torch.from_numpy(state.read(name).view(f"i{expected.itemsize}").copy())
            got = bits.view(expected.dtype).view(expected.shape)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-3)
    assert state_root(state) == subscriber.root


def test_a_cast_state_is_a_state_like_another(rng: Rng) -> None:
    """The same root, patches and resume as of a state that the caller has cast."""
    store, wide = MemoryStore(), rng.standard_normal(3000, np.float32)
    Publisher(store, stream="s").publish({"w": torch.from_numpy(wide).bfloat16()})
    events: list[Event] = []
    publisher = Publisher(store, stream="s", on_event=events.append)
    assert publisher.publish({"w": wide}, dtype="BF16").changed == 0
    assert [event.how for event in events if isinstance(event, BaselineRestored)] == ["matched"]
    wide[:9] *= 2
    assert publisher.publish({"w": wide}, dtype="BF16").changed == 9
    assert notices(events) == []


NONE_TO_COMPUTE_IN = [torch.float32, torch.int8, torch.float8_e4m3fnuz]


@pytest.mark.parametrize("dtype", ["fp16", "F32", "float32", "I8", "", 16, *NONE_TO_COMPUTE_IN])
def test_what_is_no_compute_dtype_is_refused(dtype: Any, rng: Rng) -> None:
    with pytest.raises(InputError, match="unknown compute dtype") as caught:
        Publisher(MemoryStore(), stream="s").publish({"w": weights(rng, 3)}, dtype=dtype)
    assert "BF16, F16, F8_E4M3, F8_E5M2, bfloat16, float16" in caught.value.hint


def test_other_versions_of_a_wide_state_are_patches(rng: Rng) -> None:
    """Folds read cast tensors as well."""
    first = {"w": Bits(rng.standard_normal(2000, np.float32).view(np.uint32), "F32")}
    second = mutated(rng, first, 0.01)
    publisher = FoldingPublisher(MemoryStore(), stream="s", folds=(2,))
    for state in (first, second, first, second):
        done = publisher.publish(state, dtype="BF16")
    publisher.wait()
    assert done.changed is not None
