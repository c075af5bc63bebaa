"""Ranks whose slices lie in mapped files: a restart of all downloads nothing, and what is wrong
there is not used."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pulse_rl import LocalStore, Publisher, Signer, checkout, verify_stream
from pulse_rl._util.faults import POINTS, armed
from pulse_rl.errors import InputError, PulseError, RankLost
from pulse_rl.events import BaselineRestored, Event, FallbackUsed
from pulse_rl.integrations.fsdp import ShardedPublisher
from pulse_rl.sync import pending as pending_module
from tests.support.publishers import tuned
from tests.support.sharded import followed, gathered, policy, require_equal, step
from tests.support.stores import FaultyStore
from tests.support.trainers import Group, Trainer, together

pytestmark = pytest.mark.slow
RANKS = 3
SIGNER = Signer(bytes(32))

Seen = tuple[list[str], list[str], list[str]]


def start(
    trainer: Trainer, folder: Path, steps: range, point: str = "", *, whole: bool = False
) -> Seen:
    """Publishes these ``steps``; at the last one rank 1 is killed where it comes to ``point``.
    Returns how the baseline was found, the payloads that were read for it, and why a folder was not
    used."""
    trainer.connect("start")
    store, events = FaultyStore(LocalStore(folder / "store")), list[Event]()
    model = policy(rows=1501, width=70, blocks=1)
    for seed in range(steps.start):
        step(model.state_dict(), seed)
    if not whole:
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    settings: dict[str, Any] = {
        "stream": "policy",
        "threads": 1,
        "on_event": events.append,
        "timeout_seconds": 20,
    }
    with tuned(
        store, kind=ShardedPublisher, history=True, baseline=folder / "p", **settings
    ) as publisher:
        read: list[str] = []
        for seed in steps:
            state = model.state_dict()
            step(state, seed)
            mine = (
                {} if whole and trainer.rank else state
            )  # of a whole model the other ranks have nothing
            if point and seed == steps[-1]:
                die(publisher, mine, trainer.rank, point)
                return [], [], []
            store.calls.clear()
            published = publisher.publish(mine)
            if seed == steps[0]:
                read = [
                    name
                    for call, name in store.calls
                    if call.startswith("get") and "payloads" in name
                ]
            require_equal(followed(LocalStore(folder / "store")), gathered(state), published)
        assert len(list((folder / "p" / f"rank-{trainer.rank}").glob("state-*"))) == bool(mine)
    how = [e.how for e in events if isinstance(e, BaselineRestored)]
    return (
        how,
        read,
        [e.reason for e in events if isinstance(e, FallbackUsed) and "the state in" in e.link],
    )


def die(publisher: Publisher, state: Mapping[str, Any], rank: int, point: str) -> None:
    if rank != 1:
        with suppress(
            RankLost
        ):  # of the version, or, if that was committed before the rank was lost, of the next
            publisher.publish(state)
        with pytest.raises(RankLost):
            publisher.publish(state)
    elif point in POINTS:
        with armed(point, kill):
            publisher.publish(state)
    else:
        pending_module.inner_leaves = kill
        publisher.publish(state)


def kill(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_that_start_again_download_nothing(tmp_path: Path, whole: bool) -> None:
    together(partial(start, whole=whole), RANKS, tmp_path, range(3))
    seen = together(partial(start, whole=whole), RANKS, tmp_path, range(3, 5))
    assert [(how, unused) for how, _, unused in seen] == [(["kept"], [])] * RANKS
    assert whole or [read for _, read, _ in seen] == [[]] * RANKS


@pytest.mark.parametrize("point", ["hashing", "baseline.before", "baseline.written"])
def test_a_rank_that_is_killed_loses_nothing(tmp_path: Path, point: str) -> None:
    """In the middle of the first publish all begin again; once a version is committed, its patch is
    what is read."""
    first = point == "hashing"
    Group(start, RANKS, tmp_path, range(1 if first else 3), point, lost=(1,)).results()
    at = 0 if first else 3
    for rank, (how, read, unused) in enumerate(together(start, RANKS, tmp_path, range(at, at + 2))):
        assert (how, unused) == ([] if first else ["kept"], [])
        assert {name.rpartition(".")[2] for name in read} == (
            set() if first or rank != 1 else {"patch"}
        )
        assert len({*read}) <= RANKS


@pytest.mark.parametrize("damage", ["a bit", "the folder", "other ranks"])
def test_what_is_not_right_is_read_from_the_store(tmp_path: Path, damage: str) -> None:
    together(start, RANKS, tmp_path, range(3))
    mine = tmp_path / "p" / "rank-1"
    if damage == "a bit":
        (file,) = mine.glob("state-*")
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    elif damage == "the folder":
        shutil.rmtree(mine)
    else:
        mine.rename(tmp_path / "aside")
        (tmp_path / "p" / "rank-2").rename(mine)
        (tmp_path / "aside").rename(tmp_path / "p" / "rank-2")
    seen = together(start, RANKS, tmp_path, range(3, 5))
    # Which part is damaged nobody can tell: all read theirs. Of what says that it is another's, or
    # is gone, one does.
    fetched = {"a bit": {0, 1, 2}, "the folder": {1}, "other ranks": {1, 2}}[damage]
    assert {
        rank
        for rank, (_, read, _) in enumerate(seen)
        if any("safetensors" in name for name in read)
    } == fetched
    assert {rank for rank, (_, _, unused) in enumerate(seen) if unused} == (
        fetched if damage != "the folder" else set()
    )
    assert [how for how, _, _ in seen] == [["restored" if damage == "a bit" else "kept"]] * RANKS
    assert [how for how, _, _ in together(start, RANKS, tmp_path, range(5, 6))] == [
        ["kept"]
    ] * RANKS


def attested(trainer: Trainer, folder: Path) -> None:
    """A version with an anchor beside its patch, and after a new start others."""
    trainer.connect("attested")
    model = policy(rows=1501, width=70, blocks=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    store = LocalStore(folder / "store")
    settings: dict[str, Any] = {
        "stream": "policy",
        "threads": 1,
        "baseline": folder / "p",
        "signer": SIGNER,
    }
    for first in (0, 2):
        with ShardedPublisher(store, attest=True, **settings) as publisher:
            for seed in range(first, first + 2):
                step(model.state_dict(), seed)
                published = publisher.publish(model.state_dict(), anchor=seed > 0)
                assert bool(published.patch_bytes) == (seed > 0)
    with pytest.raises(InputError, match="attest is"):
        ShardedPublisher(store, attest=trainer.rank == 0, **settings)


def test_what_ranks_with_mapped_slices_attest_is_right(tmp_path: Path) -> None:
    together(attested, RANKS, tmp_path)
    store = LocalStore(tmp_path / "store")
    assert not [
        report.problems for report in verify_stream(store, "policy", threads=1) if report.problems
    ]
    for version in range(4):
        with checkout(store, "policy", version=version, threads=1) as found:
            assert found.manifest.anchor
            assert found.manifest.anchor.attestation


def refused(trainer: Trainer, folder: Path) -> None:
    """A folder that one rank cannot use is told to all, and none is left taken."""
    trainer.connect("refused")
    path = folder / "p" / f"rank-{trainer.rank}"
    path.mkdir(parents=True)
    if trainer.rank == 1:
        (path / "theirs").write_text("theirs")
    with pytest.raises(PulseError, match="holds other files"):
        ShardedPublisher(str(folder / "store"), stream="policy", baseline=folder / "p")
    trainer.barrier("told", (0, 1))
    trainer.connect("again")
    (path / "theirs").unlink(missing_ok=True)
    shutil.rmtree(path)
    ShardedPublisher(str(folder / "store"), stream="policy", baseline=folder / "p").close()
    with pytest.raises(InputError, match="baseline is"):
        ShardedPublisher(
            str(folder / "store"), stream="policy", baseline=folder / "p" if trainer.rank else None
        )


def test_a_folder_that_cannot_be_used_is_told_to_all(tmp_path: Path) -> None:
    together(refused, 2, tmp_path)
