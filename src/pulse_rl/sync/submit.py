"""Publishing behind the training: states are taken at once, and published one after another (docs/protocol.md, 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

from .._util.serial import Operation, SerialThread
from ..events import Published

_MOST_UNFINISHED = 2  # one in flight, one behind it
T = TypeVar("T")


class Submission(Future[Published]):
    """A version that is being published, a ``concurrent.futures.Future``: ``cancel()`` succeeds while it only waits.

    An error that nobody has asked for, by `result` or `exception`, is raised by the publisher's next call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked = False

    def result(self, timeout: float | None = None) -> Published:
        """What the version cost, once it is committed; raises what publishing raised. ``timeout`` in seconds."""
        self._asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What publishing raised, None for a version that was committed. ``timeout`` in seconds."""
        self._asked = True
        return super().exception(timeout)

    def _unasked(self) -> BaseException | None:
        """The error that nobody has asked for; from now on somebody has."""
        if self._asked or not self.done() or self.cancelled():
            return None
        return self.exception()


class _Entry(NamedTuple, Generic[T]):
    """``held``: what was taken, until it is published or its memory is used again; empty from then on."""

    submission: Submission
    operation: Operation[None]
    held: list[T]


class Submissions(Generic[T]):
    """At most one version in flight and one behind it, on the publisher's own thread. Used by one thread at a time."""

    def __init__(self, serial: SerialThread) -> None:
        self._serial = serial
        self._entries: list[_Entry[T]] = []
        self._spare: deque[T] = deque(maxlen=_MOST_UNFINISHED)

    def submit(
        self, take: Callable[[T | None], T], publish: Callable[[T], tuple[Published, T | None]], replace: bool
    ) -> Submission:
        """Makes room, takes a state by ``take``, into memory that is no longer needed, and returns; ``publish`` does
        the rest behind, and hands back the memory that it no longer needs. Room is made by waiting, or, to ``replace``,
        by cancelling the version that has not begun.
        """
        while len(unfinished := self._unfinished()) >= _MOST_UNFINISHED:
            if not (replace and unfinished[-1].submission.cancel()):
                unfinished[0].operation.wait()
        self._reclaim()
        submission, held = Submission(), [take(self._spare.pop() if self._spare else None)]

        def run() -> None:
            taken = held.pop()
            if not submission.set_running_or_notify_cancel():
                return
            try:
                published, spare = publish(taken)
            except BaseException as error:
                submission.set_exception(error)
            else:
                if spare is not None:
                    self._spare.appendleft(spare)
                submission.set_result(published)

        self._entries.append(_Entry(submission, self._serial.post(run), held))
        return submission

    def raise_unasked(self) -> None:
        """Raises the first error of a version that has ended, if nobody has asked for it. The next call raises the
        next one."""
        for entry in [e for e in self._entries if e.operation.ended]:
            self._entries.remove(entry)
            if error := entry.submission._unasked():
                raise error

    def forget(self) -> None:
        """Lets spare memory go."""
        self._spare.clear()

    def _reclaim(self) -> None:
        """Takes cancelled versions out of the thread's way, and their memory back."""
        for entry in [e for e in self._entries if e.submission.cancelled() and e.operation.cancel()]:
            entry.submission.set_running_or_notify_cancel()
            self._entries.remove(entry)
            self._spare.append(entry.held.pop())

    def _unfinished(self) -> list[_Entry[T]]:
        return [e for e in self._entries if not e.operation.ended and not e.submission.cancelled()]
