"""The trainer's side: one process that commits the versions of a stream (docs/protocol.md, section 3)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import NoReturn

from .. import codec as codecs
from ..errors import ChainGap, FormatError, NotFound, PublisherConflict, StoreError
from ..events import Listener, Metadata, Published, Resumed, progress_to
from ..patch import patch
from ..patch.patch import BuiltPatch
from ..state.checkpoint import Source, as_state
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State
from ..store import Store, open_store
from ..stream import anchor
from ..stream import manifest as manifests
from ..stream.manifest import AnchorRef, Manifest, PatchRef, Payload, checked_metadata
from ..stream.signing import Signer
from ..stream.stream import PATCH, SHARD, Stream
from .folds import FoldMaker
from .host_state import Replica
from .mode import Choice, Chooser

_STRAGGLERS = 8


@dataclass(frozen=True, slots=True)
class _Pending:
    """A version that is ready to be committed, and how the baseline moves once it is."""

    manifest: Manifest
    advance: Callable[[], None]


class Publisher:
    """Publishes the states of one policy as versions 0, 1, 2 … of a stream.

    ``store`` is a store or its address. A stream that exists is continued. An anchor is stored along with a patch
    whenever the patches since the last one exceed ``anchor_ratio`` times the state's bytes. ``folds`` are the spans
    over which folds are made in the background (`folds.FoldMaker` says what that costs in memory; `pulse fold` makes
    them on any machine). With a ``signer`` every manifest is signed.

    ``mode`` "sparse" publishes patches; "dense" publishes each version as an anchor alone; "auto" chooses for each
    version what takes less time from trainer to worker over a ``link`` of so many bit/s (or text such as "50Mbit"), by
    the model of `pulse_rl.plan`; `Published.reason` says why.

    A stream has one Publisher at a time: a new one takes over when it first publishes, and the one before is refused
    with PublisherConflict at its next commit; the chain stays whole. Not thread-safe.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        codec: str = codecs.DEFAULT,
        anchor_ratio: float = 1.0,
        shard_bytes: int = anchor.DEFAULT_SHARD_BYTES,
        folds: Collection[int] = (),
        signer: Signer | None = None,
        mode: str = "sparse",
        link: str | float | None = None,
        threads: int | None = None,
        on_event: Listener | None = None,
    ) -> None:
        codecs.by_name(codec)
        self._chooser = Chooser(mode, link, codec, threads)
        self._stream = Stream(open_store(store), stream)
        self._codec = codec
        self._signer = signer
        self._anchor_ratio = anchor_ratio
        self._shard_bytes = shard_bytes
        self._threads = threads
        self._listener = on_event
        self._word = secrets.token_hex(8)
        self._head: int | None = None
        self._epoch = 0
        self._folds = FoldMaker(self._stream, folds, codec=codec, threads=threads, listener=on_event)
        self._baseline = self._new_baseline()
        self._pending: _Pending | None = None
        self._refused: str | None = None
        self._since_anchor = 0

    def head(self) -> Manifest | None:
        """The newest committed version as the store lists it, None while there is none. Its metadata tells a
        restarted trainer where it was."""
        newer = self._stream.versions(self._head)
        version = newer[-1] if newer else self._head
        return None if version is None else self._stream.manifest(version)

    def wait(self) -> None:
        """Returns when the folds that are being made in the background are stored."""
        self._folds.wait()

    def publish(self, source: Source, *, metadata: Metadata | None = None) -> Published:
        """Commits a state as the next version and returns what it cost.

        ``source`` must not change during the call. The in-memory baseline moves only after the commit is confirmed: if
        this raises StoreUnavailable or StoreFull, nothing is lost, and whether the version was committed is settled by
        the next call. A state with other names, dtypes or shapes than the last starts anew with an anchor.
        Raises also UnsupportedTensor, InputError and PublisherConflict.
        """
        started = time.perf_counter()
        facts = checked_metadata(metadata or {})
        state = as_state(source)
        for _ in range(_STRAGGLERS):
            published = self._publish(state, facts, started)
            if published:
                if self._listener:
                    self._listener(published)
                return published
        raise PublisherConflict(f"{_STRAGGLERS} commits of older publishers came between")

    def _publish(self, state: State, metadata: Metadata, started: float) -> Published | None:
        """One try; None if an older publisher, which did not know yet that it was superseded, took the version."""
        phases: dict[str, float] = {}
        if self._refused:
            raise PublisherConflict(self._refused)
        self._settle()
        if self._baseline.version is None or self._baseline.version != self._head or self._baseline.poisoned:
            self._resume(state)
        phases["resume"] = time.perf_counter() - started

        choice = self._choose(state, phases)
        built = None if choice is None or choice.dense else self._build(state, phases)
        target = built.target if built else None
        baseline = None
        if target is None:
            baseline = state.copy()
            target = state_digest(
                baseline, threads=self._threads, progress=progress_to(self._listener, "digest", state.nbytes)
            )
        upload = time.perf_counter()
        patch_ref = self._upload_patch(built) if built else None
        anchor_ref = self._upload_anchor(baseline or state, target) if self._wants_anchor(built, state) else None
        version = 0 if self._head is None else self._head + 1
        manifest = Manifest(
            format=manifests.FORMAT,
            stream=self._stream.name,
            version=version,
            epoch=self._epoch,
            root=target.root,
            elements=state.elements,
            dense_bytes=state.nbytes,
            publisher=self._word,
            created=round(time.time(), 3),
            aliases=state.aliases,
            metadata=metadata,
            patch=patch_ref,
            anchor=anchor_ref,
        ).sealed()
        if self._signer:
            manifest = self._signer.sign(manifest)
        manifests.parse(manifest.to_bytes(), stream=self._stream.name, version=version)
        self._pending = _Pending(manifest, lambda: self._advance(manifest, built, baseline, target))
        committed = time.perf_counter()
        phases["upload"] = committed - upload
        if not self._settle():
            return None
        phases["commit"] = time.perf_counter() - committed
        return Published(
            stream=self._stream.name,
            version=version,
            root=target.root,
            elements=state.elements,
            changed=patch_ref.changed if patch_ref else None,
            dense_bytes=state.nbytes,
            patch_bytes=sum(p.bytes for p in patch_ref.parts) if patch_ref else 0,
            anchor_bytes=sum(p.bytes for p in anchor_ref.shards) if anchor_ref else 0,
            seconds=time.perf_counter() - started,
            phases=phases,
            metadata=manifest.metadata,
            reason=choice.reason if choice else "",
        )

    def _new_baseline(self) -> Replica:
        baseline = Replica(self._stream, threads=self._threads, listener=self._listener)
        baseline.watcher = self._folds
        return baseline

    def _choose(self, state: State, phases: dict[str, float]) -> Choice | None:
        """Dense or sparse; None where there is no baseline, or it holds other tensors, so that no patch can be made."""
        started = time.perf_counter()
        if self._baseline.version is None or self._baseline.state.specs != state.specs:
            return None
        choice = self._chooser.choose(self._baseline.state, state)
        if choice.reason:
            phases["choose"] = time.perf_counter() - started
        return choice

    def _build(self, state: State, phases: dict[str, float]) -> BuiltPatch:
        """The patch from the baseline."""
        started = time.perf_counter()
        built = patch.build(
            self._baseline.state,
            state,
            self._baseline.digest,
            codec=self._codec,
            threads=self._threads,
            progress=progress_to(self._listener, "diff", state.nbytes),
        )
        phases["build"] = time.perf_counter() - started
        return built

    def _wants_anchor(self, built: BuiltPatch | None, state: State) -> bool:
        return built is None or self._since_anchor + built.nbytes > self._anchor_ratio * state.nbytes

    def _upload_patch(self, built: BuiltPatch) -> PatchRef:
        digest = sha256()
        for chunk in built.chunks:
            digest.update(chunk)
        payload = Payload(digest.hexdigest(), built.nbytes)
        self._stream.put_payload(payload, PATCH, built.chunks)
        assert self._baseline.version is not None
        return PatchRef(self._baseline.version, built.header.base_root, built.header.changed, (payload,))

    def _upload_anchor(self, state: State, target: StateDigest) -> AnchorRef:
        """Stores the anchor of a state whose tree is ``target``; raises IntegrityError if it changes meanwhile."""
        shards = anchor.plan_shards(state, target, self._shard_bytes, self._threads)
        progress = progress_to(self._listener, "upload", sum(s.payload.bytes for s in shards))
        for shard in shards:
            self._stream.put_payload(shard.payload, SHARD, anchor.proved(state, shard))
            if progress:
                progress(shard.payload.bytes)
        return AnchorRef(tuple(shard.payload for shard in shards))

    def _settle(self) -> bool:
        """Commits what is pending. After a lost reply this repeats the same bytes, so it finds its own commit.

        False if an older publisher has taken the version. Raises PublisherConflict, and from then on always, once a
        newer publisher has claimed the stream.
        """
        if self._pending is None:
            return True
        manifest = self._pending.manifest
        newer = self._stream.epochs(self._epoch)
        if newer:
            self._stop(f"another publisher has taken over {self._stream.name!r} with epoch {newer[-1]}")
        if not self._stream.commit(manifest):
            epoch = self._epoch_of(manifest.version)
            if epoch > self._epoch:
                self._stop(f"version {manifest.version} was committed by a publisher with epoch {epoch}")
            self._pending = None
            self._baseline = self._new_baseline()
            return False
        advance = self._pending.advance
        self._head, self._pending = manifest.version, None
        self._list_anchor(manifest)
        try:
            advance()
        except BaseException:
            # The version is committed; a baseline that did not follow is given up, and the next call resumes.
            self._baseline = self._new_baseline()
            raise
        return True

    def _epoch_of(self, version: int) -> int:
        """The epoch of a version that stands in the way; 0 where its manifest is damaged or gone: none to yield to."""
        try:
            return self._stream.manifest(version).epoch
        except (FormatError, NotFound):
            return 0

    def _stop(self, reason: str) -> NoReturn:
        self._pending = None
        self._refused = f"{reason}; this one (epoch {self._epoch}) has stopped, and the chain is whole"
        raise PublisherConflict(self._refused)

    def _list_anchor(self, manifest: Manifest) -> None:
        """Lists the anchor for newcomers. It is in the manifest, too, so failing to is no failure to publish."""
        if manifest.anchor:
            with suppress(StoreError):
                self._stream.put_anchor_link(manifest.version, sum(p.bytes for p in manifest.anchor.shards))

    def _advance(
        self, manifest: Manifest, built: BuiltPatch | None, baseline: State | None, target: StateDigest
    ) -> None:
        if built is not None:
            self._baseline.advance(manifest.version, built, manifest.aliases)
        elif baseline is not None:
            self._baseline.adopt(manifest.version, baseline, target)
        self._since_anchor = 0 if manifest.anchor else self._since_anchor + (built.nbytes if built else 0)

    def _resume(self, state: State) -> None:
        """Claims the stream and makes its head the baseline, without a download when the caller's state is the head."""
        if self._epoch == 0:
            self._epoch = self._stream.claim(self._word)
        newer = self._stream.versions(self._head)
        if newer:
            self._head = newer[-1]
        if self._head is None:
            return
        how, reason = "matched", ""
        try:
            self._since_anchor = self._bytes_since_anchor(self._head)
            manifest = self._stream.manifest(self._head)
            digest = state_digest(state, threads=self._threads)
            if digest.root == manifest.root:
                self._baseline.adopt(self._head, state.copy(), digest)
            else:
                how = "restored"
                self._baseline.move_to(self._head)
                self._baseline.tell()
        except (ChainGap, NotFound, FormatError) as error:
            how, reason = "anchored", str(error)
            self._baseline = self._new_baseline()
        if self._listener:
            self._listener(Resumed(self._stream.name, self._head, how, reason))

    def _bytes_since_anchor(self, version: int) -> int:
        """Bytes of the patches that a newcomer replays to ``version`` after its last anchor, counted up to what makes
        the next anchor due."""
        total = 0
        while True:
            manifest = self._stream.manifest(version)
            if manifest.anchor or not manifest.patch or total > self._anchor_ratio * manifest.dense_bytes:
                return total
            total += sum(p.bytes for p in manifest.patch.parts)
            version = manifest.patch.base
