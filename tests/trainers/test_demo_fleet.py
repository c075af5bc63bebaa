"""`make demo-fleet`, a short run of it: whatever is killed, joins or is cut off, all end with the trainers' bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from examples.fleet.links import Direction
from pulse_rl import LocalStore
from pulse_rl.stream.manifest import Manifest
from pulse_rl.stream.stream import Stream

ROOT = Path(__file__).parents[2]


def test_a_short_run(tmp_path: Path) -> None:
    options = ["--run", str(tmp_path / "run"), "--steps", "12", "--sft-accuracy", "0.01"]
    done = subprocess.run(
        [sys.executable, "-m", "examples.fleet", *options], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every worker of both regions holds both policies, bit for bit" in done.stdout
    for note in ("killing worker-1", "worker-7 joins far", "far is cut off", "far is back"):
        assert note in done.stdout
    for policy in ("solver", "verifier"):
        newest: Manifest | None = Stream(LocalStore(tmp_path / "run" / "origin"), policy).newest().manifest
        assert newest is not None
        assert newest.version == 12
        assert newest.patch is not None
        assert len(newest.patch.parts) == 2, "one of each rank"


def test_a_link_is_shared_by_all_who_have_its_file(tmp_path: Path) -> None:
    here, there = Direction(tmp_path / "link", 1e6), Direction(tmp_path / "link", 1e6)
    child = os.fork()
    if child == 0:
        there.carry(12_500)
        os._exit(0)
    os.waitpid(child, 0)
    before = os.times().elapsed
    here.carry(12_500)
    there.carry(12_500)
    assert os.times().elapsed - before >= 0.19
