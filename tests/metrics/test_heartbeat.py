"""A worker's heartbeat: seen again and again, why it is stuck, and gone when it ends."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from pulse_rl import MemoryStore, Publisher, Relay, Subscriber, gc_stream
from pulse_rl.events import CallFailed, FallbackUsed
from pulse_rl.metrics import Heartbeat
from tests.support.running import until
from tests.support.states import Rng, weights
from tests.support.stores import FaultyStore, names

NONE, FIRST = "s/workers/w-none", "s/workers/w-000000000000"


@pytest.fixture
def store(rng: Rng) -> MemoryStore:
    store = MemoryStore()
    Publisher(store, stream="s").publish({"w": weights(rng, 5)})
    return store


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is jittered around 30 s is done after 0.15 s."""
    monkeypatch.setattr(random, "uniform", lambda *_: 0.005)


def failed(reason: str = "no path", kind: str = "chain_gap") -> CallFailed:
    return CallFailed("s", "sync", kind, reason)


def test_it_is_written_again_until_it_is_closed(store: MemoryStore, hasty: None) -> None:
    with Heartbeat(store, "w") as heartbeat:
        heartbeat.beat("s", 0)
        first = store.head(FIRST).modified
        until(lambda: store.head(FIRST).modified > first)
        assert store.get(FIRST) == b""
        heartbeat.beat("s", 1)
        assert names(store, "s/workers") == ["s/workers/w-000000000001"]
    assert names(store, "s/workers") == []
    heartbeat.beat("s", 2)
    heartbeat(failed())
    assert names(store, "s/workers") == [], "nothing is written after the end"


def test_a_stuck_worker_says_why(store: MemoryStore, hasty: None) -> None:
    with Heartbeat(store, "w") as heartbeat:
        for _ in range(3):
            heartbeat(
                failed("no path leads\x1b[0m to s3://key:secret@bucket " + "ä\U0001f600" * 4000)
            )
        said = json.loads(until(lambda: names(store, "s/workers") and store.get(NONE)))
        assert (said["kind"], said["reason"][:13]) == ("chain_gap", "no path leads")
        assert "secret" not in said["reason"]
        assert said["reason"].isprintable()
        until(lambda: json.loads(store.get(NONE))["errors"] == 3)
        assert store.head(NONE).nbytes <= 4096
        assert Subscriber(store, stream="s", on_event=heartbeat).sync() is not None
        assert names(store, "s/workers") == [FIRST]
        assert store.get(FIRST) == b"", "the next version clears it"
        heartbeat(FallbackUsed("s", "file 'config.json'", "gone", "not_found"))
        heartbeat(FallbackUsed("s", "version 1", "damaged", "corrupt_manifest"))
        until(lambda: store.head(FIRST).nbytes)
        heartbeat.beat("s", 0)
        assert json.loads(store.get(FIRST))["kind"] == "corrupt_manifest", "it is still behind"
        heartbeat(failed())
        heartbeat.beat("s", 0)
        assert store.get(FIRST) == b"", "a call that succeeds clears what calls have failed"


def test_a_process_that_was_forked_does_not_beat(store: MemoryStore) -> None:
    with Heartbeat(store, "w") as heartbeat:
        heartbeat.beat("s", 0)
        if (child := os.fork()) == 0:  # pragma: no cover - in the child
            heartbeat.beat("s", 1)
            heartbeat(failed())
            heartbeat.close()
            os._exit(0 if names(store, "s/workers") == [FIRST] else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_old_heartbeats_without_a_version_are_collected(store: MemoryStore) -> None:
    store.put(NONE, b"")
    assert NONE not in gc_stream(store, "s", keep=1).names
    time.sleep(1.1)  # a store's clock may be coarse: collection takes a second off
    store.put("s/workers/x-000000000000", b"")
    assert gc_stream(store, "s", keep=1, grace_seconds=0).names == (NONE,)


def test_a_relay_carries_them_to_the_source(store: MemoryStore, hasty: None) -> None:
    near, far = MemoryStore(), MemoryStore()
    relays = [Relay(store, far, stream="s"), Relay(far, near, stream="s")]

    def seen() -> list[str]:
        for relay in relays:
            relay.sync()
        return names(store, "s/workers")

    store.put("s/workers/x-000000000000", b"")  # of a worker at the source
    assert seen() == ["s/workers/x-000000000000"]
    with Heartbeat(near, "w") as heartbeat:
        heartbeat.beat("s", 0)
        until(lambda: FIRST in seen())
        before = store.head(FIRST).modified
        until(lambda: seen() and store.head(FIRST).modified > before)
        heartbeat(failed())
        until(lambda: seen() and store.head(FIRST).nbytes)
        assert json.loads(store.get(FIRST))["reason"] == "no path"
    until(lambda: seen() == ["s/workers/x-000000000000"])


def test_a_relay_does_not_revive_the_dead_nor_stop_where_it_may_not_write(
    store: MemoryStore, hasty: None
) -> None:
    near, events = MemoryStore(), list[object]()
    Relay(store, near, stream="s").sync()
    near.put(FIRST, b"")
    store.put(FIRST, b"")  # another process of the relay has forwarded it
    before = store.head(FIRST).modified
    Relay(store, near, stream="s").sync()
    assert store.head(FIRST).modified == before
    near.put("s/workers/y-000000000000", b"")
    refusing = FaultyStore(store)
    relay = Relay(refusing, near, stream="s", on_event=events.append)
    refusing.fail_on("put", "workers")
    for _ in range(3):
        assert relay.sync() is None
    assert [e.call for e in events if isinstance(e, CallFailed)] == ["heartbeat"]
