"""Rollouts of many versions, generated again by a live vLLM at these versions: every token, every
bit of a logprob."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pulse_rl.engines.rollouts import Rollout
from tests.support.programs import ran


def test_rollouts_of_all_versions_come_out_the_same(tmp_path: Path) -> None:
    """In one engine, which goes back from the newest version to the first; then by the command, in
    one of its own."""
    options = ("--versions", 5, "--rollouts", 8, "--folder", tmp_path)
    facts = json.loads(ran("-m", "benchmarks.replay", *options, seconds=1200).splitlines()[-1])
    assert (facts["rollouts"], facts["same"], facts["versions"]) == (8, 8, 5)
    assert facts["across"] == [[[2, 0], [3, 3]], [[3, 0], [4, 3]]], (
        "the token from which on the weights were others"
    )

    first, *_, last = Rollout.read(tmp_path / "rollouts.jsonl")
    altered = replace(first, logprobs=(first.logprobs[0], -0.5, *first.logprobs[2:]))
    for rollout in (altered, last):
        rollout.append(tmp_path / "two.jsonl")
    program = "import sys; from pulse_rl.cli import main; sys.exit(main())"
    replay = ("replay", tmp_path / "two.jsonl", "--store", tmp_path / "store", "--json")
    said = ran("-c", program, *replay, status=1, seconds=1200)
    found = [json.loads(line) for line in said.splitlines()]
    assert [(each.get("differing"), each["same"]) for each in found] == [
        ([1], False),
        ([], True),
        (None, 1),
    ]


def test_the_example_shows_equal_logprobs(tmp_path: Path) -> None:
    said = ran("-m", "examples.replay", "--folder", tmp_path, seconds=1200)
    assert "the same, to the last bit" in said
