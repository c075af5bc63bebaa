"""What is published arrives, bit for bit, whatever the way to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pulse_rl import (
    Bits,
    Publisher,
    Store,
    Subscriber,
    verify_stream,
)
from pulse_rl.errors import InputError
from tests.support.states import UINTS, WIDTHS, present

from .oracle import STREAM, Trainer, Worker, publish, root_of


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


def test_bits_survive_whatever_they_mean(store: Store) -> None:
    rng, worker = np.random.default_rng(3), Worker(store)
    state = {"empty": Bits(np.zeros((3, 0), np.uint16), "BF16")}
    for dtype, width in WIDTHS.items():
        state[dtype] = Bits(
            rng.integers(0, 1 << 8 * width - 1, (7, 11), dtype=np.uint64).astype(UINTS[width]),
            dtype,
        )
    special = np.array(
        [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF] * 30, np.uint16
    )
    with Publisher(store, stream=STREAM) as publisher:
        for shift in range(4):
            state["special"] = Bits(np.roll(special, shift), "BF16")
            publisher.publish(state)
            worker.sync()
            assert worker.root == root_of(state)


def test_tied_tensors_are_stored_once_and_arrive_under_all_names(store: Store) -> None:
    first = np.arange(4000, dtype=np.uint16)
    tied = Bits(first, "BF16")
    with Publisher(store, stream=STREAM) as publisher:
        published = publisher.publish({"embed": tied, "head": tied})
        assert published.elements == 4000
    subscriber = Subscriber(store, stream=STREAM)
    update = subscriber.sync()
    (alias,) = update.aliases
    assert {alias, update.aliases[alias]} == {"embed", "head"}
    assert np.array_equal(subscriber.state.read("embed"), subscriber.state.read("head"))


def test_an_update_that_was_not_taken_over_is_delivered_again(store: Store) -> None:
    trainer, worker = Trainer(), Worker(store)
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
        worker.sync()
        publish(publisher, trainer)
        lost = present(worker.subscriber.sync())
        for _ in lost:
            break  # an interrupt in the midst
        publish(publisher, trainer)
        update = worker.sync()
    assert (update.previous, update.version, worker.root) == (0, 2, trainer.root)


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
