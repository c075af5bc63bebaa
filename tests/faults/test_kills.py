"""SIGKILL at every store call of real processes: nothing committed is lost, and every restart goes
on. And programs that end at a random moment."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from . import kills

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("role", "versions", "mode", "fewest_calls"),
    [("publisher", 4, "before", 20), ("subscriber", 4, "after", 30), ("gc", 4, "before", 6)],
)
def test_every_kill_point_is_survived(
    role: str, versions: int, mode: str, fewest_calls: int
) -> None:
    """``make faults`` kills before, after and in the midst of each call in longer runs."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # whose process has no threads
        survived = pool.submit(kills.run, role, versions, (mode, "midst")).result(timeout=120)
    assert survived["calls"] >= fewest_calls
    assert survived[mode] == survived["calls"]
    if role != "gc":
        assert survived["midst"] > 5


def test_programs_end_with_everything_under_way() -> None:
    """``make faults`` has more of them."""
    command = [sys.executable, "-m", "tests.faults", "exits", "--sequences", "4"]
    checkout = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "exits, seed 1: 4 sequences" in done.stdout
