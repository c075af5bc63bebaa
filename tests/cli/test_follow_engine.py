"""pulse follow --engine: what is refused before and without an engine; the rest is in
tests/engines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pulse_rl.engines.rollouts import Rollout, Weights
from tests.support.commands import Pulse

NOBODY = "http://127.0.0.1:1"


def test_an_engine_that_is_not_there_is_one_line(pulse: Pulse) -> None:
    arguments = ("follow", "store", "--stream", "policy", "--engine", NOBODY, "--once")
    pulse.refused(*arguments, kind="engine_unavailable", match=f"no answer from {NOBODY}")


def test_a_store_in_memory_is_refused(pulse: Pulse) -> None:
    arguments = ("follow", "memory://", "--stream", "policy", "--engine", NOBODY)
    pulse.refused(*arguments, kind="input", match="memory://")


@pytest.mark.parametrize("kept", [[], ["--out", "a", "--engine", NOBODY]])
def test_either_a_checkpoint_or_an_engine_is_kept(pulse: Pulse, kept: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        pulse("follow", "store", "--stream", "policy", *kept)
    assert ended.value.code == 2


def test_a_replay_says_what_it_lacks(
    pulse: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, weights = tmp_path / "r.jsonl", (Weights(0, "0" * 64),)
    arguments = ("replay", str(records), "--store", str(tmp_path))
    pulse.refused(*arguments, kind="input", match="cannot read")
    records.touch()
    pulse.refused(*arguments, kind="input", match="has no rollouts")
    facts = {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "sampling": {},
        "token_ids": (1,),
        "logprobs": (-1.5,),
    }
    Rollout.of([1, 2], stream="policy", weights=weights, seed=3, **facts).append(records)
    pulse.refused(
        *arguments, "--engine", NOBODY, kind="engine_unavailable", match=f"no answer from {NOBODY}"
    )
    monkeypatch.setitem(sys.modules, "vllm", None)
    pulse.refused(*arguments, kind="input", match="vLLM is not installed")
