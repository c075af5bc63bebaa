"""Programs of this checkout in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def ran(
    *command: object, status: int = 0, seconds: float = 300, folder: Path = CHECKOUT, **more: str
) -> str:
    """Run ``python *command`` in ``folder`` and return what it prints. It must end with ``status``.
    ``more`` are variables of its environment."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def ran_on_two_ranks(module: str, *arguments: object) -> None:
    """Run ``module`` by torchrun on two ranks, each of which must print that it "is content"."""
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", module)
    here = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    assert ran(*command, *arguments, seconds=400, **here).count("is content") == 2
