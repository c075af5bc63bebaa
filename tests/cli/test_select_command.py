"""`--select`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pulse_rl import State
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import Pulse
from tests.support.states import Rng, Tensors, history, roots


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
