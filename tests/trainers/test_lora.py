"""Merging adapters aside: right to the bit, and the base's bits stay, however often it is done."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from pulse_rl import state_root
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.frameworks.weights import policy_weights
from tests.trainers.support import adapted, cast, saved_names, tiny

TARGETS = ["q_proj", "v_proj", "down_proj"]


def made(dtype: torch.dtype = torch.bfloat16, **config: Any) -> Any:
    whole = {"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **config}
    return adapted(tiny(dtype), LoraConfig(**whole))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_after_50_merges_the_base_has_the_bits_that_it_had() -> None:
    model = made()
    before = bits(model)
    roots = {state_root(policy_weights(model, "BF16")) for _ in range(50)}
    assert len(roots) == 1
    assert unchanged(model, before)
    model.merge_adapter()
    model.unmerge_adapter()
    assert not unchanged(model, before), "PEFT's own way no longer drifts: merge as it does"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"modules_to_save": ["norm"]},
        {"lora_bias": True, "target_modules": ["q_proj"]},
    ],
    ids=str,
)
def test_what_is_published_is_what_peft_merges_in_fp32(
    dtype: torch.dtype, config: dict[str, Any]
) -> None:
    model = made(dtype, **config)
    before = bits(model)
    weights = policy_weights(model)
    assert unchanged(model, before)
    whole = copy.deepcopy(model).float().merge_and_unload().state_dict()
    assert weights.keys() == saved_names(whole)
    for name, tensor in weights.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, whole[name].to(dtype)), name
    cast_weights = policy_weights(model, "BF16")
    if dtype == torch.float32:
        changed = [name for name in cast_weights if cast_weights[name].dtype == torch.bfloat16]
        assert changed
        assert state_root(cast({n: cast_weights[n] for n in changed})) == state_root(
            cast({n: whole[n] for n in changed})
        )


def test_an_adapter_on_one_of_two_tied_tensors_unties_them_as_the_forward_pass_does() -> None:
    model = made(torch.float32, target_modules=["q_proj", "embed_tokens"])
    plain = tiny(torch.float32, seed=2)
    plain.lm_head.weight = nn.Parameter(torch.empty_like(plain.lm_head.weight))
    plain.load_state_dict(policy_weights(model))
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_several_adapters_and_one_that_is_merged_already() -> None:
    model = made()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    both = (
        copy.deepcopy(model)
        .float()
        .merge_and_unload(adapter_names=["default", "other"])
        .state_dict()
    )
    weights = policy_weights(model)
    assert weights.keys() == saved_names(both)
    assert all(
        torch.equal(tensor, both[name].to(torch.bfloat16)) for name, tensor in weights.items()
    )
    merged = made(torch.float32)
    expected = state_root(policy_weights(merged))
    merged.merge_adapter()
    assert state_root(policy_weights(merged)) == expected


@pytest.mark.parametrize("config", [{}, {"use_dora": True}], ids=str)
def test_layers_that_fsdp2_shards_one_by_one(config: dict[str, Any], alone: None) -> None:
    """An FSDP2 unit for each adapted layer, and one for a part of it: their classes refuse to be
    copied."""
    model = made(torch.float32, **config)
    expected = state_root(cast(policy_weights(model)))
    for name, module in list(model.named_modules()):
        if name.endswith(("q_proj", "down_proj", "v_proj.lora_A.default")):
            fully_shard(module)
    fully_shard(model)
    tokens = torch.arange(3, 19)[None]
    for _ in range(2):
        assert state_root(policy_weights(model, "BF16")) == expected
        model(input_ids=tokens, labels=tokens).loss.backward()


def test_adapters_without_a_peft_model_around_them() -> None:
    from peft import inject_adapter_in_model

    model = tiny()
    names = saved_names(model.state_dict())
    inject_adapter_in_model(LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False), model)
    assert set(policy_weights(model)) == names


class Experts(nn.Module):
    """Weights of two experts in one parameter, and a gate that is a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 8, 8))
        self.gate = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("inner", "config"),
    [
        (nn.MultiheadAttention(8, 2), {"target_modules": ["0"]}),
        (Experts(), {"target_modules": ["gate"], "target_parameters": ["0.weights"]}),
    ],
    ids=["attention", "experts"],
)
def test_adapters_within_what_is_adapted_are_refused(
    inner: nn.Module, config: dict[str, Any]
) -> None:
    model = get_peft_model(nn.Sequential(inner), LoraConfig(r=2, init_lora_weights=False, **config))
    with pytest.raises(UnsupportedTensor, match="'0' has adapters within"):
        policy_weights(model)


def test_what_cannot_be_merged_is_refused() -> None:
    prompts = get_peft_model(
        tiny(), PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    )
    with pytest.raises(UnsupportedTensor, match="PREFIX_TUNING"):
        policy_weights(prompts)
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        quantized = made()
        layer = quantized.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        layer.weight = nn.Parameter(torch.zeros(64, 64).to(dtype), requires_grad=False)
        with pytest.raises(UnsupportedTensor, match=f"{dtype} weights"):
            policy_weights(quantized)
