"""A folder that is followed is a checkpoint at every moment, wherever its follower is killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pulse_rl import LocalStore, Publisher, Subscriber, state_root
from pulse_rl.errors import InputError
from tests.support.commands import Pulse
from tests.support.killed import Killed, follow
from tests.support.states import Rng

INDEX = "model.safetensors.index.json"
WEIGHTS = {"a.weight": np.zeros(5000, np.float32), "b.weight": np.ones((3, 7), np.int32)}
PLACES = {
    "a.weight": "model-00001-of-00002.safetensors",
    "b.weight": "model-00002-of-00002.safetensors",
}


def files_of(version: int) -> dict[str, bytes]:
    """Each version has a config that names it, and a file that the one before has not."""
    index = {"metadata": {"total_size": 1}, "weight_map": PLACES}
    return {
        "config.json": json.dumps({"version": version}).encode(),
        f"only-{version}.txt": b"x" * 100,
        "templates/chat.jinja": str(version).encode(),
        INDEX: json.dumps(index).encode(),
    }


def publish(publisher: Publisher, version: int) -> None:
    publisher.publish(
        WEIGHTS | {"b.weight": np.full((3, 7), version, np.int32)}, files=files_of(version)
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A stream of two versions."""
    with Publisher(LocalStore(tmp_path / "store"), stream="policy") as publisher:
        publish(publisher, 0)
        publish(publisher, 1)
    return tmp_path / "store"


def version_of(folder: Path, *, sharded: bool = False) -> int:
    """The version that a folder shows to who opens its files by their names. Fails unless it is
    that one throughout."""
    version: int = json.loads((folder / "config.json").read_text())["version"]
    assert (folder / "templates/chat.jinja").read_text() == str(version)
    shown = {
        entry.name
        for entry in folder.iterdir()
        if entry.exists() and not entry.name.startswith((".", "pulse."))
    }
    names = {"config.json", f"only-{version}.txt", "templates"}
    weights = {*PLACES.values(), INDEX} if sharded else {"model.safetensors"}
    assert shown == names | weights
    found: dict[str, Any] = {}
    for name in weights - {INDEX}:
        found |= load_file(folder / name)
    if sharded:
        index = json.loads((folder / INDEX).read_text())
        assert (index["metadata"]["total_size"], index["weight_map"]) == (20000 + 84, PLACES)
        assert all(name in load_file(folder / file) for name, file in PLACES.items())
    assert (found["b.weight"] == version).all()
    assert state_root(found) == state_root(folder)
    return version


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_killed_at_every_change_of_a_folder_it_is_one_version_or_the_other(
    pulse: Pulse, store: Path, tmp_path: Path, sharded: bool
) -> None:
    before, out = tmp_path / "before", tmp_path / "out"
    options = ["--sharded"] if sharded else []
    with Subscriber(LocalStore(store), stream="policy") as worker:
        worker.sync(target=0)
        worker.save(before, sharded=sharded)
    assert version_of(before, sharded=sharded) == 0
    seen = set[int]()
    kills = 0
    with Killed(out, follow(store, out, *options)) as killed:
        shutil.copytree(before, out, symlinks=True)
        while (status := killed.next()) != 0:
            assert status == -9
            seen.add(version_of(out, sharded=sharded))
            pulse(*follow(store, out, *options))
            assert version_of(out, sharded=sharded) == 1
            assert len(list((out / ".pulse").iterdir())) <= 4, "two versions, a link and a lock"
            shutil.rmtree(out)
            shutil.copytree(before, out, symlinks=True)
            kills += 1
            killed.go_on()
    assert version_of(out, sharded=sharded) == 1
    assert seen == {0, 1}
    assert kills > 20


@pytest.mark.slow
def test_a_follower_that_is_killed_again_and_again(tmp_path: Path, rng: Rng) -> None:
    out = tmp_path / "out"
    with Publisher(LocalStore(tmp_path / "store"), stream="policy") as publisher:
        publish(publisher, 0)
        with Subscriber(LocalStore(tmp_path / "store"), stream="policy") as worker:
            worker.sync()
            worker.save(out)
        shown = 0
        with Killed(
            out, follow(tmp_path / "store", out), rng.integers(1, 90, 40).tolist()
        ) as killed:
            for newest in range(1, 41):
                killed.next()
                now = version_of(out)
                assert shown <= now <= newest
                shown = now
                publish(publisher, newest)
                killed.go_on()
    assert shown > 20


@pytest.mark.slow
def test_what_a_first_run_left_is_no_hindrance(pulse: Pulse, store: Path, tmp_path: Path) -> None:
    out, done = tmp_path / "out", False
    with Killed(out, follow(store, out)) as killed:
        while not done:
            done = killed.next() == 0
            if not done:
                pulse(*follow(store, out))
            assert version_of(out) == 1
            shutil.rmtree(out)
            killed.go_on()


def test_who_resolves_the_link_keeps_one_version(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Subscriber(LocalStore(store), stream="policy") as worker:
        worker.sync(target=0)
        worker.save(out)
        pinned = (out / ".pulse/current").resolve()
        worker.sync()
        worker.save(out)
    assert (version_of(pinned), version_of(out)) == (0, 1)


def test_a_folder_is_a_base_with_what_it_remembers(store: Path, tmp_path: Path) -> None:
    with Subscriber(LocalStore(store), stream="policy") as worker:
        worker.sync(target=0)
        worker.save(tmp_path / "out")
    again = Subscriber(LocalStore(store), stream="policy", base=tmp_path / "out")
    update = again.sync()
    assert (update.version, update.previous) == (1, 0)


def test_what_pulse_did_not_write_stays(pulse: Pulse, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    mine = {"notes.md": b"mine", "config.json": b"{}"}
    for name, data in mine.items():
        (out / name).write_bytes(data)
    pulse.refused(*follow(store, out), kind="input", match="config.json exists and was not written")
    with Subscriber(LocalStore(store), stream="policy") as worker:
        worker.sync()
        with pytest.raises(InputError, match="config"):
            worker.save(out)
    assert content(out) == mine
    pulse(*follow(store, out, "--force"))
    assert (out / "notes.md").read_bytes() == b"mine"
    (out / "notes.md").unlink()
    assert version_of(out) == 1
    pulse(*follow(store, out))


@pytest.mark.parametrize("behind_a_link", [False, True])
def test_what_others_keep_in_its_hidden_folder_stays(
    pulse: Pulse, store: Path, tmp_path: Path, behind_a_link: bool
) -> None:
    """Another program's folder has that name, too."""
    mine, out = tmp_path / "mine", tmp_path / "out"
    hidden = mine if behind_a_link else out / ".pulse"
    kept = (hidden / "cookie", hidden / "000000000001-abc/x", mine / "0123456789ab-01234567/x")
    for file in kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"mine")
    if behind_a_link:
        out.mkdir()
        (out / ".pulse").symlink_to(mine)
        pulse.refused(*follow(store, out), kind="input", match="not a folder that pulse made")
    else:
        pulse(*follow(store, out))
        pulse(*follow(store, out))
        assert version_of(out) == 1
    for file in kept:
        assert file.read_bytes() == b"mine"


def content(folder: Path) -> Mapping[str, bytes]:
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if entry.exists() and entry.is_file()
    }


@pytest.mark.parametrize(
    "name", [INDEX, "model-00001-of-00002.safetensors", "consolidated.safetensors"]
)
def test_no_folder_gets_weights_beside_others(
    pulse: Pulse, store: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"{}")
    for force in ((), ("--force",)):
        pulse.refused(*follow(store, tmp_path / "out", *force), kind="input", match="holds")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == [name]


def test_the_layout_changes_on_request(pulse: Pulse, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Subscriber(LocalStore(store), stream="policy") as worker:
        worker.sync()
        for sharded in (True, False, True):
            worker.save(out, sharded=sharded)
            assert version_of(out, sharded=sharded) == 1
    pulse(*follow(store, out, "--sharded"))
    assert os.readlink(out / "config.json") == ".pulse/current/config.json", (
        "what moves with the folder stays right"
    )


def test_commands_carry_a_folder_s_files(pulse: Pulse, store: Path, tmp_path: Path) -> None:
    """publish FOLDER, follow, diff, apply: the same checkpoint, sharded as it was."""
    first, out = tmp_path / "first", tmp_path / "out"
    with Subscriber(LocalStore(store), stream="policy") as worker:
        for version, folder in enumerate((first, tmp_path / "second")):
            worker.sync(target=version)
            worker.save(folder, sharded=True)
    pulse("publish", first, tmp_path / "other", "--stream", "policy")
    pulse(*follow(tmp_path / "other", out, "--sharded"))
    expected = {
        name: data for name, data in content(first).items() if not name.startswith("pulse.")
    }
    weights = [name for name in expected if name.endswith(".safetensors")]
    assert {n: d for n, d in content(out).items() if n not in weights} == {
        n: d for n, d in expected.items() if n not in weights
    }
    assert state_root(out) == state_root(first)
    pulse("diff", first, tmp_path / "second", "-o", tmp_path / "patch")
    pulse("apply", first, tmp_path / "patch", "-o", tmp_path / "applied")
    assert state_root(tmp_path / "applied") == state_root(tmp_path / "second")
    assert (tmp_path / "applied/config.json").read_bytes() == files_of(0)["config.json"]
    options = ("--file", first / "config.json", "--dtype", "bf16")
    pulse("publish", first, tmp_path / "other", "--stream", "policy", *options)
    pulse(*follow(tmp_path / "other", out))
    assert set(content(out)) == {"config.json", "model.safetensors"}
    pulse("publish", first, tmp_path / "other", "--stream", "policy", "--no-files")
    pulse(*follow(tmp_path / "other", out))
    assert set(content(out)) == {"model.safetensors"}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_cast_checkpoint_says_what_it_is_now(pulse: Pulse, tmp_path: Path, key: str) -> None:
    from tests.support.checkpoints import write_checkpoint

    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", WEIGHTS)
    config = {"a": 1, key: "float32", "text_config": {key: "float32", "n": 2}}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    options = ("--stream", "policy", "--dtype", "BF16")
    pulse("publish", tmp_path / "model", tmp_path / "store", *options)
    pulse(*follow(tmp_path / "store", tmp_path / "out"))
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found == {"a": 1, key: "bfloat16", "text_config": {key: "bfloat16", "n": 2}}


def test_an_adapter_becomes_a_folder_that_peft_loads(pulse: Pulse, tmp_path: Path) -> None:
    store, out, config = tmp_path / "store", tmp_path / "out", b'{"peft_type": "LORA", "r": 2}'
    with Publisher(LocalStore(store), stream="policy") as publisher:
        for version in range(3):
            weights = {
                "base_model.model.q_proj.lora_A.weight": np.full((2, 3), version, np.float32)
            }
            publisher.publish(weights, files={"adapter_config.json": config})
            pulse(*follow(store, out, *(["--sharded"] if version == 1 else [])))
            assert content(out).keys() - {"pulse.history"} == {
                "adapter_config.json",
                "adapter_model.safetensors",
            }
            assert content(out)["adapter_config.json"] == config
            assert state_root(load_file(out / "adapter_model.safetensors")) == state_root(weights)
            assert state_root(out) == state_root(weights)
    idle = pulse.json(*follow(store, out))
    assert (idle["version"], idle["payload_bytes"]) == (2, 0)
