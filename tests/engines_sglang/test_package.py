"""Updates through the real SGLang; see `package` for what is real, and `updates` for what is asked of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_updates_reach_the_models_of_sglang(tmp_path: Path, tied: str, tensor_parallel: int) -> None:
    """In a process of its own: SGLang's groups and configuration are of the process."""
    command = [sys.executable, "-m", "tests.engines_sglang.updates", str(tmp_path), str(tensor_parallel), tied]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("done\n")
