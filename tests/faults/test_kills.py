"""SIGKILL at every store call of real processes: nothing committed is lost, and every restart goes on. And programs
that end at a random moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "tests.faults"]


@pytest.mark.parametrize(
    ("role", "versions", "mode", "fewest_calls"),
    [("publisher", 5, "before", 25), ("subscriber", 4, "after", 30), ("gc", 4, "before", 6)],
)
def test_every_kill_point_is_survived(role: str, versions: int, mode: str, fewest_calls: int) -> None:
    """``make faults`` kills before, after and in the midst of each call in longer runs."""
    done = subprocess.run(
        [*PROGRAM, "kills", role, "--versions", str(versions), "--modes", mode, "midst", "--json"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    survived = json.loads(done.stdout)
    assert survived["calls"] >= fewest_calls
    assert survived["modes"][mode] == survived["calls"]
    assert survived["kills"] == sum(survived["modes"].values())
    if role != "gc":
        assert survived["modes"]["midst"] > 5


def test_programs_end_with_everything_under_way() -> None:
    """``make faults`` has more of them."""
    command = [*PROGRAM, "exits", "--count", "8"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
