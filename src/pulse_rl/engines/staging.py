"""What a node prepares while the engine generates: the leader's background thread fetches, verifies
and lays out a version on the host; the other workers take it over as one file in shared memory.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import EngineError, PulseError
from ..events import Event, Metadata, Synced
from ..state.bits import UIntArray, differing
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State, TensorSpec, as_state
from ..sync.subscriber import Subscriber
from ..sync.update import Receipt, TensorUpdate, Update
from .live import Change
from .node import Node

_PIECE_ELEMENTS = 1 << 24
POLL_SECONDS = 1.0
_LOCAL_POLL_SECONDS = 0.02
_HOLD_SECONDS = 30.0
_CLOSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Staged:
    """The step from version ``previous`` (None: from anything) to ``version``, verified on the
    host.

    ``changes``: flat indices (int64, ascending; None: all elements) and new bits by the checkpoint
    tensor's name. Empty for a whole state, which is written from the host state. ``sequence`` grows
    with each staged update.
    """

    sequence: int
    version: int
    previous: int | None
    changes: dict[str, tuple[npt.NDArray[np.int64] | None, UIntArray]]

    @classmethod
    def of(cls, update: Update, sequence: int, before: State | None = None) -> Staged:
        """``before``: the state that the update starts from, where it is at hand. Of a tensor that
        has got another name since, which an update has as a whole, only what differs is staged
        then."""
        changes: dict[str, tuple[npt.NDArray[np.int64] | None, UIntArray]] = {}
        for tensor in update.tensors if not update.full else ():
            name, indices, values = tensor.spec.name, tensor.indices, tensor.values
            if (
                indices is None
                and before is not None
                and name in before
                and before.spec(name) == tensor.spec
            ):
                indices = _differing(before, tensor)
                values = values[indices]
            elif indices is None:
                values = values.copy()  # a view of the host state, which moves on
            if len(values):
                changes[name] = (indices, values)
        return cls(sequence, update.version, update.previous, changes)

    def write(self, folder: Path) -> Path:
        """Writes the file for `publish_staged` and returns it."""
        parts: list[npt.NDArray[np.uint8]] = []
        entries = []
        offset = 0
        for name, (indices, values) in self.changes.items():
            places = []
            for array in (indices, values):
                places.append(None if array is None else offset)
                if array is not None:
                    raw = array.view(np.uint8)
                    parts += [raw, np.zeros(-len(raw) % 8, np.uint8)]
                    offset += len(raw) + len(parts[-1])
            entries.append((name, len(values), values.itemsize, *places))
        header = json.dumps((self.sequence, self.version, self.previous, entries)).encode()
        header += b" " * (-len(header) % 8)
        aside = folder / f".{self.sequence:012d}"
        try:
            with aside.open("wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                for part in parts:
                    file.write(part.data)
        except BaseException:
            aside.unlink(missing_ok=True)  # shared memory that is full must not stay so
            raise
        return aside

    @classmethod
    def load(cls, file: Path) -> Staged:
        """The update in ``file``, its arrays mapped from there."""
        raw = np.memmap(file, np.uint8, "r")
        start = 8 + int.from_bytes(bytes(raw[:8]), "little")
        sequence, version, previous, entries = json.loads(bytes(raw[8:start]))
        changes: dict[str, tuple[npt.NDArray[np.int64] | None, UIntArray]] = {}
        for name, count, width, at, values_at in entries:
            indices = (
                None
                if at is None
                else np.asarray(raw[start + at : start + at + 8 * count]).view(np.int64)
            )
            values = np.asarray(raw[start + values_at : start + values_at + width * count]).view(
                f"<u{width}"
            )
            changes[name] = (indices, values)
        return cls(sequence, version, previous, changes)


def publish_staged(file: Path) -> None:
    """Lets `newest` find the written file, and removes older ones; those that are mapped stay
    mapped."""
    file.rename(file.with_name(f"staged-{file.name[1:]}"))
    for old in sorted(file.parent.glob("staged-*"))[:-1]:
        old.unlink(missing_ok=True)


def newest(folder: Path) -> Staged | None:
    """The update that was staged last."""
    for file in sorted(folder.glob("staged-*"), reverse=True):
        try:
            return Staged.load(file)
        except FileNotFoundError:
            continue  # replaced by a newer one since
    return None


def _differing(before: State, tensor: TensorUpdate) -> npt.NDArray[np.int64]:
    pieces = [np.empty(0, np.int64)]
    for start in range(0, tensor.values.size, _PIECE_ELEMENTS):
        now = tensor.values[start : start + _PIECE_ELEMENTS]
        found = differing(before.read(tensor.spec.name, start, start + now.size), now)
        pieces.append(found.astype(np.int64) + start)
    return np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A staged update and, on this worker, where its changes go; ``changes`` is None until the map
    is known. ``digest``, ``metadata`` and stream's ``stream_id`` of the version that it leads to
    has the leader alone."""

    staged: Staged
    changes: list[Change] | None
    digest: StateDigest | None = None
    metadata: Metadata | None = None
    stream_id: str | None = None


class HeldVersion(NamedTuple):
    """What the host state is, for callers that must not wait for the thread."""

    version: int
    root: str
    specs: tuple[TensorSpec, ...]
    aliases: dict[str, str]


@dataclass(slots=True)
class Cost:
    """What the staged update took, in seconds and bytes: waiting for the store, and all else on the
    host."""

    fetch_seconds: float = 0.0
    verify_seconds: float = 0.0
    fetched_bytes: int = 0


@dataclass(slots=True)
class Answers:
    """Where the thread is: how often it was ``asked`` to look at the store, how many of these it
    has ``answered``, and the ``error`` of its last look."""

    asked: int = 1
    answered: int = 0
    error: PulseError | None = None
    cost: Cost = field(default_factory=Cost)


class Staging:
    """Follows the stream on the node's leader, and what the leader stages on the other workers.

    ``lay_out`` turns a staged update into this rank's changes, None while the map is unknown.
    ``follow``: whether to look for new versions without being asked. ``version``: which one is
    looked for until another is asked for.
    """

    def __init__(
        self,
        node: Node,
        make_subscriber: Callable[[Callable[[Event], None]], Subscriber],
        *,
        base: str | None,
        follow: bool,
        lay_out: Callable[[Staged], list[Change] | None],
        version: int | None = None,
    ) -> None:
        self._node = node
        self._folder = (
            node.folder
        )  # that of this session: the next one must not find what a late thread stages
        self._lay_out = lay_out
        self._follow = follow
        self._base = base
        self._cost = Cost()
        self.state = Answers()
        self.prepared: Prepared | None = None
        self.held: HeldVersion | None = None
        self.base_digest: StateDigest | None = None
        self.lock = threading.RLock()
        """Held while the host state moves."""
        self.gate = threading.Lock()
        """Held while something is staged: what all workers take over must not be replaced
        meanwhile."""
        self.subscriber = make_subscriber(self._heard) if node.leader else None
        self._receipt: Receipt | None = None
        self._sequence = 0
        self._wanted = version
        self._held_until = 0.0
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse-staging", daemon=True)
        self._thread.start()

    def ask(self, version: int | None) -> None:
        """Lets the thread look at once: for ``version``, or the newest."""
        self._wanted = version
        self.release()
        self.state.asked += 1
        self._wake.set()

    def wait_for(self, version: int, seconds: float) -> None:
        """Lets the thread look until it holds ``version``; returns at once where another process of
        the node leads. Raises what it last met in the store, or EngineError, once ``seconds`` have
        passed."""
        deadline, again = time.monotonic() + seconds, 0.0
        while self.subscriber is not None and (self.held is None or self.held.version != version):
            now, answered = time.monotonic(), self.state.answered >= self.state.asked
            failure = self.state.error
            if now > deadline or (answered and failure is not None and not failure.retryable):
                raise failure or EngineError(
                    f"the store did not have version {version} within {seconds:g} s"
                )
            if answered and now >= again:
                self.ask(None)
                again = now + POLL_SECONDS
            time.sleep(_LOCAL_POLL_SECONDS)

    def host_state(self) -> State | None:
        """The state that the host holds; leader only."""
        return self.subscriber.state if self.subscriber is not None else None

    def base_state(self) -> State | None:
        """The checkpoint that the engine loaded; leader only."""
        return as_state(self._base) if self._node.leader and self._base is not None else None

    def hold(self) -> int | None:
        """Keeps the host state where it is, until `release`, or for half a minute; leader only.
        Returns its version, None while it is still on the move."""
        self._held_until = time.monotonic() + _HOLD_SECONDS
        if self.subscriber is None or not self.lock.acquire(blocking=False):
            return None
        self.lock.release()
        return self.subscriber.version

    def release(self) -> None:
        self._held_until = 0.0

    def acknowledge(self, version: int) -> None:
        """The live model holds ``version`` now."""
        receipt = self._receipt
        if receipt is not None and receipt.version == version:
            receipt.acknowledged = True

    def close(self) -> None:
        """Ends the thread, which may be waiting for a store: what it fetches then goes nowhere."""
        self._closed = True
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)

    # -- the thread

    def _run(self) -> None:
        while not self._closed:
            if self.subscriber is None:
                self._take_over()
            elif (self._follow or self.state.asked > self.state.answered) and not self._held:
                asked = self.state.asked
                if self._look(self._wanted):
                    self.state.answered = asked
            self._wake.wait(_LOCAL_POLL_SECONDS if self.subscriber is None else POLL_SECONDS)
            self._wake.clear()
        if self.subscriber is not None:
            self.subscriber.close()

    def _look(self, version: int | None) -> bool:
        """Whether the thread has looked: the host state may be held."""
        assert self.subscriber is not None
        try:
            if self._base is not None and self.base_digest is None:
                self.base_digest = state_digest(as_state(self._base))
            with self.lock:
                if self._held:
                    return False
                update = self.subscriber.sync(version)
                if update is not None and not self._has(update):
                    self._stage(update)
                if self.subscriber.version is not None:
                    state = self.subscriber.state
                    self.held = HeldVersion(
                        self.subscriber.version, self.subscriber.root, state.specs, state.aliases
                    )
            self.state.error = None
        except PulseError as error:
            self.state.error = error
        # part of the status: a thread that ends in silence would look like a quiet stream
        except Exception as error:
            self.state.error = PulseError(f"{type(error).__name__}: {error}")
        return True

    @property
    def _held(self) -> bool:
        return time.monotonic() < self._held_until

    def _has(self, update: Update) -> bool:
        prepared = self.prepared
        if prepared is None or prepared.digest is None or prepared.staged.version != update.version:
            return False
        return (
            prepared.digest.root == update.root
        )  # a stream that was recreated counts from 0 again

    def _stage(self, update: Update) -> None:
        assert self.subscriber is not None
        self._sequence += 1
        started = time.perf_counter()
        staged, file = Staged.of(update, self._sequence, self._base_at(update.previous)), None
        if self._folder is not None:
            file = staged.write(self._folder)
            staged = Staged.load(file)  # so that all workers hold one copy
        subscriber = self.subscriber
        prepared = Prepared(
            staged, self._lay_out(staged), subscriber.digest, update.metadata, subscriber.stream_id
        )
        with self.gate:
            if file is not None:
                publish_staged(file)
            self.prepared = prepared
            # Not the update: while it is alive, the host state would move in a copy.
            self._receipt = update._receipt
        self._cost.verify_seconds += time.perf_counter() - started
        self.state.cost, self._cost = self._cost, Cost()

    def _base_at(self, version: int | None) -> State | None:
        """The checkpoint that the engine loaded, if it is ``version``."""
        assert self.subscriber is not None
        if version is None or self.base_digest is None:
            return None
        try:
            known = self.subscriber.stream.manifest(version).root == self.base_digest.root
        except PulseError:
            return None
        return self.base_state() if known else None

    def _take_over(self) -> None:
        if self._folder is None:
            return
        known = self.prepared.staged.sequence if self.prepared else 0
        try:
            staged = newest(self._folder)
            if staged is not None and staged.sequence > known:
                self.prepared = Prepared(staged, self._lay_out(staged))
            self.state.error = None
        except Exception as error:  # raised when the update waits for it
            self.state.error = PulseError(f"{type(error).__name__}: {error}")

    def _heard(self, event: Any) -> None:
        if isinstance(event, Synced):
            fetch = event.phases.get("fetch", 0.0) + event.phases.get("plan", 0.0)
            self._cost.fetch_seconds += fetch
            self._cost.verify_seconds += max(0.0, event.seconds - fetch)
            self._cost.fetched_bytes += event.fetched_bytes
