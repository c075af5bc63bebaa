"""Interrupts at places that a test chooses: at a step of the calling thread, or while it waits."""

from __future__ import annotations

import signal
import sys
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from pulse_rl._util.serial import Operation
from pulse_rl._util.threads import POINTS as POINTS
from pulse_rl._util.threads import armed as armed
from pulse_rl._util.threads import running

R = TypeVar("R")
_PATIENCE_SECONDS = 20.0


class Boom(BaseException):
    """What a signal handler raises."""


#: The finest steps whose tracing works: from 3.12 on opcodes of a frame that is entered while
#: tracing are left out.
STEP = "opcode" if sys.version_info < (3, 12) else "line"


class Steps:
    """A trace function that raises `Boom` at the step ``number`` of this package's frames, and
    counts them. Not of its stores: between a lock's taking and the ``with`` that gives it back no
    signal handler runs, but tracing would. ``also``: parts of the paths of other files whose frames
    count."""

    def __init__(self, number: int, *, also: tuple[str, ...] = ()) -> None:
        self.number, self._files = number, ("pulse_rl", *also)
        self.count = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not any(part in file for part in self._files) or "pulse_rl/store" in file:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = STEP == "opcode", STEP == "line"
        if event == STEP:
            self.count += 1
            if self.count == self.number:
                raise Boom
        return self

    def run(self, act: Callable[[], R]) -> R:
        """``act()``, unless it takes so many steps: `Boom`."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return act()
        finally:
            sys.settrace(before)


class GatedOperation(Operation[R]):
    """An operation that does not begin before its caller waits, so that an interrupt at a given
    step finds the same every time: nothing begun, or everything ended. ``begin_late()``: whether
    one whose caller is interrupted before it waits begins all the same, and is stopped at its first
    checkpoint."""

    __slots__ = ("_gate",)
    begin_late: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, work: Callable[[], R]) -> None:
        super().__init__(work)
        self._gate = allocate_lock()
        self._gate.acquire()
        self._done: Any = _Door(self._done, self._open)

    def run(self) -> None:
        with self._gate:
            pass
        super().run()

    def stop(self) -> None:
        self.stopping = True
        if self._gate.locked() and self.begin_late():
            self._open()
            self.wait(0.2)  # one that was never handed over does not end
        super().stop()

    def cancel(self) -> bool:
        cancelled = super().cancel()
        self._open()
        return cancelled

    def _open(self) -> None:
        if self._gate.locked():
            self._gate.release()


class _Door:
    """A lock that opens a gate before it is waited for."""

    def __init__(self, lock: Any, open_gate: Callable[[], None]) -> None:
        self._lock = lock
        self._open_gate = open_gate

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._open_gate()
        return bool(self._lock.acquire(blocking, timeout))

    def release(self) -> None:
        self._lock.release()


class Interrupter:
    """Interrupts the main thread while it waits for an operation, from within that operation. A
    context manager, which is without effect in other threads than the main one."""

    def __init__(self) -> None:
        self._armed = False
        self.works = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupter:
        if self.works:
            self._before = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self.works:
            signal.signal(signal.SIGUSR1, self._before)

    def strike(self) -> None:
        """Called in an operation: returns when its caller was interrupted and has asked it to stop.
        The signal is sent again and again: one that comes just before the wait begins does not end
        it."""
        operation = getattr(running, "operation", None)
        if operation is None or not self.works:
            return
        self._armed = True
        limit = time.monotonic() + _PATIENCE_SECONDS
        while not operation.stopping and time.monotonic() < limit:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(0.0005)

    def _handle(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise Boom
