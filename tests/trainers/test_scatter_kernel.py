"""The kernel that writes an update, run by Triton's interpreter on the CPU. A stand-in for a GPU, not one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
from pulse_rl.integrations.scatter_kernel import by_kernel
from tests.support.scatter import check
for width in (1, 2, 4, 8):
    check(width, by_kernel)
print("written")
"""


def test_the_kernel_writes_what_it_should() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "written\n"
