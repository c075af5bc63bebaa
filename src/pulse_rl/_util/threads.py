"""Work on all cores: numpy, hashlib, zstd and the native kernels release the GIL for large buffers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ..errors import InputError

T = TypeVar("T")
R = TypeVar("R")


def default_threads() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function: Callable[[T], R], items: Iterable[T], threads: int | None = None) -> Generator[R, None, None]:
    """``function`` over ``items`` in threads; results in order, at most one item more than threads in flight.

    The bound keeps peak memory at "blocks in flight" however long ``items`` is. An exception of any item is raised at
    its place. When this ends, in whatever way, no call is running any more: a caller that undoes what they did never
    races with one. Raises InputError for less than one worker.
    """
    threads = default_threads() if threads is None else threads
    if threads < 1:
        raise InputError(f"{threads} threads cannot work", hint="Give at least 1, or None for all cores.")
    if threads == 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="pulse")
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        _join(pool)


def to_the_end(work: Callable[[], R]) -> R:
    """``work()``, in a thread that an interrupt does not reach; one that comes meanwhile is raised at the end."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="pulse")
    future = pool.submit(work)
    _join(pool)
    return future.result()


def _join(pool: ThreadPoolExecutor) -> None:
    """Waits for the pool's threads, through any number of interrupts; the last one is raised afterwards."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            pool.shutdown(wait=True)
        except KeyboardInterrupt as error:
            interrupt = error
        else:
            break
    if interrupt is not None:
        raise interrupt
