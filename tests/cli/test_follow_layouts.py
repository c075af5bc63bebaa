"""`pulse follow --layout`: a folder for each version, whole whoever is killed, under the names that
readers know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pulse_rl import Publisher, Subscriber, state_root
from pulse_rl.errors import InputError
from tests.support.commands import Pulse
from tests.support.killed import Killed

INDEX = "model.safetensors.index.json"
PLACES = {"frozen": "model-00001-of-00002.safetensors", "w": "model-00002-of-00002.safetensors"}


def weights(step: int) -> dict[str, np.ndarray]:
    return {"frozen": np.ones(3000, np.float32), "w": np.full(4000, step, np.float32)}


def publish(publisher: Publisher, step: int) -> None:
    index = {"metadata": {}, "weight_map": PLACES}
    files = {"config.json": json.dumps({"step": step}).encode(), INDEX: json.dumps(index).encode()}
    publisher.publish(weights(step), metadata={"step": step}, files=files)


def follow(
    store: Path, out: Path, *options: object, layout: str = "prime-rl"
) -> tuple[object, ...]:
    return ("follow", store, "--stream", "s", "--out", out, "--once", "--layout", layout, *options)


def steps_in(out: Path, name: str = "step_{}", marker: str = "STABLE") -> set[int]:
    """The steps of the folders that a reader finds. Fails unless each is whole."""
    found = set()
    for folder in out.iterdir() if out.exists() else ():
        if folder.name.startswith("."):
            continue
        step = int(json.loads((folder / "config.json").read_text())["step"])
        assert folder.name == name.format(step)
        assert not marker or (folder / marker).is_file()
        assert all(file.is_file() and not file.is_symlink() for file in folder.iterdir())
        assert state_root(folder) == state_root(weights(step))
        found.add(step)
    return found


@pytest.mark.parametrize(
    ("layout", "name", "marker"),
    [
        ("prime-rl", "step_{}", "STABLE"),
        ("slime", "weight_v{:06}", ""),
        ("areal", "weight_update_v{}", ""),
        ("hf", "checkpoint-{}", ""),
        ("run-{:03}-full/DONE", "run-{:03}-full", "DONE"),
    ],
)
def test_versions_have_the_names_that_readers_look_for(
    pulse: Pulse, tmp_path: Path, layout: str, name: str, marker: str
) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    with Publisher(store, stream="s") as publisher:
        for step in (7, 8, 12):
            publish(publisher, step)
            pulse(*follow(store, out, "--keep", 2, layout=layout))
            pulse(*follow(store, out, "--keep", 2, layout=layout))
    assert steps_in(out, name, marker) == {8, 12}


def test_a_shard_that_did_not_change_is_a_hard_link(pulse: Pulse, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    with Publisher(store, stream="s") as publisher:
        for step in range(3):
            publish(publisher, step)
            pulse(
                *follow(store, out, "--sharded")
            )  # in a process of its own each: a restart, too, knows what it wrote
    files = {
        name: {(out / f"step_{step}" / file).stat().st_ino for step in range(3)}
        for name, file in PLACES.items()
    }
    assert (len(files["frozen"]), len(files["w"])) == (1, 3)
    assert steps_in(out) == {0, 1, 2}
    damaged = out / "step_2" / PLACES["frozen"]
    shutil.copy(damaged, tmp_path / "copy")
    (tmp_path / "copy").write_bytes((tmp_path / "copy").read_bytes()[:-1] + b"x")
    (tmp_path / "copy").replace(damaged)
    pulse(*follow(store, out, "--sharded"))
    assert steps_in(out) == {0, 1, 2}, "what is damaged is written again, and linked from nowhere"


def test_what_pulse_did_not_write_is_replaced_by_force_only(pulse: Pulse, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    with Publisher(store, stream="s") as publisher:
        publish(publisher, 3)
    mine, other = out / "step_3", out / "step_1"
    for folder in (mine, other):
        folder.mkdir(parents=True)
        save_file({"x": np.ones(2)}, folder / "model.safetensors")
    pulse.refused(*follow(store, out), kind="input", match="was not written")
    assert load_file(mine / "model.safetensors").keys() == {"x"}
    pulse(*follow(store, out, "--force", "--keep", 1))
    assert load_file(other / "model.safetensors").keys() == {"x"}, (
        "retention is for folders of pulse's own"
    )
    shutil.rmtree(other)
    assert steps_in(out) == {3}


def test_layouts_that_are_refused(pulse: Pulse, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Publisher(store, stream="s") as publisher:
        publish(publisher, 0)
    with Subscriber(store, stream="s") as worker:
        worker.sync()
        bad = "step {} ../step_{} a/{}/b/c .{} {}{} step_{step} step_{}/.x"
        for wrong in (*bad.split(), ""):
            with pytest.raises(InputError, match="no layout"):
                worker.save(tmp_path / "out", layout=wrong)
        with pytest.raises(InputError, match="of a layout"):
            worker.save(tmp_path / "out", keep=2)
    followed = ("follow", store, "--stream", "s", "--out", tmp_path / "plain", "--once")
    pulse.refused(*followed, "--keep", 2, kind="input", match="of a --layout")
    pulse(*followed)
    pulse.refused(*follow(store, tmp_path / "plain"), kind="input", match="followed checkpoint")
    engine = ("follow", store, "--stream", "s", "--engine", "http://localhost:9", "--layout", "hf")
    pulse.refused(*engine, kind="input", match="no --layout")


@pytest.mark.slow
def test_a_follower_that_is_killed_at_any_change_leaves_whole_folders(
    pulse: Pulse, tmp_path: Path
) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    command = follow(store, out, "--sharded", "--keep", 2)
    with Publisher(store, stream="s") as publisher:
        publish(publisher, 0)
        kills = newest = 0
        with Killed(out, [*map(str, command)]) as killed:
            while killed.next() != 0:
                kills += 1
                assert steps_in(out) <= {newest, newest - 1, newest - 2}
                if kills % 3 == 0:
                    pulse(*command)
                    assert max(steps_in(out)) == newest
                    newest += 1
                    publish(publisher, newest)
                killed.go_on()
        publish(publisher, newest := newest + 1)
    assert kills > 20
    pulse(*command)
    assert steps_in(out) == {newest, newest - 1}
    assert {entry.name for entry in (out / ".pulse").iterdir()} == {"lock"}


def test_only_folders_that_pulse_made_are_removed(tmp_path: Path) -> None:
    """Weights that pulse wrote have its mark wherever they are copied to."""
    out = tmp_path / "out"
    with Publisher(tmp_path, stream="s") as publisher, Subscriber(tmp_path, stream="s") as worker:
        for step in (10, 20, 30, 40, 60):
            publish(publisher, step)
            worker.sync()
            if step == 40:
                (out / "step_20" / "notes").write_text("mine")
                for copy in (5, 60):
                    shutil.copytree(out / "step_10", out / f"step_{copy}")
            if step == 60:
                with pytest.raises(InputError, match="was not written"):
                    worker.save(out, layout="prime-rl", keep=1)
            else:
                worker.save(out, layout="prime-rl", keep=1 if step == 40 else None)
    assert {entry.name for entry in out.glob("step*")} == {
        "step_5",
        "step_20",
        "step_40",
        "step_60",
    }


def test_a_version_without_a_config_is_noted_once(pulse: Pulse, tmp_path: Path) -> None:
    with Publisher(tmp_path / "s", stream="s") as publisher:
        publisher.publish(weights(0))
        pulse("follow", tmp_path / "s", "--stream", "s", "--out", tmp_path / "out", "--once")
        assert pulse.err.count("no config.json") == 1
        publish(publisher, 1)
    pulse("follow", tmp_path / "s", "--stream", "s", "--out", tmp_path / "out", "--once")
    assert "config.json" not in pulse.err
