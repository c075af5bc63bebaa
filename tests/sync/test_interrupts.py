"""Interrupts at any moment, and callers that retry at once: no wrong bit, no lost update, no
hang."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulse_rl import MemoryStore, Publisher, Store, Subscriber, Update, state_root
from pulse_rl.errors import ConcurrentUse, InputError
from tests.support.interrupts import STEP, Boom, Steps
from tests.support.states import Live, Rng, bits, mutated, policy, present


def follow(subscriber: Subscriber, live: Live) -> Update | None:
    """What a worker does in its loop."""
    update = subscriber.sync()
    if update is not None:
        live.apply(update)
    return update


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "stride"),
    [("publish", 7 if STEP == "opcode" else 1), ("sync", 5 if STEP == "opcode" else 1)],
)
def test_an_interrupt_at_each_step_of_the_calling_thread(call: str, stride: int, rng: Rng) -> None:
    """Raised where no signal could be, too."""
    state, store, live = policy(rng, 2000), MemoryStore(), Live()
    publisher, subscriber = Publisher(store, stream="policy"), Subscriber(store, stream="policy")
    publisher.publish(state)
    follow(subscriber, live)
    reached = 0
    for number in range(1, 100_000, stride):
        state = mutated(rng, state, 0.05)
        if call == "sync":
            publisher.publish(state)
        act: Callable[[], object] = (
            (lambda: follow(subscriber, live))
            if call == "sync"
            else (lambda: publisher.publish(state))  # noqa: B023
        )
        try:
            Steps(number).run(act)
        except Boom:
            reached = number
        publisher.publish(state)
        while follow(subscriber, live) is not None:
            pass
        assert live.root == subscriber.root == state_root(subscriber.state) == state_root(state), (
            number
        )
        if reached < number:
            break
    assert reached > (100 if STEP == "opcode" else 15)


def test_nothing_is_taken_for_acknowledged_that_was_not(rng: Rng) -> None:
    """Not by a call, nor by reading `Update.tensors`: the next update has all since the last
    acknowledgment."""
    state, store = policy(rng), MemoryStore()
    publisher, subscriber = Publisher(store, stream="policy"), Subscriber(store, stream="policy")
    for version in range(4):
        publisher.publish(state)
        for _ in range(2):
            update = present(subscriber.sync())
            assert (update.version, update.full, len(update.tensors)) == (version, True, len(state))
        state = mutated(rng, state, 0.1)
    update.acknowledge()
    assert subscriber.sync() is None
    publisher.publish(state)
    assert [u.previous for u in (subscriber.sync(), subscriber.sync()) if u] == [3, 3]


def test_memory_for_what_is_not_acknowledged_is_bounded(rng: Rng) -> None:
    state, store, live = {"w": bits(rng, "BF16", 1000)}, MemoryStore(), Live()
    publisher, subscriber = Publisher(store, stream="policy"), Subscriber(store, stream="policy")
    publisher.publish(state)
    follow(subscriber, live)
    for _ in range(30):
        state = mutated(rng, state, 0.1)
        publisher.publish(state)
        subscriber.sync()
    update = present(follow(subscriber, live))
    assert update.full, "by now most of it has changed"
    assert live.root == state_root(state)


class Slow(MemoryStore):
    """Waits in `get` until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.go = threading.Event(), threading.Event()
        self.go.set()

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self.waiting.set()
        assert self.go.wait(120)
        return super().get(name, start, stop)


def test_two_threads_in_one_object_are_refused(rng: Rng) -> None:
    store = Slow()
    Publisher(store, stream="policy").publish(policy(rng))
    subscriber = Subscriber(store, stream="policy")
    store.go.clear()
    store.waiting.clear()
    results: list[object] = []
    other = threading.Thread(target=lambda: results.append(subscriber.sync()))
    other.start()
    assert store.waiting.wait(60)
    with pytest.raises(ConcurrentUse, match="two threads use one Subscriber"):
        subscriber.sync()
    assert (subscriber.version, subscriber.status) == (None, "empty")
    store.go.set()
    other.join()
    assert subscriber.version == 0
    assert len(results) == 1


def both_sides(store: Store) -> list[Any]:
    return [Publisher(store, stream="policy"), Subscriber(store, stream="policy")]


def test_copies_are_refused() -> None:
    for side in both_sides(MemoryStore()):
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InputError, match="copied or pickled"):
                duplicate(side)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_twin_is_refused(rng: Rng) -> None:
    """Both would commit under one epoch, and neither would be told of the other."""
    state = policy(rng)
    publisher, subscriber = both_sides(MemoryStore())
    publisher.publish(state)
    subscriber.sync()
    for act in (lambda: publisher.publish(state), subscriber.sync):
        child = os.fork()
        if child == 0:
            try:
                act()
            except InputError as error:
                os._exit(7 if "another process" in str(error) else 2)
            except BaseException:
                os._exit(3)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    publisher.publish(state)


def test_a_listener_may_ask_the_object_that_called_it(rng: Rng) -> None:
    store, seen = MemoryStore(), list[int]()

    def listener(_: object) -> None:
        head = publisher.head()
        seen.append(head.version if head else -1)

    publisher = Publisher(store, stream="policy", on_event=listener, threads=1)
    publisher.publish(policy(rng))
    assert seen[-1] == 0


def test_an_interrupt_does_not_wait_for_the_network_twice(rng: Rng) -> None:
    """The first interrupt waits until the work rests; a second one leaves it to rest by itself."""
    store = Slow()
    state = policy(rng)
    Publisher(store, stream="policy").publish(state)
    subscriber = Subscriber(store, stream="policy")
    store.go.clear()
    times = [2]

    def handler(*_: Any) -> None:
        times[0] -= 1
        if not times[0]:
            signal.setitimer(signal.ITIMER_REAL, 0)
        raise Boom

    before = signal.signal(signal.SIGALRM, handler)
    started = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        with pytest.raises(Boom):
            subscriber.sync()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 60
    threading.Timer(0.1, store.go.set).start()
    assert subscriber.sync() is not None
    assert subscriber.root == state_root(state)
    assert np.array_equal(
        subscriber.state.read("embed.weight"), np.asarray(state["embed.weight"].array).reshape(-1)
    )
