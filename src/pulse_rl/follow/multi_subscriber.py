"""Follows many streams of one store with a few threads."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from .._util.retry import Backoff, jittered
from .._util.serial import Closing, NotCopyable, Operation, mark_worker
from .._util.settings import (
    checked_collection,
    checked_count,
    checked_number,
    checked_path,
    counted,
)
from .._util.threads import Stopped
from ..errors import ConcurrentUse, InputError, PulseError
from ..events import Listener, checked_listener, serialized
from ..state.tensors import StateSource
from ..store import Store, open_stores
from ..sync.subscriber import Subscriber
from ..sync.update import Update
from .failover import DEFAULT_PATIENCE_SECONDS

_MAX_BACKOFF = 60.0
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 0.5
T = TypeVar("T")


class _Pooled(Subscriber):
    """What its owner's threads ask of it needs a thread only for as long as it takes."""

    _idle_seconds = 0.0


@dataclass(eq=False, slots=True)
class _Followed:
    """A stream that is followed. ``backoff``: when it is polled again after a failure. ``raises``:
    an error that is none of this library waits for a reader."""

    name: str
    subscriber: Subscriber
    backoff: Backoff
    operation: Operation[Update | None] | None = None
    error: PulseError | None = None
    raises: bool = False
    ended: bool = False


class Schedule(Generic[T]):
    """Items that become due, handed to the threads that ask: the one that has been due for longest
    first."""

    def __init__(self) -> None:
        self._due: dict[T, float] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: T, seconds: float = 0.0) -> None:
        """Makes ``item`` due in ``seconds``."""
        with self._changed:
            self._due.pop(item, None)  # of two that are due at once the earlier one is first
            self._due[item] = time.monotonic() + seconds
            self._changed.notify()

    def remove(self, item: T) -> bool:
        """Whether ``item`` was waiting here; it is not handed out any more."""
        with self._changed:
            return self._due.pop(item, None) is not None

    def take(self) -> T | None:
        """Waits for the next item; None once the schedule is closed."""
        with self._changed:
            while not self._closed:
                first = min(self._due, key=self._due.__getitem__, default=None)
                left = None if first is None else self._due[first] - time.monotonic()
                if first is not None and left is not None and left <= 0:
                    del self._due[first]
                    return first
                self._changed.wait(left)
            return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class MultiSubscriber(Closing, NotCopyable):
    """Follow many streams of one store, such as hundreds of adapters, with a few threads.

    `updates` yields what is new as it comes; `add` and `remove` streams at any time. A stream that
    fails is polled again after ever longer waits, up to a minute, and holds up no other. It is a
    context manager; see `close`.

    Args:
        store: The store or its address, or several, nearest first.
        streams: The names of the streams.
        threads: How many streams are synced at a time. Each may read up to four patches ahead.
        poll_seconds: Seconds between two polls of a stream, a quarter more or less.
        cache: As for `Subscriber`, for each stream.
        trusted_keys: As for `Subscriber`, for each stream.
        allow_recreated: As the attribute of `Subscriber`, for each stream.
        patience_seconds: As the attribute of `Subscriber`, for each stream.
        on_event: Called with the events of all streams, among them `CallFailed` for each failure,
            by one thread at a time.
    Raises:
        InputError: A setting is out of range.
        StoreError: The store cannot be opened.
    """

    def __init__(
        self,
        store: Store | str | Sequence[Store | str],
        streams: Collection[str] = (),
        *,
        threads: int = 4,
        poll_seconds: float = 1.0,
        cache: str | os.PathLike[str] | None = None,
        trusted_keys: Collection[str] | None = None,
        allow_recreated: bool = False,
        patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
        on_event: Listener | None = None,
    ) -> None:
        self._poll = checked_number("poll_seconds", poll_seconds, minimum=0.01, maximum=1e6)
        self._patience = checked_number("patience_seconds", patience_seconds)
        self._allow_recreated = allow_recreated
        self._stores = open_stores(store)
        self._options: dict[str, Any] = {
            "cache": cache if cache is None else checked_path(cache),
            "trusted_keys": trusted_keys,
            "threads": 1,
            "on_event": serialized(checked_listener(on_event)),
        }
        self._followed: dict[str, _Followed] = {}
        self._schedule: Schedule[_Followed] = Schedule()
        self._ready: SimpleQueue[tuple[_Followed, Update | Exception]] = SimpleQueue()
        self._closed = threading.Event()
        count = checked_count("threads", threads)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for name in checked_collection("streams", streams, '["policy"]'):
            self.add(name)
        for thread in self._threads:
            thread.start()

    def add(
        self,
        stream: str,
        *,
        base: StateSource | None = None,
        select: str | Collection[str] | None = None,
        stream_id: str | None = None,
    ) -> Subscriber:
        """Follow one more stream.

        Where more streams are due than there are threads, the one that has been due for longest is
        first.

        Args:
            stream: The stream's name.
            base: As for `Subscriber`.
            select: As for `Subscriber`.
            stream_id: As for `Subscriber`.
        Returns: The Subscriber of the stream.
        Raises:
            InputError: The stream is followed already, or this is closed.

        It also raises what `Subscriber` raises.
        """
        if self._closed.is_set():
            raise InputError("this MultiSubscriber is closed", hint="Make a new one.")
        if stream in self._followed:
            raise InputError(f"the stream {stream!r} is followed already", hint="Remove it first.")
        subscriber = _Pooled(
            self._stores,
            stream=stream,
            base=base,
            select=select,
            stream_id=stream_id,
            **self._options,
        )
        subscriber.patience_seconds = self._patience
        subscriber.allow_recreated = self._allow_recreated
        backoff = Backoff(2 * self._poll, max(_MAX_BACKOFF, self._poll))
        followed = _Followed(stream, subscriber, backoff)
        self._followed[stream] = followed
        self._schedule.put(followed)
        return subscriber

    def remove(self, stream: str) -> None:
        """Follows ``stream`` no longer, and lets its state go. A sync in progress stops soon; its
        update is not delivered. Raises InputError where it is not followed."""
        followed = self._find(stream)
        del self._followed[stream]
        followed.ended = True
        if (operation := followed.operation) is not None:
            operation.stopping = True
        elif self._schedule.remove(followed):
            followed.subscriber.close()

    def __getitem__(self, stream: str) -> Subscriber:
        """The Subscriber of ``stream``. Its ``version`` and ``status`` may be read at any time, its
        state from when `updates` yields an update of it until the next one is asked for. Raises
        InputError."""
        return self._find(stream).subscriber

    def __contains__(self, stream: object) -> bool:
        return stream in self._followed

    def __iter__(self) -> Iterator[str]:
        """The names of the streams."""
        return iter(tuple(self._followed))

    def __len__(self) -> int:
        return len(self._followed)

    @property
    def failures(self) -> dict[str, PulseError]:
        """By stream, the error of the last sync, where it failed."""
        followed = tuple(self._followed.items())
        return {name: each.error for name, each in followed if each.error is not None}

    def updates(self, *, timeout_seconds: float | None = None) -> Iterator[tuple[str, Update]]:
        """Yield (stream, update) as versions come, until this is closed.

        Asking for the next update acknowledges the one before, whose stream rests until then.
        Several threads may iterate: each update goes to one of them.

        Args:
            timeout_seconds: End when no version has come for so long. Default: never.
        Raises: InputError, and an error of a sync that is no PulseError, such as what ``on_event``
            raises. The streams are still followed, and another call goes on with them.
        """
        timeout = math.inf
        if timeout_seconds is not None:
            timeout = checked_number("timeout_seconds", timeout_seconds)
        last = time.monotonic()
        while not self._closed.is_set() and (left := last + timeout - time.monotonic()) > 0:
            try:
                followed, update = self._ready.get(timeout=min(left, _LOOK_SECONDS))
            except Empty:
                continue
            if isinstance(update, Exception):
                followed.raises = False
                if followed.ended:
                    continue
                raise update
            try:
                if followed.ended:
                    continue
                yield followed.name, update
                update.acknowledge()
                last = time.monotonic()
            finally:
                del update
                if followed.ended or self._closed.is_set():
                    followed.subscriber.close()
                else:
                    self._schedule.put(followed)

    def close(self) -> None:
        """Stops following, within five seconds: a request that takes longer ends by itself, and
        nothing comes of it. Lets all states go. May be called twice."""
        self._closed.set()
        self._schedule.close()
        followed = [*self._followed.values()]
        for each in followed:
            if (operation := each.operation) is not None:
                operation.stopping = True
        ends = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        for each in followed:
            if self._schedule.remove(each):
                each.subscriber.close()
        self._followed = {}

    def __repr__(self) -> str:
        return f"<MultiSubscriber of {counted(len(self), 'stream')} in {self._stores[0]!r}>"

    # -- the threads

    def _work(self) -> None:
        mark_worker()
        while (followed := self._schedule.take()) is not None:
            try:
                self._sync(followed)
            except BaseException:
                # Memory may be short even for what follows a sync: the thread goes on.
                with suppress(BaseException):
                    self._schedule.put(followed, followed.backoff.wait())

    def _sync(self, followed: _Followed) -> None:
        followed.operation = operation = Operation(followed.subscriber.sync)
        if followed.ended or self._closed.is_set():
            operation.stopping = True
        update: Update | None = None
        wait: float | None = None
        try:
            operation.run()
            update = operation.result()
            followed.error = None
            followed.backoff.reset()
        except (Stopped, ConcurrentUse):
            pass
        except PulseError as error:
            followed.error = error
            wait = followed.backoff.wait()
        except Exception as error:  # a listener's, or of a store that is not ours
            wait = followed.backoff.wait()
            if not followed.raises:
                followed.raises = True
                self._ready.put((followed, error))
        finally:
            followed.operation = None
        if followed.ended or self._closed.is_set():
            followed.subscriber.close()
        elif update is not None:
            self._ready.put((followed, update))
        else:
            self._schedule.put(followed, jittered(self._poll) if wait is None else wait)

    def _find(self, stream: str) -> _Followed:
        try:
            return self._followed[stream]
        except KeyError:
            raise InputError(
                f"the stream {stream!r} is not followed", hint="Add it first."
            ) from None
