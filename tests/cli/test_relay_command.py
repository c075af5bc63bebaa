"""`pulse relay`, `pulse serve`, and `pulse follow` with what they leave."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from pulse_rl import LocalStore, Publisher, Subscriber
from tests.support.commands import Pulse, at_waits
from tests.support.running import Running, until
from tests.support.states import Rng, history, reach, roots


def test_it_copies_streams_and_goes_on(
    pulse: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: Rng
) -> None:
    states = history(rng, 3)
    far, near, late = tmp_path / "far", tmp_path / "near", tmp_path / "late"
    solver, verifier = (
        Publisher(LocalStore(far), stream=stream) for stream in ("solver", "verifier")
    )
    for publisher in (solver, verifier):
        publisher.publish(states[0])
    steps = [lambda: solver.publish(states[1]), lambda: far.rename(late), lambda: late.rename(far)]
    at_waits(monkeypatch, *steps)
    streams = ("--stream", "solver", "--stream", "verifier")
    command = ("relay", far, near, *streams, "--poll", 0.5, "--json")
    lines = [json.loads(line) for line in pulse(*command, status=130).splitlines()]
    assert [(line["stream"], line["version"], line["previous"]) for line in lines] == [
        ("solver", 0, None),
        ("verifier", 0, None),
        ("solver", 1, 0),
    ]
    assert lines[2]["links"] == ["the patch 0->1"]
    assert lines[2]["bytes"] > 0
    for stream, root in (("solver", roots(states)[1]), ("verifier", roots(states)[0])):
        reach(Subscriber(LocalStore(near), stream=stream), root)


def test_once_and_refusals(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    far, near = tmp_path / "far", tmp_path / "near"
    command = ("relay", far, near, "--stream", "s", "--once")
    pulse.refused(*command, kind="empty_stream", match="no version of it")
    Publisher(LocalStore(far), stream="s").publish(history(rng, 1)[0])
    assert pulse.json(*command)["version"] == 0
    assert pulse.json(*command)["bytes"] == 0
    two = ("relay", near, far, "--stream", "s", "--stream", "t", "--stream-id", "0" * 32)
    pulse.refused(*two, kind="input", match="one stream ID")
    lost = ("relay", "memory://", far, "--stream", "s", "--once")
    pulse.refused(*lost, kind="input", match="memory")


@pytest.mark.slow
def test_a_relay_with_a_name_reports_itself(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    """So the publisher helps one that no path leads on, as it helps a worker."""
    states, far = history(rng, 3), tmp_path / "far"
    command = ("relay", far, tmp_path / "near", "--stream", "s", "--once", "--name", "us")
    with Publisher(LocalStore(far), stream="s", anchor_ratio=1e9) as publisher:
        for state in states:
            publisher.publish(state)
            if publisher.head().version == 0:  # type: ignore[union-attr]
                pulse(*command)
        beats = far / "s/workers"
        (beat,) = beats.iterdir()
        assert (beat.name, beat.read_bytes()) == ("us-000000000000", b"")
        for patch in (far / "s/payloads").glob("*.patch"):
            patch.unlink()
        pulse(*command, status=1)
        until(lambda: '"kind": "chain_gap"' in "".join(b.read_text() for b in beats.iterdir()))


def test_follow_falls_back(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    states = history(rng, 2)
    far, near, out = tmp_path / "far", tmp_path / "near", tmp_path / "out"
    publisher = Publisher(LocalStore(far), stream="s")
    publisher.publish(states[0])
    pulse("relay", far, near, "--stream", "s", "--once")
    follow = ("follow", near, far, "--stream", "s", "--out", out, "--once")
    assert pulse.json(*follow)["root"] == roots(states)[0]
    publisher.publish(states[1])
    shutil.rmtree(near)
    assert pulse.json(*follow)["root"] == roots(states)[1]
    engine = ("follow", far, far, "--stream", "s", "--engine", "http://127.0.0.1:9")
    pulse.refused(*engine, kind="input", match="one store")


# -- pulse serve


@pytest.mark.slow
def test_a_worker_follows_what_is_served(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    states = history(rng, 2)
    publisher = Publisher(LocalStore(tmp_path / "run"), stream="policy", threads=1)
    publisher.publish(states[0])
    with Running(tmp_path / "log", "serve", tmp_path / "run", "--port", 0, "--json") as server:
        url = server.says(r'"url": "(.*?)"')
        follow = ("follow", url, "--stream", "policy", "--out", tmp_path / "out", "--once")
        for state, root in zip(states, roots(states), strict=True):
            publisher.publish(state)
            assert pulse.json(*follow)["root"] == root
        publish = ("publish", tmp_path / "out/model.safetensors", url, "--stream", "new")
        pulse.refused(*publish, kind="store", match="for readers")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 130


def test_refusals(pulse: Pulse, tmp_path: Path) -> None:
    pulse.refused("serve", tmp_path / "nothing", kind="input", match="no folder")
    pulse.refused(
        "serve", tmp_path, "--bind", "", "--port", "0", kind="input", match="empty address"
    )
    for port in ("-1", "65536", "x"):
        with pytest.raises(SystemExit, match="2"):
            pulse("serve", tmp_path, "--port", port)
