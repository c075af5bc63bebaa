"""The versions that are published behind the training, one after another (docs/protocol.md, section
3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from traceback import clear_frames
from typing import Generic, NamedTuple, TypeVar

from .._util.serial import Operation, SerialThread
from ..errors import ConcurrentUse
from ..events import Published

_MAX_UNFINISHED = 2  # one in flight, one behind it
T = TypeVar("T")


class Submission(Future[Published]):
    """A version that is being published, a ``concurrent.futures.Future``: ``cancel()`` succeeds
    while it only waits; on one rank of a `ShardedPublisher` it cancels the version on all.

    An error that nobody has asked for, by `result` or `exception`, is raised by the publisher's
    next call; by the next `wait` or `close` of a `ShardedPublisher`, whose ranks must not part.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked = False
        self._begun = False

    def __repr__(self) -> str:
        state = (
            "cancelled"
            if self.cancelled()
            else "done"
            if self.done()
            else "running"
            if self._begun
            else "waiting"
        )
        return f"<Submission: {state}>"

    def cancel(self) -> bool:
        """Whether the version will not be published: it only waited."""
        with self._condition:
            return not self._begun and super().cancel()

    def _begin(self) -> bool:
        with self._condition:
            self._begun = True
            return not self.cancelled()

    def _withdraw(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Published:
        """What the version cost, once it is committed; raises what publishing raised. ``timeout``
        in seconds."""
        self._asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What publishing raised, None for a version that was committed. ``timeout`` in seconds."""
        self._asked = True
        return super().exception(timeout)

    @property
    def _failed_unasked(self) -> bool:
        return (
            not self._asked
            and self.done()
            and not self.cancelled()
            and super().exception() is not None
        )


def begin(submission: Submission) -> bool:
    """Whether the version is not cancelled. From now on it cannot be."""
    return submission._begin()


class _Entry(NamedTuple, Generic[T]):
    """``held``: what was taken, until it is published or its memory is used again; empty from then
    on."""

    submission: Submission
    operation: Operation[None]
    held: list[T]


class Submissions(Generic[T]):
    """At most one version in flight and one behind it, on the publisher's own thread. Used by one
    thread at a time.

    ``together``: other ranks have each version in their queues, too. One that is cancelled stays
    there, until ``publish`` has told them.
    """

    def __init__(self, serial: SerialThread, *, together: bool = False) -> None:
        self._serial = serial
        self._together = together
        self._entries: list[_Entry[T]] = []
        self._spare: deque[T] = deque(maxlen=_MAX_UNFINISHED)

    def make_room(self, replace: bool) -> T | None:
        """Waits until a version may be submitted, or, to ``replace``, cancels the one that has not
        begun. Returns what an earlier version had taken and no longer needs: new memory costs as
        much as a copy."""
        while len(unfinished := self._unfinished()) >= _MAX_UNFINISHED:
            if not (replace and unfinished[-1].submission.cancel()):
                if self._serial.runs_here:
                    raise ConcurrentUse(
                        "a submission's callback would wait for itself",
                        hint="Submit so many from another thread.",
                    )
                unfinished[0].operation.wait()
        self._reclaim()
        return self._spare.pop() if self._spare else None

    def post(
        self,
        taken: T,
        publish: Callable[[T | None, Submission], tuple[Published, T | None]],
    ) -> Submission:
        """Returns at once; ``publish`` does the rest on the publisher's thread, and hands back the
        memory that it no longer needs. It begins the submission (`begin`), and raises
        CancelledError where that fails; what was ``taken`` for it may be gone then."""
        submission, held = Submission(), [taken]

        def run() -> None:
            # Whoever pops `held` first, this or `_reclaim`, has the memory.
            taken = _popped(held)
            try:
                published, spare = publish(taken, submission)
            except CancelledError:
                submission._withdraw()
                if taken is not None:
                    self._spare.appendleft(taken)
            except BaseException as error:
                taken = None
                # Or the error, which the submission keeps, would keep all states.
                clear_frames(error.__traceback__)
                submission.set_exception(error)
            else:
                if spare is not None:
                    self._spare.appendleft(spare)
                submission.set_result(published)

        self._entries.append(_Entry(submission, self._serial.post(run), held))
        return submission

    def raise_unasked(self) -> None:
        """Raises the first error of a version that has ended, if nobody has asked for it. The next
        call raises the next one."""
        for entry in [e for e in self._entries if e.operation.ended]:
            self._entries.remove(entry)
            if entry.submission._failed_unasked and (error := entry.submission.exception()):
                raise error

    def forget(self) -> None:
        """Lets spare memory go."""
        self._spare.clear()

    def _reclaim(self) -> None:
        """Takes cancelled versions out of the thread's way, and their memory back."""
        for entry in [e for e in self._entries if e.submission.cancelled()]:
            if self._together:
                if (held := _popped(entry.held)) is not None:
                    self._spare.append(held)
            elif entry.operation.cancel():
                entry.submission._withdraw()
                self._entries.remove(entry)
                self._spare.append(entry.held.pop())
        self._entries = [
            e for e in self._entries if not e.operation.ended or e.submission._failed_unasked
        ]

    def _unfinished(self) -> list[_Entry[T]]:
        return [e for e in self._entries if not e.operation.ended and not e.submission.done()]


def _popped(held: list[T]) -> T | None:
    """What was held, for the one of two threads that comes first."""
    try:
        return held.pop()
    except IndexError:
        return None
