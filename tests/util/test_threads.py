"""Work in threads: results in order, bounded work in flight, and no call left running behind the caller's back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from pulse_rl._util.threads import default_threads, ordered_map

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


@threads
def test_nothing_runs_after_it_was_closed(threads: int | None) -> None:
    """Undo relies on it: a thread that writes after the undo would leave the state half-way."""
    running, lock = [0], threading.Lock()

    def work(k: int) -> int:
        with lock:
            running[0] += 1
        time.sleep(0.005)
        with lock:
            running[0] -= 1
        return k

    with closing(ordered_map(work, range(100), threads)) as results:
        next(results)
    assert running == [0]


def test_one_worker_is_the_callers_thread() -> None:
    assert set(ordered_map(lambda k: threading.current_thread(), range(3), 1)) == {threading.current_thread()}


def test_a_single_item_needs_no_thread() -> None:
    assert list(ordered_map(lambda _: threading.get_ident(), [0])) == [threading.get_ident()]
    assert threading.get_ident() not in list(ordered_map(lambda _: threading.get_ident(), [0, 1], 2))
