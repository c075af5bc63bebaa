"""What commands that go on show of themselves: times, events, metrics, probes, heartbeats."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pulse_rl import LocalStore, Publisher
from pulse_rl.engines.handle import EngineSync
from pulse_rl.errors import EngineUnavailable
from pulse_rl.metrics import Heartbeat
from tests.support.commands import POLICY, Pulse, at_waits, without_time
from tests.support.running import Running, got, until
from tests.support.states import Rng, history
from tests.support.stores import names

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.mark.slow
def test_a_worker_shows_itself_from_its_start_to_its_end(
    pulse: Pulse, tmp_path: Path, rng: Rng
) -> None:
    store, states, events = tmp_path / "store", history(rng, 2), tmp_path / "events.jsonl"
    store.mkdir()
    serve = ("serve", store, "--port", 0, "--metrics-port", 0)
    with Running(tmp_path / "serve.log", *serve) as server:
        url = server.says(r"served at (\S+)")
        at = (*POLICY, "--poll", 0.1, "--metrics-port", 0)
        out = ("--out", tmp_path / "out", "--name", "w", "--events", events)
        with Running(tmp_path / "follow.log", "follow", url, *at, *out) as worker:
            assert got(f"{worker.address}/readyz")[0] == 503
            assert got(f"{worker.address}/healthz")[0] == 200
            worker.says("(retrying)")
            publisher = Publisher(LocalStore(store), stream="policy")
            publisher.publish(states[0])
            until(lambda: got(f"{worker.address}/readyz")[0] == 200)
            publisher.publish(states[1])
            until(lambda: names(LocalStore(store), "policy/workers") == [
                "policy/workers/w-000000000001"])  # fmt: skip
            assert publisher.wait_for(1, workers=["w"]) == ()
            assert re.search(r"w  version 1  newest  seen \d+ s ago", pulse("status", store))
            assert worker.metric("version", "subscriber") == 1
            assert worker.metric("call_failures_total") is None, "it only waited"
            assert time.time() - (worker.metric("last_success_seconds") or 0) < 60
            assert worker.end() == 143
        assert names(LocalStore(store), "policy/workers") == [], "it has left"
        assert all(re.match(TIME, line) for line in worker.log.read_text().splitlines())
        kinds = [json.loads(line)["event"] for line in events.read_text().splitlines()]
        assert [kind for kind in kinds if kind != "hint"] == ["synced", "synced"]
        assert (server.metric("served_requests_total", 'status="204"') or 0) >= 3
        assert server.end() == 143


def test_stale_workers_are_named(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    store = LocalStore(tmp_path)
    Publisher(store, stream="policy").publish(history(rng, 1)[0])
    assert "policy: version 0, no worker" in pulse("status", tmp_path, "--stale", "5m")
    Heartbeat(store, "idle").beat("policy", 0)
    stuck = {"errors": 7, "since": 1.0, "kind": "chain_gap", "reason": "no path"}
    store.put("policy/workers/stuck-none", json.dumps(stuck).encode())
    for junk in (b"{", b"[]", b'{"errors": -1}', b"[" * 4000, b"x" * 5000):
        store.put("policy/workers/junk-none", junk)
        found = pulse.json("status", tmp_path, "--stale", "5m")
        errors = {each["worker"]: each["errors"] for each in found["streams"][0]["workers"]}
        assert errors == {"stuck": 7, "junk": 0, "idle": 0}
    shown = pulse("status", tmp_path)
    assert re.search(r"stuck  no version  1 behind  seen \S+ s ago  7 errors: no path", shown)
    time.sleep(0.01)
    assert pulse("status", tmp_path, "--stale", "0", status=1).endswith(
        "3 not seen for 0 s: junk, stuck, idle\n"
    )
    assert pulse.json("status", tmp_path, "--stale", "0", status=1)["stale"][-1] == "idle"


def test_an_engine_is_counted_as_a_worker(
    pulse: Pulse, tmp_path: Path, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, events = LocalStore(tmp_path / "store"), tmp_path / "events.jsonl"
    Publisher(store, stream="policy").publish(history(rng, 1)[0])
    moved = EngineSync(0, None, "0" * 64, {}, True, 0.1, 0.1, None, 0.2, 0.3, 40, 1.5)
    moves = iter([EngineUnavailable("it starts"), moved])

    def sync() -> EngineSync | None:
        move = next(moves, None)
        if isinstance(move, EngineUnavailable):
            raise move
        return move

    handle = SimpleNamespace(
        sync=sync, version=0, wait_for_version=lambda seconds: time.sleep(seconds),
        close=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr("pulse_rl.cli.following._connect", lambda *_, **__: handle)
    seen = list[str]()

    def look() -> None:
        seen.extend(names(store, "policy/workers"))

    at_waits(monkeypatch, lambda: None, look)
    command = ("follow", store.root, *POLICY, "--engine", "http://x", "--name", "w")
    try:
        pulse(*command, "--events", events, "--metrics-port", 0, status=130)
    finally:
        monkeypatch.undo()
    assert seen == ["policy/workers/w-000000000000"]
    failed, synced = [json.loads(line) for line in events.read_text().splitlines()]
    assert (failed["event"], failed["kind"]) == ("call_failed", "engine_unavailable")
    assert (synced["event"], synced["version"], synced["fetched_bytes"]) == ("synced", 0, 40)
    assert synced["lag_seconds"] == 1.5


def test_a_thousand_junk_objects_are_not_a_thousand_lines(
    pulse: Pulse, tmp_path: Path, rng: Rng
) -> None:
    store = tmp_path / "store"
    Publisher(LocalStore(store), stream="policy").publish(history(rng, 1)[0])
    for number in range(1, 201):
        (store / "policy" / "versions" / f"{number:012d}.json").write_text("{}")
    pulse("follow", store, *POLICY, "--out", tmp_path / "out", "--once")
    notes = [without_time(line) for line in pulse.err.splitlines()]
    refused = [note for note in notes if "cannot be used" in note]
    assert len(refused) == 3
    assert "pulse: (197 more of this kind: corrupt_manifest)" in notes


def test_what_cannot_be_shown_is_refused_at_the_start(
    pulse: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = ("follow", tmp_path, *POLICY, "--out", tmp_path / "out", "--once")
    pulse.refused(*follow, "--events", tmp_path, kind="input", match="cannot write events")
    far = ("--metrics-port", 1, "--metrics-bind", "203.0.113.1")
    pulse.refused(*follow, *far, kind="input", match="cannot serve metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    pulse.refused(*follow, "--metrics-port", 0, kind="input", match="prometheus-client")
    assert not (tmp_path / "out").exists()
