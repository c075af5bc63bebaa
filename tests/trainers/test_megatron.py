"""Two ranks with a model of Megatron-Core, exported by Megatron-Bridge: tensor and pipeline parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_two_ranks_with_megatron(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="make test-trainers installs it")
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tests.trainers.megatron_ranks",
    ]
    result = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("is content") == 2
