"""Tiny models whose state_dict is not what their checkpoint has: fused experts, tied tensors."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_OTHERS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "Gemma2": {},
}
FAMILIES = tuple(_OTHERS)
EXPERTS = ("Mixtral", "Qwen3Moe")


def family(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model ``name`` of `FAMILIES` with random weights."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**_SIZES, **_OTHERS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
