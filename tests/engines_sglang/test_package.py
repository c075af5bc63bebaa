"""Updates through the real SGLang; see `package` for what is real, and `updates` for what is asked
of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.programs import ran


def run(module: str, *arguments: object) -> str:
    """What a module prints, in a process of its own: SGLang's groups and configuration are of the
    process."""
    return ran("-m", f"tests.engines_sglang.{module}", *arguments, seconds=600)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_updates_reach_the_live_model(tmp_path: Path, tied: str, tensor_parallel: int) -> None:
    assert run("updates", tmp_path, tensor_parallel, tied).endswith("done\n")


def test_quantized_checkpoints_follow_streams_of_such(tmp_path: Path) -> None:
    """Each tensor is that of a fresh load after ten updates. No kernel runs."""
    found = [
        json.loads(line)
        for line in run("quantized", tmp_path).splitlines()
        if line.startswith('{"case"')
    ]
    assert [row["differ"] for row in found] == [[], []]


def test_the_maps_of_sglangs_models_lead_where_their_loaders_do(tmp_path: Path) -> None:
    """Gemma's norms keep weight + 1 in a buffer, which only SGLang's own loader renews."""
    names = ["Qwen2", "Qwen3", "Qwen3Moe", "Llama", "Mistral", "Mixtral", "Glm4", "Olmo2"]
    names += ["Granite", "Olmoe", "GraniteMoe", "Phi3", "StableLm", "OPT"]
    printed = run("models", tmp_path).splitlines()
    assert [line for line in printed if line in names] == names
    (refused,) = [line for line in printed if " refused: " in line]
    assert refused.startswith("Gemma2 refused: the loader does not copy into the engine's")
    assert "gemma_weight' but computes it" in refused
