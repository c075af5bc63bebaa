"""TRL's GRPO with TRL's own weight sync and with Pulse: the same training, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import same_training

STEPS = 10


def lines(file: Path) -> list[dict[str, Any]]:
    """Of the steps, without the first line, which says where and when."""
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


def test_ten_steps_are_equal_to_the_bit(tmp_path: Path) -> None:
    same_training.main(["--steps", str(STEPS), "--seeds", "0", "--out", str(tmp_path / "run")])
    own, ours = (
        lines(tmp_path / f"run.{transport}.jsonl") for transport in same_training.TRANSPORTS
    )
    names = (
        *("step", "reward", "loss", "entropy", "kl", "grad_norm", "tokens", "logprobs", "trainer"),
        "engine",
    )
    assert [[line[name] for name in names] for line in own] == [
        [line[name] for name in names] for line in ours
    ]
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    assert all(line["trainer"] == line["engine"] for line in ours)
    assert len({line["engine"] for line in ours}) == len({line["root"] for line in ours}) == STEPS


@pytest.mark.parametrize("name", ["reward", "tokens", "engine"])
def test_a_difference_is_found(name: str) -> None:
    line = {
        "transport": "trl",
        "seed": 0,
        "step": 1,
        "reward": 0.5,
        "tokens": "a",
        "trainer": "b",
        "engine": "b",
    }
    assert not same_training.differences([line, line | {"transport": "pulse"}])
    (first, *_) = same_training.differences([line, line | {"transport": "pulse", name: "other"}])
    assert name in first
    assert "seed 0, step 1" in first
