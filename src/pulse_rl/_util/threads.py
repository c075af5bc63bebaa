"""Work on all cores, and operations that survive interrupts.

numpy, hashlib, zstd and the native kernels release the GIL for large buffers. Signal handlers run
in the main thread and may raise there between any two bytecodes. CPython's own pools do not survive
that: an interrupt inside ``submit`` orphans a thread or leaves a lock taken, and ``Thread.join``
gives up after one. So nothing here waits for a thread to end. The thread that runs or cancels a
call claims it, and marks its end.
"""

from __future__ import annotations

import os
import sys
import threading
from _thread import allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakMethod

from .settings import checked_count

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
#: The interval at which a wait checks for the end by itself, in case an interrupt took the signal.
LOOK_SECONDS = 0.05

#: ``operation``: the operation that runs in this thread and may be asked to stop
#: (`serial.Operation`); else None, or absent.
running = threading.local()


class Stopped(BaseException):
    """Raised at a `checkpoint` of an operation whose caller was interrupted. It is not an error:
    nobody waits for it."""


def checkpoint() -> None:
    """A point at which the running operation stops if it was asked to."""
    operation = getattr(running, "operation", None)
    if operation is not None and operation.stopping:
        raise Stopped


def default_threads() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def checked_threads(threads: int | None) -> int | None:
    """Return ``threads``; raise InputError unless it is None or a whole number of at least 1."""
    return None if threads is None else checked_count("threads", threads)


class Call(Generic[R]):
    """One call of ``work``, run by at most one thread, for whose end all other threads can wait."""

    __slots__ = ("_claim", "_done", "_error", "_result", "_work", "ended")

    def __init__(self, work: Callable[[], R]) -> None:
        self.ended = False
        self._work: Callable[[], R] | None = work
        self._claim = allocate_lock()
        self._done = allocate_lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call, unless it was cancelled or another thread runs it. Raises nothing."""
        if not self._claim.acquire(blocking=False):
            return
        assert self._work is not None
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._work = None
        self.ended = True
        self._done.release()

    def wait(self, seconds: float = -1) -> None:
        """Wait for the end of the call, or for ``seconds`` (-1: no limit). An interrupt is
        raised."""
        if not self.ended and self._done.acquire(timeout=seconds):
            self._done.release()

    def cancel(self) -> bool:
        """Cancel the call if it has not begun; return whether it was cancelled."""
        if not self._claim.acquire(blocking=False):
            return False
        self._work = None
        self.ended = True
        return True

    def settle(self) -> BaseException | None:
        """Wait until the call does not run and never will; return the last interrupt, if any.

        It continues through any number of interrupts, and cancels a call that has not begun.
        """
        interrupt: BaseException | None = None
        while not self.ended:
            try:
                if not self.cancel():
                    self.wait(LOOK_SECONDS)
            except BaseException as error:
                interrupt = error
        return interrupt

    def result(self) -> R:
        """Return what the call returned, or raise what it raised; once, after its end."""
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            # Without this the traceback would refer to itself, and keep what the call held until a
            # collection.
            del error


def ordered_map(
    function: Callable[[T], R], items: Iterable[T], threads: int | None = None
) -> Generator[R, None, None]:
    """Apply ``function`` to ``items`` in threads; yield the results in order.

    At most one item more than threads is in flight, which bounds the peak memory for any number of
    items. A single item needs no thread. An exception of an item is raised at its place. A
    `checkpoint` in ``function`` stops for the operation of the caller's thread. When the generator
    ends, in whatever way, no call runs any more and none begins. So a caller that undoes the work
    never races with a call.
    """
    threads = threads or default_threads()
    # While the interpreter is being finalized, for example in a destructor, a new thread would
    # never run.
    if threads == 1 or sys.is_finalizing() or (isinstance(items, Sequence) and len(items) < 2):
        for item in items:
            checkpoint()
            yield function(item)
        return
    # 1. Queue the items; a thread starts with each of the first ones. `pending` has the calls in
    # order.
    calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
    pending: deque[Call[R]] = deque()
    started = 0
    try:
        for item in items:
            checkpoint()
            call = Call(partial(function, item))
            pending.append(call)
            calls.put(call)
            if started < threads:
                try:
                    start_new_thread(_work_off, (calls, getattr(running, "operation", None)))
                    started += 1
                except RuntimeError:  # too many threads, or the program ends
                    threads = started
            if not started:
                call.run()
            if len(pending) > threads:
                yield _next(pending)
        # 2. The rest of the results.
        while pending:
            checkpoint()
            yield _next(pending)
    finally:
        # 3. However this ends, settle all calls and let the threads go, through any number of
        # interrupts.
        interrupt: BaseException | None = None
        while pending or started:
            try:
                for call in pending:
                    interrupt = call.settle() or interrupt
                pending.clear()
                while started:
                    calls.put(None)
                    started -= 1
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _next(pending: deque[Call[R]]) -> R:
    pending[0].wait()
    return pending.popleft().result()


def _work_off(calls: SimpleQueue[Call[Any] | None], operation: Any) -> None:
    running.operation = operation
    while (call := calls.get()) is not None:
        call.run()
        del call  # or its work stays alive until the next one comes


def weak_callback(method: Callable[P, None]) -> Callable[P, None]:
    """Call the bound ``method`` while its object lives; then do nothing."""
    held = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        alive = held()
        if alive is not None:
            alive(*args, **kwargs)

    return call


# -- fault points: places at which a test stops, fails or delays the library, where no call to a
# store shows the moment. ``hit("commit.after")`` does nothing unless a test has armed the point.
# Then it calls the test's function, which may raise or inspect. A point cannot skip a check: tests
# prove checks by data that these must refuse. Points stand outside of loops over elements and
# blocks.
POINTS = frozenset(
    {
        "payload.before",  # a payload is about to be stored
        "payload.after",
        "claim.before",  # a publisher is about to create its claim to the stream
        "commit.before",  # all that a version needs is stored, its manifest is not
        "commit.after",  # the version exists, its publisher's baseline is still the one before
        "baseline.before",  # a publisher's baseline is about to be written to
        "baseline.written",  # it has the new bits, and not yet their version
        "fold.before",  # a fold's payloads are stored, and not listed
        "apply.written",  # a worker's state has all new bits, and its root is not known yet
        "apply.undo",  # an apply has failed, and nothing is undone yet
        # the state is verified as the next version, and its folder does not say so yet
        "apply.moved",
        "apply.after",  # the state is verified, and its owner has not been given the update
        "relay.before",  # what leads to a version is copied, its manifest is not
    }
)
_armed: dict[str, Callable[[], None]] = {}


def hit(point: str) -> None:
    """Call the armed function of ``point``, if any."""
    if _armed and point in _armed:
        _armed[point]()


@contextmanager
def armed(point: str, act: Callable[[], None]) -> Iterator[None]:
    """Within this block, call ``act`` whenever a thread reaches ``point``."""
    if point not in POINTS:
        raise ValueError(f"{point!r} is no fault point")
    _armed[point] = act
    try:
        yield
    finally:
        del _armed[point]
