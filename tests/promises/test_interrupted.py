"""Calls that fail, programs that are killed, trainers that are replaced: nothing committed is lost,
all go on."""

from __future__ import annotations

import pytest

from pulse_rl import MemoryStore, Publisher, Store, state_root, verify_stream
from pulse_rl.errors import AlreadyExists, PublisherConflict, PulseError, StoreUnavailable
from tests.support.stores import FaultyStore

from .oracle import STREAM, Trainer, Worker, held, publish, root_of


def whole(store: Store) -> list[str]:
    """The roots of a stream's versions, each of which verifies."""
    reports = list(verify_stream(store, STREAM, threads=1))
    assert [report.version for report in reports] == list(range(len(reports)))
    assert all(not report.problems for report in reports), reports
    return [str(report.root) for report in reports]


@pytest.mark.parametrize("after", [False, True], ids=["request lost", "reply lost"])
def test_a_publish_may_fail_at_every_call_to_the_store(after: bool, faulty: FaultyStore) -> None:
    trainer, acknowledged = Trainer(elements=600), []
    publisher = Publisher(faulty, stream=STREAM, anchor_ratio=0.1, threads=1)
    at = 0
    while True:
        faulty.fail(at, after=after)
        state = trainer.step()
        try:
            published = publisher.publish(state)
        except StoreUnavailable:
            published = publisher.publish(state)
            at += 1
        else:
            if not faulty.fired:
                break
            at += 1
        acknowledged.append((published.version, published.root))
        assert published.root == trainer.root
    assert at > 3
    faulty.heal()
    roots = whole(faulty)
    assert [roots[version] for version, _ in acknowledged] == [root for _, root in acknowledged]
    assert roots[-1] == state_root(state)


@pytest.mark.parametrize("newcomer", [False, True], ids=["follower", "newcomer"])
def test_a_sync_may_fail_at_every_call_to_the_store(newcomer: bool, faulty: FaultyStore) -> None:
    trainer = Trainer(elements=600)
    publisher = Publisher(faulty, stream=STREAM, threads=1)
    roots = publish(publisher, trainer)
    worker, at = Worker(faulty), 0
    worker.sync()
    while True:
        roots += publish(publisher, trainer)
        worker = Worker(faulty) if newcomer else worker
        faulty.fail(at)
        try:
            worker.sync()
        except StoreUnavailable:
            version = worker.subscriber.version
            assert version is None or root_of(held(worker.subscriber)) == roots[version]
            worker.reach(trainer)
        if not faulty.fired:
            break
        at += 1
    assert at > 1, "a sync calls the store at least for a list and a payload"


def test_a_new_publisher_goes_on_where_the_last_one_ended(store: Store) -> None:
    trainer, worker, roots = Trainer(), Worker(store), []
    for life in range(3):
        with Publisher(store, stream=STREAM) as publisher:
            roots += publish(publisher, trainer, 3)
            worker.sync()
            assert (worker.subscriber.version, worker.root) == (3 * life + 2, trainer.root)
    assert whole(store) == roots


def test_one_that_restarts_from_an_older_checkpoint_goes_on_above_the_head(store: Store) -> None:
    trainer, worker = Trainer(), Worker(store)
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer, 2)
        checkpoint = dict(trainer.state)
        publish(publisher, trainer, 2)
    worker.sync()
    trainer.state = checkpoint
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
    worker.sync()
    assert (worker.subscriber.version, worker.root) == (4, trainer.root)
    assert len(whole(store)) == 5


def test_of_two_publishers_the_later_one_goes_on(store: Store) -> None:
    first, second = Trainer(1), Trainer(2)
    older, newer = Publisher(store, stream=STREAM), Publisher(store, stream=STREAM)
    publish(older, first, 2)
    publish(newer, second)
    with pytest.raises(PublisherConflict):
        older.publish(first.step())
    publish(newer, second)
    worker = Worker(store)
    worker.sync()
    assert (worker.subscriber.version, worker.root) == (3, second.root)
    assert len(whole(store)) == 4


def test_a_store_that_is_away_leaves_the_last_version(store: Store) -> None:
    flaky, trainer = FaultyStore(store), Trainer()
    publisher, worker = Publisher(flaky, stream=STREAM), Worker(flaky)
    publish(publisher, trainer)
    worker.sync()
    root = worker.root
    publish(publisher, trainer)
    for _ in range(3):
        flaky.fail(0)
        with pytest.raises(StoreUnavailable):
            worker.sync()
        assert (worker.subscriber.version, worker.subscriber.root) == (0, root)
    worker.reach(trainer)


def test_errors_are_of_the_library_and_say_whether_to_try_again() -> None:
    assert StoreUnavailable("x").retryable
    assert not PublisherConflict("x").retryable
    assert issubclass(StoreUnavailable, PulseError)


def test_a_client_that_repeats_a_create_meets_its_own_object() -> None:
    """After a lost reply it reports that the object exists, which is its own."""

    class Repeats(MemoryStore):
        def put_new(self, name: str, data: bytes) -> None:
            super().put_new(name, data)
            raise AlreadyExists(f"{name} already exists")

    store, trainer = Repeats(), Trainer(elements=600)
    with Publisher(store, stream=STREAM, threads=1) as publisher:
        roots = publish(publisher, trainer, 3)
    assert whole(store) == roots
