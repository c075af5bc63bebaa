"""The folder of an adapter, written without PEFT or torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from pulse_rl import MemoryStore, Publisher, Subscriber
from pulse_rl.errors import InputError, StoreError
from pulse_rl.integrations.peft import write_adapter

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
CONFIG = {"peft_type": "LORA", "r": 2}


def test_the_folder_is_what_peft_saves(tmp_path: Path) -> None:
    store = MemoryStore()
    weights = {NAME: np.arange(6, dtype=np.float32).reshape(2, 3)}
    Publisher(store, stream="adapter").publish(weights, metadata={"adapter_config": json.dumps(CONFIG), "step": 1})
    subscriber = Subscriber(store, stream="adapter")
    update = subscriber.sync()
    assert update is not None
    for _ in range(2):  # the second time it is replaced
        folder = write_adapter(subscriber.state, tmp_path / "new" / "adapter-v0", update.metadata)
    assert folder.is_absolute()
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((folder / "adapter_config.json").read_text()) == CONFIG
    with safe_open(folder / "adapter_model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert np.array_equal(file.get_tensor(NAME), weights[NAME])


def test_a_version_of_a_whole_model_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    Publisher(store, stream="policy").publish({"a": np.zeros(3, np.float32)}, metadata={"step": 1})
    subscriber = Subscriber(store, stream="policy")
    update = subscriber.sync()
    assert update is not None
    with pytest.raises(InputError, match="is no adapter") as refusal:
        write_adapter(subscriber.state, tmp_path / "adapter", update.metadata)
    assert "adapter=True" in refusal.value.hint
    assert not (tmp_path / "adapter").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        write_adapter(subscriber.state, tmp_path / "file", {"adapter_config": "{}"})


@pytest.mark.slow
def test_the_other_side_needs_no_torch() -> None:
    code = "import sys, pulse_rl.integrations.peft; sys.exit('torch' in sys.modules or 'peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
