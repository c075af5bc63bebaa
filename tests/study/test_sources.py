"""Where a study's states come from: folders of checkpoints in natural order, streams; and the
command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from torch import bfloat16, float32, int16, zeros

from pulse_rl import LocalStore, Publisher, State
from pulse_rl.errors import CorruptCheckpoint, InputError, StateMismatch
from pulse_rl.frameworks.torch import to_torch
from pulse_rl.study import study
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import Pulse
from tests.support.states import Rng, Tensors, history, publish_each


def save_sharded(folder: Path, state: Tensors) -> None:
    """Two shards with an index, as Hugging Face writes them."""
    names = sorted(state)
    places = {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_checkpoint(folder / file, {name: state[name] for name in part})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.fixture
def states(rng: Rng) -> list[Tensors]:
    return history(rng, 6, density=0.02)


@pytest.fixture
def folder(tmp_path: Path, states: list[Tensors]) -> Path:
    """Files, folders and sharded folders side by side, and things that are no checkpoints; steps 7
    to 12."""
    place = tmp_path / "run"
    for i, state in enumerate(states):
        name = f"step-{7 + i}"
        if i % 3 == 0:
            write_checkpoint(place / f"{name}.safetensors", state)
        elif i % 3 == 1:
            write_checkpoint(place / name / "model.safetensors", state)
        else:
            save_sharded(place / name, state)
    (place / "logs").mkdir()
    (place / "trainer_state.json").write_text("{}")
    return place


def test_checkpoints_are_ordered_by_the_numbers_in_their_names(folder: Path) -> None:
    assert study(folder)["states"] == [
        "step-7.safetensors",
        "step-8",
        "step-9",
        "step-10.safetensors",
        "step-11",
        "step-12",
    ]


def test_natural_order_of_any_names(tmp_path: Path) -> None:
    ordered = ["1", "2b", "10", "a", "a1b2", "a1b10", "a2", "a10", "step9.old", "step10.new"]
    for name in ordered:
        write_checkpoint(tmp_path / name, {"w": np.zeros(2, np.float32)})
    assert study(tmp_path)["states"] == ordered


def test_a_folder_of_every_kind_of_checkpoint_is_studied(
    folder: Path, states: list[Tensors]
) -> None:
    found = study(folder, ks=(1, 5))
    assert [row["pairs"] for row in found["rows"]] == [5, 1]
    first, last = (to_torch(State.of(states[i])) for i in (0, 5))
    cast = {
        n: (first[n].to(bfloat16), last[n].to(bfloat16))
        for n in first
        if first[n].is_floating_point()
    }
    changed = sum(int((old.view(int16) != new.view(int16)).sum()) for old, new in cast.values())
    changed += sum(int((first[n] != last[n]).sum()) for n in first.keys() - cast.keys())
    assert found["rows"][1]["changed"] == changed
    assert found["dtypes"].keys() == {"BF16", "I64"}  # the FP32 norm is cast


def test_a_stream_gives_the_numbers_of_the_folder(
    folder: Path, states: list[Tensors], tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    publish_each(Publisher(store, stream="policy"), states)
    stream = study(store, stream="policy")
    files = study(folder)
    assert stream["states"] == [f"version {i}" for i in range(6)]
    for name in ("source", "states"):
        del stream[name], files[name]
    assert stream == files


def test_the_last_checkpoint_beside_the_folders_of_a_trainer_is_left_out(
    tmp_path: Path, states: list[Tensors]
) -> None:
    for i in (500, 1000):
        write_checkpoint(tmp_path / f"checkpoint-{i}" / "model.safetensors", states[0])
    write_checkpoint(tmp_path / "model.safetensors", states[1])
    assert study(tmp_path)["states"] == ["checkpoint-500", "checkpoint-1000"]


def refused(folder: Path, match: str, kind: type[Exception] = InputError) -> None:
    with pytest.raises(kind, match=match):
        study(folder)


def test_what_is_no_folder_of_checkpoints_is_refused(tmp_path: Path, states: list[Tensors]) -> None:
    refused(tmp_path / "absent", "cannot read .*absent")
    refused(tmp_path, "holds 0 checkpoints")
    write_checkpoint(tmp_path / "a.safetensors", states[0])
    refused(tmp_path, "holds 1 checkpoints")
    refused(tmp_path / "a.safetensors", "cannot read")
    save_sharded(tmp_path / "one", states[0])
    with pytest.raises(InputError, match="holds 1 checkpoints") as caught:
        study(tmp_path / "one")
    assert "folder above" in caught.value.hint


def test_states_of_different_models_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"w": zeros(4, dtype=bfloat16)}, tmp_path / "1.safetensors")
    for tensors, match in (
        (
            {"w": zeros(5, dtype=bfloat16)},
            r"2\.safetensors: tensor 'w' is BF16 \[5\], but BF16 \[4\] in 1\.safetensors",
        ),
        ({"w": zeros(4, dtype=float32)}, "tensor 'w' is F32"),
        ({"v": zeros(4, dtype=bfloat16)}, "tensor 'v' is not in"),
        ({"w": zeros(4, dtype=bfloat16), "x": zeros(1)}, "'x'"),
    ):
        save_file(tensors, tmp_path / "2.safetensors")
        refused(tmp_path, match, StateMismatch)
    (tmp_path / "2.safetensors").write_bytes(b"no")
    refused(tmp_path, r"2\.safetensors", CorruptCheckpoint)


def test_a_stream_of_one_version_or_of_two_models_is_refused(
    tmp_path: Path, states: list[Tensors]
) -> None:
    store = LocalStore(tmp_path)
    publisher = Publisher(store, stream="policy")
    publisher.publish(states[0])
    with pytest.raises(InputError, match="holds 1 version,"):
        study(store, stream="policy")
    publisher.publish({name: states[0][name] for name in list(states[0])[:2]})
    with pytest.raises(StateMismatch, match="version 1: tensor"):
        study(store, stream="policy")


# -- the command


def test_the_command_ends_with_the_three_numbers(folder: Path, pulse: Pulse) -> None:
    lines = pulse("study", folder, "--step-seconds", "10").splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["sparsity", "bytes", "bandwidth"]
    assert "90% utilization at 10 s per step" in lines[-1]
    assert "6 states (step-7.safetensors … step-12)" in lines[0]
    assert [line.split()[0] for line in lines[4:7]] == ["1", "2", "4"]


def publish_all(folder: Path, states: list[Tensors]) -> None:
    publish_each(Publisher(LocalStore(folder), stream="policy"), states)


def test_the_command_prints_the_study_as_json(folder: Path, pulse: Pulse) -> None:
    out = pulse("study", folder, "--json", "--k", "5", "2", "--dtype", "f8_e4m3")
    assert out.count("\n") == 1
    assert json.loads(out) == study(folder, ks=(2, 5), dtype="F8_E4M3")
    assert {row["k"] for row in json.loads(out)["rows"]} == {2, 5}


def test_the_command_studies_a_stream(tmp_path: Path, states: list[Tensors], pulse: Pulse) -> None:
    publish_all(tmp_path, states[:3])
    found = pulse.json("study", tmp_path, "--stream", "policy")
    assert found["source"] == f"{tmp_path} stream policy"
    assert [row["k"] for row in found["rows"]] == [1, 2]


def test_the_command_writes_a_report(folder: Path, tmp_path: Path, pulse: Pulse) -> None:
    pulse("study", folder, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "step-7" in page or str(folder) in page


@pytest.mark.parametrize("wrong", [["--step-seconds", "0"], ["--k", "0"], ["--k", "6"]])
def test_the_command_refuses_with_one_line(folder: Path, pulse: Pulse, wrong: list[Any]) -> None:
    pulse("study", folder, *wrong, status=1)
    assert pulse.err.count("\n") == 1
