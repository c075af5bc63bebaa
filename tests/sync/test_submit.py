"""Publishing behind the training: the state is taken at once, the rest happens as `publish` does
it."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from pulse_rl import Bits, MemoryStore, Published, Publisher, Subscriber, state_root, verify_stream
from pulse_rl.errors import ConcurrentUse, InputError, PublisherConflict, StoreUnavailable
from tests.support.publishers import FoldingPublisher
from tests.support.states import Rng, Tensors, history, mutated, policy, present, roots
from tests.support.stores import FaultyStore, GatedStore


@pytest.fixture
def slow() -> Iterator[GatedStore]:
    store = GatedStore()
    yield store
    store.gate.set()


def overwrite(tensors: Tensors) -> None:
    """What an optimizer does after the step."""
    for bits in tensors.values():
        bits.array.reshape(-1)[:] ^= 1


def test_the_state_may_change_as_soon_as_it_is_taken(slow: GatedStore, rng: Rng) -> None:
    states = history(rng, 4)
    expected = roots(states)
    with Publisher(slow, stream="policy") as publisher:
        slow.gate.clear()
        first = publisher.submit(states[0], metadata={"step": 0})
        overwrite(states[0])
        second = publisher.submit(states[1])
        overwrite(states[1])
        assert not first.done()
        slow.gate.set()
        assert [first.result(20).version, second.result(20).version] == [0, 1]
        for state in states[2:]:
            publisher.submit(state)
            overwrite(state)
        head = present(publisher.head())
        assert head.version == 3, "head waits for its turn"
    assert [report.root for report in verify_stream(slow, "policy")] == expected
    assert all(report.ok for report in verify_stream(slow, "policy"))


def test_a_callback_that_would_wait_for_itself_is_refused(rng: Rng) -> None:
    publisher, ended = Publisher(MemoryStore(), stream="s", threads=1), threading.Event()

    def again(_: object) -> None:
        with pytest.raises(ConcurrentUse, match="itself"):
            list(map(publisher.submit, history(rng, 3)))
        ended.set()

    publisher.submit(policy(rng)).add_done_callback(again)
    assert ended.wait(20)


def test_it_is_the_same_stream_as_that_of_publish(rng: Rng) -> None:
    """Patches, anchors and bytes, with memory that is used again and tensors that come and go."""
    states = history(rng, 9, density=0.05)
    states[6:] = [
        state | {"extra": Bits(np.arange(7, dtype=np.uint16), "BF16")} for state in states[6:]
    ]
    seen: list[list[tuple[Any, ...]]] = []
    for how in ("publish", "submit"):
        with FoldingPublisher(
            MemoryStore(), stream="policy", anchor_ratio=0.3, folds=(4,)
        ) as publisher:
            done: list[Published] = [
                publisher.publish(state) if how == "publish" else publisher.submit(state).result(20)
                for state in states
            ]
        seen.append([(d.version, d.root, d.changed, d.patch_bytes, d.anchor_bytes) for d in done])
        assert all(d.blocked_seconds == d.seconds for d in done) is (how == "publish")
        assert all(d.blocked_seconds > 0 for d in done)
    assert seen[0] == seen[1]


def test_there_is_room_for_one_more_and_the_next_waits(slow: GatedStore, rng: Rng) -> None:
    states = history(rng, 3)
    publisher = Publisher(slow, stream="policy")
    slow.gate.clear()
    publisher.submit(states[0])
    publisher.submit(states[1])
    threading.Timer(0.2, slow.gate.set).start()
    third = publisher.submit(states[2])
    assert slow.gate.is_set(), "it had to wait"
    assert third.result(20).version == 2
    assert third.result().blocked_seconds > 0.05
    publisher.close()


def test_the_one_that_waits_can_be_replaced(slow: GatedStore, rng: Rng) -> None:
    states = history(rng, 4)
    with Publisher(slow, stream="policy") as publisher:
        slow.gate.clear()
        publisher.submit(states[0])
        assert slow.waiting.wait(20)
        replaced = [publisher.submit(state, replace=True) for state in states[1:3]]
        last = publisher.submit(states[3], replace=True)
        assert [submission.cancelled() for submission in replaced] == [True, True]
        slow.gate.set()
        assert last.result(20).version == 1
        with pytest.raises(CancelledError):
            replaced[0].result()
    assert [report.root for report in verify_stream(slow, "policy")] == roots(
        [states[0], states[3]]
    )


@pytest.mark.parametrize("how", ["replaced", "cancelled"])
def test_versions_that_are_given_up_hold_no_memory(how: str, slow: GatedStore, rng: Rng) -> None:
    """Whatever the number of steps that a slow store misses: a state in flight, and one that
    waits."""
    state = {"w": Bits(rng.integers(0, 1 << 16, 1 << 20, dtype=np.uint16), "BF16")}
    nbytes = 2 << 20
    with Publisher(slow, stream="policy", threads=1) as publisher:
        slow.gate.clear()
        publisher.submit(state)
        assert slow.waiting.wait(20)
        publisher.submit(state).cancel()
        tracemalloc.start()
        given_up = []
        for _ in range(8):
            state["w"].array[:100] ^= 1
            given_up.append(publisher.submit(state, replace=how == "replaced"))
            if how == "cancelled":
                assert given_up[-1].cancel()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < nbytes, "the one that waits is copied into the memory of the one before"
        last = publisher.submit(state, replace=True)
        assert futures.wait(given_up, timeout=20).not_done == set()
        slow.gate.set()
        assert last.result(20).root == state_root(state)


@pytest.mark.parametrize("call", ["submit", "publish", "wait", "close"])
def test_an_error_nobody_asked_for_surfaces_at_the_next_call(call: str, rng: Rng) -> None:
    states = history(rng, 3)
    store = FaultyStore(MemoryStore())
    publisher = Publisher(store, stream="policy")
    publisher.publish(states[0])
    store.fail_on("put", "payloads")
    failed = publisher.submit(states[1])
    while not failed.done():
        pass
    calls = {
        "submit": lambda: publisher.submit(states[2]),
        "publish": lambda: publisher.publish(states[2]),
        "wait": publisher.wait,
        "close": publisher.close,
    }
    with pytest.raises(StoreUnavailable):
        calls[call]()
    calls[call]()  # said once
    assert publisher.publish(states[2]).root == state_root(states[2])
    publisher.close()


def test_of_two_errors_none_is_lost(slow: GatedStore, rng: Rng) -> None:
    publisher = Publisher(slow, stream="policy")
    publisher.publish(policy(rng))
    slow.gate.clear()
    failed = [publisher.submit(policy(rng)) for _ in range(2)]
    slow.away = True
    slow.gate.set()
    for submission in failed:
        while not submission.done():
            pass
    for _ in failed:
        with pytest.raises(StoreUnavailable):
            publisher.wait()
    publisher.close()


def test_an_error_that_was_asked_for_is_not_raised_again(rng: Rng, faulty: FaultyStore) -> None:
    states = history(rng, 3)
    publisher = Publisher(faulty, stream="policy")
    publisher.publish(states[0])
    faulty.fail_on("put_new", "versions", after=True)
    with pytest.raises(StoreUnavailable):
        publisher.submit(states[1]).result(20)
    assert publisher.submit(states[2]).result(20).version == 2, (
        "the version whose reply was lost is version 1"
    )
    publisher.close()
    assert [report.root for report in verify_stream(faulty, "policy")] == roots(states)


def test_a_publisher_that_was_superseded_says_so(rng: Rng, store: MemoryStore) -> None:
    states = history(rng, 4)
    publisher = Publisher(store, stream="policy")
    publisher.publish(states[0])
    Publisher(store, stream="policy").publish(states[1])
    with pytest.raises(PublisherConflict):
        publisher.submit(states[2]).result(20)
    publisher.submit(states[3]).exception(20)
    publisher.close()


@pytest.mark.parametrize("own", [None, ZeroDivisionError])
def test_an_error_in_a_with_block_is_not_hidden(own: type[Exception] | None, rng: Rng) -> None:
    store = FaultyStore(MemoryStore())
    store.fail_on("put", "payloads")

    def train() -> None:
        with Publisher(store, stream="policy") as publisher:
            publisher.submit(policy(rng))
            if own:
                raise own

    with pytest.raises(own or StoreUnavailable):
        train()


def test_casts_metadata_and_wrong_arguments(rng: Rng, store: MemoryStore) -> None:
    wide = {"w": rng.standard_normal(5000).astype(np.float32)}
    with Publisher(store, stream="policy") as publisher:
        publisher.submit(wide, dtype="BF16", metadata={"step": 3}, anchor=True)
        wide["w"][:] = 0
        with pytest.raises(InputError):
            publisher.submit(wide, metadata={"loss": float("nan")})
        with pytest.raises(InputError):
            publisher.submit(5)  # type: ignore[arg-type]
    worker = Subscriber(store, stream="policy")
    update = present(worker.sync())
    assert update.metadata == {"step": 3}
    assert worker.state.spec("w").dtype.name == "BF16"
    assert np.any(worker.state.read("w"))


def test_two_threads_are_refused(slow: GatedStore, rng: Rng) -> None:
    states = history(rng, 3)
    publisher = Publisher(slow, stream="policy")
    slow.gate.clear()
    publisher.submit(states[0])
    caught: list[BaseException] = []

    def intrude() -> None:
        try:
            publisher.submit(states[2])
        except ConcurrentUse as error:
            caught.append(error)

    head = threading.Thread(target=publisher.head)
    head.start()
    while not publisher._serial._callers:
        pass
    intruder = threading.Thread(target=intrude)
    intruder.start()
    intruder.join(20)
    slow.gate.set()
    head.join(20)
    assert len(caught) == 1
    publisher.close()


@pytest.mark.slow
def test_many_at_random(rng: Rng, store: MemoryStore) -> None:
    """Publishes, submits and replacements in any order: every version that was not cancelled is
    there, in order."""
    state = policy(rng)
    kept: list[tuple[Any, str]] = []
    with Publisher(store, stream="policy", anchor_ratio=0.2) as publisher:
        for _ in range(60):
            state = mutated(rng, state)
            how = rng.integers(4)
            if how == 0:
                publisher.publish(state)
                kept.append((None, state_root(state)))
            else:
                kept.append((publisher.submit(state, replace=how == 1), state_root(state)))
                overwrite(state)
    expected = [
        root for submission, root in kept if submission is None or not submission.cancelled()
    ]
    assert [report.root for report in verify_stream(store, "policy")] == expected
