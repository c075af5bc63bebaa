"""One worker of an engine, as a handle sees it: its session, its owner, its status."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .._util.addresses import shown
from .._util.settings import checked_path
from ..errors import ConcurrentUse, InputError, PulseError
from ..store import LocalStore, open_store
from .node import Node
from .session import Session, VerifiedMap
from .transport import WEIGHTS, InitInfo, Status, asleep

LEASE_SECONDS = 15.0
#: Of the environment in which an engine is started: addresses of stores and folders, divided by
#: spaces.
ALLOWED = "PULSE_ENGINE_ALLOWED"
_PLAIN = re.compile(r"[A-Za-z0-9._:/-]*")


def require_allowed(info: InitInfo) -> None:
    """Raises InputError where a client names a store, a cache or a checkpoint that the operator did
    not allow: another than the addresses in `ALLOWED`, and what lies below them. Where that is not
    set, any store may be read, and no folder of this machine be written or loaded: a client that
    reaches the engine may not be its operator."""
    allowed = os.environ.get(ALLOWED)
    roots = [_place(address) for address in (allowed or "").split()]
    named = {
        "store": None if allowed is None else _place(info.store),
        "cache": None if info.cache is None else _path(info.cache),
        "base": None if info.base is None else _path(info.base),
    }
    for what, place in named.items():
        if place is not None and not any(place[: len(root)] == root for root in roots):
            asked = shown(str(getattr(info, what)))[:200]
            raise InputError(
                f"the {what} {asked!r} is not allowed on this engine",
                hint=f"Its operator names what is, in {ALLOWED}.",
            )


def _path(path: object) -> tuple[str, ...]:
    """A path's parts, behind all links."""
    return Path(os.path.realpath(checked_path(path))).parts


def _place(address: object) -> tuple[str, ...]:
    """The parts of a store's address, of which the first ones are what it lies in. Raises
    InputError and StoreError."""
    if not isinstance(address, str):
        raise InputError(f"{type(address).__name__} is not a store's address")
    scheme, found, rest = address.partition("://")
    if not found or scheme == "file":
        opened = open_store(address)
        assert isinstance(opened, LocalStore)
        return _path(opened.root)
    parts = tuple(rest.rstrip("/").split("/"))
    if not {"", ".", ".."}.isdisjoint(parts) or not _PLAIN.fullmatch(rest):
        raise InputError(
            f"{shown(address)[:200]!r} is not a plain address",
            hint="Write it as scheme://bucket/prefix.",
        )
    return (f"{scheme}:", *parts)


class Worker:
    """``open_session`` makes the session for an `InitInfo`. ``workers``: returns the group for
    `Node`; called once, by all workers at the same time. ``engine``: its name and version."""

    def __init__(
        self,
        open_session: Callable[[InitInfo, Node, VerifiedMap], Session],
        workers: Callable[[], Any],
        engine: tuple[str, str] = ("", ""),
    ) -> None:
        self._engine = engine
        self._open_session = open_session
        self._workers = workers
        self._node: Node | None = None
        self._session: Session | None = None
        self._info: InitInfo | None = None
        self._map = VerifiedMap()
        self._heard_of_owner = 0.0
        self._error: PulseError | None = None
        self._asleep: set[str] = set()

    @property
    def node(self) -> Node:
        self._node = self._node or Node(self._workers())
        return self._node

    # -- what the engine calls on all of its workers

    def open(self, info: InitInfo) -> PulseError | None:
        """Starts a session, or returns why it was not started, on all workers."""
        failure = self._noting(lambda: self._begin(info))
        if failure is not None and self._info is info:
            self.close()
        return failure

    def begin_update(self) -> None:
        """Forgets the error of the last update."""
        self._error = None

    def update(
        self, version: int | None, owner: str = "", wait_seconds: float = 0.0
    ) -> PulseError | None:
        """`Session.update`, or why it failed, on all workers. ``owner``: of the handle that asks,
        if one does. ``wait_seconds``: how long to wait for a ``version`` that is not staged yet."""

        def work() -> None:
            if owner:
                self._hear(owner)
            session = self._awake()
            if version is not None and wait_seconds > 0:
                session.stage(version, wait_seconds)
            session.update(version)
            # Its owner waited for it, and could not renew the lease.
            self._heard_of_owner = time.monotonic()

        return self._noting(work)

    def close(self) -> None:
        """Ends the session."""
        if self._session is not None:
            self._session.close()
        self._session = self._info = None

    # -- what the engine does to its weights besides

    def sleep(self, parts: Iterable[str], *, lost: bool) -> None:
        """The memory of ``parts`` is taken away until `wake_up`; ``lost``: that of the weights
        comes back empty."""
        self._asleep.update(parts)
        if lost:
            self._map.lost = True
            self.forget()

    def wake_up(self, parts: Iterable[str] | None = None) -> None:
        """The memory of ``parts``, None: of all, is there again."""
        self._asleep.difference_update(self._asleep if parts is None else set(parts))

    def forget(self) -> None:
        """Something else writes to the weights, or they are lost: the next update writes all of
        them."""
        self._map.written = True
        if self._session is not None:
            self._session.forget()

    # -- what a handle asks for

    def answer(self, action: str, owner: str = "", version: int | None = None) -> Status:
        """One of the actions "hello", "status", "stage", "prepare", "audit", "prove" and "close".

        The answer is the status: "failure" is the error of this call, if it has one; "error" that
        of the last update, or of the last poll of the store. They are part of the answer because
        not every transport carries errors.
        """
        actions: dict[str, Callable[[], object]] = {
            "hello": lambda: self._require_free(owner),
            "status": lambda: None,
            "stage": lambda: self._stage(version),
            "prepare": lambda: self._awake().prepare(),
            "audit": lambda: self._awake().audit(),
            "prove": lambda: self._awake().prove(),
            "close": self.close,
        }
        try:
            if action != "hello":
                self._hear(owner)
            result = actions[action]()
            if action not in ("hello", "close"):
                self._heard_of_owner = time.monotonic()
        except PulseError as error:
            return self.status() | {"failure": described(error)}
        return self.status() | ({"differing": result} if action in ("audit", "prove") else {})

    def status(self) -> Status:
        session, error = self._session, self._error
        status: Status = {"open": session is not None, "asleep": sorted(self._asleep)}
        if session is not None and self._info is not None:
            staging = session.staging
            prepared = staging.prepared
            status |= {
                "store": self._info.store,
                "stream": self._info.stream,
                "leader": staging.subscriber is not None,
                "version": session.live_version,
                "root": session.live_root,
                "engine": list(self._engine),
                "held": staging.subscriber.version if staging.subscriber is not None else None,
                "staged": prepared.staged.version if prepared is not None else None,
                "asked": staging.asked,
                "answered": staging.answered,
                "left": session.left,
                "derives": session.derives,
                "proof": session.map.proof,
                "unused": list(session.map.unused),
                "report": session.report,
            }
            status["failed"] = error is not None
            error = error or staging.error
        return status | {"error": described(error) if error is not None else None}

    # -- the parts

    def _begin(self, info: InitInfo) -> None:
        if not info.store or not info.stream:
            raise InputError("init_info needs a store and a stream")
        require_allowed(info)
        self.node.together(lambda: self._require_free(info.owner))  # not each by its own clock
        self._require_awake()
        self.close()
        self._error = None
        self._info = info
        self._session = self._open_session(info, self.node, self._map)
        self._heard_of_owner = time.monotonic()

    def _opened(self) -> Session:
        if self._session is None:
            raise InputError(
                "the engine follows no stream", hint="Open a session first, as connect() does."
            )
        return self._session

    def _awake(self) -> Session:
        self._require_awake()
        return self._opened()

    def _require_awake(self) -> None:
        if WEIGHTS in self._asleep:
            raise asleep()

    def _require_free(self, owner: str) -> None:
        """Raises ConcurrentUse unless ``owner`` may take the engine: each call of its owner renews
        a lease."""
        if self._info is None or self._info.owner == owner:
            return
        if time.monotonic() - self._heard_of_owner < LEASE_SECONDS:
            raise ConcurrentUse(
                f"another handle drives this engine along {self._info.stream!r}",
                hint="Close the other handle; one that died is forgotten after "
                f"{LEASE_SECONDS:.0f} seconds.",
            )

    def _hear(self, owner: str) -> None:
        """Raises ConcurrentUse unless ``owner`` drives the engine."""
        if self._info is not None and self._info.owner != owner:
            raise ConcurrentUse(
                "another handle has taken this engine over",
                hint="One handle drives an engine: close this one.",
            )
        self._heard_of_owner = time.monotonic()

    def _stage(self, version: int | None) -> None:
        self._error = None
        self._opened().staging.ask(version)

    def _noting(self, work: Callable[[], object]) -> PulseError | None:
        """Runs ``work`` on all workers; where one fails, all note it."""
        try:
            self.node.together(work)
        except PulseError as failure:
            self._error = failure
            return failure
        return None


def described(error: PulseError) -> dict[str, Any]:
    """What a status says of an error."""
    return {
        "kind": error.kind,
        "message": str(error),
        "hint": error.hint,
        "retryable": error.retryable,
    }
