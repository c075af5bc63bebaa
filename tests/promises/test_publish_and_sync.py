"""What is published arrives, bit for bit, whatever the way to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pulse_rl import Bits, Publisher, Store, verify_stream
from pulse_rl.errors import InputError

from .oracle import STREAM, Trainer, Worker, publish


def test_a_newcomer_reaches_every_version_and_the_stream_verifies(store: Store) -> None:
    trainer = Trainer()
    with Publisher(store, stream=STREAM, anchor_ratio=0.05) as publisher:
        roots = publish(publisher, trainer, 12)
    for version, root in enumerate(roots):
        worker = Worker(store)
        worker.sync(version)
        assert (worker.subscriber.version, worker.root) == (version, root)
    reports = list(verify_stream(store, STREAM))
    assert [(report.version, report.root, report.problems) for report in reports] == [
        (version, root, ()) for version, root in enumerate(roots)
    ]


def test_a_worker_that_was_away_has_each_change_once(store: Store) -> None:
    """With the newest bits, also of what changed twice or back again."""
    trainer, worker = Trainer(), Worker(store)
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
        worker.sync()
        first = trainer.state
        publish(publisher, trainer, 4)
        trainer.state = first
        publish(publisher, trainer)
        update = worker.sync()
    assert (update.previous, update.version, update.full) == (0, 5, False)
    for name, indices, values in update:
        assert indices is not None
        assert np.all(np.diff(indices) > 0)
        np.testing.assert_array_equal(values, trainer.state[name].array.reshape(-1)[indices])
    assert worker.root == trainer.root


def test_a_trainer_that_restarts_submits_what_it_has(store: Store) -> None:
    """Its first state is the head: the memory that it was copied into is the publisher's from then
    on."""
    trainer = Trainer()
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer, 2)
    with Publisher(store, stream=STREAM) as publisher:
        submitted = [publisher.submit(trainer.state)]
        submitted += [publisher.submit(trainer.step()) for _ in range(4)]
        assert [each.result().version for each in submitted] == list(range(2, 7))
    assert all(not report.problems for report in verify_stream(store, STREAM))


@pytest.mark.parametrize("source", [{"a": "text"}, {"a": Bits(np.zeros(3, np.uint16), "F4")}, 7])
def test_what_is_no_state_is_refused_and_commits_nothing(store: Store, source: Any) -> None:
    trainer = Trainer()
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
        with pytest.raises((InputError, TypeError, ValueError)):
            publisher.publish(source)
        publish(publisher, trainer)
    worker = Worker(store)
    worker.sync()
    assert (worker.subscriber.version, worker.root) == (1, trainer.root)
