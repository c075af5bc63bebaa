"""Tiny models and data made on the spot, and what a follower of a stream must hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

from pulse_rl import Published, Store, Subscriber, state_root
from pulse_rl.events import Event

WORDS = 64


def tiny(dtype: torch.dtype = torch.float32, seed: int = 0, **others: Any) -> Qwen2ForCausalLM:
    """107,072 weights with tied embeddings; ``others`` of the config make it another model."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(config | others))).to(dtype)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(WORDS))]
    inner = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def adapted(model: torch.nn.Module, config: Any) -> Any:
    """A model with adapters that do something, the same on every rank."""
    from peft import get_peft_model

    made = get_peft_model(model, config)
    for name, parameter in made.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            torch.manual_seed(len(name))
            torch.nn.init.normal_(parameter, std=0.05)
    return made


def saved(folder: Path) -> str:
    """A checkpoint of `tiny`, in BF16 as most are."""
    tiny(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def sentences(count: int = 40) -> list[dict[str, Any]]:
    rows = []
    for seed in range(count):
        ids = torch.randint(3, WORDS, (16,), generator=torch.Generator().manual_seed(seed))
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    return TrainingArguments(**common(folder, **others))


def common(folder: Path, **others: Any) -> dict[str, Any]:
    """Arguments that all trainers take. lr 1e-6 is TRL's default for GRPO."""
    defaults = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 1e-6,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return defaults | others


def cast(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state in BF16 by torch's own cast, tied tensors still tied."""
    made: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        made.setdefault(tensor.data_ptr(), tensor.detach().to(torch.bfloat16, copy=True))
    return {name: made[tensor.data_ptr()] for name, tensor in state.items()}


def saved_names(state: dict[str, torch.Tensor]) -> set[str]:
    """The names under which ``save_pretrained`` writes a state: of tied tensors the first one
    alone."""
    return set({tensor.data_ptr(): name for name, tensor in reversed(state.items())}.values())


class Witness(TrainerCallback):
    """Notes after each step the root of what workers must hold then: ``roots`` by step."""

    def __init__(self) -> None:
        self.roots: dict[int, str] = {}

    def note(self, step: int, model: torch.nn.Module) -> None:
        self.roots[step] = state_root(cast(model.state_dict()))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(state.global_step, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(state.global_step, kwargs["model"])


class Merged(Witness):
    """Notes what PEFT's own merge of a copy of the model holds, computed in FP32."""

    def note(self, step: int, model: Any) -> None:
        super().note(step, copy.deepcopy(model).float().merge_and_unload())


def collect(published: list[Published]) -> Callable[[Event], None]:
    return lambda event: published.append(event) if isinstance(event, Published) else None


def followed(store: Store | str, stream: str = "policy", key: str = "step") -> dict[int, str]:
    """The root of a follower's own state after each version, by the ``key`` in the version's
    metadata."""
    with Subscriber(store, stream=stream) as newest:
        newest.sync()
        last = newest.version
    assert last is not None
    roots = {}
    with Subscriber(store, stream=stream) as follower:
        for version in range(last + 1):
            update = follower.sync(version)
            update.acknowledge()
            roots[update.metadata[key]] = state_root(follower.state)
    return roots
