"""The workers of a stream: each reports in the store which version it holds, when it was last seen
and why it is stuck (docs/format.md, section 6); readers, publishers and relays read it."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from .._util.addresses import shown_text
from .._util.retry import Backoff, jittered
from .._util.serial import Closing
from .._util.settings import short_int
from .._util.threads import ordered_map
from ..errors import InputError, PulseError, StoreError, kinds_of
from ..events import CallFailed, Event, FallbackUsed, Relayed, Synced
from ..store import Store, open_store
from ..store.base import UNREADABLE, ObjectInfo, whole
from ..stream.names import MAX_BEAT_BYTES, MAX_WORKERS, StreamNames, WorkerName, check_word
from ..stream.stream import Stream
from ..sync.planner import BROKEN_LINK

#: A heartbeat is written again this often, a quarter more or less.
BEAT_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_MAX_OF_A_WORKER = 100
# A caller waits for so long until its news are written; then it goes on, and the thread writes them
# later. Also the time that `close` and the end of the program wait.
_PATIENCE_SECONDS = 5.0
# Errors of alternating kinds are not written more often than this.
_REPORT_SECONDS = 5.0
# Four bytes of UTF-8 for each character, and the other fields, fit into MAX_BEAT_BYTES.
_MAX_REASON = 900
_MAX_ERRORS = 10**9
# A relay copies weights: heartbeats take at most so long in one of its calls, and are not tried
# again for so long after a failure, which may have taken minutes.
_FORWARDING_SECONDS, _AFTER_FAILURE_SECONDS = 1.0, 60.0
# A publisher reads heartbeats at most this often, in seconds.
_HEAL_SECONDS = 10.0
# A worker tries again within this time, and finds a new anchor.
_RETRIED_SECONDS = 16.0
# A heartbeat that is older and was not seen to change is of a worker that is gone. By two clocks.
_ALIVE_SECONDS = 120.0
# One failure may be a damaged reply.
_LEAST_ERRORS = 2
# Workers that an anchor does not help must not cost a state each minute. In seconds.
_FIRST_WAIT, _LONGEST_WAIT = 60.0, 3600.0

_KIND = re.compile(r"[a-z_]{1,64}")
_log = logging.getLogger("pulse_rl")


@dataclass(slots=True)
class _Held:
    """What a worker has to say of one stream."""

    #: It has a kind of error where something could not be used since the last success.
    state: WorkerState = field(default_factory=lambda: WorkerState(None, 0.0))
    #: The worker's objects in the store, once they were listed.
    written: list[str] | None = None
    #: How many reports there were to be written, and how many of them the thread has tried.
    news: int = 0
    done: int = 0
    next_report: float = 0.0

    def body(self) -> bytes:
        _, _, errors, since, kind, reason = self.state
        if not kind:
            return b""
        facts = {"errors": max(errors, 1), "since": round(since, 3), "kind": kind, "reason": reason}
        return json.dumps(facts, ensure_ascii=False).encode("utf-8", "replace")


class _Control:
    """What the thread of a heartbeat needs without the heartbeat, which it must not keep alive."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.woken = threading.Event()
        self.written = threading.Condition()
        self.ended = False
        #: The objects are removed at the end.
        self.leave = False
        self.thread: threading.Thread | None = None

    def end(self) -> None:
        """Ends the thread; waits for a write that is under way, so that the program does not end
        in the middle of a call of the store's client. In a forked process the thread, and whoever
        holds the locks, is not there."""
        if os.getpid() != self.process:
            return
        self.ended = True
        self.woken.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_PATIENCE_SECONDS)


class Heartbeat(Closing):
    """Report in ``store`` which version a worker holds, that it lives, and why it is stuck.

    A listener for a `Subscriber` or a `Relay`. ``pulse status`` shows the reports, and
    `Publisher.wait_for` waits for them. There is one small object for each worker and stream. A
    thread writes it again every 30 seconds, so its time of writing says when the worker was last
    seen. While the worker fails to reach the newest version, the object holds the number of failed
    calls and the last error; the next version, or `beat`, clears them. If the worker cannot write,
    it logs that once and goes on. `close` ends the thread and removes the objects: the worker has
    left. A process forked from the worker's reports nothing.

    Args:
        store: The store, or its address. The worker needs the right to write and delete below
            ``STREAM/workers``. Anybody with that right can report false versions.
        name: The worker's name. Default: one made of the machine's name and the process ID.
    Raises:
        InputError: ``name`` is not a valid name.
        StoreError: The store cannot be opened.
    """

    def __init__(self, store: Store | str, name: str | None = None) -> None:
        self._store = open_store(store)
        self._name = name or re.sub(
            r"[^A-Za-z0-9._-]", "-", f"w-{socket.gethostname()[:100]}-{os.getpid()}"
        )
        check_word(self._name, "a worker")
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._failed = False
        self._control = _Control()
        # Also at the end of the program; the thread is a daemon, which would be cut off there.
        self._end = weakref.finalize(self, self._control.end)

    def __repr__(self) -> str:
        return f"<Heartbeat of {self._name!r} in {self._store!r}>"

    def __call__(self, event: Event) -> None:
        match event:
            case Synced() | Relayed():
                self.beat(event.stream, event.version)
            case CallFailed(call="sync" | "relay"):
                self._trouble(event, failed=1)
            case FallbackUsed() if not event.link.startswith("file "):  # the weights are right
                self._trouble(event, failed=0)

    def beat(self, stream: str, version: int | None) -> None:
        """Report that the worker holds ``version`` of ``stream``, and that all is well.

        Call it where no listener hears of a success: for an engine, whose own processes sync, or
        after a `Subscriber.sync` that found nothing new. An unchanged report costs nothing.

        Args:
            stream: The stream's name.
            version: The version. None: it holds none yet.
        """
        StreamNames(stream)
        if self._is_over():
            return
        with self._lock:
            held = self._held.setdefault(stream, _Held())
            # What could not be used although no call failed, such as a damaged manifest above the
            # worker's version, is still so: only another version clears that.
            if held.state.version == version and not held.state.errors and held.news:
                return
            held.state = WorkerState(version, 0.0)
            held.news = mine = held.news + 1
        self._wake()
        with self._control.written:
            self._control.written.wait_for(lambda: held.done >= mine, _PATIENCE_SECONDS)

    def close(self) -> None:
        """End the thread and remove the worker's objects. May be called twice."""
        self._control.leave = True
        self._end()

    def _trouble(self, event: CallFailed | FallbackUsed, *, failed: int) -> None:
        if self._is_over():
            return
        now = time.monotonic()
        with self._lock:
            held = self._held.setdefault(event.stream, _Held())
            version, _, errors, since, kind, _ = held.state
            # More errors of one kind can wait for the next beat, and so can kinds that alternate.
            urgent = not kind or (event.kind != kind and now > held.next_report)
            # From then on the publisher reacts.
            urgent = urgent or (failed > 0 and errors + failed == _LEAST_ERRORS)
            text = " ".join(shown_text(event.reason).split())
            reason = "".join(filter(str.isprintable, text))[:_MAX_REASON]
            trouble = (errors + failed, since or time.time(), event.kind, reason)
            held.state = WorkerState(version, 0.0, *trouble)
            if urgent:
                held.news, held.next_report = held.news + 1, now + _REPORT_SECONDS
        if urgent:
            self._wake()

    def _is_over(self) -> bool:
        """Whether this process does not beat: it was forked, or has called `close`."""
        return os.getpid() != self._control.process or self._control.ended

    def _wake(self) -> None:
        control = self._control
        with self._lock:
            if control.thread is None:
                beating = partial(_keep_beating, weakref.ref(self), control)
                control.thread = threading.Thread(
                    target=beating, name="pulse-heartbeat", daemon=True
                )
                control.thread.start()
        control.woken.set()

    def _write(self, *, again: bool) -> None:
        """Writes the reports that are new; with ``again`` all of them."""
        for stream, held in list(self._held.items()):
            with self._lock:
                news, version, body = held.news, held.state.version, held.body()
            if again or news > held.done:
                self._try(partial(self._put, stream, held, version, body))
            with self._control.written:
                held.done = news
                self._control.written.notify_all()

    def _put(self, stream: str, held: _Held, version: int | None, body: bytes) -> None:
        names = StreamNames(stream)
        if held.written is None:  # what an earlier process of this name has left
            start = f"{names.workers}/{self._name}-"
            own = takewhile(
                lambda info: info.name.startswith(start), self._store.list(names.workers, start)
            )
            found = ((info.name, names.parse(info.name)) for info in islice(own, _MAX_OF_A_WORKER))
            held.written = [
                name for name, of in found if isinstance(of, WorkerName) and of.worker == self._name
            ]
        now = names.worker(self._name, version)
        self._store.put(now, body)
        old, held.written = held.written, [now]
        for name in old:
            if name != now:
                self._store.delete(name)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # whatever a store raises: the worker goes on
            if not self._failed:
                self._failed = True
                hint = getattr(error, "hint", "The worker goes on without it.")
                text = shown_text(str(error))
                _log.warning("no heartbeat of worker %s: %s. %s", self._name, text, hint)


def _keep_beating(reference: weakref.ref[Heartbeat], control: _Control) -> None:
    due = time.monotonic() + jittered(BEAT_SECONDS)
    while True:
        control.woken.wait(max(0.0, due - time.monotonic()))
        control.woken.clear()
        heartbeat = reference()
        if heartbeat is None:
            return
        if control.ended:
            reports = list(heartbeat._held.values())
            written = [name for held in reports for name in held.written or ()]
            for name in written if control.leave else ():
                heartbeat._try(partial(heartbeat._store.delete, name))
            return
        again = time.monotonic() >= due
        if again:
            due = time.monotonic() + jittered(BEAT_SECONDS)
        heartbeat._write(again=again)
        del heartbeat


class WorkerState(NamedTuple):
    """What a worker of a stream has reported last.

    Args:
        version: The version that it holds. None: none yet.
        seen: When it reported, in Unix seconds by the store's clock.
        errors: How many of its calls failed since the last success; 0 while all is well.
        since: When the first of them failed, in Unix seconds by the worker's clock.
        kind: The kind of the last error (`pulse_rl.errors`).
        reason: Its message.
    """

    version: int | None
    seen: float
    errors: int = 0
    since: float = 0.0
    kind: str = ""
    reason: str = ""


def workers_of(stream: Stream) -> dict[str, WorkerState]:
    """The last reports of a stream's workers, by name."""
    # A worker that has just moved may have two objects for a moment.
    newest = dict(sorted(_beats(stream).values(), key=lambda beat: beat[1].modified))
    found = {}
    for worker, info in newest.items():
        name = stream.names.parse(info.name)
        assert isinstance(name, WorkerName)
        found[worker] = WorkerState(name.version, info.modified)
        if 0 < info.nbytes <= MAX_BEAT_BYTES:
            with suppress(*UNREADABLE):  # it was replaced meanwhile
                body = whole(stream.store, info.name, info.nbytes)
                found[worker] = _with_trouble(found[worker], body)
    return found


def _with_trouble(state: WorkerState, body: bytes) -> WorkerState:
    """The state with what a heartbeat's body says; junk says nothing."""
    try:
        said = json.loads(body, parse_int=short_int)
        errors, since, kind, reason = (said[k] for k in ("errors", "since", "kind", "reason"))
        known = type(errors) is int and 0 < errors <= _MAX_ERRORS and _KIND.fullmatch(kind)
        if known and math.isfinite(since):
            reason = "".join(filter(str.isprintable, reason))[:_MAX_REASON]
            return WorkerState(state.version, state.seen, errors, float(since), kind, reason)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        pass
    return state


def wait_for_workers(
    stream: Stream,
    version: int,
    workers: int | Collection[str],
    *,
    max_lag: float,
    timeout_seconds: float,
) -> tuple[str, ...]:
    """Waits as `Publisher.wait_for` says, and returns what that does. Raises InputError."""
    if isinstance(workers, str) or (isinstance(workers, int) and workers < 0):
        raise InputError("workers must be a number of workers, or a collection of their names")
    deadline = time.monotonic() + timeout_seconds
    while True:
        held = {worker: state.version for worker, state in workers_of(stream).items()}
        there = {w for w, of in held.items() if of is not None and of >= version - max_lag}
        if isinstance(workers, int):
            missing = max(0, workers - len(there))
            late = [*sorted(held.keys() - there), *["?"] * missing][:missing]
        else:
            late = sorted(set(workers) - there)
        left = deadline - time.monotonic()
        if not late or left <= 0:
            return tuple(late)
        time.sleep(min(jittered(_LOOK_SECONDS), left))


class StuckWorkers:
    """Whether workers of ``stream`` report that no path leads them to its newest version."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._look_at = self._not_before = 0.0
        self._seen: dict[str, float] = {}
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT)
        self._kinds = {kind for error in BROKEN_LINK for kind in kinds_of(error)}

    def anchored(self) -> None:
        """An anchor was stored: what workers have reported before it does not count."""
        self._not_before = max(self._not_before, time.monotonic() + _RETRIED_SECONDS)

    def need_anchor(self) -> bool:
        """Whether the next version should have an anchor for them; at most every 10 seconds the
        store is asked. A store that fails is no reason to stop."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _HEAL_SECONDS
        try:
            workers = workers_of(self._stream)
        except StoreError:
            return False
        before, self._seen = self._seen, {name: worker.seen for name, worker in workers.items()}
        stuck = [
            name
            for name, worker in workers.items()
            if worker.errors >= _LEAST_ERRORS
            and worker.kind in self._kinds
            and (
                abs(time.time() - worker.seen) < _ALIVE_SECONDS
                or before.get(name, worker.seen) != worker.seen
            )
        ]
        if not stuck:
            self._backoff.reset()
            return False
        if now < self._not_before:
            return False
        self._not_before = now + self._backoff.wait()
        return True


class HeartbeatRelay:
    """Copies the heartbeats of a relay's target to its source, where the publisher reads them
    (docs/protocol.md, section 8)."""

    def __init__(self, target: Stream, source: Stream) -> None:
        self._target, self._source = target, source
        #: By name: the time of writing, in the target, of what was forwarded.
        self._forwarded: dict[str, float] | None = None
        self._due = 0.0
        self._failing = False

    def forward(self) -> PulseError | None:
        """Forwards what is new, at most every 30 s, or goes on where the last call stopped after a
        second. Returns the first error since the last success, and raises none."""
        if time.monotonic() < self._due:
            return None
        try:
            if self._copy():
                self._due = time.monotonic() + jittered(BEAT_SECONDS)
            self._failing = False
        except PulseError as error:
            self._due = time.monotonic() + _AFTER_FAILURE_SECONDS
            was, self._failing = self._failing, True
            return None if was else error
        return None

    def _copy(self) -> bool:
        """Whether all was forwarded."""
        there = _beats(self._target)
        if self._forwarded is None:
            if not there:
                return True
            # What another process of this relay has forwarded: a worker that ended before now must
            # not look alive again.
            workers = {worker for worker, _ in there.values()}
            known = _beats(self._source).values()
            self._forwarded = {i.name: i.modified for worker, i in known if worker in workers}
        forwarded, ends = self._forwarded, time.monotonic() + _FORWARDING_SECONDS
        new = [i for _, i in there.values() if i.modified > forwarded.get(i.name, -1.0)]
        with closing(ordered_map(self._copy_one, new)) as copied:
            for info in copied:
                forwarded[info.name] = info.modified
                if time.monotonic() > ends:
                    return False
        for name in forwarded.keys() - there.keys():
            self._source.store.delete(name)
            del forwarded[name]
        return True

    def _copy_one(self, info: ObjectInfo) -> ObjectInfo:
        body = b""
        with suppress(*UNREADABLE):  # it was replaced meanwhile
            body = whole(self._target.store, info.name, min(info.nbytes, MAX_BEAT_BYTES))
        self._source.store.put(info.name, body)
        return info


def _beats(stream: Stream) -> dict[str, tuple[str, ObjectInfo]]:
    """(worker, object) of each heartbeat, by the object's name."""
    listed = islice(stream.store.list(stream.names.workers), MAX_WORKERS)
    parsed = ((info, stream.names.parse(info.name)) for info in listed)
    return {info.name: (name.worker, info) for info, name in parsed if isinstance(name, WorkerName)}
