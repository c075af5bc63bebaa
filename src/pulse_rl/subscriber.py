"""The worker's side: follows a stream with a verified host state (docs/protocol.md, section 4)."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator

from .checkpoint import Source, as_state
from .digest import StateDigest, state_digest
from .errors import EmptyStream, FormatError, NotFound, SubscriberPoisoned, Untrusted
from .events import Listener, Synced
from .manifest import Manifest
from .replica import Replica
from .signing import TrustedKeys
from .store import CachedStore, Store, open_store
from .stream import Stream
from .tensors import State
from .update import TensorUpdate, Update

_SEARCHED_FOR_BASE = 1000


class Subscriber:
    """Holds one version of a stream in host memory and moves it forward on `sync`.

    ``store`` is a store or its address. ``base`` is a state that the worker has already, such as its checkpoint: where
    its root is that of a version of the stream, syncing starts there instead of from an anchor. Payloads are
    kept in the folder ``cache``, if given, and not downloaded again after a restart. With ``trusted_keys``
    (Ed25519 public keys, 64 hexadecimal digits each; extra ``[sign]``) only manifests that one of them has signed are
    accepted. Not thread-safe.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        base: Source | None = None,
        cache: str | os.PathLike[str] | None = None,
        trusted_keys: Collection[str] | None = None,
        workers: int | None = None,
        on_event: Listener | None = None,
    ) -> None:
        trusted = None if trusted_keys is None else TrustedKeys(trusted_keys)
        opened = open_store(store)
        self.stream = Stream(opened if cache is None else CachedStore(opened, cache), stream, trusted)
        self._replica = Replica(self.stream, workers=workers, listener=on_event)
        self._base = base
        self._workers = workers
        self._listener = on_event

    @property
    def status(self) -> str:
        """One of "empty" (no version yet), "ready" (the state is the verified `version`) and "poisoned"."""
        if self._replica.poisoned:
            return "poisoned"
        return "empty" if self._replica.version is None else "ready"

    @property
    def version(self) -> int | None:
        return self._replica.version

    @property
    def root(self) -> str:
        """The verified root of `state`, 64 hexadecimal digits."""
        return self._ready().digest.root

    @property
    def digest(self) -> StateDigest:
        """The digest tree of `state`, with which `pulse_rl.audit` compares a live model."""
        return self._ready().digest

    @property
    def manifest(self) -> Manifest:
        """What the publisher said of the current version."""
        version = self._ready().version
        assert version is not None
        return self.stream.manifest(version)

    @property
    def state(self) -> State:
        """The verified state as read-only views, which the next `sync` overwrites: copy what you keep.

        Raises EmptyStream before the first sync and SubscriberPoisoned after an interrupted one.
        """
        return self._ready().state.readonly()

    def sync(self, target: int | None = None) -> Update | None:
        """Moves to ``target`` (default: the newest version) and returns what changed; None where nothing is newer.

        All is fetched and verified on the host before this returns, so that a worker pauses only to scatter the
        update. A missing or damaged object makes it take another path. When this raises (ChainGap, StoreUnavailable …)
        the state rests at a verified version, at which a repeated call goes on.
        """
        started = time.perf_counter()
        self._replica.recover()
        if self._base is not None:
            self._adopt_base(self._base)
            self._base = None
        if target is None:
            newer = self.stream.versions(self._replica.version)
            target = newer[-1] if newer else None
        if target is None or (self._replica.version is not None and target <= self._replica.version):
            return None
        step = self._replica.move_to(target)
        manifest = self.stream.manifest(target)
        payload_bytes = sum(link.nbytes for link in step.links)
        if self._listener:
            links = tuple(str(link) for link in step.links)
            self._listener(
                Synced(
                    self.stream.name,
                    target,
                    step.previous,
                    manifest.root,
                    links,
                    payload_bytes,
                    time.perf_counter() - started,
                )
            )
        if step.changes is None:
            return self._full(started, payload_bytes)
        state = self._replica.state
        tensors = tuple(TensorUpdate(state.spec(n), c.indices, c.values) for n, c in step.changes.items())
        return Update(
            version=target,
            previous=step.previous,
            root=manifest.root,
            tensors=tensors,
            aliases=state.aliases,
            metadata=manifest.metadata,
            payload_bytes=payload_bytes,
            seconds=time.perf_counter() - started,
        )

    def full_update(self) -> Update:
        """The whole current state as an update, for a model that is new or missed one."""
        return self._full(time.perf_counter())

    def updates(self, *, poll_seconds: float = 1.0, timeout: float | None = None) -> Iterator[Update]:
        """Yields updates as versions appear; ends when none has appeared for ``timeout`` seconds (None: never)."""
        last = time.monotonic()
        while timeout is None or time.monotonic() - last < timeout:
            update = self.sync()
            if update is None:
                time.sleep(poll_seconds)
            else:
                yield update
                last = time.monotonic()

    def _ready(self) -> Replica:
        if self._replica.poisoned:
            raise SubscriberPoisoned("the last sync was interrupted while it applied a patch")
        if self._replica.version is None:
            raise EmptyStream(f"nothing was synced from {self.stream.name!r} yet", hint="Call sync() first.")
        return self._replica

    def _full(self, started: float, payload_bytes: int = 0) -> Update:
        state, manifest = self.state, self.manifest
        return Update(
            version=manifest.version,
            previous=None,
            root=manifest.root,
            tensors=tuple(TensorUpdate(spec, None, state.read(spec.name)) for spec in state.specs),
            aliases=state.aliases,
            metadata=manifest.metadata,
            payload_bytes=payload_bytes,
            seconds=time.perf_counter() - started,
        )

    def _adopt_base(self, base: Source) -> None:
        """Starts from the caller's state where its root is that of a recent version."""
        state = as_state(base)
        digest = state_digest(state, workers=self._workers)
        for version in reversed(self.stream.versions()[-_SEARCHED_FOR_BASE:]):
            try:
                manifest = self.stream.manifest(version)
            except (NotFound, FormatError, Untrusted):
                continue
            if manifest.root == digest.root:
                copy = state.copy()
                copy.aliases = dict(manifest.aliases)
                self._replica.adopt(version, copy, digest)
                return
