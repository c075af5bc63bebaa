"""The adapter as a small stream of its own, and as a folder on the other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import TrainerCallback

from pulse_rl import MemoryStore, Subscriber
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.frameworks.transformers import PulseCallback
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
