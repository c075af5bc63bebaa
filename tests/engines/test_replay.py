"""Rollouts of many versions, generated again by a live vLLM at these versions: every token, every
bit of a logprob."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from pulse_rl.rollouts import Rollout

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def test_rollouts_of_all_versions_come_out_the_same(tmp_path: Path) -> None:
    """In one engine, which goes back from the newest version to the first; then by the command, in
    one of its own."""
    made = run(
        "-m", "benchmarks.replay", "--versions", "5", "--rollouts", "8", "--folder", str(tmp_path)
    )
    assert made.returncode == 0, made.stderr[-4000:]
    facts = json.loads(made.stdout.splitlines()[-1])
    assert (facts["rollouts"], facts["same"], facts["versions"]) == (8, 8, 5)
    assert facts["across"] == [[[2, 0], [3, 3]], [[3, 0], [4, 3]]], (
        "the token from which on the weights were others"
    )

    first, *_, last = Rollout.read(tmp_path / "rollouts.jsonl")
    altered = replace(first, logprobs=(first.logprobs[0], -0.5, *first.logprobs[2:]))
    for rollout in (altered, last):
        rollout.append(tmp_path / "two.jsonl")
    command = "import sys; from pulse_rl.cli import main; sys.exit(main())"
    options = ("--store", str(tmp_path / "store"), "--json")
    done = run("-c", command, "replay", str(tmp_path / "two.jsonl"), *options)
    assert done.returncode == 1, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each.get("differing"), each["same"]) for each in found] == [
        ([1], False),
        ([], True),
        (None, 1),
    ]


def test_the_example_shows_equal_logprobs(tmp_path: Path) -> None:
    done = run("-m", "examples.replay", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the same, to the last bit" in done.stdout
