"""The workers of one engine on one node: who leads, what they share, how they agree, and what they
stage while the engine generates.

One worker, the leader, follows the stream: its background thread fetches, verifies and lays out a
version on the host. The others read what it staged from one file in shared memory, so that a node
fetches, verifies and decodes each version once and holds one host state.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .._util.collective import Alone, GlooTransport, RankGroup
from ..errors import EngineError, PulseError
from ..events import Metadata, Synced
from ..state.bits import UIntArray, differing
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State
from ..sync.subscriber import Subscriber
from ..sync.update import Receipt, TensorUpdate, Update
from .live import Change
from .transport import InitInfo

T = TypeVar("T")
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "pulse-engine-"
_OWNER = "owner"
_ABANDONED_SECONDS = 60.0
_TIMEOUT_SECONDS = 1800.0  # a large model is loaded, packed and compared between two messages
_PIECE_ELEMENTS = 1 << 24
POLL_SECONDS = 1.0
_LOCAL_POLL_SECONDS = 0.02
_HOLD_SECONDS = 30.0
_CLOSE_SECONDS = 0.5


class Node:
    """This worker among those of its node. ``leader``: whether it is the one that follows the
    stream.

    ``world``: the group of the engine's workers, with ``ranks`` and ``world_size`` as the engines'
    own have; None: this worker is the only one. All methods are collective: every worker of the
    engine calls them in the same order.
    """

    def __init__(self, world: Any) -> None:
        self.folder: Path | None = None
        self._owned: int | None = None
        self._engine = self._node = RankGroup(Alone())
        if world is not None and world.world_size > 1:
            self._engine = _group(world.ranks)
            places = self.gathered((socket.gethostname(), _boot()))
            mine = places[self._engine.rank]
            here = [rank for rank, place in zip(world.ranks, places, strict=True) if place == mine]
            if len(here) == self._engine.size:
                self._node = self._engine
            elif len(here) > 1:
                self._node = _group(here)
        self.rank, self.size = self._node.rank, self._node.size
        self.leader = self.rank == 0
        #: Whether all workers of the engine are on this node.
        self.alone = self.size == self._engine.size
        #: Whether this is the engine's last worker.
        self.last = self._engine.rank == self._engine.size - 1

    def open_folder(self) -> None:
        """Makes ``folder``, in shared memory, where several workers share it."""
        if self.size > 1:
            made = ""
            if self.leader:
                parent = _SHARED_MEMORY
                if not os.access(parent, os.W_OK):
                    parent = Path(tempfile.gettempdir())
                _remove_abandoned(parent)
                made = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
                self._owned = _locked(Path(made))
            self.folder = Path(self.shared(made))

    def shared(self, value: T) -> T:
        """The leader's ``value``."""
        found: T = self._node.from_first(lambda: value, pickle.dumps, pickle.loads)
        return found

    def common(self, value: T) -> T:
        """The ``value`` of the engine's first worker, across its nodes."""
        found: T = self._engine.from_first(lambda: value, pickle.dumps, pickle.loads)
        return found

    def gathered(self, value: T) -> list[T]:
        """What each worker of the engine gives."""
        return self._engine.each(lambda: value, pickle.dumps, pickle.loads)

    def on_node(self, value: T) -> list[T]:
        """What each worker of the node gives."""
        return self._node.each(lambda: value, pickle.dumps, pickle.loads)

    def first(self, value: T | None) -> T | None:
        """The ``value`` of the engine's first worker that has one."""
        return next((found for found in self.gathered(value) if found is not None), None)

    def union(self, names: Collection[str]) -> list[str]:
        """The ``names`` of all workers of the engine."""
        return sorted({name for found in self.gathered(sorted(names)) for name in found})

    def barrier(self) -> None:
        """Returns when all workers of the node have called it."""
        self._node.together(lambda: None)

    def window(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that the workers of the node share."""
        if self.folder is None:
            return np.empty(nbytes, np.uint8)
        file = self.folder / "window"
        self._node.together(lambda: _reserve(file, nbytes) if self.leader else None)
        view = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        self.barrier()
        if self.leader:
            file.unlink()
        return view

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on this worker; raises on all of the engine's if it raises on
        one."""

        def run() -> T:
            try:
                return work()
            except PulseError:
                raise
            # of torch, or of the model: a worker that ends in silence would be waited for
            except Exception as error:
                raise PulseError(
                    f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                ) from error

        return self._engine.together(run)

    def close_folder(self) -> None:
        """Removes what was shared. Not collective."""
        if self.leader and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._owned is not None:
            os.close(self._owned)
        self.folder = self._owned = None


def _group(ranks: Sequence[int]) -> RankGroup:
    return RankGroup(GlooTransport(ranks, _TIMEOUT_SECONDS, owner="node"))


def _reserve(file: Path, nbytes: int) -> None:
    """Makes a file of that size. Raises PulseError if there is no room: writing to memory that is
    not there would kill the process."""
    try:
        with file.open("wb") as handle:
            handle.truncate(nbytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle.fileno(), 0, nbytes)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise PulseError(
            f"no room for {nbytes} bytes in {file.parent.parent}: {error.strerror}",
            hint="Give the container more shared memory (docker: --shm-size).",
        ) from error


def _locked(folder: Path) -> int:
    """A lock on ``folder`` for as long as this process lives, or until it is closed."""
    lock = os.open(folder / _OWNER, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of workers that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _ABANDONED_SECONDS:
                continue  # perhaps it was just made
            lock = os.open(folder / _OWNER, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


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
            known = before if before is not None and name in before else None
            if indices is None and known is not None and known.spec(name) == tensor.spec:
                indices = _differing(known, tensor)
                values = values[indices]
            elif indices is None:
                values = values.copy()  # a view of the host state, which moves on
            if len(values):
                changes[name] = (indices, values)
        return cls(sequence, update.version, update.previous, changes)

    def write(self, folder: Path) -> Path:
        """Writes the file for `publish_staged` and returns it."""
        buffers: list[pickle.PickleBuffer] = []
        fields = pickle.dumps(self, 5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        header = memoryview(pickle.dumps((fields, [array.nbytes for array in arrays])))
        aside = folder / f".{self.sequence:012d}"
        try:
            with aside.open("wb") as file:
                file.write(len(header).to_bytes(8, "little"))
                # Arrays begin at multiples of 8 bytes, so that they can be mapped.
                for part in (header, *arrays):
                    file.write(part)
                    file.write(bytes(-len(part) % 8))
        except BaseException:
            aside.unlink(missing_ok=True)  # shared memory that is full must not stay so
            raise
        return aside

    @classmethod
    def load(cls, file: Path) -> Staged:
        """The update in ``file``, its arrays mapped from there."""
        raw = np.memmap(file, np.uint8, "r")
        start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        fields, lengths = pickle.loads(raw[8:start].tobytes())
        arrays = []
        for length in lengths:
            start += -start % 8
            arrays.append(raw[start : start + length])
            start += length
        staged: Staged = pickle.loads(fields, buffers=arrays)
        return staged


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


class Version(NamedTuple):
    """A version of the stream; the leader alone knows more of it than the number."""

    number: int
    digest: StateDigest | None = None
    metadata: Metadata | None = None
    stream_id: str | None = None
    aliases: dict[str, str] | None = None


class Prepared(NamedTuple):
    """A staged update, which leads to ``target``, and where its ``changes`` go on this worker: None
    until the map is known."""

    staged: Staged
    target: Version
    changes: list[Change] | None


@dataclass(slots=True)
class Cost:
    """What the staged update took, in seconds and bytes: waiting for the store, and all else on the
    host. ``created``: when its version was committed, by the publisher's clock."""

    fetch_seconds: float = 0.0
    verify_seconds: float = 0.0
    fetched_bytes: int = 0
    created: float | None = None


class Staging:
    """Follows the stream on the node's leader, and what the leader stages on the other workers.

    ``info``: which stream, and how; ``base``: the path of the checkpoint that the engine loaded.
    ``lay_out`` turns a staged update into this rank's changes, None while the map is unknown.
    ``asked``: how often the thread was asked to poll the store; ``answered``: how many of these
    it has done; ``error``: that of the last time; ``cost``: that of the staged update.
    """

    def __init__(
        self,
        node: Node,
        info: InitInfo,
        base: str | None,
        lay_out: Callable[[Staged], list[Change] | None],
    ) -> None:
        self._node = node
        # That of this session: the next one must not find what a late thread stages.
        self._folder = node.folder
        self._lay_out = lay_out
        self._follow = info.follow
        self._base = base
        self.cost, self._cost = Cost(), Cost()
        self.asked, self.answered = 1, 0
        self.error: PulseError | None = None
        self.prepared: Prepared | None = None
        self.held: Version | None = None
        self.base_digest: StateDigest | None = None
        #: Held while the host state moves.
        self.lock = threading.RLock()
        #: Held while something is staged: what all workers take over must not be replaced
        #: meanwhile.
        self.gate = threading.Lock()
        self.subscriber: Subscriber | None = None
        if node.leader:
            self.subscriber = Subscriber(
                info.store,
                stream=info.stream,
                base=base,
                cache=info.cache,
                trusted_keys=info.trusted_keys or None,
                stream_id=info.stream_id,
                on_event=self._heard,
            )
            self.subscriber.allow_recreated = info.allow_recreated
        self._receipt: Receipt | None = None
        self._sequence = 0
        self._wanted = info.version
        self._held_until = 0.0
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse-staging", daemon=True)
        self._thread.start()

    def ask(self, version: int | None) -> None:
        """Lets the thread poll at once: for ``version``, or the newest."""
        self._wanted = version
        self.release()
        self.asked += 1
        self._wake.set()

    def wait_for(self, version: int, seconds: float) -> None:
        """Lets the thread poll until it holds ``version``; returns at once where another process of
        the node leads. Raises what it last met in the store, or EngineError, once ``seconds`` have
        passed."""
        deadline, again = time.monotonic() + seconds, 0.0
        while self.subscriber is not None and (self.held is None or self.held.number != version):
            now, answered = time.monotonic(), self.answered >= self.asked
            failure = self.error
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

    def host_version(self) -> Version | None:
        """The version that the host holds; leader only. `held` is that for callers that must not
        wait for the thread."""
        host = self.subscriber
        if host is None or host.version is None:
            return None
        return Version(
            host.version, host.digest, host.manifest.metadata, host.stream_id, host.state.aliases
        )

    def base_state(self) -> State | None:
        """The checkpoint that the engine loaded; leader only."""
        return State.of(self._base) if self._node.leader and self._base is not None else None

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
            elif (self._follow or self.asked > self.answered) and not self._held:
                asked = self.asked
                if self._poll(self._wanted):
                    self.answered = asked
            self._wake.wait(_LOCAL_POLL_SECONDS if self.subscriber is None else POLL_SECONDS)
            self._wake.clear()
        if self.subscriber is not None:
            self.subscriber.close()

    def _poll(self, version: int | None) -> bool:
        """Whether the thread has looked: the host state may be held."""
        assert self.subscriber is not None
        try:
            if self._base is not None and self.base_digest is None:
                self.base_digest = state_digest(State.of(self._base))
            with self.lock:
                if self._held:
                    return False
                update, target = self.subscriber.sync(version), self.host_version()
                if update is not None and target is not None and not self._has(target):
                    self._stage(update, target)
                self.held = target
            self.error = None
        except PulseError as error:
            self.error = error
        # part of the status: a thread that ends in silence would look like a quiet stream
        except Exception as error:
            self.error = PulseError(f"{type(error).__name__}: {error}")
        return True

    @property
    def _held(self) -> bool:
        return time.monotonic() < self._held_until

    def _has(self, target: Version) -> bool:
        """By the root as well: a stream that was recreated counts from 0 again."""
        known = self.prepared.target if self.prepared is not None else None
        if known is None or known.digest is None or target.digest is None:
            return False
        return (known.number, known.digest.root) == (target.number, target.digest.root)

    def _stage(self, update: Update, target: Version) -> None:
        self._sequence += 1
        started = time.perf_counter()
        staged, file = Staged.of(update, self._sequence, self._base_at(update.previous)), None
        if self._folder is not None:
            file = staged.write(self._folder)
            staged = Staged.load(file)  # so that all workers hold one copy
        prepared = Prepared(staged, target, self._lay_out(staged))
        with self.gate:
            if file is not None:
                publish_staged(file)
            self.prepared = prepared
            # Not the update: while it is alive, the host state would move in a copy.
            self._receipt = update._receipt
        self._cost.verify_seconds += time.perf_counter() - started
        self.cost, self._cost = self._cost, Cost()

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
                self.prepared = Prepared(staged, Version(staged.version), self._lay_out(staged))
            self.error = None
        except Exception as error:  # raised when the update waits for it
            self.error = PulseError(f"{type(error).__name__}: {error}")

    def _heard(self, event: Any) -> None:
        if isinstance(event, Synced):
            fetch = event.phases.get("fetch", 0.0) + event.phases.get("plan", 0.0)
            self._cost.fetch_seconds += fetch
            self._cost.verify_seconds += max(0.0, event.seconds - fetch)
            self._cost.fetched_bytes += event.fetched_bytes
            self._cost.created = time.time() - event.lag_seconds
