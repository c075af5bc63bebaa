"""Families of models and methods of PEFT: a published version has the bits of the files that
``save_pretrained`` of transformers or PEFT writes, or it is refused with a way that works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer

from pulse_rl import MemoryStore, Publisher, StateSource, Subscriber
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.frameworks.transformers import PulseCallback, checkpoint_weights
from pulse_rl.frameworks.weights import adapter_weights
from tests.trainers.support import arguments, sentences, tiny

DTYPES = (torch.float32, torch.bfloat16)
#: By the names that configs have for them; each config gets those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("max_position_embeddings", "intermediate_size", "ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("intermediate_size_mlp",), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("embed_dim", "out_hidden_size", "mamba_d_ssm"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("image_size", "window_size"), 28),
    **dict.fromkeys(("head_dim", "d_kv", "moe_intermediate_size", "num_mel_bins"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "embedding_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("patch_size",), 14),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "laurel_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("n_layer", "depth", "num_experts_per_tok", "moe_k", "eos_token_id"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "mamba_n_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = (
    *("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3", "Phi3", "Granite"),
    *("Olmo2", "Cohere2", "GPT2", "OPT", "Bloom", "SmolLM3", "GPTNeoX", "StableLm"),
    *("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss", "DeepseekV2", "DeepseekV3"),
    *("Glm4Moe", "Phimoe", "GraniteMoe", "Ernie4_5_Moe", "MiniMax", "Llama4", "HunYuanMoEV1"),
    *("Qwen3Next", "Jamba", "Mamba", "FalconH1", "NemotronH", "Qwen3_5", "MiniMaxM2"),
    "RecurrentGemma",
)
OTHERS = (
    *("T5ForConditionalGeneration", "BartForConditionalGeneration", "BertForMaskedLM"),
    *("AlbertForMaskedLM", "ModernBertForMaskedLM", "WhisperForConditionalGeneration"),
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"),
    *("LlavaForConditionalGeneration", "LlamaForSequenceClassification"),
)
NAMES = (*(f"{name}ForCausalLM" for name in FAMILIES), *OTHERS)
NAMES = tuple({"GPT2ForCausalLM": "GPT2LMHeadModel"}.get(name, name) for name in NAMES)


def sized(kind: Any) -> dict[str, Any]:
    known = kind()
    found = {
        name: size
        for name, size in SIZES.items()
        if hasattr(known, name) and isinstance(getattr(known, name), int | None)
    }
    for name in getattr(kind, "sub_configs", {}):
        if inner := getattr(known, name, None):
            found[name] = sized(type(inner)) | {"model_type": inner.model_type}
    return found


def built(name: str, dtype: torch.dtype) -> Any:
    """A small model of random weights, which differ from those that it began with."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return moved(kind(kind.config_class(**sized(kind.config_class))).to(dtype))


def moved(model: Any) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def files(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def published(source: StateSource, folder: Path) -> dict[str, torch.Tensor]:
    """What a follower saves of ``source``."""
    store = MemoryStore()
    with Publisher(store, stream="policy") as publisher:
        publisher.publish(source)
    return followed(store, folder)


def followed(store: MemoryStore, folder: Path) -> dict[str, torch.Tensor]:
    with Subscriber(store, stream="policy") as subscriber:
        subscriber.sync()
        subscriber.save(folder)
    return files(folder)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether names, dtypes, shapes and bits are equal."""
    assert found.keys() == wanted.keys()
    return all(
        (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        and torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
        for name, tensor in wanted.items()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_version_has_the_files_of_save_pretrained(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = built(name, dtype)
    model.save_pretrained(tmp_path / "saved")
    assert same(published(model, tmp_path / "followed"), files(tmp_path / "saved"))


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "Gemma2ForCausalLM"])
def test_a_trainer_publishes_what_it_saves(name: str, tmp_path: Path) -> None:
    store, model = MemoryStore(), built(name, torch.float32)
    callback = PulseCallback(store, stream="policy", dtype=None)
    options = arguments(tmp_path, max_steps=1, learning_rate=1e-3)
    Trainer(model, options, train_dataset=sentences(4), callbacks=[callback]).train()
    model.save_pretrained(tmp_path / "saved")
    assert same(followed(store, tmp_path / "followed"), files(tmp_path / "saved"))


# -- methods of PEFT

TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
Method = Callable[[Any], Any]


def method(kind: str, **options: Any) -> Method:
    """Adapters of PEFT's ``kind``, on two layers unless ``options`` name others."""
    return lambda model: get_peft_model(model, getattr(peft, f"{kind}Config")(**options))


def on_layers(kind: str, **options: Any) -> Method:
    return method(kind, **TARGETS | options)


def lora(**options: Any) -> Method:
    return on_layers("Lora", r=4, **options)


def eva(model: Any) -> Any:
    """Initialized by the activations of the model."""
    config = peft.EvaConfig(rho=1.0)
    made = lora(init_lora_weights="eva", eva_config=config)(model)
    torch.manual_seed(1)
    batches = [torch.randint(3, 512, (2, 16)) for _ in range(4)]
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches]
    peft.initialize_lora_eva_weights(made, data)
    return made


def prompts(kind: str, **options: Any) -> Method:
    return method(kind, task_type="CAUSAL_LM", num_virtual_tokens=4, **options)


METHODS: dict[str, Method] = {
    "LoRA": lora(),
    "all layers": lora(target_modules="all-linear"),
    "rsLoRA": lora(use_rslora=True),
    "DoRA": lora(use_dora=True),
    "biases": lora(bias="all"),
    "LoRA bias": lora(lora_bias=True, target_modules=["q_proj"]),
    "PiSSA": lora(init_lora_weights="pissa"),
    "OLoRA": lora(init_lora_weights="olora"),
    "orthogonal": lora(init_lora_weights="orthogonal"),
    "MiCA": lora(init_lora_weights="mica"),
    "EVA": eva,
    "QA-LoRA": lora(use_qalora=True, qalora_group_size=16),
    "aLoRA": lora(alora_invocation_tokens=[1]),
    "parameters": lora(target_modules=[], target_parameters=["q_proj.weight"]),
    "modules_to_save": lora(modules_to_save=["embed_tokens"]),
    "tied modules_to_save": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "token indices": lora(trainable_token_indices=[1, 2]),
    "trainable tokens": on_layers(
        "TrainableTokens", target_modules=["embed_tokens"], token_indices=[1, 2]
    ),
    "layer norms": on_layers("LNTuning", target_modules=["norm", "input_layernorm"]),
    "AdaLoRA": on_layers("AdaLora", total_step=10),
    "LoHa": on_layers("LoHa"),
    "LoKr": on_layers("LoKr"),
    "IA3": on_layers(
        "IA3", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "OFT": on_layers("OFT", oft_block_size=4, r=0),
    "BOFT": on_layers("BOFT", boft_block_size=4),
    "VeRA": on_layers("Vera", r=4),
    "PVeRA": on_layers("Pvera", r=4),
    "FourierFT": on_layers("FourierFT", n_frequency=20),
    "WaveFT": on_layers("WaveFT", n_frequency=20),
    "HRA": on_layers("HRA", r=4),
    "VB-LoRA": on_layers("VBLoRA", r=4, vector_length=16, num_vectors=8),
    "MiSS": on_layers("Miss", r=4),
    "Bone": on_layers("Miss", r=4, init_weights="bat"),
    "RandLoRA": on_layers("RandLora", r=4),
    "SHiRA": on_layers("Shira", r=4),
    "C3A": on_layers("C3A", block_size=16),
    "RoAd": on_layers("Road"),
    "HiRA": on_layers("Hira"),
    "DeLoRA": on_layers("Delora", r=4),
    "GraLoRA": on_layers("Gralora", r=4, gralora_k=2),
    "OSF": on_layers("OSF"),
    "TinyLoRA": on_layers("TinyLora"),
    "PSOFT": on_layers("Psoft", r=4),
    "GLoRA": on_layers("Glora", r=4),
    "UniLoRA": on_layers("UniLora", r=4),
    "Poly": on_layers("Poly", r=4),
    "Lily": on_layers("Lily"),
    "prefix": prompts("PrefixTuning"),
    "prompt": prompts("PromptTuning"),
    "p-tuning": prompts("PromptEncoder"),
    "LLaMA-Adapter": method("AdaptionPrompt", adapter_len=4, adapter_layers=1),
}
UNMERGED = {"aLoRA", "Poly", "Lily", "prefix", "prompt", "p-tuning", "LLaMA-Adapter"}
CHANGES_BASE = {"PiSSA", "OLoRA"}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", METHODS)
def test_an_adapter_is_published_as_peft_saves_it(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if name == "LLaMA-Adapter":  # PEFT has it for Llama alone
        base = built("LlamaForCausalLM", dtype)
    else:
        base = tiny(dtype, num_hidden_layers=1, num_key_value_heads=4)
    model = moved(METHODS[name](base))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    if name in UNMERGED:
        with pytest.raises(UnsupportedTensor) as caught:
            published(model, tmp_path / "followed")
        assert "adapter=True" in caught.value.hint
    else:
        # As documented the adapters are merged in FP32, whatever the dtype of the base.
        merged = copy.deepcopy(model).float().merge_and_unload().to(dtype)
        merged.save_pretrained(tmp_path / "merged")
        assert same(published(model, tmp_path / "followed"), files(tmp_path / "merged"))
    assert same(model.state_dict(), before), "the trainer's model keeps its bits"
    # PEFT makes the `ranknum` of AdaLoRA trainable when it casts an adapter, and does not save it.
    if name in CHANGES_BASE or (name, dtype) == ("AdaLoRA", torch.bfloat16):
        with pytest.raises(UnsupportedTensor) as caught:
            adapter_weights(model)
        assert "merged" in caught.value.hint
        return
    alone = published(adapter_weights(model)[0], tmp_path / "alone")
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    assert same(alone, files(tmp_path / "adapter"))


@pytest.mark.parametrize(
    "name",
    ["Gemma2ForCausalLM", "MiniCPM3ForCausalLM", "CTRLLMHeadModel", "T5ForConditionalGeneration"],
)
def test_trained_tokens_of_tied_embeddings(name: str, tmp_path: Path) -> None:
    """The head has a bias, or the embedding a scale, so that not all of their tensors are tied."""
    options = {"target_modules": "all-linear", "trainable_token_indices": [1, 2]}
    model = moved(lora(**options, task_type=None)(built(name, torch.float32)))
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path / "merged")
    assert same(published(model, tmp_path / "followed"), files(tmp_path / "merged"))


def test_a_mixture_of_adapters_by_the_input_is_refused(tmp_path: Path) -> None:
    """PEFT merges the adapters of X-LoRA, though its forward pass weighs them for each token."""
    lora(init_lora_weights=False)(tiny()).save_pretrained(tmp_path)
    paths = {"0": str(tmp_path), "1": str(tmp_path)}
    base = tiny()
    base.config.use_cache = False
    model = method("XLora", task_type="CAUSAL_LM", hidden_size=64, adapters=paths)(base)
    with pytest.raises(UnsupportedTensor, match="XLORA") as caught:
        checkpoint_weights(model)
    assert "LoRA, which is merged" in caught.value.hint


@pytest.fixture(params=["embed_tokens", "lm_head"])
def tied(request: pytest.FixtureRequest) -> PeftModel:
    config = LoraConfig(r=4, target_modules=["q_proj", request.param], ensure_weight_tying=True)
    return moved(get_peft_model(tiny(), config))


def test_tied_tensors_with_one_adapter_stay_one(tied: PeftModel, tmp_path: Path) -> None:
    """PEFT merges such an adapter twice into the one tensor. Once is what the forward pass does."""
    found = published(tied, tmp_path)
    plain = tiny()
    assert plain.load_state_dict(found, strict=False).missing_keys == ["lm_head.weight"]
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, tied(tokens).logits)
    # PEFT's merge of the same adapter into an embedding that has no tie.
    alone = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    loose = get_peft_model(tiny(tie_word_embeddings=False), alone)
    state = {
        name.replace("lm_head.base_layer", "lm_head"): t for name, t in tied.state_dict().items()
    }
    loose.load_state_dict(state, strict=False)
    merged = loose.merge_and_unload().get_input_embeddings().weight
    assert torch.equal(found["model.embed_tokens.weight"], merged)


def test_adapters_of_tied_tensors_that_parted_untie_them(tied: PeftModel, tmp_path: Path) -> None:
    """As PEFT has them over a BF16 base, whose adapters it casts."""
    head: Any = tied.get_base_model().lm_head
    with torch.no_grad():
        weight = head.lora_A["default"].weight
        weight.data = weight * 1.5
    plain = tiny()
    plain.lm_head.weight = torch.nn.Parameter(torch.empty_like(plain.lm_head.weight))
    plain.load_state_dict(published(tied, tmp_path))
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, tied(tokens).logits)
