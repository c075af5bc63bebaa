"""An engine that follows a server waits for it, and whoever drives the engine asks the store nothing meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulse_rl import HttpStore
from pulse_rl.integrations.engines.handle import EngineHandle
from pulse_rl.integrations.engines.transport import InitInfo
from pulse_rl.store.server import FolderServer

from .test_handle import Engine
from .world import World, stage


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    with FolderServer(made.store) as server:
        made.address = server.url
        yield made
        for session in made.sessions:
            session.close()


def asked_of_the_store(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The method and path of each request from now on."""
    found: list[str] = []
    ask = HttpStore._ask

    def noting(self: HttpStore, method: str, path: str, *args: Any, **options: Any) -> object:
        found.append(f"{method} {path}")
        return ask(self, method, path, *args, **options)

    monkeypatch.setattr(HttpStore, "_ask", noting)
    return found


def test_an_idle_engine_makes_four_requests_a_minute(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list, and a wait of 25 seconds (here of one)."""
    monkeypatch.setattr("pulse_rl.sync.polling._LONGEST_WAIT", 1.0)
    monkeypatch.setattr("pulse_rl.integrations.engines.staging.POLL_SECONDS", 0.05)
    session = world.session(follow=True)
    assert session.staging.waits
    found = asked_of_the_store(monkeypatch)
    time.sleep(2.5)
    asked = list(found)
    assert {line for line in asked if line.startswith("POST")} == {"POST ?wait=1.000"}
    assert 2 <= len(asked) <= 8, asked


def test_a_version_is_staged_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the poll's time."""
    monkeypatch.setattr("pulse_rl.integrations.engines.staging.POLL_SECONDS", 60.0)
    session = world.session(follow=True)
    for _ in range(3):
        time.sleep(0.3)
        number, started = world.step(), time.monotonic()
        while session.staging.subscriber is not None and session.staging.subscriber.version != number:
            assert time.monotonic() - started < 20
            time.sleep(0.02)
    stage(session)
    session.update(None)
    assert world.live()


class Waiting(Engine):
    """An engine that waits at its store by itself; ``looks`` are the times at which a handle let it look."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = self.questions = 0

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[dict[str, Any]]:
        self.looks += action == "stage"
        self.questions += action == "status"
        return [status | {"waits": True} for status in super().pulse(action, owner, version)]


def test_a_handle_lets_an_engine_look_only_when_it_has_staged_something() -> None:
    engine = Waiting()
    handle = EngineHandle._on(engine, InitInfo("s", "policy"), "keep", 5.0)
    moved = threading.Event()
    handle.follow(poll_seconds=0.01, on_sync=lambda _: moved.set())
    while engine.questions < 30:
        time.sleep(0.01)
    assert engine.looks == 1
    engine.newest = 1
    assert moved.wait(20)
    assert engine.looks == 2
    handle.close()
