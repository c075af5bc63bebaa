"""Two ranks under DeepSpeed: ZeRO-3 and ZeRO-2, a loop of one's own, the Trainer, adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_two_ranks_under_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="make test-trainers installs it")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.trainers.zero"]
    result = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"},
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("is content") == 2
