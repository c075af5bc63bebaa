"""The worker's side: follow a stream with a verified host state (docs/protocol.md, section 4)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from .._util.retry import LONGEST_POLL, Outage, pause
from .._util.serial import Closing, NotCopyable, SerialThread
from .._util.settings import checked_count, checked_number, checked_path
from .._util.threads import checked_threads, weak_callback
from ..errors import EmptyStream, InputError, IntegrityError, PulseError, StreamRecreated
from ..events import Listener, Synced, checked_listener, failures_to, fell_back, progress_shown
from ..hints import EmptyStreamHint
from ..state.digest import PartDigest, StateDigest
from ..state.tensors import State, StateSource
from ..store import Store, open_stores
from ..stream.manifest import Manifest
from ..stream.names import FILE, payload_digest
from ..stream.signing import trusted_by
from ..stream.stream import Stream
from .host_state import HostState
from .update import Pending, Receipt, Update, make_update

# Updates to one version whose acknowledgment still counts; a caller that ignores its updates must
# not make the list grow.
_KEPT_RECEIPTS = 8


class Subscriber(Closing, NotCopyable):
    """Hold one version of a stream in host memory and move it forward with `sync`.

    It is a context manager; see `close`. An interrupt does no harm: the work is done on a thread of
    its own, which an interrupted call leaves at a verified version. One thread at a time may use it
    (ConcurrentUse); any thread may use `Update.acknowledge`, `version` and `status`. It cannot be
    copied, pickled, or used in a forked process.

    Args:
        store: A store, or its address (see `open_store`). Or several in order of preference, the
            stream's own store last, such as ``[near, origin]`` where a `Relay` fills ``near``. The
            first store decides which version is the newest. The next one decides if the first is
            unavailable or damaged, or has been behind for `patience_seconds`.
        stream: The stream's name.
        base: A state that the worker has already, such as its checkpoint's path. If its root is
            that of a version of the stream, the first sync starts there instead of at an anchor.
            Default: none.
        cache: A folder that keeps up to 64 GiB of payloads in ``pulse-cache``, so that a restart
            does not download them again. Not with ``select``. Default: no cache.
        trusted_keys: Ed25519 public keys, 64 hexadecimal digits each (extra ``[sign]``). Only
            manifests that one of them has signed are accepted. Default: all are accepted.
        stream_id: The stream's ID (`Manifest.stream_id`). Default: that of the first version found;
            later versions of another stream of this name are skipped.
        select: Names of tensors, or patterns such as ``"layers.0.*"``. Only these are fetched,
            held, verified and shown. Default: all.
        state: A folder of this worker's own in which the state is a mapped file instead of memory.
            A worker that starts again with it continues from the version in it, once that is
            verified. Not with ``select``. Default: memory.
        threads: The maximum number of threads. Default: one per core.
        on_event: Called with the events of `pulse_rl.events`. Default: nobody.
    Raises:
        InputError: A setting is out of range, or two exclude each other.
        StoreError: The store cannot be opened.
        ConcurrentUse: Another process uses the folder ``state``.
    """

    _idle_seconds: ClassVar[float | None] = None
    _goes_back: ClassVar[bool] = False

    def __init__(
        self,
        store: Store | str | Sequence[Store | str],
        *,
        stream: str,
        base: StateSource | None = None,
        cache: str | os.PathLike[str] | None = None,
        trusted_keys: Collection[str] | None = None,
        stream_id: str | None = None,
        select: str | Collection[str] | None = None,
        state: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        on_event: Listener | None = None,
    ) -> None:
        # 1. Check the settings, and open the stores.
        checked_threads(threads)
        checked_listener(on_event)
        opened = open_stores(store)
        if select is not None and cache is not None:
            raise InputError(
                "select and cache do not go together: what is selected is fetched in ranges, "
                "which are not kept",
                hint="Give one of the two.",
            )
        if select is not None and state is not None:
            raise InputError(
                "select and state do not go together: a folder holds whole states",
                hint="Give one of the two.",
            )
        # 2. One stream per store. The callback is weak: it would keep a dropped subscriber alive.
        trusted = trusted_by(trusted_keys)
        streams = [
            Stream(
                self._read_through(each, cache),
                stream,
                trusted,
                stream_id=stream_id,
                on_refused=weak_callback(self._refused),
            )
            for each in opened
        ]
        self.stream = streams[0]
        from ..follow.failover import Failover

        self._failover = Failover(streams, on_event)
        self._absence = EmptyStreamHint(opened[-1], stream, on_event)
        self._pinned = stream_id is not None
        self._allow_recreated = False
        self._serial = SerialThread("Subscriber", self._idle_seconds)
        # 3. Optional parts, imported on demand.
        self._selection = None
        if select is not None:
            from ..follow.selection import Selection

            self._selection = Selection(select)
        self._folder = None
        if state is not None:
            from ..follow.state_folder import StateFolder

            self._folder = StateFolder(state, "state")
        # 4. The host state, empty until the first sync.
        self._host = self._empty_host(threads, on_event)
        self._base = base
        self._threads = threads
        self._listener = on_event
        self._delivered: list[Receipt] = []
        self._files: dict[str, bytes] = {}
        self._known: Manifest | None = None
        # The checkpoint on disk that was last written or found: its unchanged parts need not be
        # written again.
        self._checkpoint: Path | None = None

    def _read_through(self, store: Store, cache: str | os.PathLike[str] | None) -> Store:
        """The store with the cache in front of it, if there is one."""
        if cache is None:
            return store
        from ..stores.cached import CachedStore

        return CachedStore(store, checked_path(cache), payload_digest)

    @property
    def status(self) -> str:
        """The state: "ready" at the verified `version`, "empty" without one, or "poisoned".

        The state is poisoned if an interrupt stopped an apply; the next `sync` verifies or restores
        it.
        """
        if self._host.poisoned:
            return "poisoned"
        return "empty" if self._host.version is None else "ready"

    @property
    def patience_seconds(self) -> float:
        """Seconds that a nearer store may be unavailable or behind before a farther one decides.

        Default: 30. Setting it raises InputError below 0.
        """
        return self._failover.patience_seconds

    @patience_seconds.setter
    def patience_seconds(self, seconds: float) -> None:
        self._failover.patience_seconds = checked_number("patience_seconds", seconds)

    @property
    def allow_recreated(self) -> bool:
        """Whether `sync` starts over with the new stream if the stream is deleted and recreated, or
        with the store's history if the store went back in time. Until it is set, `sync` raises
        StreamRecreated, of which StreamForked is a kind. Raises InputError where ``stream_id`` is
        given."""
        return self._allow_recreated

    @allow_recreated.setter
    def allow_recreated(self, allowed: bool) -> None:
        if allowed and self._pinned:
            raise InputError(
                "allow_recreated contradicts a fixed stream_id", hint="Give one of the two."
            )
        self._allow_recreated = allowed

    @property
    def version(self) -> int | None:
        """The version that the host state holds; None before the first sync."""
        return self._host.version

    @property
    def stream_id(self) -> str | None:
        """The ID of the followed stream, 32 hexadecimal digits; None until the first sync."""
        return self.stream.stream_id

    @property
    def root(self) -> str:
        """The verified root of `state`, 64 hexadecimal digits."""
        return self.digest.root

    @property
    def digest(self) -> StateDigest:
        """The digest tree of `state`, with which `pulse_rl.audit` compares a live model."""
        return self._serial.run(self._digest)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the current version."""
        return self._serial.run(self._manifest)

    @property
    def state(self) -> State:
        """The verified state as read-only views, which the next `sync` overwrites.

        Copy what you keep. Raises EmptyStream before the first sync and IntegrityError after an
        interrupted one.
        """
        return self._serial.run(self._proved_state)

    def sync(self, target: int | None = None, *, progress: bool = False) -> Update | None:
        """Move to a version and return what changed since the last acknowledged update.

        Everything is fetched and verified on the host before this returns, so a worker pauses only
        to scatter the update. A missing or damaged object makes it take another path. Changes that
        an earlier update returned and nobody acknowledged (`Update.acknowledge`) are returned
        again, together with newer ones. If this raises, the state stays at a verified version, from
        which a repeated call continues.

        Args:
            target: The version to move to; versions below the current one are ignored. Default: the
                newest version that can be read and reached. Newer ones that cannot are skipped with
                a `FallbackUsed`.
            progress: Show a bar, with the time left, in a terminal or a notebook for work of more
                than half a second. Default: False.
        Returns: The update, or None if there is nothing newer.
        Raises:
            ChainGap: No path leads to the version.
            StoreUnavailable: The store cannot be reached.
            StreamRecreated: The stream was deleted and recreated; StreamForked, if its store went
                back in time, and has another history than this worker.
        """
        if target is not None:
            checked_count("target", target, 0)
        with failures_to(self._listener, self.stream.name, "sync"):
            return self._serial.run(lambda: self._sync_shown(target, progress))

    def files(self) -> dict[str, bytes]:
        """Return the files next to the weights that the current version has (`Publisher.publish`).

        Each file is verified, and fetched once while it does not change.

        Returns: Names such as "tokenizer/vocab.txt" to bytes.
        Raises:
            EmptyStream: Nothing was synced yet.
            IntegrityError: The last sync was interrupted.
            StoreError: The store failed.
            DigestMismatch: A file is damaged.
        """
        return self._serial.run(self._read_files)

    def save(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
        *,
        sharded: bool = False,
        force: bool = False,
        layout: str | None = None,
        keep: int | None = None,
    ) -> None:
        """Write the current version to ``path``, a folder that engines load, or one file.

        A folder changes to the new version in one step: whenever this process is killed, it is the
        one version or the other. Its files are links into ``.pulse/current``, which is a link to
        the folder of one version. The version before stays there until the next `save`. The history
        of the version is written too, as ``pulse.history``: a Subscriber with this ``path`` as
        ``base`` continues from it.

        Args:
            path: A folder; or a name that ends with ``.safetensors``, for the weights alone.
            metadata: Strings to add to the metadata of the weights. Default: none.
            sharded: Write the files of the published index, or files of 5 GB. Default: one file,
                ``model.safetensors``.
            force: Replace files that pulse did not write. Default: refuse, also if other weights
                lie in the folder.
            layout: Give each version a folder of plain files in ``path``, as a framework's trainer
                writes it: "prime-rl", "slime", "areal", "hf", or a pattern such as
                ``"step_{}/STABLE"``. A pattern is the folder's name, where the number is the
                ``step`` of the version's metadata, or else the version; and a file that is written
                last. A folder appears whole. Shards that did not change since the version before,
                which this Subscriber wrote, are hard links to it. Default: no such folders.
            keep: How many of the folders of a ``layout`` stay, the newest ones. Default: all.
        Raises: What `state` and `files` raise, InputError, StoreFull and StoreError.
        """
        from ..follow.folder import HeldVersion, save_version

        target = checked_path(path)
        alone = target.suffix == ".safetensors" and layout is None
        # One operation reads everything, so that all of it is of one version. The writing needs no
        # thread of its own: an interrupted save leaves the old version in place.
        held = self._serial.run(
            lambda: HeldVersion(
                self._proved_state(),
                self._digest(),
                self._manifest(),
                self._host.history,
                {} if alone else self._read_files(),
            )
        )
        self._checkpoint = save_version(
            held,
            target,
            metadata or {},
            sharded=sharded,
            force=force,
            layout=layout,
            keep=keep,
            earlier=self._checkpoint,
        )

    def full_update(self) -> Update:
        """Return the whole current state as an update, for a model that is new or missed one.

        Raises: What `state` raises.
        """
        started = time.perf_counter()
        return self._serial.run(lambda: self._update(Pending(), started, self._proved_state()))

    def updates(
        self,
        *,
        poll_seconds: float = 1.0,
        timeout_seconds: float | None = None,
        progress: bool = False,
    ) -> Iterator[Update]:
        """Yield updates as versions appear.

        Asking for the next update acknowledges the one before. An error that may pass
        (`PulseError.retryable`) ends nothing: the log says when it begins and when it ends.

        Args:
            poll_seconds: Seconds between two polls (see `wait_for_new`), and up to 4 after an
                error. Default: 1.
            timeout_seconds: End when no version has appeared for this time, or raise the error that
                prevented it. Default: never.
            progress: As for `sync`.
        Raises: InputError, and what `sync` raises that is not retryable.
        """
        last = time.monotonic()
        checked_number("poll_seconds", poll_seconds, maximum=LONGEST_POLL)
        if timeout_seconds is not None:
            checked_number("timeout_seconds", timeout_seconds)
        timeout = math.inf if timeout_seconds is None else timeout_seconds
        outage = Outage(f"stream {self.stream.name!r}")
        while True:
            wait, failure = poll_seconds, None
            try:
                update = self.sync(progress=progress)
                outage.ended()
            except PulseError as error:
                if not error.retryable:
                    raise
                update, failure = None, error
                outage.failed(error)
                wait = max(wait, min(10 * wait, 4.0))
            if update is not None:
                yield update
                update.acknowledge()
                last = time.monotonic()
            elif (left := timeout - (time.monotonic() - last)) > 0:
                self.wait_for_new(wait, left)
            elif failure is not None:
                raise failure
            else:
                return

    def wait_for_new(self, poll_seconds: float = 1.0, max_seconds: float = math.inf) -> None:
        """Sleep between two calls of `sync`.

        Args:
            poll_seconds: Seconds to sleep, a quarter more or less at random. Default: 1.
            max_seconds: Seconds to sleep at most. Default: no limit.
        Raises:
            InputError: An argument is out of range.
        """
        pause(poll_seconds, max_seconds)

    def close(self) -> None:
        """Release the host state; the folder ``state`` keeps its files.

        This may be called twice. A `sync` afterwards starts as a new Subscriber would.
        """
        self._serial.run(self._close)

    def __repr__(self) -> str:
        held = "nothing yet" if self.version is None else f"version {self.version}"
        return (
            f"<{type(self).__name__.strip('_')} of {self.stream.name!r} in "
            f"{self.stream.store!r}: {held}>"
        )

    def _sync_shown(self, target: int | None, progress: bool) -> Update | None:
        with progress_shown(progress, self._listener) as self._host.listener:
            try:
                return self._sync(target)
            finally:
                self._host.listener = self._listener

    def _sync(self, target: int | None) -> Update | None:
        started = time.perf_counter()
        host = self._host
        # 1. Settle what earlier calls left: a state that an error left half-way, and updates that
        # the owner has acknowledged since.
        host.recover(doubted=bool(self._folder and self._folder.lengthen()))
        if any(
            receipt.acknowledged for receipt in self._delivered if receipt.version == host.version
        ):
            host.acknowledge()
            self._delivered = []
        newcomer = host.version is None and not self._pinned
        # The folder is read whenever there is no state. A version of a stream that was recreated is
        # not taken from it.
        if self._folder and host.version is None:
            from ..follow.state_folder import adopt_kept

            self._folder.open()
            if adopt_kept(host, self.stream, self._failover.manifest):
                self._failover.adopt_id(self.stream.stream_id or self._manifest().stream_id)
        # A base is used once: it saves the first anchor, and means nothing afterwards.
        if host.version is not None:
            self._base = None
        if self._base is not None:
            from ..follow.state_folder import adopt_base

            found = adopt_base(
                self._base, self._failover, self._host, self._selection, threads=self._threads
            )
            if found.looked:
                self._base, self._checkpoint = None, found.place or self._checkpoint
        looked = time.perf_counter() - started
        # 2. Find and follow: every path ends at a verified version, even if an error ends it early.
        phases: dict[str, float] = {}
        previous = host.version
        if target is None:
            phases = self._sync_to_head(newcomer)
        elif host.version is None or host.version < target or self._goes_back:
            phases = self._failover.reach(host, target)
        host = self._host  # a new one if the stream was recreated
        if host.version is None:
            self._absence.poll()
        elsewhere = target is not None and target != host.version
        if host.version is None or elsewhere or host.acknowledged:
            return None
        # 3. Return all changes that were not acknowledged, each element once, those of earlier
        # calls too. Those of several are read from the state.
        if self._folder:
            self._folder.prove(host, self._failover, delivers=True)
        update = self._update(host.pending(), started, self._state())
        # The links of earlier calls that raised are counted too: their bytes were fetched for this
        # update.
        links, host.followed = host.followed, []
        if self._listener and links:
            self._listener(
                Synced(
                    stream=self.stream.name,
                    version=update.version,
                    previous=previous,
                    root=update.root,
                    links=tuple(str(link) for link in links),
                    fetched_bytes=sum(link.nbytes for link in links),
                    seconds=update.seconds,
                    lag_seconds=time.time() - self._manifest().created,
                    phases=phases | {"plan": looked + phases.get("plan", 0.0)},
                )
            )
        return update

    def _sync_to_head(self, newcomer: bool) -> dict[str, float]:
        try:
            return self._failover.follow(self._host)
        except StreamRecreated:
            if not self._allow_recreated and not newcomer:
                raise
            self._failover.start_over()
            self._forget()
            return self._failover.follow(self._host)

    def _refused(self, version: int, error: PulseError) -> None:
        fell_back(self._listener, self.stream.name, f"version {version}", error)

    def _manifest(self) -> Manifest:
        host, known = self._ready(), self._known
        assert host.version is not None
        # The store may have another version under the same number by now.
        if known is None or (known.version, known.root) != (host.version, host.digest.root):
            known = self._known = self._failover.manifest(host.version)
        return known

    def _read_files(self) -> dict[str, bytes]:
        refs = self._manifest().files
        self._files = {
            ref.sha256: self._files.get(ref.sha256) or self._failover.fetch(ref.payload, FILE)
            for ref in refs
        }
        return {ref.name: self._files[ref.sha256] for ref in refs}

    def _forget(self) -> None:
        self._files, self._known = {}, None
        self._host = self._empty_host(self._threads, self._host.listener)
        self._delivered = []

    def _empty_host(self, threads: int | None, listener: Listener | None) -> HostState:
        return HostState(
            threads=threads, listener=listener, selection=self._selection, folder=self._folder
        )

    def _close(self) -> None:
        self._forget()
        if self._folder:
            self._folder.close()

    def _proved_state(self) -> State:
        if self._folder:
            self._folder.prove(self._host, self._failover)
        return self._state()

    def _state(self) -> State:
        state = self._ready().state
        return (self._selection.shown(state) if self._selection else state).readonly()

    def _digest(self) -> StateDigest:
        host = self._ready()
        if isinstance(host.digest, PartDigest):
            return host.digest.of(self._state().specs)
        return host.digest

    def _ready(self) -> HostState:
        if self._host.poisoned:
            raise IntegrityError(
                "the last sync was interrupted while it applied a patch",
                hint="Call sync() again: it restores a verified version from an anchor.",
            )
        if self._host.version is None:
            raise EmptyStream(
                f"nothing was synced from {self.stream.name!r} yet", hint="Call sync() first."
            )
        return self._host

    def _update(self, pending: Pending, started: float, state: State) -> Update:
        host = self._ready()
        update = make_update(pending, state, self._manifest(), started, self._serial)
        # The acknowledgment of an older version says nothing about the changes since, so older
        # receipts are dropped.
        self._delivered = [r for r in self._delivered if r.version == update.version][
            -_KEPT_RECEIPTS:
        ]
        self._delivered.append(update._receipt)
        # Values of whole tensors are views of the host state; changes have arrays of their own.
        if any(tensor.whole for tensor in update.tensors):
            host.pin(update)
        return update
