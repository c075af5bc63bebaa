"""An adapter that came through a stream of its own, in a vLLM server that loads adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel

from pulse_rl import Subscriber
from pulse_rl.frameworks.transformers import PulseCallback
from tests.engines.server import complete, post, server

from .support import grpo, untrained
from .test_rollout import NOISE, log_probabilities


def test_a_server_generates_with_each_version_by_its_name(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "store")
    callback = PulseCallback(store, stream="adapter", adapter=True, replace=False)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    grpo(
        checkpoint,
        tmp_path,
        None,
        callbacks=[callback],
        peft_config=lora,
        config={"learning_rate": 3e-2},
    ).train()
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    prompt = list(range(10, 30))
    with (
        server(
            checkpoint,
            tmp_path / "log",
            pulse=False,
            options=["--enable-lora", "--max-lora-rank", "8"],
        ) as url,
        Subscriber(store, stream="adapter") as worker,
    ):
        for version in (0, 3):
            update = worker.sync(version)
            assert update is not None
            folder = tmp_path / f"adapter-v{version}"
            worker.save(folder)
            update.acknowledge()
            adapter = {"lora_name": f"policy-v{version}", "lora_path": str(folder)}
            post(f"{url}/v1/load_lora_adapter", adapter)
            choice = complete(url, model=f"policy-v{version}", prompt=prompt)["choices"][0]
            said = torch.tensor(choice["logprobs"]["token_logprobs"])
            adapted = PeftModel.from_pretrained(untrained(torch.bfloat16), folder)
            ours = log_probabilities(adapted, [prompt], [choice["token_ids"]])
            plain = log_probabilities(untrained(torch.bfloat16), [prompt], [choice["token_ids"]])
            assert (said - ours).abs().mean() < NOISE
            assert ((said - plain).abs().mean() > 3 * NOISE) == (version == 3)
