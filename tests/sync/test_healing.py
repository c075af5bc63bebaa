"""A worker that no path leads to the newest version gets an anchor, without a person."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import Bits, LocalStore, MemoryStore, ObjectInfo, Publisher, Store, Subscriber
from pulse_rl.errors import ChainGap, StoreUnavailable
from pulse_rl.metrics import Heartbeat
from tests.support.running import until
from tests.support.states import Rng
from tests.support.stores import names


class Trainer:
    def __init__(self, rng: Rng) -> None:
        self.rng, self.weights = rng, rng.integers(0, 1 << 15, 4000).astype(np.uint16)

    def publish(self, publisher: Publisher, count: int = 1) -> list[int]:
        """The bytes of the anchors."""
        found = []
        for _ in range(count):
            self.weights = self.weights.copy()
            self.weights[self.rng.integers(0, 4000, 60)] += 1
            found.append(publisher.publish({"w": Bits(self.weights, "BF16")}).anchor_bytes)
        return found


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    real, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])

    def later(seconds: float) -> None:
        passed[0] += seconds

    return later


def harm(store: Store, version: int) -> None:
    with Subscriber(store, stream="s") as reader:
        reader.sync(version)
        patch = reader.manifest.patch
    assert patch is not None
    store.put(f"s/payloads/{patch.parts[0].sha256}.patch", bytes(patch.parts[0].bytes))


def reported(store: Store, worker: str, errors: int, kind: str = "chain_gap") -> None:
    facts = {"errors": errors, "since": time.time(), "kind": kind, "reason": "no path"}
    store.put(f"s/workers/{worker}-none", json.dumps(facts).encode())


@pytest.mark.parametrize("held", [None, 1])
def test_a_stuck_worker_gets_an_anchor(
    held: int | None, tmp_path: Path, rng: Rng, pass_time: Callable[[float], None]
) -> None:
    store, trainer = LocalStore(tmp_path), Trainer(rng)
    with (
        Publisher(store, stream="s") as publisher,
        Heartbeat(store, "w") as heartbeat,
        Subscriber(store, stream="s", on_event=heartbeat) as worker,
    ):
        trainer.publish(publisher, 2)
        if held is not None:
            worker.sync(held)
        trainer.publish(publisher)
        harm(store, 2)
        for _ in range(2):
            with pytest.raises(ChainGap):
                worker.sync()
        until(lambda: [n for n in names(store, "s/workers") if b'"errors": 2' in store.get(n)])
        pass_time(30)
        assert trainer.publish(publisher)[0] > 0
        worker.sync()
        assert worker.root == publisher.head().root  # type: ignore[union-attr]
        pass_time(30)
        assert trainer.publish(publisher) == [0], "all is well again"


def test_an_anchor_is_stored_for_those_alone_whom_it_helps(
    rng: Rng, pass_time: Callable[[float], None]
) -> None:
    store, trainer = MemoryStore(), Trainer(rng)
    with Publisher(store, stream="s") as publisher:
        trainer.publish(publisher, 2)

        def anchored() -> bool:
            pass_time(30)
            return trainer.publish(publisher) != [0]

        reported(store, "one-failure", 1)
        reported(store, "store-away", 50, "store_unavailable")
        assert not anchored()
        reported(store, "stuck", 2)
        assert anchored()
        # It is not helped: it waits ever longer, and costs no state each minute.
        found = []
        for minute in range(120):
            pass_time(30)
            reported(store, "stuck", minute + 2)
            found.append(anchored())
        assert 4 <= sum(found) <= 8
        store.delete("s/workers/stuck-none")
        assert not anchored()


def test_a_worker_that_is_gone_costs_nothing(
    tmp_path: Path, rng: Rng, pass_time: Callable[[float], None]
) -> None:
    store, trainer = LocalStore(tmp_path), Trainer(rng)
    with Publisher(store, stream="s") as publisher:
        trainer.publish(publisher, 2)
        reported(store, "w", 9)
        beat = tmp_path / "s/workers/w-none"
        os.utime(beat, (1e9, 1e9))
        for _ in range(3):
            pass_time(30)
            assert trainer.publish(publisher) == [0]
        # By a store's clock that is years behind: it lives as long as that time moves.
        os.utime(beat, (1e9 + 30, 1e9 + 30))
        pass_time(30)
        assert trainer.publish(publisher)[0] > 0


def test_heartbeats_that_cannot_be_read_stop_no_publish(
    rng: Rng, pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(store: Store, folder: str, *args: object) -> Iterator[ObjectInfo]:
        if folder == "s/workers":
            raise StoreUnavailable("away")
        return real(store, folder, *args)

    real: Any = MemoryStore.list
    monkeypatch.setattr(MemoryStore, "list", away)
    with Publisher(MemoryStore(), stream="s") as publisher:
        pass_time(30)
        assert Trainer(rng).publish(publisher, 2)[1:] == [0]


def test_reports_from_before_an_anchor_do_not_count(
    rng: Rng, pass_time: Callable[[float], None]
) -> None:
    store, trainer = MemoryStore(), Trainer(rng)
    with Publisher(store, stream="s") as publisher:
        trainer.publish(publisher, 2)
        reported(store, "stuck", 2)
        publisher.publish({"w": Bits(trainer.weights, "BF16")}, anchor=True)
        pass_time(11)
        assert trainer.publish(publisher) == [0]
        pass_time(11)
        assert trainer.publish(publisher)[0] > 0
