"""Two ranks: DDP in the Trainer and in GRPO, FSDP2 with and without adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_two_ranks(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.trainers.ranks"]
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
