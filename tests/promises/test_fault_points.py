"""The seams of the promises, at the moments that no call to a store shows: the code is stopped at
each fault point."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pulse_rl
from pulse_rl import MemoryStore, Publisher, Relay, verify_stream
from pulse_rl.errors import ChainGap, DigestMismatch, PublisherConflict, StoreUnavailable
from tests.support.interrupts import POINTS, armed
from tests.support.publishers import FoldingPublisher

from .oracle import STREAM, Trainer, Worker, held, objects, publish, root_of


class Interrupt(BaseException):
    """What a signal handler raises."""


FAILURES = [StoreUnavailable("away"), MemoryError("no memory"), Interrupt("stop")]


def once(error: BaseException) -> tuple[Callable[[], None], list[int]]:
    """Raises ``error`` the first time; how often it was called."""
    calls = [0]

    def act() -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise error

    return act, calls


def stream(**settings: Any) -> tuple[MemoryStore, Trainer, Publisher]:
    """Two versions of a stream, and its publisher."""
    store, trainer = MemoryStore(), Trainer(elements=600)
    publisher = FoldingPublisher(store, stream=STREAM, threads=1, **settings)
    publish(publisher, trainer, 2)
    return store, trainer, publisher


def test_every_point_is_in_the_code_and_armed_by_a_test() -> None:
    code = "".join(file.read_text() for file in Path(pulse_rl.__file__).parent.rglob("*.py"))
    assert set(re.findall(r'\bhit\("([a-z.]+)"\)', code)) == POINTS
    tests = "".join(file.read_text() for file in Path(__file__).parents[1].rglob("*.py"))
    assert all(f'"{point}"' in tests for point in POINTS)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "point",
    [
        "payload.before",
        "payload.after",
        "commit.before",
        "commit.after",
        "baseline.before",
        "baseline.written",
    ],
)
def test_a_publish_that_stops_anywhere_is_made_up_for_by_the_next(
    point: str, error: BaseException
) -> None:
    store, trainer, publisher = stream()
    worker = Worker(store)
    worker.sync()
    root = worker.root
    act, calls = once(error)
    with armed(point, act), pytest.raises(type(error)):
        publisher.publish(trainer.step())
    assert calls[0] == 1
    update = worker.sync()
    assert (worker.root == root) == (update is None)
    assert update is None or worker.root == trainer.root, (
        "committed, and told as if it was not: never half"
    )
    for _ in range(2):
        publish(publisher, trainer)
        worker.reach(trainer)
    assert all(not report.problems for report in verify_stream(store, STREAM, threads=1))


def test_at_the_commit_all_that_a_version_needs_is_there_and_no_sooner_is_it_shown() -> None:
    """A newcomer looks at the very moments before and after it, with an anchor and without, and
    with a fold due."""
    store, trainer, publisher = stream(folds=(2,))
    seen: list[tuple[int | None, str]] = []

    def look() -> None:
        newcomer = Worker(store)
        newcomer.sync()
        seen.append((newcomer.subscriber.version, newcomer.root))

    before = trainer.root
    for version, anchor in ((2, False), (3, True)):
        seen.clear()
        with armed("commit.before", look):
            state = trainer.step()
            now = trainer.root
            with armed("commit.after", look):
                publisher.publish(state, anchor=anchor)
        assert seen == [(version - 1, before), (version, now)]
        before = now
    publisher.close()


def test_a_baseline_moves_after_the_commit_only() -> None:
    store, trainer, publisher = stream()
    versions: list[int | None] = []

    def look() -> None:
        newcomer = Worker(store)
        newcomer.sync()
        versions.append(newcomer.subscriber.version)

    with armed("baseline.before", look):
        publish(publisher, trainer)
    assert versions == [2]


def test_of_two_that_claim_a_stream_at_once_one_goes_on() -> None:
    store, first, second = MemoryStore(), Trainer(1), Trainer(2)
    one = Publisher(store, stream=STREAM, threads=1)
    other = Publisher(store, stream=STREAM, threads=1)
    raced = []

    def race() -> None:
        if not raced:
            raced.append(other)
            publish(other, second)

    with armed("claim.before", race):
        publish(one, first)
    with pytest.raises(PublisherConflict):
        other.publish(second.step())
    publish(one, first)
    worker = Worker(store)
    worker.sync()
    assert worker.root == first.root
    assert all(not report.problems for report in verify_stream(store, STREAM, threads=1))


def test_one_that_was_superseded_commits_nothing_before_its_successor_does() -> None:
    """The claim alone stops it: the successor has built on the head that it found."""
    store, trainer, older = stream()
    newer, refused = Publisher(store, stream=STREAM, threads=1), []

    def late() -> None:
        if not refused:
            refused.append(True)
            with pytest.raises(PublisherConflict):
                older.publish(trainer.state)

    successor = Trainer(2, elements=600)
    with armed("commit.before", late):
        publish(newer, successor)
    assert refused
    worker = Worker(store)
    worker.sync()
    assert (worker.subscriber.version, worker.root) == (2, successor.root)


def test_a_fold_that_is_not_listed_leads_nowhere() -> None:
    store, trainer, publisher = stream(folds=(2,))
    publisher.wait()
    links = {name for name in objects(store) if "/links/" in name}
    with armed("fold.before", once(StoreUnavailable("away"))[0]):
        publish(publisher, trainer, 2)
        publisher.wait()
    assert {name for name in objects(store) if "/links/" in name} <= links | {
        name for name in objects(store) if "anchor" in name
    }
    publish(publisher, trainer, 4)
    publisher.wait()
    worker = Worker(store)
    worker.reach(trainer)
    publisher.close()


@pytest.fixture
def behind() -> Iterator[tuple[MemoryStore, Trainer, Publisher, Worker, str]]:
    """A worker at a version, and a newer one in the store."""
    store, trainer, publisher = stream()
    worker = Worker(store)
    worker.sync()
    root = worker.root
    publish(publisher, trainer)
    yield store, trainer, publisher, worker, root
    publisher.close()


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("point", ["apply.written", "apply.after"])
def test_an_apply_that_stops_shows_no_half_state_and_loses_no_change(
    point: str, error: BaseException, behind: Any
) -> None:
    _, trainer, publisher, worker, root = behind
    with armed(point, once(error)[0]), pytest.raises(type(error)):
        worker.subscriber.sync()
    assert worker.root == root, "the model was given nothing"
    if worker.subscriber.status == "ready":
        assert root_of(held(worker.subscriber)) == worker.subscriber.root
    worker.sync()
    assert worker.root == trainer.root, "what was new is delivered after all"
    publish(publisher, trainer)
    worker.reach(trainer)


def test_a_patch_that_leads_elsewhere_is_undone_to_the_last_bit(behind: Any) -> None:
    """There is no other way to the version: what only the anchors hold is gone."""
    store, _, _, worker, root = behind
    for name in objects(store):
        if name.endswith(".safetensors"):
            store.delete(name)
    with (
        armed("apply.written", once(DigestMismatch("not the root that was promised"))[0]),
        pytest.raises(ChainGap),
    ):
        worker.subscriber.sync()
    assert worker.subscriber.status == "ready"
    assert root_of(held(worker.subscriber)) == worker.subscriber.root == root
    worker.sync()
    assert worker.subscriber.version == 2


def test_an_apply_whose_undo_stops_is_known_to_be_half_way(behind: Any) -> None:
    _, trainer, publisher, worker, root = behind
    with (
        armed("apply.written", once(MemoryError())[0]),
        armed("apply.undo", once(Interrupt())[0]),
        pytest.raises(Interrupt),
    ):
        worker.subscriber.sync()
    assert worker.subscriber.status == "poisoned"
    with pytest.raises(pulse_rl.PulseError):
        _ = worker.subscriber.state
    worker.sync()
    assert worker.root == trainer.root != root
    publish(publisher, trainer)
    worker.reach(trainer)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_relay_that_stops_before_it_shows_a_version_shows_it_later(error: BaseException) -> None:
    store, trainer, publisher = stream()
    near = MemoryStore()
    relay = Relay(store, near, stream=STREAM, threads=1)
    relay.sync()
    root = trainer.root
    publish(publisher, trainer, 2)
    with armed("relay.before", once(error)[0]), pytest.raises(type(error)):
        relay.sync()
    worker = Worker(near)
    worker.sync()
    assert (worker.subscriber.version, worker.root) == (1, root)
    Relay(store, near, stream=STREAM, threads=1).sync()
    worker.sync()
    assert (worker.subscriber.version, worker.root) == (3, trainer.root)
