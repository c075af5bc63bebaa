"""Two ranks on gloo: DDP in the Trainer and in GRPO, FSDP2; DeepSpeed's ZeRO-3 and ZeRO-2;
Megatron-Core's tensor, pipeline and data parallelism by Megatron-Bridge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("program", "package"),
    [("ranks", "torch"), ("zero", "deepspeed"), ("megatron_ranks", "megatron.core")],
)
def test_two_ranks(program: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason="make test-trainers installs it")
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        f"tests.trainers.{program}",
    ]
    result = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"},
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("is content") == 2
