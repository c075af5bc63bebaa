"""Work on all cores: numpy, hashlib, zstd and the native kernels release the GIL for large buffers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def default_workers() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int | None = None) -> Generator[R, None, None]:
    """``function`` over ``items`` in threads; results in order, at most one item more than workers in flight.

    The bound keeps peak memory at "blocks in flight" however long ``items`` is. An exception of any item is raised at
    its place, after the calls in flight have ended, so that the caller never races with a thread it started.
    """
    workers = workers or default_workers()
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="pulse") as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
