"""The adapter as a small stream of its own, and as a folder on the other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, OFTConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import TrainerCallback

from pulse_rl import MemoryStore, Subscriber
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.frameworks.transformers import PulseCallback, checkpoint_weights
from pulse_rl.frameworks.weights import adapter_weights
from tests.trainers.support import tiny
from tests.trainers.test_trl import LORA, grpo


class Adapters(TrainerCallback):
    """Notes the adapter after each step as PEFT would save it, in BF16."""

    def __init__(self) -> None:
        self.saved: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = get_peft_model_state_dict(kwargs["model"])
        self.saved.append(
            {name: tensor.to(torch.bfloat16, copy=True) for name, tensor in found.items()}
        )

    on_step_end = on_train_begin


@pytest.mark.parametrize("extra", [{}, {"modules_to_save": ["norm"]}, {"use_dora": True}], ids=str)
def test_peft_loads_what_was_published_bit_for_bit(tmp_path: Path, extra: dict[str, Any]) -> None:
    store, witness = MemoryStore(), Adapters()
    config = LoraConfig(**{**LORA.to_dict(), **extra})
    callback = PulseCallback(store, stream="adapter", adapter=True, replace=False)
    trainer = grpo(
        tmp_path, [callback, witness], peft_config=config, config={"learning_rate": 1e-4}
    )
    trainer.train()
    subscriber = Subscriber(store, stream="adapter")
    for version, expected in enumerate(witness.saved):
        update = subscriber.sync(version)
        assert update.metadata["step"] == version
        folder = tmp_path / f"adapter-v{version}"
        subscriber.save(folder)
        update.acknowledge()
        loaded = PeftModel.from_pretrained(tiny(torch.bfloat16), folder)
        found = get_peft_model_state_dict(loaded)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name].bfloat16(), tensor) for name, tensor in expected.items())
        assert loaded.peft_config["default"].lora_alpha == config.lora_alpha
    assert len(witness.saved) == 5
    assert {tensor.dtype for tensor in expected.values()} == {torch.bfloat16}


def test_a_model_without_one_adapter_in_use_is_refused() -> None:
    with pytest.raises(UnsupportedTensor, match="no PEFT adapter"):
        adapter_weights(tiny())
    model = get_peft_model(tiny(), LORA)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnsupportedTensor, match="2 adapters"):
        adapter_weights(model)
    model.base_model.set_adapter("other")
    weights, config = adapter_weights(model)
    assert all("q_proj" in name for name in weights)
    assert '"r": 2' in config


def copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def refusal(model: Any) -> str:
    with pytest.raises(UnsupportedTensor) as caught:
        adapter_weights(model)
    assert "adapter=True" in caught.value.hint
    return str(caught.value)


def test_an_adapter_that_is_not_all_of_the_training_is_refused(tmp_path: Path) -> None:
    for init in ("pissa", "pissa_niter_4", "olora"):
        model = get_peft_model(tiny(), LoraConfig(**LORA.to_dict() | {"init_lora_weights": init}))
        assert "changes the base" in refusal(model)
        merged = copied(checkpoint_weights(model))
        assert equal(merged, model.merge_and_unload().state_dict())
    model = get_peft_model(tiny(), LORA)
    model.add_adapter("first", LORA)
    model.base_model.merge_adapter(["first"])
    assert "'first' is merged" in refusal(model)
    model = get_peft_model(tiny(), LORA)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    assert "norm.weight' is trained outside" in refusal(model)
    tiny().save_pretrained(tmp_path)
    grown = type(tiny()).from_pretrained(tmp_path)
    assert adapter_weights(get_peft_model(grown, LORA))[0]
    grown = type(tiny()).from_pretrained(tmp_path)
    grown.resize_token_embeddings(520)
    assert "520 tokens, and 512" in refusal(get_peft_model(grown, LORA))


@pytest.mark.parametrize("extra", [{}, {"modules_to_save": ["input_layernorm"]}], ids=str)
def test_checkpointed_layers_have_the_names_of_plain_ones(extra: dict[str, Any]) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    config = LoraConfig(**LORA.to_dict() | extra | {"init_lora_weights": False})
    model = get_peft_model(tiny(), config)
    merged, alone = copied(checkpoint_weights(model)), copied(get_peft_model_state_dict(model))
    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__.endswith("Layer"))
    for found, wanted in (checkpoint_weights(model), merged), (adapter_weights(model)[0], alone):
        assert found.keys() == wanted.keys()
        assert equal(found, wanted)


def test_what_has_no_merge_names_the_way_that_works() -> None:
    called = LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[1])
    model = get_peft_model(tiny(), called)
    with pytest.raises(UnsupportedTensor) as caught:
        checkpoint_weights(model)
    assert "adapter=True" in caught.value.hint
    assert adapter_weights(model)[0]
    rotated = get_peft_model(tiny(), OFTConfig(oft_block_size=4, target_modules=["q_proj"]))
    merged = copied(checkpoint_weights(rotated))
    assert equal(merged, rotated.merge_and_unload().state_dict())
