"""Several engines switch to a version together: all of them, or none."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_rl.engines.handle import EngineHandle, switch_together
from pulse_rl.engines.node import Node
from pulse_rl.engines.session import Session, VerifiedMap
from pulse_rl.engines.transport import InitInfo
from pulse_rl.engines.worker import Worker
from pulse_rl.errors import EngineError, InputError, StoreUnavailable

from .test_handle import NO_ROUTE, Engine, handle_on
from .world import Model, World


def test_all_engines_stage_before_any_switches() -> None:
    engines = [Engine() for _ in range(3)]
    handles = [handle_on(engine) for engine in engines]
    for engine in engines:
        engine.newest = 4
    engines[2].live = 4
    engines[1].error = NO_ROUTE
    with pytest.raises(StoreUnavailable, match="no route"):
        switch_together(handles, 4)
    assert [engine.live for engine in engines] == [0, 0, 4]
    assert not any("update" in engine.calls for engine in engines)
    assert all(engine.asked == 2 for engine in engines), "each was let go after it had staged"

    engines[1].error = None
    done = switch_together(handles, 4)
    assert [each and each.version for each in done] == [4, 4, None]
    assert [engine.live for engine in engines] == [4] * 3
    assert switch_together(handles, 4) == [None] * 3
    assert switch_together([], 4) == []


def test_after_a_failed_switch_the_others_go_back() -> None:
    engines = [Engine(), Engine()]
    handles = [handle_on(engine) for engine in engines]
    for engine in engines:
        engine.newest = 4
    engines[0].failing = "500"
    with pytest.raises(EngineError, match="500"):
        switch_together(handles, 4)
    assert [engine.live for engine in engines] == [0, 0]
    assert [call for call in engines[1].calls if "finish" in call] == ["finish 4", "finish 0"]
    assert [engine.calls[-1] for engine in engines] == ["resume", "resume"]


def test_a_handle_that_follows_is_refused() -> None:
    handle = handle_on(Engine())
    handle.follow(poll_seconds=60)
    with pytest.raises(InputError, match="follows"):
        switch_together([handle], 1)
    handle.close()


class InProcess(Engine):
    """An engine of one worker with a real session, on a stream in a real store."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.model = world.make()
        self.model.load_weights(world.tensors.items())

        def open_session(info: Any, node: Node, known: VerifiedMap) -> Session:
            base, forms = str(world.base), self.model.forms()
            return Session(self.model, info, node, known, base, nullcontext, forms)

        self.worker = Worker(open_session, lambda: None, ("test", "1"))

    @property
    def subscriber(self) -> Any:
        assert self.worker._session is not None
        return self.worker._session.staging.subscriber

    def init(self, init_info: dict[str, Any]) -> None:
        if error := self.worker.open(InitInfo(**init_info)):
            raise error

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[dict[str, Any]]:
        return [self.worker.answer(action, owner, version)]

    def update(self, version: int | None, owner: str = "") -> None:
        self.worker.begin_update()
        if error := self.worker.update(version, owner):
            raise error


def bits_of(model: Model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_real_sessions_switch_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    engines = [InProcess(world) for _ in range(2)]
    handles = []
    for engine in engines:
        info = InitInfo(world.store, "policy", follow=False)
        handles.append(EngineHandle._on(engine, info, "keep", 20.0))
    before = bits_of(engines[0].model)
    version = world.step()

    with monkeypatch.context() as patched:

        def away(*_: object) -> None:
            raise StoreUnavailable("no route")

        patched.setattr(engines[1].subscriber, "sync", away)
        with pytest.raises(StoreUnavailable, match="no route"):
            switch_together(handles, version)
    for engine in engines:
        assert all(map(torch.equal, bits_of(engine.model), before))
    assert [handle.version for handle in handles] == [0, 0]

    done = switch_together(handles, version)
    assert [each and (each.version, each.previous) for each in done] == [(version, 0)] * 2
    fresh = world.make()
    fresh.load_weights(world.tensors.items())
    for engine in engines:
        assert all(map(torch.equal, bits_of(engine.model), fresh.parameters()))
    for handle in handles:
        handle.close()
