"""The handle's protocol against an engine that plays its part: order of calls, errors, restarts,
following, waiting."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pulse_rl import PulseError
from pulse_rl.engines.handle import EngineHandle, EngineSync
from pulse_rl.engines.transport import InitInfo
from pulse_rl.errors import (
    ConcurrentUse,
    EngineError,
    EngineUnavailable,
    InputError,
    StateMismatch,
    StoreUnavailable,
)
from tests.support.states import present

SECONDS = {
    "apply_seconds": 0.1,
    "audit_seconds": None,
    "fetch_seconds": 0.2,
    "lag_seconds": 1.5,
    "verify_seconds": 0.3,
}
STEP = {"previous": 0, "root": "ab", "metadata": {"step": 1}, "full": False, "fetched_bytes": 4}
ANOTHER = {"kind": "concurrent_use", "message": "another handle", "hint": "wait"}
UPDATED = ("pause keep", "start", "update", "finish 3", "reset False", "resume")
NO_ROUTE = {"kind": "store_unavailable", "message": "no route", "hint": "wait"}


class Engine:
    """A worker and its server. ``newest`` is what the store holds; ``calls`` what was asked,
    without looks."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.newest = 0
        self.live: int | None = 0
        self.tagged: list[str] = []
        self.owner: str | None = None
        self.asked = 0
        self.error: dict[str, Any] | None = None
        self.failing = ""
        self.lost = ""
        self.cache_refuses = 0
        self.asleep: list[str] = []

    def init(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        self.owner = init_info["owner"]
        if init_info["version"] is not None:
            self.live, self.newest = None, init_info["version"]

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[dict[str, Any]]:
        status: dict[str, Any] = {"open": self.owner is not None, "error": self.error}
        status |= {"asleep": self.asleep}
        if self.owner not in (None, owner):
            return [status | {"failure": ANOTHER}]
        if action == "stage":
            self.asked += 1
        if action == "close":
            self.owner = None
        if self.owner is None:
            return [status]
        status |= {"leader": True, "version": self.live, "derives": False, "left": 0}
        status |= dict.fromkeys(("held", "staged"), self.newest)
        status |= dict.fromkeys(("asked", "answered"), self.asked)
        status |= {"root": f"root {self.live}", "engine": ["vllm", "0.32"], "differing": ["a"]}
        return [status | {"report": STEP | SECONDS}]

    def recover(self) -> None:
        self.calls.append("recover")

    def pause(self, mode: str) -> None:
        self._called(f"pause {mode}")

    def resume(self) -> None:
        self.calls.append("resume")

    def start(self) -> None:
        self.calls.append("start")

    def update(self, version: int | None, owner: str = "") -> None:
        self.calls.append("update")
        if self.failing:
            raise RuntimeError(self.failing)
        self.live = self.newest
        self._called("")

    def finish(self, weight_version: str) -> None:
        self._called(f"finish {weight_version}")

    def tag(self, weight_version: str) -> None:
        self.tagged.append(weight_version)

    def reset_prefix_cache(self, running: bool) -> bool:
        self.calls.append(f"reset {running}")
        self.cache_refuses -= 1
        return self.cache_refuses < 0

    def _called(self, call: str) -> None:
        """Notes the call; its answer is ``lost`` where that is what the call begins with, "update"
        for an update."""
        if call:
            self.calls.append(call)
        if self.lost and (call or "update").startswith(self.lost):
            self.lost = ""
            raise EngineUnavailable("no answer")


def handle_on(engine: Engine) -> EngineHandle:
    return EngineHandle._on(engine, InitInfo("s", "policy"), "keep", 5.0)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def handle(engine: Engine) -> EngineHandle:
    return handle_on(engine)


def test_a_sync_pauses_once_and_tags_what_follows(engine: Engine, handle: EngineHandle) -> None:
    assert handle.sync() is None
    engine.newest = 3
    done = present(handle.sync())
    assert (done.version, done.previous, done.fetched_bytes) == (3, 0, 4)
    assert done.metadata == {"step": 1}
    assert engine.calls == ["init", *UPDATED]
    assert handle.version == 3
    assert handle.audit() == ("a",)


def test_an_engine_that_sleeps_is_not_written_to_and_not_resumed(engine: Engine) -> None:
    handle = handle_on(engine)
    engine.newest, engine.asleep = 1, ["kv_cache", "weights"]
    with pytest.raises(EngineUnavailable, match="sleeps"):
        handle.sync()
    assert engine.calls == ["init"]
    engine.asleep = ["kv_cache"]
    assert handle.sync() is not None
    assert engine.calls == ["init", "start", "update", "finish 1", "reset False"]


def test_a_failed_update_resumes_and_tells_the_workers_reason(engine: Engine) -> None:
    handle = handle_on(engine)
    engine.newest, engine.failing = 1, "500"
    with pytest.raises(EngineError, match="500"):
        handle.sync()
    assert engine.calls[-2:] == ["update", "resume"]
    engine.error = {"kind": "state_mismatch", "message": "another model", "hint": "compare"}
    with pytest.raises(StateMismatch, match="another model") as refusal:
        handle.sync()
    assert refusal.value.hint == "compare"


def test_an_update_that_the_workers_have_undone_leaves_nothing_to_do(engine: Engine) -> None:
    handle = handle_on(engine)
    engine.newest, engine.failing = 1, "500"
    real = engine.pulse

    def failed(action: str, owner: str, version: int | None = None) -> list[dict[str, Any]]:
        told = {"kind": "state_mismatch", "message": "undone", "hint": ""}
        return [status | {"failed": True, "error": told} for status in real(action, owner, version)]

    def update(version: int | None, owner: str) -> None:
        engine.pulse = failed  # type: ignore[method-assign]
        raise RuntimeError("500")

    engine.update = update  # type: ignore[method-assign]
    with pytest.raises(StateMismatch, match="undone"):
        handle.sync()
    engine.pulse, engine.newest = real, 0  # type: ignore[method-assign]
    engine.calls.clear()
    assert handle.sync() is None
    assert engine.calls == []


def test_an_error_of_the_store_is_raised_without_a_pause(engine: Engine) -> None:
    engine.newest = 1
    engine.error = NO_ROUTE
    handle = handle_on(engine)  # which waits for no store
    with pytest.raises(StoreUnavailable, match="no route"):
        handle.sync()
    assert engine.calls == ["init"]


def test_a_prefix_cache_in_use_is_emptied_with_its_requests(engine: Engine) -> None:
    handle = handle_on(engine)
    engine.newest, engine.cache_refuses = 1, 1
    assert handle.sync() is not None
    assert engine.calls[-3:] == ["reset False", "reset True", "resume"]
    engine.newest, engine.cache_refuses = 2, 2
    with pytest.raises(EngineError, match="prefix cache"):
        handle.sync()
    assert engine.calls[-1] == "resume"
    engine.calls.clear()
    assert handle.sync() is None
    assert handle.sync() is None
    assert engine.calls == ["pause keep", "reset False", "resume"]


def test_one_handle_at_a_time_and_a_restarted_server_is_opened_again(engine: Engine) -> None:
    handle = handle_on(engine)
    with pytest.raises(ConcurrentUse, match="another handle"):
        handle_on(engine)
    engine.owner = None
    engine.newest = 1
    assert handle.sync() is not None
    assert engine.calls.count("init") == 2
    handle.close()
    handle.close()
    handle_on(engine)


def test_following_goes_on_after_errors_that_pass(engine: Engine, handle: EngineHandle) -> None:
    seen: list[EngineSync] = []
    arrived, failed = threading.Event(), threading.Event()

    def note(done: EngineSync) -> None:
        seen.append(done)
        arrived.set()

    engine.error = NO_ROUTE
    handle.follow(on_sync=note, on_error=lambda error: failed.set(), poll_seconds=0.01)
    with pytest.raises(InputError, match="already"):
        handle.follow()
    assert failed.wait(60)
    engine.error, engine.newest = None, 1
    assert arrived.wait(60)
    assert [done.version for done in seen] == [1]
    handle.close()


def test_an_engine_that_did_not_answer_to_the_pause_is_resumed(engine: Engine) -> None:
    handle = handle_on(engine)
    engine.newest, engine.lost = 1, "pause"
    with pytest.raises(EngineUnavailable):
        handle.sync()
    assert engine.calls[-2:] == ["pause keep", "resume"]
    assert handle.sync() is not None


@pytest.mark.parametrize("lost", ["update", "finish"])
def test_an_update_whose_answer_was_lost_is_tagged_and_its_cache_emptied_by_the_next_sync(
    lost: str, engine: Engine, handle: EngineHandle
) -> None:
    engine.newest, engine.lost = 1, lost
    with pytest.raises(EngineUnavailable):
        handle.sync()
    engine.calls.clear()
    assert handle.sync() is None
    assert engine.calls == ["pause keep", "finish 1", "reset False", "resume"]
    engine.calls.clear()
    assert handle.sync() is None
    assert engine.calls == []


def test_what_a_dead_handle_left_is_ended_by_the_next(engine: Engine) -> None:
    handle_on(engine)._owner = "dead"
    owner, engine.owner = engine.owner, None
    pulse = engine.pulse

    def open_still(action: str, who: str, version: int | None = None) -> list[dict[str, Any]]:
        return [status | {"open": True} for status in pulse(action, who, version)]

    engine.pulse = open_still  # type: ignore[method-assign]
    handle_on(engine)
    assert owner is not None
    assert engine.calls == ["init", "recover", "init"]


def test_an_earlier_version_begins_another_session(engine: Engine, handle: EngineHandle) -> None:
    engine.newest = 7
    assert handle.sync(7) is not None
    engine.calls.clear()
    assert handle.sync(7) is None
    done = present(handle.sync(3))
    assert done.version == 3
    assert engine.calls == ["recover", "init", *UPDATED]
    assert engine.tagged == ["0"], (
        "what the engine was started from, and nothing that an update has tagged"
    )


def test_following_ends_with_a_word_whatever_the_engine_raises(engine: Engine) -> None:
    handle = handle_on(engine)
    told: list[PulseError] = []

    def broken(action: str, owner: str, version: int | None = None) -> list[dict[str, Any]]:
        raise ValueError("not an answer")

    pulse, engine.pulse = engine.pulse, broken  # type: ignore[method-assign]
    handle.follow(on_error=told.append, poll_seconds=0.01)
    assert handle._follower is not None
    handle._follower.join(60)
    assert [str(error) for error in told] == ["ValueError: not an answer"]
    engine.pulse = pulse  # type: ignore[method-assign]
    handle.follow(poll_seconds=0.01)
    handle.close()
    with pytest.raises(InputError, match="closed"):
        handle.follow()


def test_a_generation_says_with_which_versions_it_began_and_ended(engine: Engine) -> None:
    handle = handle_on(engine)
    with handle.admit() as generation:
        assert (generation.end_version, generation.end_root) == (None, None)
    assert (generation.start_version, generation.start_root) == (0, "root 0")
    assert not generation.spans_update
    with handle.admit(minimum=0) as generation:
        engine.newest = 2
        handle.sync()
    assert (generation.start_version, generation.end_version) == (0, 2)
    assert generation.spans_update
    assert (generation.end_root, generation.restarted) == ("root 2", False)


def test_a_generation_in_an_engine_that_was_restarted_within_spans_an_update() -> None:
    engine = Engine()
    handle = handle_on(engine)
    with handle.admit() as gone:
        engine.owner = None
    assert (gone.end_version, gone.spans_update) == (None, True)
    with handle.admit() as unknown:
        pass
    assert (unknown.start_version, unknown.spans_update) == (None, True)
    handle.sync()
    with handle.admit(0) as mended:
        engine.owner = None
        handle.sync()
    assert (mended.start_version, mended.end_version) == (0, 0)
    assert (mended.restarted, mended.spans_update) == (True, True)


def test_a_generation_waits_for_its_version(engine: Engine, handle: EngineHandle) -> None:
    engine.newest = 1
    assert handle.admit(minimum=1).start_version == 1, "where no thread follows, the handle syncs"
    looked = threading.Event()
    handle.follow(on_error=lambda error: looked.set(), poll_seconds=0.01)
    engine.newest, engine.error = 2, NO_ROUTE
    assert looked.wait(60)
    with pytest.raises(
        EngineUnavailable, match="version 1 is live, not 2, after 0 seconds"
    ) as late:
        handle.admit(2, timeout_seconds=0)
    assert "on_error" in late.value.hint
    assert handle.admit(minimum=1, timeout_seconds=0).start_version == 1
    engine.error = None
    assert handle.admit(2).start_version == 2
    handle.close()


def test_an_engine_is_brought_to_just_the_version_that_is_wanted_and_not_back() -> None:
    engine = Engine()
    handle = EngineHandle._on(engine, InitInfo("s", "policy", follow=False), "keep", 5.0)
    asked: list[int | None] = []
    pulse = engine.pulse

    def noting(action: str, owner: str, version: int | None = None) -> list[dict[str, Any]]:
        asked.extend([version] if action == "stage" else [])
        return pulse(action, owner, version)

    engine.pulse, engine.newest = noting, 3  # type: ignore[method-assign]
    assert handle.admit(3).start_version == 3
    assert asked == [3]
    with pytest.raises(StateMismatch, match="version 3 is live, past 2") as past:
        handle.admit(2)
    assert "minimum" in past.value.hint
    with pytest.raises(InputError, match="not both"):
        handle.admit(3, minimum=3)
    engine.error = NO_ROUTE
    with pytest.raises(
        EngineUnavailable, match=r"version 3 is live, not 4, after 0 seconds: no route"
    ):
        handle.admit(4, timeout_seconds=0)
    engine.error = {"kind": "untrusted", "message": "a stranger", "hint": "look"}
    with pytest.raises(PulseError, match="a stranger"):
        handle.admit(4)
