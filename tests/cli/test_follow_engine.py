"""`pulse follow --engine`: what is refused before and without an engine; the rest is in
tests/engines. And `--select`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pulse_rl import State
from pulse_rl.engines.rollouts import Rollout, Weights
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import Pulse
from tests.support.states import Rng, Tensors, history, roots

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


# -- --select


@pytest.fixture
def states(rng: Rng) -> list[Tensors]:
    return history(rng, 3)


def test_a_part_is_followed(pulse: Pulse, tmp_path: Path, states: list[Tensors]) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    publish = ("publish", "--stream", "policy")
    follow = ("follow", store, "--stream", "policy", "--out", out, "--once")
    for k, state in enumerate(states):
        pulse(*publish, write_checkpoint(tmp_path / f"{k}.safetensors", state), store)
        found = pulse.json(*follow, "--select", "embed.*", "--select", "layers.0.mlp.weight")
        assert (found["version"], found["root"]) == (k, roots(states)[k])
        held = State.of(out)
        assert held.names == ["embed.weight", "layers.0.mlp.weight"]
    assert "nothing" in pulse.json(*follow, "--select", "nothing.*", status=1)["message"]
    assert pulse.json(*follow)["version"] == 2, "the whole, where there was a part"
    whole = State.of(out)
    assert np.array_equal(held.read("embed.weight"), whole.read("embed.weight"))
    assert len(whole) == len(states[2])


def test_an_engine_takes_all(pulse: Pulse, tmp_path: Path) -> None:
    engine = ("--engine", "http://127.0.0.1:9", "--select", "a")
    pulse.refused(
        "follow", tmp_path, "--stream", "policy", *engine, kind="input", match="all tensors"
    )
