"""A store that went back in time, and streams that took another's place: nobody stays, without a
word, at what was lost."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import Publisher, Relay, Subscriber, state_root, verify_stream
from pulse_rl.errors import StreamForked
from pulse_rl.store import LocalStore
from tests.support.states import present, publish_each, reach


def publish(store: Path, versions: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    states = [{"w": rng.integers(0, 1 << 16, 4000, dtype=np.uint16)} for _ in range(versions)]
    with Publisher(store, stream="s") as publisher:
        publish_each(publisher, states)
    return states


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A store with versions 0 to 7, and its backup with versions 0 to 2."""
    store, backup = tmp_path / "store", tmp_path / "backup"
    publish(store, 3, 1)
    shutil.copytree(store, backup)
    publish(store, 5, 2)
    return store, backup


@pytest.mark.parametrize("late", [False, True], ids=["saw all versions", "began at the newest"])
@pytest.mark.parametrize("goes_on", [1, 3, 5], ids=["below", "still below", "the same number"])
def test_a_lost_version_is_reported_and_followed_where_allowed(
    places: tuple[Path, Path], goes_on: int, late: bool
) -> None:
    store, backup = places
    worker = Subscriber(store, stream="s")
    for version in [7] if late else range(8):
        update = present(worker.sync(version))
        update.acknowledge()
    lost = worker.root
    shutil.rmtree(store)
    shutil.copytree(backup, store)
    assert worker.sync() is None  # nobody has published yet: the lost version may come back
    states = publish(store, goes_on, 3)
    with pytest.raises(StreamForked, match="went back in time"):
        worker.sync()
    assert (worker.version, worker.root) == (7, lost)
    worker.allow_recreated = True
    update = present(worker.sync())
    assert (update.full, worker.version) == (True, 2 + goes_on)
    assert worker.root == state_root(states[-1]) == state_root(worker.state)


def test_a_relay_and_its_readers_follow(places: tuple[Path, Path], tmp_path: Path) -> None:
    store, backup = places
    near = tmp_path / "near"
    relay = Relay(store, near, stream="s")
    relay.sync()
    worker = Subscriber([str(near), str(store)], stream="s")
    worker.allow_recreated = True
    worker.patience_seconds = 0.0
    worker.sync()
    shutil.rmtree(store)
    shutil.copytree(backup, store)
    states = publish(store, 1, 3)
    with pytest.raises(StreamForked):
        relay.sync()
    reach(worker, state_root(states[-1]), 3)


@pytest.mark.parametrize("keep", [None, 3])
@pytest.mark.parametrize("how", ["recreated", "restored"])
@pytest.mark.parametrize("restart", [False, True])
def test_folders_of_versions_show_the_new_stream(
    places: tuple[Path, Path], tmp_path: Path, how: str, keep: int | None, restart: bool
) -> None:
    store, backup = places
    out = tmp_path / "out"
    worker = Subscriber(store, stream="s")
    for version in range(4, 8):
        worker.sync(version)
        worker.save(out, layout="hf", keep=keep)
    shutil.rmtree(store)
    if how == "restored":
        shutil.copytree(backup, store)
    states = publish(store, 1, 3)
    if restart:
        worker = Subscriber(store, stream="s")
    worker.allow_recreated = True
    worker.sync()
    worker.save(out, layout="hf", keep=keep)
    (shown,) = (name for name in os.listdir(out) if not name.startswith("."))
    assert shown == f"checkpoint-{worker.version}"
    assert state_root(out / shown) == state_root(states[-1])
    earlier = out / ".pulse" / "earlier"
    assert len(list(earlier.glob("*"))) == (4 if keep is None else 0)


@pytest.mark.parametrize("keep", [1, 4])
def test_what_a_publisher_deletes_meanwhile_is_no_damage(tmp_path: Path, keep: int) -> None:
    state = np.zeros(3000, np.uint16)
    with Publisher(tmp_path, stream="s", keep=keep) as publisher:

        def more() -> None:
            for _ in range(6):
                state[publisher.publish({"w": state.copy()}, anchor=True).version] += 1
            publisher.wait()

        more()
        for report in verify_stream(str(tmp_path), "s"):
            assert report.ok, report.problems
            more()


def test_a_listing_is_read_again_whatever_the_times_of_its_folder_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put("s/a", b"")
    at = os.stat(tmp_path / "s").st_mtime_ns - 10_000_000_000
    os.utime(tmp_path / "s", ns=(at, at))
    assert [info.name for info in store.list("s")] == ["s/a"]
    store.put("s/b", b"")
    os.utime(tmp_path / "s", ns=(at, at))  # as of a clock with a coarse tick
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6)
    assert [info.name for info in store.list("s")] == ["s/a", "s/b"]
