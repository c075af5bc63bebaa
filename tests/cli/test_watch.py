"""`pulse watch`: checkpoints that a trainer writes become versions, each once, whoever is
killed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pulse_rl import MemoryStore, Publisher, Subscriber, state_root, verify_stream
from pulse_rl.errors import PublisherConflict
from tests.support.commands import Pulse
from tests.support.killed import Killed
from tests.support.running import Running
from tests.support.states import Rng, reach


def written(folder: Path, step: int, seed: int = 0, done: bool = True) -> Path:
    """What a trainer writes for a step, its marker last."""
    out = folder / f"step_{step}"
    out.mkdir(parents=True)
    rng = np.random.default_rng(step + seed)
    save_file({"w": rng.integers(0, 9, 3000).astype(np.float32)}, out / "model.safetensors")
    (out / "config.json").write_text(f'{{"step": {step}}}')
    if done:
        (out / "STABLE").touch()
    return out


def watch(folder: Path, store: Path) -> tuple[object, ...]:
    which = ("--pattern", "step_*", "--done", "STABLE")
    return ("watch", folder, store, "--stream", "s", *which, "--once")


def steps_of(store: Path) -> list[Any]:
    stream = Subscriber(store, stream="s").stream
    if not stream.versions():
        return []
    assert all(not report.problems for report in verify_stream(store, "s"))
    return [stream.manifest(version).metadata["step"] for version in stream.versions()]


def test_each_complete_checkpoint_becomes_a_version_once(pulse: Pulse, tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "out"
    command = watch(folder, store)
    pulse.refused(*command, kind="input", match="no folder")
    for step in (9, 10):
        written(folder, step)
    unfinished = written(folder, 11, done=False)
    pulse(*command)
    assert steps_of(store) == [9, 10], "by number, not by name"
    (unfinished / "STABLE").touch()
    shutil.rmtree(folder / "step_9")  # retention
    broken = written(folder, 12) / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-5])
    last = written(folder, 13)
    pulse(*command)
    assert "step_12 is passed over" in pulse.err
    assert "is newer than step 13" in pulse(*command)
    assert steps_of(store) == [9, 10, 11, 13]
    with Subscriber(store, stream="s") as worker:
        reach(worker, state_root(last))
        worker.save(tmp_path / "followed")
    assert (tmp_path / "followed" / "config.json").read_text() == '{"step": 13}'
    Publisher(store, stream="s").publish(last, metadata={})
    pulse.refused(*command, kind="input", match="which step")


@pytest.mark.slow
def test_two_watchers_publish_nothing_twice(pulse: Pulse, tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "out"
    for step in range(12):
        written(folder, step)
    both = [Running(tmp_path / f"log-{k}", *watch(folder, store)) for k in range(2)]
    assert 0 in {each.process.wait() for each in both}
    pulse(*watch(folder, store))
    assert steps_of(store) == list(range(12))


@pytest.mark.slow
def test_a_watcher_that_is_killed_at_any_change_tears_nothing(pulse: Pulse, tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "out"
    written(folder, 0)
    with Killed(store, [*map(str, watch(folder, store))]) as killed:
        while killed.next() != 0:
            known = steps_of(store)
            assert known == list(range(len(known)))
            if len(known) == len(list(folder.iterdir())):
                written(folder, len(known))
            killed.go_on()
    pulse(*watch(folder, store))
    assert steps_of(store) == list(range(len(list(folder.iterdir()))))


def test_a_version_follows_the_one_that_was_named(rng: Rng, store: MemoryStore) -> None:
    states = [{"w": rng.standard_normal(100).astype(np.float32)} for _ in range(4)]
    with Publisher(store, stream="s") as publisher:
        with pytest.raises(PublisherConflict, match="none, not 3"):
            publisher.publish(states[0], after=3)
        assert publisher.publish(states[0], after=-1).version == 0
        assert publisher.publish(states[1], after=0).version == 1
        for wrong in (0, -1, 2):
            with pytest.raises(PublisherConflict, match="is 1, not"):
                publisher.publish(states[2], after=wrong)
        assert publisher.publish(states[2], after=1).version == 2
    with Publisher(store, stream="s") as restarted:
        with pytest.raises(PublisherConflict, match="is 2, not 1"):
            restarted.publish(states[3], after=1)
        assert restarted.publish(states[3], after=2).version == 3
