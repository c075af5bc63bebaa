"""The maps of SGLang's own models, each in small: ``python -m tests.engines_sglang.models
FOLDER``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.support.stub_packages import install

# Of the version of the torch that is installed: transformers asks.
install("torchvision", "0.28.0")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.srt.model_loader.utils import set_default_torch_dtype  # noqa: E402

from pulse_rl import State  # noqa: E402
from pulse_rl.engines.live import Journal, LiveWeights, located, trace_loader  # noqa: E402
from pulse_rl.errors import UnsupportedTensor  # noqa: E402

from .package import bits, join  # noqa: E402

SIZES = {
    "vocab_size": 501,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# Where the module is not named as its model.
_FILES = {"phi3": "llama"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | {"moe_intermediate_size": 32}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "gemma2": ("Gemma2", {"hidden_act": "gelu_pytorch_tanh"}),
    "glm4": ("Glm4", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {}),
    "olmoe": ("Olmoe", _EXPERTS | {"num_key_value_heads": 4}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"bos_token_id": 1, "eos_token_id": 2}),
    "stablelm": ("StableLm", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}


def main(folder: Path) -> None:
    joined = False
    for module, (name, more) in MODELS.items():
        config = getattr(transformers, f"{name}Config")(**(SIZES | more))
        config.architectures = [f"{name}ForCausalLM"]
        torch.manual_seed(0)
        checkpoint = str(folder / module)
        getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().save_pretrained(checkpoint)
        if not joined:
            join(checkpoint, 0, 1, str(folder / "meeting"), {})
            joined = True
        kind = getattr(
            importlib.import_module(f"sglang.srt.models.{_FILES.get(module, module)}"),
            f"{name}ForCausalLM",
        )
        try:
            print(name, *differing(kind, config, load_file(f"{checkpoint}/model.safetensors")))
        except UnsupportedTensor as refusal:
            print(name, "refused:", refusal)


@torch.inference_mode()
def differing(kind: Any, config: Any, old: dict[str, torch.Tensor]) -> list[str]:
    """The parameters that a change of a tenth of all elements reaches otherwise than by the model's
    own loader."""
    new = {name: (w + (torch.rand(w.shape) < 0.1)).contiguous() for name, w in old.items()}
    with set_default_torch_dtype(torch.bfloat16):
        live, fresh = kind(config), kind(config)
    for model, tensors in ((live, old), (fresh, old), (fresh, new)):
        model.load_weights(list(tensors.items()))
    before, after = State.of(old), State.of(new)
    loader_map, journal = trace_loader(live, before), Journal(LiveWeights(live))
    for spec in after.specs:
        values = after.read(spec.name)
        changed = np.flatnonzero(before.read(spec.name) != values)
        journal.apply(located(loader_map, spec.name, changed, values[changed]))
    wanted = dict(fresh.named_parameters())
    found = [
        name
        for name, weight in live.named_parameters()
        if not torch.equal(bits(weight), bits(wanted[name]))
    ]
    assert loader_map.unused == ()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
