"""The runs of `make study`: what the recorder keeps of a run, the tables, and a short real run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.study.recorder import Recorder
from benchmarks.study.settings import KS, Settings
from pulse_rl import Bits, State
from tests.support.states import Rng


def recorded(rng: Rng, settings: Settings) -> tuple[dict[str, Any], list[np.ndarray]]:
    states = [rng.integers(0x3C00, 0x3E00, 2000, np.uint16)]
    while len(states) <= settings.steps:
        at = rng.choice(2000, rng.integers(1, 50), replace=False)
        states.append(states[-1].copy())
        states[-1][at] ^= 1
    first, *others = [State.of({"mlp.weight": Bits(s, "BF16")}) for s in states]
    recorder = Recorder(settings, first)
    for state in others:
        recorder.add(state)
    result = recorder.result([0.5] * settings.steps)
    return {
        "settings": vars(settings),
        "rewards": [0.1] * settings.steps,
        "dtypes": {},
        **result,
    }, states


def test_the_steady_part_counts_and_every_step_has_a_density(rng: Rng) -> None:
    settings = Settings("run", "minilm", 1e-6, steps=36, steady_from=2)
    result, states = recorded(rng, settings)
    assert result["density"] == [float((a != b).mean()) for a, b in pairwise(states)]
    assert result["peak"] == result["density"][result["peak_step"] - 1] == max(result["density"])
    for row in result["study"]["rows"]:
        k = row["k"]
        pairs = [(states[t - k] == states[t]).mean() for t in range(2 + k, 37)]
        assert row["sparsity"] == pytest.approx(np.mean(pairs))
        assert (row["pairs"], row["coded_pairs"]) == (35 - k, 2)
    assert [row["k"] for row in result["study"]["rows"]] == list(KS)


@pytest.mark.slow
def test_a_short_run_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.study import example  # imports transformers: seconds

    monkeypatch.setattr(example, "CACHE", tmp_path)
    for name, value in {"FIT_STEPS": 1, "FIT_BATCH": 8, "PROMPTS": 2}.items():
        monkeypatch.setattr(example, name, value)
    settings = Settings("short", "qwen-0.4m", 1e-4, supervised=True, steps=3, steady_from=0)
    seen: list[tuple[int, float]] = []
    result = example.run(settings, 0, lambda step, _reward, density: seen.append((step, density)))
    assert seen == list(enumerate(result["density"], 1))
    assert all(density > 0 for _, density in seen)
    assert [row["k"] for row in result["study"]["rows"]] == [1, 2]
    assert result["study"]["gradient_density"] > 0
