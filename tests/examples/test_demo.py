"""The example run, small: killed processes resume, and the proof at the end can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pulse_rl.cli import main

CHECKOUT = Path(__file__).parents[2]
SMALL = ["--sft-steps", "30", "--prompts", "4", "--checkpoint-every", "2"]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.grpo", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.slow
def test_killed_trainer_and_worker_resume_with_identical_weights(tmp_path: Path) -> None:
    done = demo("--run", str(tmp_path), "--steps", "6", *SMALL, "--kill", "trainer@3", "--kill", "worker-1@4")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "trainer.jsonl").read_text().splitlines()[-1])
    assert (result["event"], result["step"], result["identical"]) == ("result", 6, True)
    assert set(result["workers"].values()) == {result["root"]}
    assert len(result["workers"]) == 2
    assert (tmp_path / "reward-and-density.png").stat().st_size > 10_000
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0

    report = tmp_path / f"store/reports/worker-0/{result['version']:012d}.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"root": "0" * 64}))
    assert demo("trainer", "--run", str(tmp_path)).returncode == 3


def test_rollouts_of_another_root_or_too_old_are_refused() -> None:
    from examples.grpo.rollouts import Origin, refusal

    origin = Origin("worker-0", "policy", 5, "aa", 1.0, 1.0)
    roots = {4: "99", 5: "aa"}
    assert refusal(origin, roots=roots, newest=7, max_lag=2) is None
    assert refusal(origin, roots=roots, newest=8, max_lag=2) == "too old"
    assert refusal(replace(origin, root="bb"), roots=roots, newest=7, max_lag=2) == "wrong root"
    assert refusal(replace(origin, version=3), roots=roots, newest=7, max_lag=2) == "unknown version"
