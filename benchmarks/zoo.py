"""Model families in a real vLLM: small random models follow a stream, and are compared with engines
that load the same.

``python -m benchmarks.zoo [FAMILY …]`` prints the table of docs/vllm.md as it is measured here.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import pulse_rl
from pulse_rl.errors import PulseError

SCALE = 0.06
#: Of which the fifth and the eighth change most of the weights; before the last one the engine
#: forgets its version.
UPDATES = 10

_SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": SCALE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,  # vLLM's kernels know this size only
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

Config = Callable[..., Any]


def _of(name: str, **fixed: Any) -> Config:
    """The configuration class ``name`` of transformers with small sizes."""

    def make(**options: Any) -> Any:
        return getattr(transformers, name)(**(_SMALL | fixed | options))

    return make


FAMILIES: dict[str, Config] = {
    "Llama": _of("LlamaConfig", attention_bias=True),
    "Qwen2": _of("Qwen2Config"),
    "Qwen3": _of("Qwen3Config", head_dim=32),
    "Qwen3-MoE": _of("Qwen3MoeConfig", **_EXPERTS, head_dim=32, moe_intermediate_size=64),
    "Mixtral": _of("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, head_dim=32),
    "OLMoE": _of("OlmoeConfig", **_EXPERTS, num_key_value_heads=4),
    "GPT-OSS": _of(
        "GptOssConfig",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=128,
        sliding_window=64,
    ),
    "DeepSeek V2": _of("DeepseekV2Config", **_LATENT, topk_method="greedy", scoring_func="softmax"),
    "DeepSeek V3": _of("DeepseekV3Config", **_LATENT | {"q_lora_rank": 64}, topk_method="noaux_tc"),
    "GLM-4.5 MoE": _of(  # vLLM keeps its gates in FP32
        "Glm4MoeConfig",
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "Gemma 2": _of("Gemma2Config", head_dim=32, query_pre_attn_scalar=32),
    "Gemma 3": _of("Gemma3TextConfig", head_dim=32, query_pre_attn_scalar=32),
    "Gemma 3n": _of(  # vLLM keeps its output scale in FP32
        "Gemma3nTextConfig",
        head_dim=32,
        intermediate_size=[256, 256],
        vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=0,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
    ),
    "Gemma 4": _of(  # a scale of each layer is a buffer
        "Gemma4TextConfig",
        head_dim=32,
        global_head_dim=32,
        vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
    ),
    "Phi 3": _of("Phi3Config"),
    "GPT-2": lambda **options: transformers.GPT2Config(
        vocab_size=512,
        n_positions=256,
        n_embd=128,
        n_layer=2,
        n_head=4,
        initializer_range=SCALE,
        **options,
    ),
    "OPT": lambda **options: transformers.OPTConfig(
        vocab_size=512,
        hidden_size=128,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=128,
        init_std=SCALE,
        **options,
    ),
    "Granite": _of("GraniteConfig"),
    "Granite-MoE": _of("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2),
    "Falcon-H1": _of(
        "FalconH1Config",
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_chunk_size=64,
        head_dim=32,
    ),
    "Qwen2.5-VL": lambda **options: transformers.Qwen2_5_VLConfig(
        text_config=_SMALL
        | {
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": False,
        }
        | options,
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
            "initializer_range": SCALE,
        },
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
        **options,
    ),
}
#: Families of which tied models are not made.
UNTIED_ONLY = {
    "Qwen3-MoE",
    "Mixtral",
    "OLMoE",
    "GPT-OSS",
    "DeepSeek V2",
    "DeepSeek V3",
    "GLM-4.5 MoE",
    "Phi 3",
    "Qwen2.5-VL",
}
#: Families of which vLLM takes no head of their own.
TIED_ONLY = {"Gemma 2", "Gemma 3", "Gemma 3n", "Gemma 4"}


class Trained:
    """A small model of ``family``, changed by steps large enough to tell, and published as it is
    saved."""

    def __init__(self, folder: Path, family: str, *, tied: bool) -> None:
        torch.manual_seed(0)
        self.folder = folder
        config = FAMILIES[family](tie_word_embeddings=tied)
        config.dtype = torch.bfloat16
        generic = (
            transformers.AutoModelForImageTextToText
            if family == "Qwen2.5-VL"
            else transformers.AutoModelForCausalLM
        )
        self.model = generic.from_config(config).to(torch.bfloat16)
        for name, buffer in self.model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = buffer.data.float()  # as checkpoints of DeepSeek V3 have it
        self.generator = torch.Generator().manual_seed(1)
        self._change(1.0)
        self.checkpoint = self.save("model")
        self.store = str(folder / "store")
        self.publisher = pulse_rl.Publisher(self.store, stream="policy", threads=1)
        self.publish(self.checkpoint)

    def save(self, name: str) -> str:
        """Writes a checkpoint with a tokenizer of one word a token, and returns its path."""
        self.model.save_pretrained(self.folder / name)
        words = WordLevel({f"t{token}": token for token in range(512)}, unk_token="t0")
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(
            self.folder / name
        )
        return str(self.folder / name)

    def publish(self, checkpoint: str) -> int:
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(Path(checkpoint).glob("*.safetensors")):
            tensors |= load_file(file)
        return self.publisher.publish(tensors).version

    def step(self, density: float) -> int:
        """Draws ``density`` of each tensor anew and publishes what ``save_pretrained`` writes."""
        self._change(density)
        return self.publish(self.save("model-now"))

    def _change(self, density: float) -> None:
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                chosen = torch.rand(weight.shape, generator=self.generator) < density
                drawn = torch.randn(weight.shape, generator=self.generator) * SCALE
                if weight.ndim == 1 and name.endswith("weight"):
                    drawn += 1  # of a norm
                weight.copy_(torch.where(chosen, drawn.to(weight.dtype), weight))


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one family: ``refused`` (why), or the largest difference of log-probabilities
    to a fresh engine after all updates, by how much these have ``moved``, the tensors that differ
    by the audit, and the last pause."""

    family: str
    tied: bool
    tensor_parallel: int
    refused: str = ""
    difference: float = 0.0
    moved: float = 0.0
    differing: tuple[str, ...] = ()
    pause_seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return (
            not self.refused and self.difference == 0 and not self.differing and self.moved > 0.05
        )


def forget(worker: Any) -> None:
    """The worker does not know its live version any more: its next update writes everything."""
    worker.weight_transfer_engine.worker._session.live = None


def measure(
    folder: Path, family: str, *, tied: bool = False, tensor_parallel: int = 1, **options: Any
) -> Row:
    from pulse_rl.engines.vllm import connect
    from tests.engines.engines import answer, engine

    trained = Trained(folder, family, tied=tied)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(
        int(tensor_parallel > 1)
    )  # a process less to start
    with engine(trained.checkpoint, tensor_parallel=tensor_parallel, **options) as llm:
        begun = answer(llm)[0]
        try:
            with connect(llm, store=trained.store, stream="policy") as handle:
                for number in range(1, UPDATES + 1):
                    trained.step(0.9 if number in (5, 8) else 0.02)
                    if number == UPDATES:
                        llm.collective_rpc(forget)
                    done = handle.sync()
                differing = handle.audit()
        except PulseError as error:
            assert torch.equal(begun, answer(llm)[0]), "what is refused is left as it was"
            return Row(family, tied, tensor_parallel, f"{type(error).__name__}: {error}")
        last = answer(llm)[0]
    with engine(trained.save("last"), tensor_parallel=tensor_parallel, **options) as llm:
        fresh = answer(llm)[0]
    return Row(
        family,
        tied,
        tensor_parallel,
        "",
        float((last - fresh).abs().max()),
        float((last - begun).abs().max()),
        differing,
        done.pause_seconds if done is not None else 0.0,
    )


def rows(families: Iterable[str], sizes: Iterable[int]) -> Iterable[Row]:
    for family in families:
        for tied in (False, True):
            if family in (UNTIED_ONLY if tied else TIED_ONLY):
                continue
            for size in sizes:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        yield measure(Path(folder), family, tied=tied, tensor_parallel=size)
                    except (
                        Exception
                    ) as error:  # the engine does not start here, which is an answer too
                        reason = " ".join(str(error).split())[:120]
                        yield Row(family, tied, size, f"not run: {type(error).__name__}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1], metavar="N")
    arguments = parser.parse_args()
    print(
        "| family | head | TP | to a fresh engine, after 10 updates | audit "
        "|\n|---|---|---|---|---|",
        flush=True,
    )
    for row in rows(arguments.families, arguments.tensor_parallel):
        found = row.refused or f"{row.difference:.3g} (moved by {row.moved:.2g})"
        audit = "" if row.refused else (", ".join(row.differing) or "()")
        print(
            f"| {row.family} | {'tied' if row.tied else 'untied'} | {row.tensor_parallel} | "
            f"{found} | {audit} |",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    begun = time.monotonic()
    main()
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
