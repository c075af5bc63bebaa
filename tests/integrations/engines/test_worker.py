"""A worker between its engine and a handle: who owns it, what it says of errors."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulse_rl import PulseError
from pulse_rl.engines import worker as workers
from pulse_rl.engines.node import Node
from pulse_rl.engines.session import Session, VerifiedMap
from pulse_rl.engines.worker import Worker
from pulse_rl.errors import ConcurrentUse, InputError

from .test_session import World


def info(world: World, owner: str, **changes: Any) -> Any:
    facts = {
        "store": world.store,
        "stream": "policy",
        "base": None,
        "cache": None,
        "trusted_keys": None,
        "follow": False,
    }
    return SimpleNamespace(**(facts | {"audit_every": 100, "owner": owner} | changes))


@pytest.fixture
def worker(world: World) -> Any:
    def open_session(info: Any, node: Node, known: VerifiedMap) -> Session:
        if info.audit_every < 0:
            raise RuntimeError("no session")
        return world.session()

    made = Worker(open_session, lambda: None)
    yield made
    made.close()


def test_an_update_waits_for_its_version(world: World, worker: Worker) -> None:
    assert worker.open(info(world, "")) is None
    version = world.publish()
    assert worker.update(version, wait_seconds=60.0) is None
    assert (worker.status()["version"], worker.status()["root"]) == (
        version,
        world.publisher.head().root,
    )  # type: ignore[union-attr]
    assert "did not have version" in str(worker.update(version + 1, wait_seconds=0.1))
    assert worker.status()["version"] == version


def test_an_owner_keeps_the_worker_by_being_heard_of(
    world: World, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.open(info(world, "a")) is None
    assert isinstance(worker.open(info(world, "b")), ConcurrentUse)
    assert worker.answer("hello", "b")["failure"]["kind"] == "concurrent_use"
    assert (
        worker.answer("status", "b")["failure"]["message"]
        == "another handle has taken this engine over"
    )
    assert "failure" not in worker.answer("status", "a")
    now = time.monotonic() + workers.LEASE_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert "failure" not in worker.answer("hello", "b")
    assert "failure" not in worker.answer("status", "a")
    assert isinstance(worker.open(info(world, "b")), ConcurrentUse)


def test_a_client_names_what_the_operator_allowed(
    world: World, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, link, beside = tmp_path / "cache", tmp_path / "cache" / "link", tmp_path / "cache-2"
    cache.mkdir()
    link.symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PULSE_ENGINE_ALLOWED", f"{world.store} {cache} s3://bucket/run")
    for store in ("s3://bucket", "s3://bucket/run-2", "s3://bucket/run/../x", "s3a://bucket/run", "http://bucket/run",
                  "/", "s3://bucket/run/%2e%2e/x", f"file://localhost{tmp_path}",
                  f"{world.store}/..", str(link),
                  f"file://{cache}/%2e%2e", "memory://", ".", 7):  # fmt: skip
        failure = worker.open(info(world, "a", store=store))
        assert isinstance(failure, PulseError), store
        assert "session" not in str(failure), store
    for name in ("cache", "base"):
        for path in (beside, tmp_path, link, f"{cache}/../x", "cache-2", f"file://{cache}", "~"):
            assert isinstance(worker.open(info(world, "a", **{name: str(path)})), InputError), path
    for places in ({}, {"cache": f"{cache}/of-mine"}, {"base": str(cache)}, {"store": f"file://{world.store}"},
                   {"store": "s3://bucket/run"}, {"store": "s3://bucket/run/deep/"},
                   {"cache": "cache/x"}):  # fmt: skip
        assert worker.open(info(world, "a", **places)) is None, places
    monkeypatch.setenv("PULSE_ENGINE_ALLOWED", "")
    assert isinstance(worker.open(info(world, "a")), InputError)
    monkeypatch.delenv("PULSE_ENGINE_ALLOWED")
    assert worker.open(info(world, "a")) is None
    for name in ("cache", "base"):
        assert isinstance(worker.open(info(world, "a", **{name: str(cache)})), InputError), name


def test_a_session_that_does_not_open_leaves_none(world: World, worker: Worker) -> None:
    assert isinstance(worker.open(info(world, "a", store="")), InputError)
    failure = worker.open(info(world, "a", audit_every=-1))
    assert str(failure) == "RuntimeError: no session"
    status = worker.answer("status", "b")
    assert (status["open"], status["error"]["message"]) == (False, "RuntimeError: no session")
    assert isinstance(worker.update(None), InputError)
    assert worker.open(info(world, "b")) is None


def test_the_error_of_an_update_is_told_until_the_next(world: World, worker: Worker) -> None:
    worker.open(info(world, "a"))
    failure = worker.update(7)
    assert isinstance(failure, PulseError)
    assert worker.answer("status", "a")["error"] == workers.described(failure)
    worker.begin_update()
    assert worker.answer("status", "a")["error"] is None
    assert worker.update(None) is None
    assert worker.answer("audit", "a")["differing"] == []
    assert worker.answer("close", "a") == {"open": False, "asleep": [], "error": None}


def test_an_update_is_made_for_its_owner_alone(world: World, worker: Worker) -> None:
    worker.open(info(world, "a"))
    world.step()
    assert isinstance(worker.update(None, "b"), ConcurrentUse)
    assert worker.update(None, "a") is None


def test_a_long_call_keeps_the_lease(
    world: World, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it cannot be heard of meanwhile."""
    worker.open(info(world, "a"))
    later = time.monotonic() + 2 * workers.LEASE_SECONDS

    def long(*_: object) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: later)

    monkeypatch.setattr(Session, "update", long)
    assert worker.update(None, "a") is None
    assert isinstance(worker.open(info(world, "b")), ConcurrentUse)
