"""Models that vLLM has loaded from a quantized checkpoint follow a stream of such ones: after ten
updates each tensor is what a fresh load leaves.

No engine runs. Most kernels of these formats need a GPU; what vLLM does to weights up to there runs
on a CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_rl import Bits
from pulse_rl.quantize.states import QuantizedState
from pulse_rl.state.tensors import State
from tests.engines.policy import SMALL, Followed
from tests.support.programs import ran

FORMATS = {
    # first: vLLM makes its groups of experts for a model that has some
    "experts packed for a CPU": "fp8_block",
    "codes as they are loaded": "fp8_block",
    "scales to powers of two, transposed and padded": "fp8_block",
    "scales swizzled": "nvfp4",
}


def force(kernels: Any, kernel: Any) -> None:
    """Has vLLM choose ``kernel`` on a CPU, which it does not run there."""
    from vllm.platforms import PlatformEnum

    kernels[PlatformEnum.CPU] = [kernel]
    kernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
    kernel.can_implement = classmethod(lambda cls, config: (True, None))


def prepare(case: str) -> None:
    """The kernels of ``case``; what they call of a GPU's libraries is replaced by the same in
    torch."""
    import vllm.model_executor.kernels.linear as linear
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    blocks, kernel = linear._POSSIBLE_FP8_BLOCK_KERNELS, linear.DeepGemmFp8BlockScaledMMKernel
    if "CPU" in case:
        force(blocks, CPUFp8BlockScaledMMKernel)
        CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
    elif case == "codes as they are loaded":
        force(blocks, linear.TritonFp8BlockScaledMMKernel)
    elif "powers of two" in case:

        def packed(sf: torch.Tensor, **sizes: Any) -> torch.Tensor:
            exponents = torch.nn.functional.pad(sf.view(torch.int32) >> 23, (0, 3)).to(torch.uint8)
            return exponents.transpose(-1, -2).contiguous().transpose(-1, -2)

        fp8_utils.transform_sf_into_required_layout = packed
        force(blocks, kernel)
        make = kernel.__init__

        def made(self: Any, config: Any) -> None:
            make(self, config)
            self.is_deep_gemm_supported = self.use_deep_gemm_e8m0 = True

        kernel.__init__ = made
    else:
        torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign,assignment,misc]
        force(linear._POSSIBLE_NVFP4_KERNELS, linear.CutlassNvFp4LinearKernel)


def small(experts: bool) -> Any:
    import transformers

    sizes: dict[str, Any] = SMALL | {"max_position_embeddings": 256, "initializer_range": 0.06}
    if not experts:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).to(torch.bfloat16)
    sizes |= {
        "head_dim": 64,
        "moe_intermediate_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).to(torch.bfloat16)


def loaded(folder: Path) -> tuple[Any, Any]:
    """The model of the checkpoint in ``folder`` as vLLM loads it, and vLLM's configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    config = EngineArgs(
        model=str(folder),
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
        weight_transfer_config={"backend": "pulse"},  # type: ignore[arg-type]
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        model = get_model_loader(config.load_config).load_model(
            vllm_config=config, model_config=config.model_config
        )
    return model, config


def bits(model: Any) -> dict[str, Any]:
    """The shapes and digests of a model's tensors."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flat = {
        name: (t.shape, t.detach().contiguous().reshape(-1).view(torch.uint8))
        for name, t in tensors.items()
    }
    return {name: (shape, sha256(t.numpy()).digest()) for name, (shape, t) in flat.items()}


def updated(case: str, folder: Path) -> list[str]:
    """The tensors that differ from those of a fresh load, after ten updates."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    prepare(case)
    trained = small("experts" in case)
    trained.save_pretrained(folder / "bf16")
    with_scales = FORMATS[case] == "nvfp4"
    policy = Followed(trained, folder, nvfp4 if with_scales else FORMATS[case])
    policy.publish(files=with_activations(folder) if with_scales else str(folder / "bf16"))
    model, config = loaded(policy.saved("first"))
    engine = WeightTransferEngineFactory.create_engine(
        config.weight_transfer_config, config, torch.device("cpu"), model
    )
    engine.init_transfer_engine(
        engine.init_info_cls(store=policy.store, stream="policy", follow=False, audit_every=3)
    )
    for version in policy.ten_versions():
        engine.start_weight_update()
        engine.receive_weights(engine.update_info_cls(version=version, wait_seconds=60))
        engine.finish_weight_update()
    engine.shutdown()
    live, fresh = bits(model), bits(loaded(policy.saved("last"))[0])
    return sorted(name for name in live.keys() | fresh.keys() if live.get(name) != fresh.get(name))


def with_activations(folder: Path) -> dict[str, bytes]:
    """The configuration of a model whose activations are quantized, too."""
    config: dict[str, Any] = json.loads((folder / "bf16/config.json").read_text())
    scheme = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
    }
    group = {
        "targets": ["Linear"],
        "weights": scheme,
        "input_activations": scheme | {"dynamic": "local"},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return {"config.json": json.dumps(config).encode()}


def nvfp4(name: str, weight: Any) -> Any:
    """Codes and scales of a weight, and the scale of its layer's inputs."""
    if weight.ndim != 2 or "embed" in name or "lm_head" in name:
        return None
    made = QuantizedState(State.of({name: weight}), "nvfp4")
    found = {
        spec.name: Bits(made.read(spec.name).reshape(spec.shape), spec.dtype.name)
        for spec in made.specs
    }
    return found | {f"{name.removesuffix('weight')}input_global_scale": abs(weight[:1, 0]) + 1}


def has_packed_kernels() -> bool:
    """Whether vLLM's build for this CPU packs FP8 weights."""
    import vllm._custom_ops  # noqa: F401 (it loads the build)

    return hasattr(torch.ops._C, "convert_weight_packed")


@pytest.fixture(scope="module")
def differing() -> dict[str, list[str]]:
    """What ten updates leave wrong, by the case. In a process of its own: vLLM's kernels are
    replaced there."""
    cases = [case for case in FORMATS if "CPU" not in case or has_packed_kernels()]
    said = ran("-m", __name__, *cases, seconds=1200)
    # vLLM logs there, too.
    found = [json.loads(line) for line in said.splitlines() if line.startswith('{"case"')]
    return {row["case"]: row["differ"] for row in found}


@pytest.mark.parametrize("case", FORMATS)
def test_a_fresh_load_leaves_the_same(differing: dict[str, list[str]], case: str) -> None:
    if case not in differing:
        pytest.skip("vLLM has no kernels for packed FP8 on this CPU: they need AVX512-BF16 or AMX")
    assert not differing[case]


if __name__ == "__main__":
    torch.accelerator.empty_cache = lambda: None
    for case in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"case": case, "differ": updated(case, Path(folder))}))
