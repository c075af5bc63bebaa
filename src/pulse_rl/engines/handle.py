"""The handle: moves a live engine from version to version (docs/vllm.md, docs/sglang.md)."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self

from .._util.retry import LONGEST_POLL, Backoff, jittered
from .._util.serial import Closing
from .._util.settings import checked_number
from ..errors import (
    EmptyStream,
    EngineError,
    EngineUnavailable,
    InputError,
    PulseError,
    StateMismatch,
)
from ..events import Metadata
from .rollouts import Replay, Rollout, Weights, new_seed, no_sampling, replay
from .transport import (
    WEIGHTS,
    EngineTransport,
    Generated,
    InitInfo,
    Status,
    asleep,
    raise_for_status,
)

InFlight = Literal["keep", "abort", "wait"]
_POLL_SECONDS = 0.02
_LONGEST_WAIT = 1.0
_MAX_BACKOFF = 30.0
# Of versions that requests in flight may come from.
_MAX_ROOTS = 1024


@dataclass(frozen=True, slots=True)
class EngineSync:
    """The move of an engine from one version to another.

    Args:
        version: The version that is live now.
        previous: The version that was live before. None: the weights were no version of the stream.
        root: The root of ``version``.
        metadata: The publisher's metadata of ``version``.
        full: All elements were written, not only those that changed.
        pause_seconds: The time during which the engine generated nothing.
        apply_seconds: The part of the pause that wrote the live parameters.
        audit_seconds: The part of the pause that read them back. None: not this time.
        fetch_seconds: The wait for the store, before the pause.
        verify_seconds: The time to decode, hash and lay out, before the pause.
        fetched_bytes: What was fetched from the store.
        lag_seconds: Age of the version when it was live: from its commit by the publisher's clock
            to then by the engine's. None: nothing was fetched.
    """

    version: int
    previous: int | None
    root: str
    metadata: Metadata
    full: bool
    pause_seconds: float
    apply_seconds: float
    audit_seconds: float | None
    fetch_seconds: float
    verify_seconds: float
    fetched_bytes: int
    lag_seconds: float | None


_REPORTED = {field.name for field in fields(EngineSync)} - {"version", "pause_seconds"}


@dataclass(slots=True, repr=False)
class Generation:
    """Some use of an engine, from `EngineHandle.admit` to `end`, which the end of a ``with`` block
    calls.

    ``start_version`` with its ``start_root`` was live when it was admitted, ``end_version`` with
    its ``end_root`` at its end; None where no version was proved to be live, and before the end.
    ``restarted``: whether the engine was, meanwhile.
    """

    _handle: EngineHandle
    _session: int
    start_version: int | None
    start_root: str | None
    end_version: int | None = None
    end_root: str | None = None
    restarted: bool = False

    @property
    def spans_update(self) -> bool:
        """Whether what was generated may come from other weights than those of ``start_version``:
        from those of two versions, or of none. To be asked after the end."""
        start, end = (self.start_version, self.start_root), (self.end_version, self.end_root)
        return self.restarted or None in start or start != end

    def end(self) -> None:
        """Asks the engine which version is live now.

        Raises:
            EngineError: The engine refused the call; EngineUnavailable if it did not answer.
        """
        session, self.end_version, self.end_root = self._handle._live()
        self.restarted = session != self._session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()

    def __repr__(self) -> str:
        return f"<Generation from version {self.start_version} to {self.end_version}>"


class EngineHandle(Closing):
    """A live engine that follows a stream. Made by `connect`.

    A context manager; see `close`. Several threads may use it, one call at a time.
    """

    @classmethod
    def _on(
        cls, transport: EngineTransport, info: InitInfo, in_flight: str, timeout_seconds: float
    ) -> Self:
        """A handle that has opened a session in the engine as its owner. Raises InputError, and
        UnsupportedTensor where the engine cannot follow the stream."""
        self = cls.__new__(cls)
        self._begin(transport, info, in_flight, timeout_seconds)
        return self

    def _begin(
        self, transport: EngineTransport, info: InitInfo, in_flight: str, timeout_seconds: float
    ) -> None:
        if not isinstance(info.store, str):
            raise InputError(
                f"the store must be an address, not a {type(info.store).__name__}",
                hint="The engine's own processes open it.",
            )
        if in_flight not in ("keep", "abort", "wait"):
            raise InputError(f"in_flight must be 'keep', 'abort' or 'wait', not {in_flight!r}")
        self._transport = transport
        self._owner = uuid.uuid4().hex
        keys = None if info.trusted_keys is None else list(info.trusted_keys)
        self._info = replace(info, owner=self._owner, trusted_keys=keys)
        self._in_flight = in_flight
        self._timeout = timeout_seconds
        self._lock = threading.RLock()
        self._follower: threading.Thread | None = None
        self._closing = threading.Event()
        self._stale = self._untagged = self._paused = False
        self._asleep: frozenset[str] = frozenset()
        self._sessions = 0
        self._tagged: int | None = None
        self._roots: dict[int, str] = {}
        self._engine = ("", "")
        self._open()
        try:
            self._prove()
        except BaseException:
            self.close()
            raise

    @property
    def stream(self) -> str:
        """The name of the stream that the engine follows."""
        return self._info.stream

    @property
    def version(self) -> int | None:
        """The version that is live, None while none is proved to be."""
        with self._lock:
            version: int | None = self._leader(self._ask("status"))["version"]
            return version

    def sync(self, version: int | None = None) -> EngineSync | None:
        """Moves the engine to a version.

        Fetches and verifies while the engine generates, then pauses it, writes what changed,
        empties the prefix cache, tags later outputs with the version, and resumes. An engine that
        sleeps in part, its weights awake, is neither paused nor resumed. An older version is
        restored from the engine's checkpoint or an anchor, and written as a whole.

        Args:
            version: The version, at which the engine stays until another call. Default: the newest.

        Returns:
            The move. None: the version was live already.

        Raises:
            PulseError: The engine goes on with the weights that it has, and its prefix cache was
                computed with these. If the engine refuses to empty the cache, the next sync begins
                with that.
        """
        with self._lock:
            return self._switch(version) if self._make_ready(version) else None

    def wait_for_version(self, poll_seconds: float = 1.0) -> None:
        """Sleeps between two calls of `sync`, or until `close`.

        Args:
            poll_seconds: For so long, a quarter more or less.

        Raises:
            InputError: ``poll_seconds`` is no such number.
        """
        checked_number("poll_seconds", poll_seconds, maximum=LONGEST_POLL)
        self._closing.wait(jittered(poll_seconds))

    def admit(
        self,
        version: int | None = None,
        *,
        minimum: int | None = None,
        timeout_seconds: float = 60.0,
    ) -> Generation:
        """Waits for a version, and notes which versions are live around a generation::

            with handle.admit(minimum=trained - 2) as generation:
                outputs = llm.generate(prompts)
            if generation.spans_update: ...

        If no thread follows (`follow`), this call syncs meanwhile; a handle with ``follow=False``
        syncs to just that ``version``. The engine may move on before the generation ends: with
        ``in_flight="wait"`` of `connect` requests end first. Each call asks the engine's workers
        twice, so admit many requests together. Several threads may call it, also during a sync.

        Args:
            version: Wait until this version is live.
            minimum: Wait until a version of at least this number is live.
            timeout_seconds: Wait for at most so long.

        Returns:
            The notes, to be ended after the generation.

        Raises:
            StateMismatch: The engine is past ``version``.
            EngineUnavailable: The version is not live within ``timeout_seconds``.
            InputError: ``version`` and ``minimum`` were both given, or the handle was closed.
            PulseError: What `sync` raises, if it is not retryable.
        """
        if version is not None and minimum is not None:
            raise InputError("give a version or a minimum, not both")
        least = version if version is not None else minimum
        deadline = time.monotonic() + checked_number("timeout_seconds", timeout_seconds)
        backoff, doubt = Backoff(_POLL_SECONDS, _LONGEST_WAIT), ""
        while True:
            live = None
            try:
                session, live, root = self._live()
                if least is None or (live is not None and live >= least):
                    break
                if not self._follows:
                    self.sync(None if self._info.follow else version)
            except PulseError as error:
                if not error.retryable:
                    raise
                doubt = f": {error}"
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"version {live} is live, not {least}, after {timeout_seconds:g} "
                    f"seconds{doubt}",
                    hint="See whether the trainer publishes, and what sync() raises, or follow() "
                    "hands to on_error.",
                )
            if self._closing.wait(backoff.wait()):
                raise InputError("the handle was closed")
        if version is not None and live != version:
            raise StateMismatch(
                f"version {live} is live, past {version}",
                hint="Admit by a minimum, or go back by sync().",
            )
        return Generation(self, session, live, root)

    def audit(self, *, functional: bool = False) -> tuple[str, ...]:
        """Reads all live parameters back and compares them with the digests of the live version.

        The engine generates nothing meanwhile. An engine that derives parameters from its weights
        is moved to the newest version first: these are compared with what it derives from its host
        state.

        Args:
            functional: Also compare what the modules compute. The engine makes a second model, for
                which it needs the memory; both get weights of trial, and the live ones are restored
                then. `connect` or the first update does it once; no sync repairs what it finds.

        Returns:
            The names of the tensors that differ, which the next sync writes again, and of the
            modules that do not compute with the live parameters. Empty if all is well.

        Raises:
            InputError: Nothing was synced yet.
        """
        with self._lock:
            if self._leader(self._ask("status"))["derives"]:
                self.sync()
            differing = list(self._leader(self._ask("audit"))["differing"])
            if functional:
                differing += self._leader(self._ask("prove"))["differing"]
            return tuple(differing)

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Generates one completion, and returns its record.

        The record has the weights of each part, since a sync may come between. Several threads may
        call it, except on a ``vllm.LLM``.

        Args:
            prompt: The prompt's token ids.
            sampling: Parameters in the engine's terms, and "max_tokens", which every engine takes.
            seed: The request's seed. Default: a random one if tokens are sampled.
            metadata: Anything to keep in the record.

        Returns:
            The record.

        Raises:
            InputError: More than one completion was asked for, or nothing to complete was given.
            EngineError: The engine refused, or some tokens come from weights that are no known
                version: of an engine that another handle, or nobody, has synced. EngineUnavailable
                if it did not answer.
        """
        wanted = {name: value for name, value in (sampling or {}).items() if value is not None}
        found = no_sampling(wanted)
        if wanted.pop("n", 1) != 1 or found or not prompt:
            raise InputError(
                "a generation has one prompt, one completion, and the seed as an argument"
                + (f"; {found!r} is no sampling parameter" if found else "")
            )
        if seed is None and wanted.get("temperature", 1.0) != 0:
            seed = new_seed()
        before = self._tagged
        made = self._transport.generate(
            list(prompt), wanted if seed is None else wanted | {"seed": seed}
        )
        return Rollout.of(
            prompt,
            stream=self._info.stream,
            weights=self._weights_of(made, before),
            engine=self._engine[0],
            engine_version=self._engine[1],
            sampling=wanted,
            seed=seed,
            token_ids=tuple(made.tokens),
            logprobs=tuple(made.logprobs),
            metadata=dict(metadata or {}),
        )

    def _weights_of(self, found: Generated, before: int | None) -> tuple[Weights, ...]:
        """Which weights have generated it. An engine that does not report them has had those of
        ``before`` first, and those of now last; from which token on is unknown."""
        after = self._tagged
        tags: list[tuple[str, int | None]] = [*(found.tags or [(str(before), 0)])]
        if not found.tags and after != before:
            tags.append((str(after), None))
        weights = [
            Weights(int(tag), self._roots[int(tag)], start)
            for tag, start in tags
            if tag.isdecimal() and int(tag) in self._roots
        ]
        if len(weights) < len(tags):
            raise EngineError(
                f"tokens come from weights with the tag {', '.join(tag for tag, _ in tags)!r}, "
                f"no known version of {self._info.stream!r}",
                hint="Call sync() first. One handle drives an engine, and knows the versions "
                "that it has made live.",
            )
        return tuple(weights)

    def replay(self, rollout: Rollout) -> Replay:
        """Generates a rollout again, each part with its exact weights, and compares
        (docs/replay.md).

        The engine stays at the last of these weights. Generate nothing else meanwhile.

        Args:
            rollout: The record.

        Returns:
            What differs. If something cannot be repeated, `Replay.reason` says why.

        Raises:
            PulseError: What `sync` and `generate` raise.
        """
        return replay(self, rollout)

    def follow(
        self,
        *,
        on_sync: Callable[[EngineSync], None] | None = None,
        on_error: Callable[[PulseError], None] | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        """Starts a thread that keeps the engine at the newest version, until `close`.

        Args:
            on_sync: Called after each move.
            on_error: Called with each error. The thread goes on after retryable errors
                (`PulseError.retryable`), and ends with any other.
            poll_seconds: The time between two polls, as of `wait_for_version`.

        Raises:
            InputError: The handle was closed, or follows already.
        """
        if self._closing.is_set():
            raise InputError("the handle was closed")
        if self._follows:
            raise InputError("the handle follows already")
        if poll_seconds <= 0:
            raise InputError(f"poll_seconds must be more than 0, not {poll_seconds}")

        def keep_up() -> None:
            backoff = Backoff(2 * poll_seconds, _MAX_BACKOFF)
            self.wait_for_version(poll_seconds)
            while not self._closing.is_set():
                try:
                    done = self.sync()
                # Errors of the engine as well: a thread that ends in silence would go unnoticed.
                except Exception as error:
                    known = as_known(error)
                    if on_error is not None:
                        on_error(known)
                    if not known.retryable:
                        return
                    self._closing.wait(backoff.wait())
                else:
                    backoff.reset()
                    if done is not None and on_sync is not None:
                        on_sync(done)
                    self.wait_for_version(poll_seconds)

        self._follower = threading.Thread(target=keep_up, name="pulse-follow", daemon=True)
        self._follower.start()

    def close(self) -> None:
        """Ends following. The engine keeps its weights. May be called twice."""
        self._closing.set()
        if self._follower is not None and self._follower is not threading.current_thread():
            self._follower.join()
        with self._lock, suppress(PulseError):  # an engine that is gone follows nothing any more
            self._transport.pulse("close", self._owner)

    def __repr__(self) -> str:
        return f"<EngineHandle of {self._info.stream!r} in {self._info.store!r}>"

    # -- the parts

    @property
    def _follows(self) -> bool:
        return self._follower is not None and self._follower.is_alive()

    def _live(self) -> tuple[int, int | None, str | None]:
        """(which session it is of this handle, the version that is live, its root). The latter are
        None in an engine that was restarted, until the next sync. Needs no lock: nothing is
        changed."""
        session = self._sessions
        for status in self._ask("status"):
            if status.get("leader"):
                return session, status["version"], status["root"]
        return session, None, None

    def _open(self, version: int | None = None) -> None:
        """Starts a session in the engine, unless another handle has one. It stages ``version``
        first, None: the newest."""
        self._tagged = None
        if any(status["open"] for status in self._ask("hello")) and not self._asleep:
            with suppress(PulseError):  # there may be nothing to end
                self._transport.recover()
        try:
            self._transport.init(asdict(replace(self._info, version=version)))
        except Exception as error:
            raise self._reason(error) from error
        self._sessions += 1

    def _prove(self) -> None:
        """Has the engine learn and prove its map for the tensors of the stream. Left to the first
        sync where nothing can be staged yet, which says why."""
        try:
            leader = self._staged(self._leader(self._ask("status"))["asked"])
        except PulseError:  # an empty stream, a store that is away
            return
        if leader["left"]:
            leader = self._leader(self._ask("prepare"))
        self._tag_held(leader)

    def _make_ready(self, version: int | None) -> bool:
        """Prepares the engine for a switch to ``version`` while it generates. Returns whether a
        switch is due: False, if the version is live already."""
        # 1. What failed calls left; then fetch, verify and lay out in the engine's workers.
        if not any(status["open"] for status in self._ask("status")):
            self._open()  # the server was restarted
        self._settle()
        leader = self._stage(version)
        if WEIGHTS in self._asleep:
            raise asleep()
        live, newest = leader["version"], leader["held"]
        if live is not None and live == (newest if version is None else version):
            self._tag_held(leader)
            return False
        if version is not None and version != newest:
            # The engine's host state only ever moves forward: another session begins from its
            # checkpoint.
            self._open(version)
            leader = self._stage(version)
            if leader["held"] != version:
                raise StateMismatch(
                    f"version {leader['held']} is staged, not {version}", hint="Sync again."
                )
        # 2. The map is traced and layers are derived, in pieces between two steps of the engine.
        deadline = time.monotonic() + self._timeout
        while leader["left"]:
            before, leader = leader, self._leader(self._ask("prepare"))
            if leader["version"] is not None and leader["version"] == leader["held"]:
                self._tag_held(leader)
                return False
            if leader["left"] == before["left"]:
                if time.monotonic() > deadline:
                    raise EngineError(f"the engine was not prepared in {self._timeout:.0f} seconds")
                time.sleep(_POLL_SECONDS)
        return True

    def _stage(self, version: int | None) -> Status:
        """Lets the engine's workers poll the store, and waits for what they find."""
        return self._staged(self._leader(self._ask("stage", version))["asked"])

    def _staged(self, asked: int) -> Status:
        """Waits until the engine's workers have polled the store ``asked`` times, and hold what
        they found."""
        deadline = time.monotonic() + self._timeout
        while True:
            statuses = self._ask("status")
            leader = self._leader(statuses)
            if leader["answered"] >= asked:
                raise_for_status("error", statuses)
                if leader["held"] is None:
                    raise EmptyStream(f"nothing was synced from {self._info.stream!r} yet")
                if all(status["staged"] == leader["staged"] for status in statuses):
                    return leader
            if time.monotonic() > deadline:
                raise EngineError(f"the engine has staged nothing in {self._timeout:.0f} seconds")
            time.sleep(_POLL_SECONDS)

    def _switch(self, version: int | None) -> EngineSync | None:
        transport = self._transport
        started = time.perf_counter()
        with self._pause():
            try:
                transport.start()
                # From here on, whatever becomes of the answers.
                self._stale = self._untagged = True
                transport.update(version, self._owner)
            except Exception as error:
                raise self._reason(error) from error
            status = self._leader(self._ask("status"))
            self._note(status)
            self._tagged = status["version"]
            transport.finish(str(status["version"]))
            self._untagged = False
            self._reset_cache()
        return EngineSync(
            version=status["version"],
            pause_seconds=time.perf_counter() - started,
            **{name: status["report"][name] for name in _REPORTED},
        )

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Nothing is generated within. An engine that could not be resumed is by the next sync."""
        if self._asleep:  # it generates nothing until it is woken up
            yield
            return
        self._paused = True
        try:
            self._transport.pause(self._in_flight)
            yield
        except BaseException:
            with suppress(PulseError):  # the first error is the one to raise
                self._resume()
            raise
        self._resume()

    def _resume(self) -> None:
        if not self._asleep:  # it may have been put to sleep meanwhile
            self._transport.resume()
        self._paused = False

    def _settle(self) -> None:
        """Finishes what failed calls have left: the tag of the live version, the prefix cache, the
        end of a pause."""
        if self._stale or self._untagged:
            with self._pause():
                if self._untagged:
                    self._tag()
                self._reset_cache()
        elif self._paused:
            self._resume()

    def _tag(self) -> None:
        """Ends an update of which it is not known whether it was made, with the version that is
        live."""
        leader = self._leader(self._ask("status"))
        live = leader["version"]
        if live is not None:
            self._note(leader)
            self._tagged = live
            try:
                self._transport.finish(str(live))
            except EngineUnavailable:
                raise
            except Exception:  # it has ended
                self._transport.tag(str(live))
        self._untagged = False

    def _tag_held(self, leader: Status) -> None:
        """Tags what comes from a version that the engine holds without an update: that of its
        checkpoint."""
        if leader["version"] not in (None, self._tagged):
            self._note(leader)
            self._transport.tag(str(leader["version"]))
            self._tagged = leader["version"]

    def _note(self, leader: Status) -> None:
        """Notes what the tag of the live version stands for, before anything has it."""
        self._engine = tuple(leader["engine"])
        self._roots.pop(leader["version"], None)
        self._roots[leader["version"]] = leader["root"]
        if len(self._roots) > _MAX_ROOTS:
            del self._roots[next(iter(self._roots))]

    def _reset_cache(self) -> None:
        reset = self._transport.reset_prefix_cache
        if not reset(False) and not reset(True):
            raise EngineError(
                "the engine did not empty its prefix cache, which was filled by the old weights",
                hint="The new weights are live. The next sync tries again.",
            )
        self._stale = False

    def _reason(self, error: Exception) -> PulseError:
        """What the workers say of a call that failed, and have undone then; the error itself if
        they say nothing."""
        statuses: list[Status] = []
        try:
            statuses = self._ask("status")
            raise_for_status("error", [status for status in statuses if status.get("failed", True)])
        except PulseError as known:
            if any(status.get("failed") for status in statuses):
                self._stale = self._untagged = False
            return known
        return as_known(error)

    def _ask(self, action: str, version: int | None = None) -> list[Status]:
        statuses = self._transport.pulse(action, self._owner, version)
        raise_for_status("failure", statuses)
        self._asleep = frozenset(part for status in statuses for part in status.get("asleep", ()))
        return statuses

    def _leader(self, statuses: list[Status]) -> Status:
        for status in statuses:
            if status.get("leader"):
                return status
        raise EngineError(
            "the engine follows no stream any more",
            hint="It was restarted, or closed: connect again.",
        )


def as_known(error: Exception) -> PulseError:
    """``error`` itself, or an EngineError for what else an engine raises."""
    if isinstance(error, PulseError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


def switch_together(handles: Sequence[EngineHandle], version: int) -> list[EngineSync | None]:
    """Moves several engines to ``version`` together: all of them, or none.

    Every engine fetches and verifies the version while it generates. The engines switch at the same
    time, and only after all of them have staged the version. No handle may `follow` by itself, or
    be used by another thread meanwhile.

    Args:
        handles: The engines, a handle each.
        version: The number of the version.

    Returns:
        What `EngineHandle.sync` returns of each engine, in the order of ``handles``: None if the
        version was live there already.

    Raises:
        InputError: A handle follows by itself.
        PulseError: What `EngineHandle.sync` raises. If an engine cannot stage the version, none has
            switched. If one cannot switch, the others go back to the version that they had; an
            engine whose weights were no version before stays at the new one.
    """
    if any(handle._follows for handle in handles):
        raise InputError(
            "a handle follows the newest version by itself",
            hint="Connect again, and do not call follow().",
        )
    with ThreadPoolExecutor(max(len(handles), 1)) as pool:
        # 1. Stage everywhere. After a failure, let the engines stage the newest version again.
        staged = [pool.submit(handle._make_ready, version) for handle in handles]
        failures = [error for each in staged if (error := each.exception())]
        if failures:
            for handle in handles:
                with suppress(PulseError):  # the first failure is the one to raise
                    handle._ask("stage")
            raise failures[0]

        # 2. Switch everywhere. After a failure, move those back that have switched.
        due = [ready.result() for ready in staged]
        moves = [
            pool.submit(handle._switch, version) if ready else None
            for handle, ready in zip(handles, due, strict=True)
        ]
        failures = [error for move in moves if move and (error := move.exception())]
        if failures:
            for handle, move in zip(handles, moves, strict=True):
                done = None if move is None or move.exception() else move.result()
                if done is not None and done.previous is not None:
                    with suppress(PulseError):
                        handle.sync(done.previous)
            raise failures[0]
        return [move.result() if move else None for move in moves]
