"""What is in a store: list, log, status, checkout; and publish with all that it can say."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from pulse_rl import (
    Bits,
    MemoryStore,
    Publisher,
    State,
    Subscriber,
    gc_stream,
    open_store,
    state_root,
)
from pulse_rl.errors import InputError
from pulse_rl.frameworks.torch import to_torch
from pulse_rl.metrics import Heartbeat, tee_listeners
from tests.support.commands import POLICY, Pulse
from tests.support.states import Rng, weights
from tests.support.stores import FaultyStore, names


def publish(folder: Path, stream: str, rng: Rng, versions: int = 3) -> list[str]:
    tensor, roots = weights(rng, 500), []
    with Publisher(str(folder), stream=stream) as publisher:
        for step in range(versions):
            roots.append(
                publisher.publish({"w": tensor}, metadata={"step": step, "reward": step / 3}).root
            )
            tensor = Bits(tensor.array ^ (np.arange(500) == step).astype(np.uint16), "BF16")
    return roots


def test_list_and_log(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    assert pulse.json("list", tmp_path)["streams"] == []
    assert "no streams" in pulse("list", tmp_path)
    for stream in ("b", "a", "a-2"):
        publish(tmp_path, stream, rng)
    (tmp_path / "junk" / "x").mkdir(parents=True)
    (tmp_path / "junk" / "x" / "y").write_text("no stream")
    streams = pulse.json("list", tmp_path)["streams"]
    assert [each["stream"] for each in streams] == ["a", "a-2",
    "b"] or [each["stream"] for each in streams] == [
        "a-2", "a", "b"
    ]  # fmt: skip
    a = next(each for each in streams if each["stream"] == "a")
    assert (a["versions"], a["oldest"], a["newest"], a["anchors"]) == (3, 0, 2, [0])
    assert (a["metadata"]["step"], a["dense_bytes"], a["problem"]) == (2, 1000, "")
    assert a["bytes"] == sum(info.nbytes for info in open_store(tmp_path).list("a/payloads"))
    lines = pulse("list", tmp_path).splitlines()
    assert len(lines) == 4
    assert all("0 to 2" in line and "step=2 reward=0.6667" in line for line in lines[1:])

    found = pulse.json("log", tmp_path, "--stream", "a", "--last", "2")["versions"]
    assert [(each["version"], each["metadata"]["step"], each["density"]) for each in found] == [
        (1, 1, 0.002),
        (2, 2, 0.002),
    ]
    lines = pulse("log", tmp_path, "--stream", "a", "--last", "2").splitlines()
    assert [line.split()[0] for line in lines] == ["version", "2", "1", "(and"]
    assert len(pulse.json("log", tmp_path, "--stream", "a", "--last", "0")["versions"]) == 3
    (tmp_path / "a" / "versions" / f"{1:012d}.json").write_text("{}")
    assert "cannot be read" in pulse("log", tmp_path, "--stream", "a")
    pulse.refused("log", tmp_path, "--stream", "A", kind="empty_stream", match="has the streams")


def test_any_version_is_checked_out(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    roots = publish(tmp_path / "store", "policy", rng)
    for version in (2, 0, 1):
        command = ("checkout", tmp_path / "store", "--stream", "policy", "--version", version)
        assert pulse.json(*command, "--out", tmp_path / "out")["root"] == roots[version]
        assert state_root(tmp_path / "out") == roots[version]
    pulse.refused(
        "checkout", tmp_path / "store", "--stream", "policy", "--version", "7", "--out",
        tmp_path / "out",
        kind="input", match="it has 0 to 2",
    )  # fmt: skip


def test_workers_say_what_they_hold(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    publish(tmp_path, "policy", rng)
    kept = pulse("gc", tmp_path, "--stream", "policy", "--keep", 1, "--dry-run")
    assert "restored from the anchor of version 0" in kept
    assert "no worker" in pulse("status", tmp_path)
    store = open_store(tmp_path)
    for name, version in (("w-1", 1), ("w", 2), ("w-1", 0)):
        Subscriber(store, stream="policy", on_event=tee_listeners(Heartbeat(store, name))).sync(
            version
        )
    with pytest.raises(InputError):
        Heartbeat(store, "a/b")
    pulse("follow", tmp_path, *POLICY, "--out", tmp_path / "out", "--once", "--name", "cli")
    (found,) = pulse.json("status", tmp_path, "--stream", "policy")["streams"]
    assert [(each["worker"], each["version"], each["behind"]) for each in found["workers"]] == [
        ("w-1", 0, 2),
        ("cli", 2, 0),
        ("w", 2, 0),
    ]
    assert len(names(store, "policy/workers")) == 3, "one object a worker"
    assert "w-1  version 0  2 behind" in pulse("status", tmp_path)
    with Publisher(store, stream="policy") as publisher:
        assert publisher.wait_for(2, workers={"w", "cli"}) == publisher.wait_for(2, workers=2) == ()
        assert publisher.wait_for(2, workers=["w", "w-1", "x"], timeout_seconds=0) == ("w-1", "x")
        assert publisher.wait_for(2, workers=4, timeout_seconds=0) == ("w-1", "?")
        assert publisher.wait_for(workers=3, max_lag=2) == ()
        with pytest.raises(InputError, match="collection"):
            publisher.wait_for(2, workers="w")
        later = threading.Timer(0.2, Heartbeat(store, "x").beat, ("policy", 2))
        later.start()
        assert publisher.wait_for(2, workers=["x"]) == ()
        Heartbeat(store, "x").beat("policy", 2)
        publisher.publish({"w": weights(rng, 500)}, anchor=True)
    gc_stream(store, "policy", keep=1)
    assert names(store, "policy/workers") == []


def test_a_worker_that_may_not_write_goes_on(rng: Rng, caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(MemoryStore())
    Publisher(store, stream="s").publish({"w": weights(rng, 5)})
    heartbeat = Heartbeat(store, "w")
    for version in range(2):
        store.fail_on("put", "workers")
        heartbeat.beat("s", version)
        assert store.fired
    assert [record.name for record in caplog.records] == ["pulse_rl"]
    worker = Subscriber(store, stream="s", on_event=heartbeat)
    assert worker.sync() is not None
    assert names(store, "s/workers") == ["s/workers/w-000000000000"]


def test_publish_says_what_it_is_told_and_keeps_up_the_stream(
    pulse: Pulse, tmp_path: Path, rng: Rng
) -> None:
    store, file, tensor = tmp_path / "store", tmp_path / "m.safetensors", weights(rng, 3000).array
    for step in range(5):
        tensor = tensor ^ (np.arange(3000) % 100 == step).astype(np.uint16)
        save_file(to_torch(State.of({"w": Bits(tensor, "BF16")})), file)
        pulse(
            "publish", file, store, "--stream", "s", "--anchor", "--keep", 2, "--folds", 2, 4,
            "--metadata", f"step={step}", "--metadata", "note=a=b", "--metadata", "on=true",
        )  # fmt: skip
    (found,) = pulse.json("list", store)["streams"]
    assert found["metadata"] == {"step": 4, "note": "a=b", "on": True}
    assert (found["oldest"], found["newest"]) == (3, 4)
    with pytest.raises(SystemExit):
        pulse("publish", file, store, "--stream", "s", "--metadata", "step")


def test_the_help_has_examples_that_parse(pulse: Pulse) -> None:
    text = pulse()
    assert "examples:" in text
    assert "pulse publish" in text
    with pytest.raises(SystemExit) as ended:
        pulse("gc", "--help")
    assert ended.value.code == 0


@pytest.mark.parametrize("words", [["pulse", "stu"], ["pulse", "gc", "--dr"]])
def test_bash_completes_commands_and_options(pulse: Pulse, words: list[str]) -> None:
    script = pulse("completion", "bash")
    line = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _pulse pulse "
        f"{words[-1]}; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [{"stu": "study", "--dr": "--dry-run"}[words[-1]]]
    assert pulse("completion", "zsh").startswith("autoload")
