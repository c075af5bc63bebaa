"""TRL's AsyncGRPOTrainer with a real server: the stream has what TRL sent, and the server what the
stream has."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig

from pulse_rl import Published
from pulse_rl.frameworks.trl import PulseWeightTransfer
from tests.engines.server import checksums
from tests.trainers.support import Witness, collect, followed

from .support import STEPS, async_grpo, weight_version, written_anew


def test_after_each_step_the_server_has_the_cast_weights(
    url: str, checkpoint: str, tmp_path: Path, async_grpo_on_cpu: None
) -> None:
    store, witness, published = str(tmp_path / "store"), Witness(), list[Published]()

    transfer = PulseWeightTransfer(url, store, "policy", on_event=collect(published))
    trainer = async_grpo(checkpoint, tmp_path, url, transfer, callbacks=[witness])
    trainer.train()
    assert str(trainer.model.dtype) == "torch.float32"
    assert sorted(witness.roots) == list(range(STEPS + 1))
    assert followed(store, key="sync") == {step + 1: root for step, root in witness.roots.items()}
    assert all(0 < p.density < 0.05 for p in published[1:])
    assert (transfer.synced.version, transfer.synced.previous, transfer.synced.full) == (
        STEPS,
        STEPS - 1,
        False,
    )
    assert weight_version(url) == str(STEPS)
    assert checksums(url) == written_anew(url, store)


def test_lora_is_sent_merged(
    url: str, checkpoint: str, tmp_path: Path, async_grpo_on_cpu: None
) -> None:
    store = str(tmp_path / "store")
    transfer = PulseWeightTransfer(url, store, "policy")
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    settings = {"learning_rate": 1e-3}
    trainer = async_grpo(checkpoint, tmp_path, url, transfer, peft_config=lora, config=settings)
    trainer.train()
    assert transfer.published.version == STEPS
    assert 0 < transfer.published.density < 0.5
    assert checksums(url) == written_anew(url, store)
