"""Operations of one object, one after another, on a thread that no interrupt reaches.

An interrupt in the middle of an operation would leave its work half-way, and any cleanup could be
interrupted too. So the caller only waits. When it is interrupted, it asks the operation to stop,
waits until it rests, and raises. A second interrupt raises at once; the operation then comes to
rest by itself, and the next call waits for that.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from _thread import allocate_lock, get_ident, start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Self, TypeVar

from ..errors import ConcurrentUse, InputError
from .threads import LOOK_SECONDS, Call, running

R = TypeVar("R")
# A thread ends after this time without an operation; the next operation starts another.
_IDLE_SECONDS = 10.0
# The time that an ending program waits for operations that it asked to stop. A longer wait would be
# for a store.
_LONGEST_REST_SECONDS = 10.0


class Operation(Call[R]):
    """A call that can be asked to stop at its next `checkpoint`."""

    __slots__ = ("__weakref__", "stopping")

    def __init__(self, work: Callable[[], R]) -> None:
        super().__init__(work)
        self.stopping = False

    def run(self) -> None:
        running.operation = self
        _active[self] = get_ident()
        try:
            super().run()
        finally:
            _active.pop(self, None)
            running.operation = None

    def stop(self) -> None:
        """Cancel the operation if it has not begun; else ask it to stop, and wait until it rests.

        An interrupt of the caller is raised at once; the operation still comes to rest.
        """
        self.stopping = True
        if not self.cancel():
            while not self.ended:
                self.wait(LOOK_SECONDS)


class NotCopyable:
    """An object that refuses copy and pickle, since two copies would work on the same things."""

    def __reduce__(self) -> NoReturn:
        raise InputError(
            f"a {type(self).__name__} cannot be copied or pickled",
            hint="Make a new one where it is needed.",
        )


class Closing(ABC):
    """An object that is closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()


class SerialThread(NotCopyable):
    """Runs the operations of ``owner`` (words for messages) on a thread of its own.

    The thread starts with the first operation. It ends with this object, or after ``idle_seconds``
    without an operation (None: ten). Operations of a worker thread (`mark_worker`) run in that
    thread.
    """

    def __init__(self, owner: str, idle_seconds: float | None = None) -> None:
        self._owner = owner
        self._idle_seconds = idle_seconds
        self._operations: SimpleQueue[Operation[Any] | None] = SimpleQueue()
        self._serving = allocate_lock()
        self._ident: list[int] = []
        self._process = os.getpid()
        self._callers: dict[str, int] = {}
        weakref.finalize(self, self._operations.put, None)

    def run(self, work: Callable[[], R], *, whole: bool = False) -> R:
        """Run ``work()`` on the thread and return its result.

        From within an operation, such as from a listener, this is a plain call. ``whole``: once
        begun, the work ends before this returns or raises, through any number of interrupts; for
        work that waits for nothing. Raises ConcurrentUse if another thread waits for an operation,
        and InputError in a forked process.
        """
        if get_ident() in self._ident:
            return work()
        _park_at_the_end()
        self._take_turn()
        try:
            if getattr(running, "pooled", False) and self._serving.acquire(blocking=False):
                return self._run_here(work)
            operation = Operation(_unstoppable(work) if whole else work)
            try:
                self._put(operation)
                operation.wait()
            except BaseException:
                if whole:
                    operation.settle()
                else:
                    # An interrupted caller asks for a stop, and waits until the operation rests.
                    # Before any call: a second interrupt could be raised there.
                    operation.stopping = True
                    operation.stop()
                raise
            return operation.result()
        finally:
            self._callers.pop("caller", None)

    def post(self, work: Callable[[], R]) -> Operation[R]:
        """Queue ``work()`` after all earlier operations and return at once.

        After the end of the program it waits for the work. Raises as `run`.
        """
        if getattr(running, "operation", None) is None:
            _park_at_the_end()
        self._take_turn()
        try:
            operation = Operation(work)
            _posted.add(operation)
            self._put(operation)
            if _ending and get_ident() not in self._ident:
                operation.wait()
            return operation
        finally:
            self._callers.pop("caller", None)

    @property
    def runs_here(self) -> bool:
        """Whether the caller is within an operation, so that it cannot wait for another one."""
        return get_ident() in self._ident

    def _run_here(self, work: Callable[[], R]) -> R:
        self._ident[:] = [get_ident()]
        try:
            if getattr(running, "operation", None) is not None:
                return work()
            operation = Operation(work)
            operation.run()
        finally:
            self._ident.clear()
            self._serving.release()
        _park_at_the_end()
        return operation.result()

    def _take_turn(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                f"this {self._owner} was made in another process",
                hint="Make one in each process, and start processes by spawn.",
            )
        if sys.is_finalizing():  # threads do not run any more
            raise InputError(
                f"a {self._owner} is used after the program has ended",
                hint="Use it before the end.",
            )
        me = get_ident()
        if self._callers.setdefault("caller", me) != me:
            raise ConcurrentUse(f"two threads use one {self._owner} at the same time")

    def _put(self, operation: Operation[Any]) -> None:
        self._operations.put(operation)
        if not self._serving.locked():
            idle_seconds = _IDLE_SECONDS if self._idle_seconds is None else self._idle_seconds
            try:
                start_new_thread(
                    _serve, (self._operations, self._serving, self._ident, idle_seconds)
                )
            except RuntimeError:  # too many threads, or the program ends
                _serve(self._operations, self._serving, self._ident, 0.0)


def mark_worker() -> None:
    """Mark the calling thread as one of a pool. No interrupt reaches it, so it may run operations
    itself."""
    running.pooled = True


def _serve(
    operations: SimpleQueue[Operation[Any] | None],
    serving: Any,
    ident: list[int],
    idle_seconds: float,
) -> None:
    # Only one thread serves, even if two were started. A thread that ends checks the queue once
    # more after it has released `serving`. It serves operations that arrived meanwhile; later ones
    # start another thread.
    while serving.acquire(blocking=False):
        ident[:] = [get_ident()]
        try:
            while (operation := operations.get(timeout=idle_seconds)) is not None:
                operation.run()
                del operation  # or its work stays alive until the next one comes
        except Empty:
            pass
        finally:
            ident.clear()
            serving.release()
        if operations.empty():
            return


def _unstoppable(work: Callable[[], R]) -> Callable[[], R]:
    def run() -> R:
        with shield():
            return work()

    return run


@contextmanager
def shield() -> Iterator[None]:
    """Within this block no `checkpoint` stops the operation."""
    operation, running.operation = getattr(running, "operation", None), None
    try:
        yield
    finally:
        running.operation = operation


# -- the end of the program
#
# A thread that returns from a native kernel while the interpreter is being finalized is ended
# inside C++ frames, which aborts the process. So no thread may be in a kernel by then. Posted
# operations are finished twice: before other libraries' pools end, and after the threads for which
# the program waits and all exit handlers.

_posted: weakref.WeakSet[Operation[Any]] = weakref.WeakSet()
_active: dict[Operation[Any], int] = {}
_ending: list[bool] = []


def _finish() -> None:
    """Wait for all posted operations, as an executor does."""
    for operation in _unended():
        while not operation.ended:
            operation.wait(LOOK_SECONDS)


def _unended() -> list[Operation[Any]]:
    while True:
        try:
            return [operation for operation in _posted if not operation.ended]
        except RuntimeError:  # a thread posted during the iteration
            pass


def _rest() -> None:
    """Finish operations that were posted since; stop all others at their next checkpoint.

    The callers of those others wait for ever by now, so nothing else would end them.
    """
    _ending.append(True)
    while _unended():
        _finish()
    limit = time.monotonic() + _LONGEST_REST_SECONDS
    while _active and time.monotonic() < limit:
        for operation in list(_active):
            operation.stopping = True
        time.sleep(0.001)


def _park_at_the_end() -> None:
    """Block for ever in a thread that is not the main one, once the program ends."""
    if _ending and threading.current_thread() is not threading.main_thread():
        for operation in [
            operation for operation, ident in list(_active.items()) if ident == get_ident()
        ]:
            del _active[operation]
        # Acquired twice, the lock never returns.
        lock = allocate_lock()
        lock.acquire()
        lock.acquire()


def _forget() -> None:
    _posted.clear()
    _active.clear()


threading._register_atexit(_finish)  # type: ignore[attr-defined]
atexit.register(_rest)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
