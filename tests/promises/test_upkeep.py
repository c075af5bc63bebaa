"""Folds, garbage collection, relays and several stores change how a version is reached, never what
it is."""

from __future__ import annotations

import pytest

from pulse_rl import MemoryStore, Publisher, Relay, Store, verify_stream
from pulse_rl.errors import StoreUnavailable
from tests.support.stores import FaultyStore

from .oracle import STREAM, Trainer, Worker, publish


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
