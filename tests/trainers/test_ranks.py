"""Two ranks on gloo: DDP in the Trainer and in GRPO, FSDP2; DeepSpeed's ZeRO-3 and ZeRO-2;
Megatron-Core's tensor, pipeline and data parallelism by Megatron-Bridge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import ran_on_two_ranks


@pytest.mark.parametrize(
    ("program", "package"),
    [("ranks", "torch"), ("zero", "deepspeed"), ("megatron_ranks", "megatron.core")],
)
def test_two_ranks(program: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason="make test-trainers installs it")
    ran_on_two_ranks(f"tests.trainers.{program}", tmp_path)
