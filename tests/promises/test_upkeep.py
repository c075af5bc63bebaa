"""Folds, garbage collection, relays and several stores change how a version is reached, never what
it is."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl import MemoryStore, Publisher, Relay, Store, gc_stream, verify_stream
from pulse_rl.errors import StoreUnavailable
from tests.support.publishers import FoldingPublisher
from tests.support.stores import FaultyStore

from .oracle import STREAM, Trainer, Worker, objects, publish


def test_one_that_is_far_behind_reads_less_where_there_are_folds(store: Store) -> None:
    trainer, worker = Trainer(elements=30_000), Worker(store)
    with FoldingPublisher(
        store, stream=STREAM, folds=(8,), anchor_ratio=100, threads=1
    ) as publisher:
        publish(publisher, trainer)
        worker.sync()
        base = dict(trainer.state)
        sent = 0
        for _ in range(16):
            # The same elements again and again: a fold tells each of them once.
            trainer.state = {**base} if publisher.head().version % 2 else trainer.step(0.02)  # type: ignore[union-attr]
            sent += publisher.publish(trainer.state).patch_bytes
        publisher.wait()
    update = worker.sync()
    assert update is not None
    assert worker.root == trainer.root
    for _, indices, _ in update:
        assert indices is not None
        assert np.all(np.diff(indices) > 0), "each change once"
    assert 0 < update.payload_bytes < 0.7 * sent
    assert all(not report.problems for report in verify_stream(store, STREAM))


def test_the_newest_versions_outlive_a_garbage_collection(store: Store) -> None:
    trainer = Trainer(elements=600)
    with FoldingPublisher(
        store, stream=STREAM, folds=(2,), anchor_ratio=0.1, threads=1
    ) as publisher:
        roots = publish(publisher, trainer, 12)
        publisher.wait()
        before = set(objects(store))
        gc_stream(store, STREAM, keep=3, grace_seconds=0)
        left = set(objects(store))
        assert left < before
        for version in (9, 10, 11):
            worker = Worker(store)
            worker.sync(version)
            assert worker.root == roots[version]
        gc_stream(store, STREAM, keep=3, grace_seconds=0)
        assert set(objects(store)) == left, "a second one finds nothing to do"
        publish(publisher, trainer)
    worker = Worker(store)
    worker.sync()
    assert (worker.subscriber.version, worker.root) == (12, trainer.root)


def test_a_relays_copy_is_the_stream(store: Store) -> None:
    """And so is a copy of the copy."""
    trainer, near, nearer = Trainer(), MemoryStore(), MemoryStore()
    worker = Worker(nearer)
    relays = Relay(store, near, stream=STREAM), Relay(near, nearer, stream=STREAM)
    with Publisher(store, stream=STREAM, anchor_ratio=0.2) as publisher:
        roots = []
        for _ in range(6):
            roots += publish(publisher, trainer)
            for relay in relays:
                relay.sync()
            worker.reach(trainer)
    assert [report.root for report in verify_stream(nearer, STREAM)] == roots


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "after"), [("source", False), ("target", False), ("target", True)]
)
def test_a_relay_may_fail_at_every_call_to_a_store(side: str, after: bool) -> None:
    trainer = Trainer(elements=600)
    source = FaultyStore(MemoryStore())
    target = FaultyStore(MemoryStore())
    failing = source if side == "source" else target
    with Publisher(source.inner, stream=STREAM, anchor_ratio=0.1, threads=1) as publisher:
        at, roots = 0, []
        while True:
            roots += publish(publisher, trainer, 2)
            failing.fail(at, after=after)
            relay = Relay(source, target, stream=STREAM, threads=1)
            try:
                relay.sync()
            except StoreUnavailable:
                cut_short = Worker(target.inner)
                cut_short.sync()
                assert (
                    cut_short.subscriber.version is None
                    or cut_short.root == roots[cut_short.subscriber.version]
                )
                relay.sync()
            worker = Worker(target.inner)
            worker.reach(trainer)
            if not failing.fired:
                break
            at += 1
    assert at > 2
