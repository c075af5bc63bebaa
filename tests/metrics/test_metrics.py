"""Listeners: JSON lines that survive a crash, the watch over density, and facts of the events that
they need."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulse_rl import MemoryStore, Publisher, Store, Subscriber
from pulse_rl.errors import InputError
from pulse_rl.events import Event, FallbackUsed, Progress, Published, Synced
from pulse_rl.metrics import JsonLines, read_events, tee_listeners
from tests.support.events import ONE_OF_EACH, PUBLISHED
from tests.support.states import Rng, history, present
from tests.support.stores import names


def of(kind: type[Event], events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def synced_over(
    store: Store, states: list[Any], *, every: int = 1
) -> tuple[list[Event], list[Event]]:
    """The events of a publisher of ``states``, and of a subscriber that syncs after every few of
    them."""
    sent: list[Event] = []
    seen: list[Event] = []
    publisher = Publisher(store, stream="policy", on_event=sent.append)
    subscriber = Subscriber(store, stream="policy", on_event=seen.append)
    for i, state in enumerate(states):
        publisher.publish(state, metadata={"reward": i / 10})
        if i % every == 0:
            subscriber.sync()
    return sent, seen


def test_events_say_how_far_behind_and_where_the_time_went(rng: Rng) -> None:
    sent, seen = synced_over(MemoryStore(), history(rng, 7), every=3)
    syncs = of(Synced, seen)
    assert [(s.version, s.versions_behind) for s in syncs] == [(0, None), (3, 3), (6, 3)]
    assert set(syncs[0].phases) == {"plan", "fetch", "restore"}
    assert set(syncs[1].phases) == {"plan", "fetch", "apply"}
    for sync in syncs:
        assert min(sync.phases.values()) >= 0
        assert 0 < sum(sync.phases.values()) <= sync.seconds
        assert -0.01 < sync.lag_seconds < 60
    for published in of(Published, sent)[1:]:
        assert set(published.phases) == {"resume", "build", "upload", "commit"}
        assert sum(published.phases.values()) <= published.seconds * 1.01


def test_lag_is_the_age_of_the_version(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    committed = Publisher(store, stream="policy")
    committed.publish(history(rng, 1)[0])
    head = present(committed.head())
    monkeypatch.setattr("pulse_rl.sync.subscriber.time.time", lambda: head.created + 12.5)
    seen: list[Event] = []
    Subscriber(store, stream="policy", on_event=seen.append).sync()
    assert of(Synced, seen)[0].lag_seconds == pytest.approx(12.5)


def test_a_failed_path_names_the_kind_of_error(rng: Rng, store: MemoryStore) -> None:
    publisher = Publisher(store, stream="policy", anchor_ratio=0.0)
    states = history(rng, 2)
    publisher.publish(states[0])
    seen: list[Event] = []
    subscriber = Subscriber(store, stream="policy", on_event=seen.append)
    subscriber.sync()
    publisher.publish(states[1])
    (patch,) = [name for name in names(store, "policy/payloads") if name.endswith(".patch")]
    store.put(patch, b"\0" * len(store.get(patch)))
    subscriber.sync()
    assert [e.kind for e in of(FallbackUsed, seen)] == ["digest_mismatch"]
    assert of(Synced, seen)[-1].links == ("the anchor of version 1",)


def test_json_lines_hold_every_event_but_progress(tmp_path: Path) -> None:
    path = tmp_path / "new" / "events-trainer.jsonl"
    with JsonLines(path) as log:
        for event in ONE_OF_EACH:
            log(event)
            assert path.read_bytes().endswith(b"\n") or isinstance(
                event, Progress
            )  # on disk before the next event
    with pytest.raises(ValueError, match="closed"):
        log(PUBLISHED)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [
        "published", "baseline_restored", "synced", "call_failed", "fallback_used", "hint",
        "folded", "call_failed", "relayed", "served",
    ]  # fmt: skip
    assert lines[0]["metadata"] == {"step": 1}
    assert lines[0]["changed"] == 10
    assert lines[2]["lag_seconds"] == 1.5
    assert lines[2]["links"] == ["the patch"]
    assert all(1.7e9 < line["time"] < 1e10 for line in lines)
    assert list(read_events(path)) == lines


@pytest.mark.parametrize("cut", [0, 1, 2, 10, 100, 200])
def test_a_crash_in_mid_line_loses_that_line_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    with JsonLines(path) as log:
        log(PUBLISHED)
        log(replace(PUBLISHED, version=2))
    path.write_bytes(path.read_bytes()[: -cut or None])
    left = [1, 2] if cut <= 1 else [1]  # without its line feed alone, a line is whole
    assert [e["version"] for e in read_events(path)] == left
    with JsonLines(path) as log:
        log(replace(PUBLISHED, version=3))
    assert [e["version"] for e in read_events(path)] == [*left, 3]
    assert b"\n\n" not in path.read_bytes()


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    versions = [range(i * 50, i * 50 + 50) for i in range(8)]
    with JsonLines(tmp_path / "events.jsonl") as log:
        threads = [
            threading.Thread(target=lambda r=r: [log(replace(PUBLISHED, version=v)) for v in r])
            for r in versions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(e["version"] for e in read_events(tmp_path / "events.jsonl")) == list(range(400))


def test_what_is_no_event_is_skipped(tmp_path: Path) -> None:
    good = b'{"event": "published", "time": 1}\n'
    bad = [
        b"\n",
        b"null\n",
        b"[1]\n",
        b'"event"\n',
        b'{"event": 1, "time": 1}\n',
        b'{"event": "a"}\n',
        b"\xff\xfe\n",
    ]
    bad += [
        b'{"event": "a", "time": "1"}\n',
        b"[" * 100_000 + b"\n",
        b'{"x": "' + b"y" * (1 << 21) + b'"}\n',
    ]
    path = tmp_path / "events.jsonl"
    path.write_bytes(good + good.join(bad) + good)
    assert len(list(read_events(path))) == len(bad) + 1


def test_paths_that_cannot_be_used_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        JsonLines(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        list(read_events(tmp_path / "nothing.jsonl"))


def test_tee_listeners_hands_each_event_on_in_order() -> None:
    seen: list[tuple[str, Event]] = []
    tee_listeners(lambda e: seen.append(("a", e)), lambda e: seen.append(("b", e)))(PUBLISHED)
    assert seen == [("a", PUBLISHED), ("b", PUBLISHED)]


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_shows_bars_until_the_call_ends(
    rng: Rng, wanted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the listener, which gets what it always gets, for a publish, a patch and a first
    sync."""
    monkeypatch.setattr("pulse_rl.events._BAR_DELAY_SECONDS", 0)
    heard: list[Event] = []
    store = MemoryStore()
    with Publisher(store, stream="policy", on_event=heard.append) as publisher:
        for state in history(rng, 2):
            publisher.publish(state, progress=wanted)
    shown = capsys.readouterr().err
    for stage in ("digest", "diff", "upload"):
        assert (f"{stage}: " in shown) == wanted
        assert stage in {event.stage for event in of(Progress, heard)}
    assert len(of(Published, heard)) == 2
    subscriber = Subscriber(store, stream="policy")
    (update,) = subscriber.updates(timeout_seconds=0.0, progress=wanted)
    assert update.version == 1
    assert ("restore: " in capsys.readouterr().err) == wanted
    assert not wanted or not shown.rpartition("\r")[2].strip(), "the last bar was taken away"


def test_numbers_that_no_float_holds_are_no_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for field in ("time", "version"):
        event = {"event": "published", "time": 1.0, "version": 1} | {field: 10**400}
        path.write_text(json.dumps(event) + "\n")
        assert list(read_events(path)) == []
