"""A small policy on disk, trainings of it, and what TRL's AsyncGRPO needs on a CPU."""

from __future__ import annotations

import json
import re
import types
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)

from pulse_rl.engines.vllm import connect
from tests.engines.server import checksums
from tests.trainers.support import common, tiny

WORDS = 256
SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
STEPS = 3
SETTINGS: dict[str, Any] = {"num_generations": 2, "max_completion_length": 8, "max_steps": STEPS}


def tokenizer() -> PreTrainedTokenizerFast:
    """One word a token, with a chat template that TRL knows."""
    words = [*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), WORDS))]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="w3",
        padding_side="left",
    )
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return made


def untrained(dtype: torch.dtype = torch.float32) -> Any:
    """230,528 weights. vLLM's attention on a CPU takes heads of 32 or more."""
    return tiny(dtype, vocab_size=WORDS, hidden_size=128)


def saved(folder: Path) -> str:
    """The checkpoint, in BF16 as most are, with its tokenizer."""
    untrained(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def numbers(completions: list[Any], **_: Any) -> list[float]:
    """The reward: the mean of the words' numbers, which hardly ever is the same for two
    completions."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    found = [[int(number) for number in re.findall(r"w(\d+)", text)] for text in texts]
    return [sum(row) / max(len(row), 1) for row in found]


def grpo(checkpoint: str, folder: Path, rollout_func: Any, **others: Any) -> GRPOTrainer:
    settings = SETTINGS | others.pop("config", {})
    return GRPOTrainer(
        model=checkpoint,
        reward_funcs=numbers,
        args=GRPOConfig(**common(folder, **settings)),
        train_dataset=Dataset.from_list(
            [{"prompt": f"w{n + 3} w{n + 4} w{n + 5}"} for n in range(20)]
        ),
        processing_class=tokenizer(),
        rollout_func=rollout_func,
        **others,
    )


def async_grpo(
    checkpoint: str, folder: Path, url: str, transfer: Any, **others: Any
) -> AsyncGRPOTrainer:
    settings = SETTINGS | {"vllm_server_base_url": url, "gradient_checkpointing": False}
    settings |= {"max_inflight_tasks": 4} | others.pop("config", {})
    rows = [{"prompt": [{"role": "user", "content": f"w{n + 3} w{n + 4}"}]} for n in range(20)]
    return AsyncGRPOTrainer(
        model=checkpoint,
        reward_funcs=numbers,
        args=AsyncGRPOConfig(**common(folder, **settings)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        weight_transfer=transfer,
        **others,
    )


def run_on_cpu(replace: Callable[..., None]) -> None:
    """Replaces what of AsyncGRPO runs on GPUs only, none of it part of the weight transfer: its
    attention kernel (FlashAttention 3) by torch's, and the look-up of the GPU's peak speed. The
    third is vLLM's: on a CPU it packs weights, which the backend pulse keeps plain."""
    kernel = types.SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    replace(packing, "_flash_attn", lambda: kernel)
    replace(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """FlashAttention's function by torch: segments [length, heads, width], masks aligned at their
    ends."""
    assert causal
    assert window_size == (-1, -1)
    parts = []
    for number in range(len(cu_seqlens_q) - 1):
        q = query[cu_seqlens_q[number] : cu_seqlens_q[number + 1]].transpose(0, 1)
        k, v = (
            t[cu_seqlens_k[number] : cu_seqlens_k[number + 1]].transpose(0, 1) for t in (key, value)
        )
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        found = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def weight_version(url: str) -> str:
    """The tag of what the server generates now."""
    with urllib.request.urlopen(f"{url}/weight_info") as found:
        return str(json.loads(found.read())["weight_version"])


def written_anew(url: str, store: str) -> dict[str, str]:
    """vLLM's checksums of its live tensors after all of the stream's newest version was written
    over them."""
    with connect(url, store=store, stream="policy") as handle:
        done = handle.sync()
        assert done.full
        assert handle.audit() == ()
    return checksums(url)
