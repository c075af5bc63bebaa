"""Work in threads: results in order, bounded work in flight, no call left running behind the
caller's back; operations that an interrupt leaves at rest."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from pulse_rl._util.serial import Operation, SerialThread, shield
from pulse_rl._util.threads import Call, Stopped, checkpoint, default_threads, ordered_map

threads = pytest.mark.parametrize("threads", [None, 1, 2, 5])


@threads
def test_results_come_in_order(threads: int | None) -> None:
    def slow_first(k: int) -> int:
        time.sleep(0.01 if k == 0 else 0)
        return k * k

    assert list(ordered_map(slow_first, range(50), threads)) == [k * k for k in range(50)]
    assert list(ordered_map(slow_first, [], threads)) == []


@threads
def test_few_items_are_taken_ahead(threads: int | None) -> None:
    """Peak memory is what is in flight, however long the list of blocks is."""
    taken: list[int] = []

    def items() -> Iterator[int]:
        for k in range(1000):
            taken.append(k)
            yield k

    results = ordered_map(lambda k: k, items(), threads)
    for done in range(20):
        assert next(results) == done
        assert len(taken) <= done + 2 * (threads or default_threads()) + 1
    results.close()
    assert len(taken) < 50


@threads
def test_an_exception_is_raised_at_its_place(threads: int | None) -> None:
    def refuse(k: int) -> int:
        if k >= 3:
            raise ValueError(f"item {k}")
        return k

    seen = []
    with pytest.raises(ValueError, match="item 3"):  # noqa: PT012
        for result in ordered_map(refuse, range(10), threads):
            seen.append(result)
    assert seen == [0, 1, 2]


def counted() -> tuple[list[int], Callable[[int], int]]:
    """How many calls of the function are running, and the function."""
    running, lock = [0], threading.Lock()

    def work(k: int) -> int:
        with lock:
            running[0] += 1
        time.sleep(0.004)
        with lock:
            running[0] -= 1
        return k

    return running, work


@threads
def test_nothing_runs_after_it_was_closed(threads: int | None) -> None:
    """Undo relies on it: a thread that writes after the undo would leave the state half-way."""
    running, work = counted()
    with closing(ordered_map(work, range(100), threads)) as results:
        next(results)
    assert running == [0]


def test_one_worker_is_the_callers_thread() -> None:
    assert set(ordered_map(lambda k: threading.current_thread(), range(3), 1)) == {
        threading.current_thread()
    }


def test_a_single_item_needs_no_thread() -> None:
    assert list(ordered_map(lambda _: threading.get_ident(), [0])) == [threading.get_ident()]
    assert threading.get_ident() not in list(
        ordered_map(lambda _: threading.get_ident(), [0, 1], 2)
    )


# -- operations


class Boom(BaseException):
    """What a signal handler raises."""


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Gives what raises Boom in the main thread when work in another one calls it."""

    def handler(*_: Any) -> None:
        raise Boom

    before, main = signal.signal(signal.SIGALRM, handler), threading.get_ident()
    try:
        yield lambda: signal.pthread_kill(main, signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)


def steps(
    done: list[int], interrupt: Callable[[], None], count: int = 1000, at: Container[int] = (10,)
) -> Callable[[], None]:
    """Work of so many steps, which is interrupted in some."""

    def work() -> None:
        for k in range(count):
            checkpoint()
            if k in at:
                interrupt()
            time.sleep(0.002)
            done.append(k)

    return work


def test_results_and_errors_come_back() -> None:
    serial = SerialThread("Thing")
    assert serial.run(lambda: 7) == 7
    with pytest.raises(ValueError, match="no"):
        serial.run(lambda: int("no"))
    assert (
        serial.run(threading.get_ident) == serial.run(threading.get_ident) != threading.get_ident()
    )


def test_an_interrupted_call_leaves_the_operation_at_rest() -> None:
    serial, done = SerialThread("Thing"), list[int]()
    with pytest.raises(Boom), interruptible() as interrupt:
        serial.run(steps(done, interrupt))
    rested = len(done)
    assert 0 < rested < 1000
    time.sleep(0.02)
    assert len(done) == rested


def test_what_cannot_stop_is_waited_for() -> None:
    serial, done = SerialThread("Thing"), list[int]()
    with pytest.raises(Boom), interruptible() as interrupt:
        serial.run(steps(done, interrupt, 60, at=(10, 20, 30)), whole=True)
    assert len(done) == 60

    def inner() -> None:
        with shield():
            steps(done, interrupt, 60)()

    with pytest.raises(Boom), interruptible() as interrupt:
        serial.run(inner)
    assert len(done) == 120


def test_a_second_interrupt_at_once_does_not_lose_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two signals in the same moment: the second is raised where `stop` begins, before it has done
    anything."""
    serial = SerialThread("Thing")
    done: list[int] = []

    def interrupted(*_: Any) -> None:
        raise Boom

    monkeypatch.setattr(Operation, "stop", interrupted)
    with pytest.raises(Boom), interruptible() as interrupt:
        serial.run(steps(done, interrupt))
    assert serial.run(lambda: len(done)) < 900


def test_the_thread_ends_with_its_object() -> None:
    serial = SerialThread("Thing")
    serial.run(lambda: None)
    serving = serial._serving
    assert serving.locked()
    del serial
    assert serving.acquire(timeout=60), "the thread is still there"


def test_an_idle_thread_ends_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_rl._util.serial._IDLE_SECONDS", 0.0005)
    serial = SerialThread("Thing")
    for k in range(300):
        assert serial.run(lambda: k) == k  # noqa: B023
        time.sleep(0.0005)
    assert serial.run(lambda: 5) == 5
    for _ in range(1000):
        if not serial._serving.locked():
            break
        time.sleep(0.01)
    else:
        pytest.fail("an idle thread goes on")
    assert serial.run(lambda: 6) == 6


def test_a_call_is_run_once_or_cancelled() -> None:
    ran: list[int] = []
    call = Call(lambda: ran.append(1))
    assert call.cancel()
    call.run()
    assert not ran
    again = Call(lambda: ran.append(2))
    again.run()
    again.run()
    assert not again.cancel()
    assert ran == [2]


def test_a_stopped_map_leaves_nothing_running() -> None:
    """What undo relies on, in an operation that is asked to stop in the midst of it."""
    serial, (running, block) = SerialThread("Thing"), counted()

    def interrupting(k: int) -> int:
        if k == 10:
            interrupt()
        return block(k)

    def work() -> None:
        try:
            for _ in ordered_map(interrupting, range(10_000), 3):
                pass
        except Stopped:
            assert running == [0]
            raise

    with pytest.raises(Boom), interruptible() as interrupt:
        serial.run(work)
    assert running == [0]


def test_what_a_map_runs_in_threads_stops_with_the_operation() -> None:
    serial, stopped, both = SerialThread("Thing"), list[int](), threading.Barrier(2)

    def slow(k: int) -> None:
        both.wait(60)
        try:
            steps([], interrupt, 50_000, at=(10,) if k else ())()
        except Stopped:
            stopped.append(k)
            raise

    started = time.monotonic()
    with pytest.raises(Boom), interruptible() as interrupt:
        serial.run(lambda: list(ordered_map(slow, range(2), 2)))
    assert sorted(stopped) == [0, 1]
    assert time.monotonic() - started < 25
