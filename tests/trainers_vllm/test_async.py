"""TRL's AsyncGRPOTrainer with a real server: what the stream has is what TRL sent, and what the server holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from pulse_rl.integrations.trl import PulseWeightTransfer
from pulse_rl.integrations.vllm import connect
from tests.engines.server import checksums
from tests.trainers.support import Witness, followed

from .support import STEPS, async_grpo


def test_each_step_s_weights_are_live(url: str, checkpoint: str, tmp_path: Path, patched: Any) -> None:
    store, witness = str(tmp_path / "store"), Witness()
    transfer = PulseWeightTransfer(url, store, "policy")
    trainer = async_grpo(checkpoint, tmp_path, url, transfer, callbacks=[witness])
    trainer.train()
    assert str(trainer.model.dtype) == "torch.float32"
    assert followed(store, key="sync") == {step + 1: root for step, root in witness.roots.items()}
    assert transfer.published is not None
    assert transfer.published.density < 0.05
    print(transfer.published, transfer.synced)
