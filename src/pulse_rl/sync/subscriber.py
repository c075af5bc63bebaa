"""The worker's side: follows a stream with a verified host state (docs/protocol.md, section 4)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterator

from ..errors import EmptyStream, FormatError, InputError, NotFound, SubscriberPoisoned, Untrusted
from ..events import Listener, Synced
from ..state.checkpoint import Source, as_state
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State
from ..store import CachedStore, Store, open_store
from ..stream.manifest import Manifest
from ..stream.signing import TrustedKeys
from ..stream.stream import Stream
from .host_state import Replica, Step
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
        threads: int | None = None,
        on_event: Listener | None = None,
    ) -> None:
        trusted = None if trusted_keys is None else TrustedKeys(trusted_keys)
        opened = open_store(store)
        self.stream = Stream(opened if cache is None else CachedStore(opened, cache), stream, trusted)
        self._replica = Replica(self.stream, threads=threads, listener=on_event)
        self._base = base
        self._threads = threads
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
        replica = self._replica
        replica.recover()
        if self._base is not None and self._adopt_base(self._base):
            self._base = None
        if target is None:
            newer = self.stream.versions(replica.version)
            target = newer[-1] if newer else replica.version
        if target is None or (replica.version is not None and target < replica.version):
            return None
        if target == replica.version and replica.is_told:
            return None
        looked = time.perf_counter() - started
        step = replica.move_to(target)
        update = self._update(step, started)
        if self._listener:
            self._listener(
                Synced(
                    stream=self.stream.name,
                    version=target,
                    previous=step.previous,
                    root=update.root,
                    links=tuple(str(link) for link in step.links),
                    fetched_bytes=update.payload_bytes,
                    seconds=update.seconds,
                    lag_seconds=time.time() - self.stream.manifest(target).created,
                    phases=step.phases | {"plan": looked + step.phases.get("plan", 0.0)},
                )
            )
        # Last: whatever fails before, the next call tells the caller the same once more.
        replica.tell()
        return update

    def full_update(self) -> Update:
        """The whole current state as an update, for a model that is new or missed one."""
        started = time.perf_counter()
        return self._update(Step(None, self.manifest.version, (), None, frozenset(), {}), started)

    def updates(self, *, poll_seconds: float = 1.0, timeout: float | None = None) -> Iterator[Update]:
        """Yields updates as versions appear; ends when none has appeared for ``timeout`` seconds (None: never)."""
        last = time.monotonic()
        if not (0 <= poll_seconds < math.inf):
            raise InputError(f"poll_seconds must be a number from 0 on, not {poll_seconds}")
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

    def _update(self, step: Step, started: float) -> Update:
        manifest, state = self.stream.manifest(step.version), self._ready().state.readonly()
        if step.changes is None:
            tensors = [TensorUpdate(spec, None, state.read(spec.name)) for spec in state.specs]
        else:
            tensors = [
                TensorUpdate(state.spec(name), changed.indices, changed.values)
                for name, changed in step.changes.items()
                if name not in step.renamed
            ]
            tensors += [TensorUpdate(state.spec(name), None, state.read(name)) for name in sorted(step.renamed)]
        update = Update(
            version=step.version,
            previous=step.previous,
            root=manifest.root,
            tensors=tuple(tensors),
            aliases=dict(state.aliases),
            metadata=manifest.metadata,
            payload_bytes=sum(link.nbytes for link in step.links),
            seconds=time.perf_counter() - started,
        )
        if any(tensor.indices is None for tensor in tensors):
            self._replica.lend(update)
        return update

    def _adopt_base(self, base: Source) -> bool:
        """Starts from the caller's state where its root is that of a recent version. False while there are none."""
        versions = self.stream.versions()
        if not versions:
            return False
        state = as_state(base)
        digest = state_digest(state, threads=self._threads)
        for version in reversed(versions[-_SEARCHED_FOR_BASE:]):
            try:
                manifest = self.stream.manifest(version)
            except (NotFound, FormatError, Untrusted):
                continue
            if manifest.root == digest.root:
                # What the worker has is what it loaded, under the names that it knows: aliases that the version adds
                # are told with the next update.
                self._replica.adopt(version, state.copy(), digest)
                break
        return True
