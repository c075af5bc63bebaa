"""TRL's trainers with their defaults (FP32), in BF16, and with LoRA: followers hold the cast
weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from pulse_rl import MemoryStore, Published, Subscriber
from pulse_rl.frameworks.transformers import PulseCallback
from tests.trainers.support import (
    Merged,
    Witness,
    collect,
    common,
    followed,
    saved,
    saved_names,
    tokenizer,
)

LORA = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
)


def longest(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) + len(text) / 1000 for text in completions]


def grpo(folder: Path, callbacks: list[TrainerCallback], **others: Any) -> Trainer:
    model = others.pop("model", None) or saved(folder / "checkpoint")
    settings = {"num_generations": 2, "max_completion_length": 8, **others.pop("config", {})}
    return GRPOTrainer(
        model=model,
        reward_funcs=longest,
        args=GRPOConfig(**common(folder, **settings)),
        train_dataset=Dataset.from_list([{"prompt": f"w{n} w{n + 1} w{n + 2}"} for n in range(20)]),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **others,
    )


def sft(folder: Path, callbacks: list[TrainerCallback], **others: Any) -> Trainer:
    model = saved(folder / "checkpoint")
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            **common(
                folder, **{"learning_rate": 1e-6, "max_length": 32, **others.pop("config", {})}
            )
        ),
        train_dataset=Dataset.from_list(
            [{"text": f"w{n} w{n + 1} w{n + 2} w{n + 3}"} for n in range(20)]
        ),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **others,
    )


@pytest.mark.parametrize("make", [grpo, sft])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_training(tmp_path: Path, make: Callable[..., Trainer], dtype: str) -> None:
    store, witness, published = MemoryStore(), Witness(), list[Published]()
    callback = PulseCallback(store, stream="policy", replace=False, on_event=collect(published))
    # TRL's default is float32, whatever the checkpoint holds.
    config = {} if dtype == "float32" else {"model_init_kwargs": {"dtype": dtype}}
    trainer = make(tmp_path, [callback, witness], config=config)
    assert str(trainer.model.dtype) == f"torch.{dtype}"
    trainer.train()
    assert sorted(witness.roots) == [0, 1, 2, 3, 4]
    assert followed(store) == witness.roots
    assert all(p.density < 0.05 for p in published[1:])
    assert sum(p.changed or 0 for p in published[1:]) > 0


def test_rewards_become_metadata(tmp_path: Path) -> None:
    callback = PulseCallback(MemoryStore(), stream="policy", replace=False)
    trainer = grpo(tmp_path, [callback])
    trainer.train()
    assert callback.published is not None
    third = next(row for row in trainer.state.log_history if row["step"] == 3)
    assert callback.published.metadata["reward"] == third["reward"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_is_published_merged_under_the_base_model_s_names(tmp_path: Path, dtype: str) -> None:
    store, witness, published = MemoryStore(), Merged(), list[Published]()
    callback = PulseCallback(store, stream="policy", replace=False, on_event=collect(published))
    config = {"model_init_kwargs": {"dtype": dtype}, "learning_rate": 1e-4}
    trainer = grpo(tmp_path, [callback, witness], peft_config=LORA, config=config)
    base = {n: t.clone() for n, t in trainer.model.state_dict().items() if "lora_" not in n}
    trainer.train()
    assert followed(store) == witness.roots
    assert all(p.density < 0.05 for p in published[1:])
    assert sum(p.changed or 0 for p in published[1:]) > 0
    for name, tensor in base.items():
        assert torch.equal(trainer.model.state_dict()[name], tensor)
    plain = type(trainer.model.get_base_model()).from_pretrained(tmp_path / "checkpoint")
    subscriber = Subscriber(store, stream="policy")
    subscriber.sync()
    assert set(subscriber.state.names) == saved_names(plain.state_dict())
