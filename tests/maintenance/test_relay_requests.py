"""What a relay asks of its source: the numbers of docs/clusters.md; where the source can be waited
for, it waits."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulse_rl import LocalStore, MemoryStore, Publisher, Relay, Subscriber
from pulse_rl.store.server import FolderServer
from tests.support.http import CountedHttpStore, asked
from tests.support.relays import Counted, newest_root
from tests.support.states import Rng, history, roots
from tests.support.stores import FaultyStore, requests

pytestmark = pytest.mark.slow


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    (tmp_path / "origin").mkdir()
    return LocalStore(tmp_path / "origin")


@pytest.fixture
def served(origin: LocalStore) -> Iterator[FolderServer]:
    with FolderServer(origin.root) as server:
        yield server


def test_a_version_costs_a_list_a_manifest_and_the_patch(rng: Rng) -> None:
    states, source = history(rng, 4), FaultyStore(MemoryStore())
    publisher = Publisher(source, stream="policy", anchor_ratio=1e9)
    publisher.publish(states[0])
    relay = Relay(source, MemoryStore(), stream="policy", threads=1)
    relay.sync()
    look = Counter({"list versions": 1})
    version = look + Counter(
        {
            "get versions": 1,
            "head payloads": 1,
            "get payloads": 1,
            "head digests": 1,
            "get digests": 1,
        }
    )
    for state in states[1:]:
        publisher.publish(state)
        assert requests(source, relay) == version
        assert requests(source, relay) == look


def test_the_origin_serves_each_payload_once_to_a_hundred_workers(rng: Rng) -> None:
    """Which have it in their lists of stores, but behind the relay's."""
    states, source, near = history(rng, 5), Counted(), MemoryStore()
    publisher = Publisher(source, stream="policy", anchor_ratio=1e9)
    relay = Relay(source, near, stream="policy", threads=1)
    workers = [Subscriber([near, source], stream="policy", threads=1) for _ in range(100)]
    for state, root in zip(states, roots(states), strict=True):
        publisher.publish(state)
        relay.sync()
        for worker in workers:
            worker.sync()
            assert worker.root == root
    stored = {info.name: info.nbytes for info in source.list("policy/payloads")}
    assert len(stored) == len(states)
    assert source.payloads_read() == stored


def test_an_idle_relay_makes_four_requests_a_minute(
    served: FolderServer, origin: LocalStore, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list, and a wait of 25 seconds (here of one)."""
    monkeypatch.setattr("pulse_rl.sync.polling.MAX_WAIT_SECONDS", 1.0)
    Publisher(origin, stream="policy", threads=1).publish(history(rng, 1)[0])
    store = CountedHttpStore(served.url)
    relay = Relay(store, MemoryStore(), stream="policy", threads=1)
    relay.sync()
    asked(store)
    stop = time.monotonic() + 2.5
    while (left := stop - time.monotonic()) > 0:
        relay.wait_for_new(0.01, left)
        assert relay.sync() is None
    found = list(asked(store))
    assert found[0] == "POST ?wait=1.000"
    assert set(found[1::2]) == {"GET policy/versions/?after="}
    assert len(found) <= 8, found


@pytest.mark.slow
def test_a_command_that_waits_copies_each_stream_at_once(
    served: FolderServer, origin: LocalStore, tmp_path: Path, rng: Rng
) -> None:
    """Long before the poll's time."""
    states = history(rng, 3)
    publishers = {
        stream: Publisher(origin, stream=stream, threads=1) for stream in ("solver", "verifier")
    }
    for publisher in publishers.values():
        publisher.publish(states[0])
    streams = [word for stream in publishers for word in ("--stream", stream)]
    command = [
        str(Path(sys.executable).parent / "pulse"),
        "relay",
        served.url,
        str(tmp_path / "near"),
        *streams,
    ]
    with subprocess.Popen(
        [*command, "--poll", "60", "--json"], stdout=subprocess.PIPE, text=True
    ) as relay:
        try:
            assert relay.stdout is not None
            for _ in publishers:
                assert json.loads(relay.stdout.readline())["version"] == 0
            for state in states[1:]:
                for stream, publisher in publishers.items():
                    time.sleep(0.3)
                    started = time.monotonic()
                    version = publisher.publish(state).version
                    line = json.loads(relay.stdout.readline())
                    assert (line["stream"], line["version"]) == (stream, version)
                    assert time.monotonic() - started < 20
        finally:
            relay.kill()
    assert newest_root(LocalStore(tmp_path / "near"), "verifier") == roots(states)[2]
