"""What befalls those who call a publisher or a subscriber: interrupts, second threads, forks. All
at chosen places."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from pulse_rl.errors import ConcurrentUse, InputError
from pulse_rl.patch import apply
from tests.support.interrupts import Interrupter, Steps

from .model import Violation, check
from .store import Client, CrashNow

Calls = list[tuple[str, Callable[[], Any]]]
_LIMIT_SECONDS = 3.0


class Interrupts:
    """Chooses where a call is interrupted: ``anywhere``, at a step of its thread, one of as many as
    the last such call took; or while it waits for one of its calls of the store."""

    def __init__(self, interrupter: Interrupter) -> None:
        self._interrupter = interrupter
        self._steps: dict[str, int] = {}
        self._last: tuple[str, Steps] | None = None

    def choose(
        self, rng: Random, call: str, client: Client, *, anywhere: bool = True
    ) -> Steps | None:
        if self._last is not None:
            kind, steps = self._last
            if steps.count < steps.number:
                self._steps[kind] = steps.count
            self._last = None
        if not anywhere or rng.random() < 0.4:
            client.meanwhile(rng.randint(1, 12), self._interrupter.strike)
            return None
        steps = Steps(rng.randint(1, 20 + self._steps.get(call, 600)))
        self._last = (call, steps)
        return steps


def intrude(client: Client, rng: Random, calls: Calls) -> list[str]:
    """Lets a second thread make ``calls`` while the next call of ``client``'s owner is at work;
    what was not refused is in the list by then."""
    wrong: list[str] = []

    def attempt() -> None:
        for name, act in calls:
            try:
                act()
            except ConcurrentUse:
                continue
            except BaseException as error:
                wrong.append(f"{name} of a second thread: {error!r}")
            else:
                wrong.append(f"{name} of a second thread was not refused")

    def meanwhile() -> None:
        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(_LIMIT_SECONDS)
        if thread.is_alive():
            wrong.append("a second thread was let in and waits")

    client.meanwhile(rng.randint(1, 8), meanwhile)
    return wrong


def fork(calls: Iterable[tuple[str, Callable[[], Any]]]) -> None:
    """Makes ``calls`` in a forked process; all of them must be refused there, and at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, _LIMIT_SECONDS)
            status = _refused(calls)
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended:
        names = [name for name, _ in calls]
        what = (
            names[ended - 1] if 0 < ended <= len(names) else f"one of {names} (ended with {ended})"
        )
        raise Violation(f"a forked process may use {what}")


def _refused(calls: Iterable[tuple[str, Callable[[], Any]]]) -> int:
    """The number of the first call, from 1 on, that is not refused; 0 if all are."""
    for number, (_, act) in enumerate(calls, 1):
        try:
            act()
        except InputError as error:
            if "another process" not in str(error):
                return number
        except BaseException:
            return number
        else:
            return number
    return 0


def check_refused(wrong: list[str]) -> None:
    check(not wrong, "; ".join(wrong))


class torn_writes:  # noqa: N801 (it is used as a function is)
    """Within it, the writes to a state number ``first`` to ``first + times - 1`` are cut short.
    ``count``: how many were."""

    def __init__(self, first: int, times: int) -> None:
        self.count = 0
        self._calls, self._first, self._times = 0, first, times

    def __enter__(self) -> torn_writes:
        self._whole = apply.scatter
        apply.scatter = self._torn  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        apply.scatter = self._whole

    def _torn(self, block: Any, state: Any, changes: Any) -> None:
        self._calls += 1
        if not self._first <= self._calls < self._first + self._times:
            self._whole(block, state, changes)
            return
        self.count += 1
        half = len(changes.positions) // 2
        self._whole(block, state, type(changes)(changes.positions[:half], changes.values[:half]))
        raise CrashNow("in the midst of a write")
