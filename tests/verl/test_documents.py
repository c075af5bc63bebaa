"""The lines of docs/verl.md in verl's real configuration."""

from __future__ import annotations

import re
from pathlib import Path

import verl
from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass

PAGE = Path(__file__).parents[2] / "docs/verl.md"


def test_the_lines_to_add_configure_the_engine() -> None:
    lines = re.findall(r"^(\+?actor_rollout_ref\.\S+=\S+)", PAGE.read_text(), re.MULTILINE)
    lines += re.findall(r"`(actor_rollout_ref\.model\.\S+=\S+)`", PAGE.read_text())
    assert len(lines) == 5
    with initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer/config"), version_base=None
    ):
        config = compose("ppo_trainer", overrides=lines)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    assert (engine.backend, engine.custom_backend_module) == ("pulse", "pulse_rl.frameworks.verl")
    assert engine.engine_kwargs["pulse"] == {"store": "s3://bucket/run", "stream": "policy"}
    assert config.actor_rollout_ref.model.lora.merge is True
