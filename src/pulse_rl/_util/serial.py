"""An object's operations, one after another, on a thread of their own that no interrupt reaches.

An interrupt that is raised in the middle of an operation leaves what it worked on half-way, and whatever cleans up can
be interrupted as well. So the caller only waits. When it is interrupted it asks the operation to stop, waits until it
rests, and raises. A second interrupt raises at once; the operation then rests by itself, and the next call waits for
that.
"""

from __future__ import annotations

import os
import weakref
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

from ..errors import ConcurrentUse, InputError
from .threads import LOOK_SECONDS, Call, running

R = TypeVar("R")
_IDLE_SECONDS = 10.0
"""After so long without an operation a thread ends; the next one starts it again."""


class Operation(Call[R]):
    """A call that can be asked to stop at its next `checkpoint`."""

    __slots__ = ("stopping",)

    def __init__(self, work: Callable[[], R]) -> None:
        super().__init__(work)
        self.stopping = False

    def run(self) -> None:
        running.operation = self
        super().run()
        running.operation = None

    def stop(self) -> None:
        """Cancels the operation if it has not begun; else asks it to stop, and returns when it rests. An interrupt is
        raised, and the operation goes on to its rest."""
        self.stopping = True
        if not self.cancel():
            while not self.ended:
                self.wait(LOOK_SECONDS)


class NotCopyable:
    """What must not be copied or pickled: a twin would work on the same things without being noticed."""

    def __reduce__(self) -> NoReturn:
        raise InputError(
            f"a {type(self).__name__} cannot be copied or pickled", hint="Make a new one where it is needed."
        )


class SerialThread(NotCopyable):
    """Runs the operations of ``owner`` (words for messages). The thread starts with the first, and ends with this, or
    after ``idle_seconds`` without one (None: ten). What a thread of a pool (`pooled`) asks for runs in that thread."""

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
        """The result of ``work()``. From within an operation, such as from a listener, it is a plain call.

        ``whole``: what has begun is ended before this returns or raises, whatever interrupts come; for work that does
        not wait for anybody. Raises ConcurrentUse where another thread waits for an operation, and InputError in a
        forked process.
        """
        if get_ident() in self._ident:
            return work()
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
                    operation.stopping = True  # before any call: a second interrupt is raised where one begins
                    operation.stop()
                raise
            return operation.result()
        finally:
            self._callers.pop("caller", None)

    def post(self, work: Callable[[], R]) -> Operation[R]:
        """Runs ``work()`` after what was run or posted before, and does not wait for it. Raises as `run` does."""
        self._take_turn()
        try:
            operation = Operation(work)
            self._put(operation)
            return operation
        finally:
            self._callers.pop("caller", None)

    def _run_here(self, work: Callable[[], R]) -> R:
        self._ident[:] = [get_ident()]
        try:
            return work()
        finally:
            self._ident.clear()
            self._serving.release()

    def _take_turn(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                f"this {self._owner} was made in another process", hint="Make one in each process, after the fork."
            )
        me = get_ident()
        if self._callers.setdefault("caller", me) != me:
            raise ConcurrentUse(f"two threads use one {self._owner} at the same time")

    def _put(self, operation: Operation[Any]) -> None:
        self._operations.put(operation)
        if not self._serving.locked():
            idle_seconds = _IDLE_SECONDS if self._idle_seconds is None else self._idle_seconds
            start_new_thread(_serve, (self._operations, self._serving, self._ident, idle_seconds))


def pooled() -> None:
    """Makes the calling thread one of a pool: it is not the main thread, so that no interrupt reaches what it runs."""
    running.pooled = True


def _serve(operations: SimpleQueue[Operation[Any] | None], serving: Any, ident: list[int], idle_seconds: float) -> None:
    # Only one thread serves, should two have been started. One that ends looks once more after it has said so: what
    # came in between is served by it, what comes later starts another.
    while serving.acquire(blocking=False):
        ident[:] = [get_ident()]
        try:
            while (operation := operations.get(timeout=idle_seconds)) is not None:
                operation.run()
                del operation  # what it holds is not kept until the next one comes
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
    """Within it no `checkpoint` stops the operation: what is begun here is ended here."""
    operation, running.operation = getattr(running, "operation", None), None
    try:
        yield
    finally:
        running.operation = operation
