"""SGLang's models of quantized checkpoints, on a CPU: ``python -m tests.engines_sglang.quantized
FOLDER``.

Loaded by SGLang's own loader, for its Triton kernels, which are never called; then ten updates, of
which each tensor must be what a fresh load leaves. Printed is each case, with the tensors that are
not.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.stub_packages import install

# Of the version of the torch that is installed: transformers asks.
install("torchvision", "0.28.0")

import torch  # noqa: E402
import transformers  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.model_loader import get_model_loader  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402

from pulse_rl.engines.sglang import plugin  # noqa: E402
from tests.engines.policy import SMALL, Followed  # noqa: E402

from .package import join  # noqa: E402

SIZES: dict[str, Any] = SMALL | {"head_dim": 64, "max_position_embeddings": 128}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
}
CASES: dict[str, tuple[str, Any]] = {
    "codes as they are loaded": ("Qwen3", "fp8_block"),
    "experts as they are loaded": ("Qwen3Moe", "fp8_block"),
}


def loaded(folder: Path) -> tuple[Any, Any]:
    config = ModelConfig(str(folder))
    loader = get_model_loader(LoadConfig(), config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0)), config


def bits(model: Any) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (t.shape, t.detach().contiguous().reshape(-1).view(torch.uint8))
        for name, t in tensors.items()
    }


def differing(case: str, folder: Path) -> list[str]:
    name, quantize = CASES[case]
    config = getattr(transformers, f"{name}Config")(**SIZES, **(EXPERTS if "Moe" in name else {}))
    trained = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    trained.save_pretrained(folder / "bf16")
    policy = Followed(trained, folder, quantize)
    policy.publish(files=str(folder / "bf16"))
    model, config = loaded(policy.saved("first"))
    runner = SimpleNamespace(
        model=model, model_config=config, server_args=SimpleNamespace(load_format="auto")
    )
    updater = SimpleNamespace(get_model=lambda: model)
    asked = {"store": policy.store, "stream": "policy", "owner": "me"}
    asked |= {"follow": False, "audit_every": 3}
    (status,) = plugin.answer(runner, {"action": "open", "init_info": asked})
    assert "failure" not in status, status
    for version in policy.ten_versions():
        stage(runner, version)
        plugin.begin_weight_update(None, updater)
        plugin.update(model, [])
        assert plugin.outcome(model) is None, plugin.outcome(model)
        plugin.end_weight_update(None, updater)
    live, fresh = bits(model), bits(loaded(policy.saved("last"))[0])
    plugin.answer(runner, {"action": "close", "owner": "me"})
    same = {
        k
        for k in live.keys() & fresh.keys()
        if live[k][0] == fresh[k][0] and torch.equal(live[k][1], fresh[k][1])
    }
    return sorted((live.keys() | fresh.keys()) - same)


def stage(runner: Any, version: int) -> None:
    (status,) = plugin.answer(runner, {"action": "stage", "owner": "me", "version": version})
    while status["answered"] < status["asked"]:
        time.sleep(0.01)
        (status,) = plugin.answer(runner, {"action": "status", "owner": "me"})
    assert status.get("error") is None, status


def main(folder: Path) -> None:
    load_plugins()
    joined = False
    for number, case in enumerate(CASES):
        inner = folder / str(number)
        if not joined:
            # SGLang's configuration is of the process.
            transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).save_pretrained(
                folder / "any"
            )
            join(str(folder / "any"), 0, 1, str(folder / "meeting"), {})
            joined = True
        print(json.dumps({"case": case, "differ": differing(case, inner)}), flush=True)
        shutil.rmtree(inner)


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]))
