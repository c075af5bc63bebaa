"""The trainer's side: one process that commits the versions of a stream (docs/protocol.md, section 3).

A publish reads in one direction: settle and resume (`commit`, `resume`), build (`draft`), `upload`, `commit`, and the
baseline follows.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import CancelledError
from types import TracebackType
from typing import NamedTuple, Self

from .. import codec as codecs
from .._util.serial import NotCopyable, SerialThread, shield
from .._util.settings import checked_collection, checked_number
from .._util.threads import checked_threads
from .._util.weak import weak_callback
from ..errors import InputError, PublisherConflict, PulseError
from ..events import (
    BaselineRestored,
    Event,
    FallbackUsed,
    Listener,
    Metadata,
    PhaseTimer,
    Published,
    checked_listener,
    failures_to,
)
from ..patch.history import History
from ..state.checkpoint import StateSource
from ..state.snapshot import await_devices
from ..state.tensors import State
from ..store import Store, open_store
from ..stream import manifest as manifests
from ..stream.anchor import DEFAULT_SHARD_BYTES
from ..stream.manifest import MAX_NUMBER, Manifest
from ..stream.signing import Signer, TrustedKeys
from ..stream.stream import Stream
from .commit import Committer, Content, published_as
from .device_baseline import DeviceBaseline, Seen
from .draft import Draft, FullDraft, make_draft
from .folds import FoldMaker
from .host_state import HostState
from .notices import Notices
from .order import Order, Taken
from .remember import Memory
from .resume import resume
from .submit import Submission, Submissions, begin
from .upload import upload

_MAX_STALE_COMMITS = 8


class _Pending(NamedTuple):
    """A version whose payloads were stored at ``uploaded`` (Unix seconds) and whose commit is not confirmed, what was
    ``seen`` to become it, and the ``history`` at it."""

    manifest: Manifest
    draft: Draft
    seen: Seen
    history: History
    uploaded: float


class Publisher(NotCopyable):
    """Publishes the states of one policy as versions 0, 1, 2 … of a stream. A context manager (see `close`).

    ``store``: a store, or its address (see `open_store`). ``stream``: its name; a stream that exists is continued.
    ``codec``: "auto" or "zstd", the layout of the PULSE paper. ``history``: code by what changed in the last versions,
    too. ``anchor_ratio``: an anchor is stored along with a patch whenever the patches since the last one exceed
    ``anchor_ratio`` times the state's bytes. ``shard_bytes``: the size at which an anchor's file is followed by
    another. ``folds``: the spans, in versions, over which folds are made in the background, for about 6 bytes of memory
    for every BF16 weight that changed within a span (``pulse fold`` makes them on any machine). ``signer`` signs every
    manifest, claim and fold; then only
    what is signed by its key or by one of ``trusted_keys`` (Ed25519, 64 hexadecimal digits each) is believed.
    ``stream_id``: the stream's (`Manifest.stream_id`) where the caller knows it; versions of another stream of this
    name are then passed over.

    A patch that is no smaller than an anchor is not stored: the version is an anchor alone, and `Published.reason` says
    so. ``on_device``: what the devices of CUDA tensors have memory for:
    "copy", a copy, until it is on the host, so that training does not wait for the bus; "baseline", that, and the last
    version, so that only what differs crosses the bus; None, nothing. ``threads``: the maximum number of threads (None:
    one per core). ``on_event`` gets the events of `pulse_rl.events`.

    A stream has one Publisher at a time: a new one takes over when it first publishes, and the one before is refused
    with PublisherConflict at its next commit; the chain stays whole. Raises InputError, InvalidName and StoreError.

    Interrupts do no harm: the work is done on a thread of its own. After one, `head` says whether the version was
    committed. One thread uses it at a time (ConcurrentUse). It cannot be copied, pickled, or used in a forked process.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        codec: str = codecs.AUTO,
        history: bool = False,
        anchor_ratio: float = 1.0,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        folds: Collection[int] = (),
        signer: Signer | None = None,
        trusted_keys: Collection[str] = (),
        stream_id: str | None = None,
        on_device: str | None = None,
        threads: int | None = None,
        on_event: Listener | None = None,
    ) -> None:
        codecs.check_codec(codec)
        checked_threads(threads)
        checked_listener(on_event)
        checked_number("anchor_ratio", anchor_ratio)
        checked_number("shard_bytes", shard_bytes, least=1, most=MAX_NUMBER)
        if on_device not in (None, "copy", "baseline"):
            raise InputError(f"on_device must be None, 'copy' or 'baseline', not {on_device!r}")
        if signer is not None and not isinstance(signer, Signer):
            raise InputError(f"signer must be a Signer, not {signer!r}", hint="Make one with Signer.load(file).")
        self._serial = SerialThread("Publisher")
        trusted = checked_collection("trusted_keys", trusted_keys, "[key]")
        keys = [*([signer.public_key] if signer else ()), *trusted]
        self._stream = Stream(
            open_store(store),
            stream,
            TrustedKeys(keys) if keys else None,
            signer=signer,
            stream_id=stream_id,
            on_refused=weak_callback(self._refused),
        )
        self._codec, self._remember = codec, history
        self._signer = signer
        self._anchor_ratio = anchor_ratio
        self._shard_bytes = shard_bytes
        self._on_device = on_device
        self._threads = threads
        self._listener = on_event
        self._folds = FoldMaker(self._stream, folds, codec=codec, threads=threads, listener=on_event)
        self._memory = Memory.of(folds)
        self._notices = Notices(stream, on_event)
        self._committer = Committer(self._stream)
        self._baseline, self._devices = self._new_baseline(), DeviceBaseline()
        self._since_anchor = 0
        self._anchor_due = False
        self._pending: _Pending | None = None
        self._submissions: Submissions[Taken] = Submissions(self._serial)

    def publish(
        self,
        source: StateSource,
        *,
        metadata: Metadata | None = None,
        dtype: str | None = None,
        anchor: bool = False,
    ) -> Published:
        """Commits a state as the next version and returns what it cost.

        ``source``: a mapping of names to tensors (a ``state_dict``), a `State`, or a checkpoint's path; it must not
        change during the call. ``metadata``: the caller's own data about the version, small and flat. ``dtype``: the
        compute dtype ("BF16", "F16", "F8_E4M3", "F8_E5M2") that floating-point tensors wider than it are cast to,
        rounded to nearest even as ``torch.Tensor.to`` does (NaN stays NaN); FP8 without a scale. None: as they are.
        ``anchor``: store an anchor with it, so that a newcomer can start here whatever it trusts or can reach of what
        was before.

        The in-memory baseline moves only after the commit is confirmed: if this raises StoreUnavailable or StoreFull,
        nothing is lost, and whether the version was committed is settled by the next call. A state with other names,
        dtypes or shapes than the last is published with an anchor; so is the next one where the head is lost from the
        store, or was signed with another key. Also raises UnsupportedTensor, InputError and PublisherConflict.
        """
        self._submissions.raise_unasked()
        with failures_to(self._listener, self._stream.name, "publish"):
            order = Order.of(source, metadata, dtype, anchor)
            if self._on_device == "baseline":
                order = order.within_devices()
            await_devices(order.source)
            return self._serial.run(lambda: self._publish(order, PhaseTimer()))[0]

    def submit(
        self,
        source: StateSource,
        *,
        metadata: Metadata | None = None,
        dtype: str | None = None,
        anchor: bool = False,
        replace: bool = False,
    ) -> Submission:
        """Takes a copy of a state and returns; the version is committed behind the caller's work, as `publish` does it.

        ``source``, ``metadata``, ``dtype`` and ``anchor`` are those of `publish`; the state may change as soon as this
        returns. One version is in flight and one may wait; for another one this waits for room, or, to ``replace``,
        cancels the one that waits and takes over its memory. Needs the memory of a state for each. An error that nobody
        has asked the `Submission` for is raised by the next call, which then does nothing else; `close` waits for all.
        ``Published.blocked_seconds`` tells how long this took.

        CUDA tensors are copied into page-locked memory (as they are: they are cast behind) by a stream of their own,
        after the work that the caller's current stream has been given; what it is given later waits on the device for
        the copy (with ``on_device`` for one within the device, where there is memory for that), and the host for
        neither. Where no memory can be page-locked, this returns after the copy.
        """
        self._submissions.raise_unasked()
        began = time.perf_counter()
        blocked = 0.0

        def take(spare: Taken | None) -> Taken:
            nonlocal blocked
            order = Order.of(source, metadata, dtype, anchor)
            taken = order.taken(spare, self._threads, self._on_device)
            blocked = time.perf_counter() - began
            return taken

        def publish(taken: Taken | None, submission: Submission) -> tuple[Published, Taken | None]:
            if taken is None or not (begin(submission) and submission.set_running_or_notify_cancel()):
                if taken:
                    taken.resident = None
                raise CancelledError
            with failures_to(self._listener, self._stream.name, "publish"):
                order = taken.arrived()
                taken.resident = None
                published, draft = self._publish(order, PhaseTimer(), blocked)
            return published, None if order.owned and isinstance(draft, FullDraft) else taken

        return self._submissions.submit(take, publish, replace)

    def head(self) -> Manifest | None:
        """The newest committed version that can be read and trusted, None while there is none. Its metadata tells a
        restarted trainer where it was."""
        return self._serial.run(self._head)

    @property
    def stream_id(self) -> str | None:
        """The stream's ID, 32 hexadecimal digits, for subscribers to pin; None before the first publish."""
        return self._stream.stream_id

    def wait(self) -> None:
        """Waits until what was submitted is published, and the background folds are stored."""
        self._serial.run(self._folds.wait)
        self._submissions.raise_unasked()

    def close(self) -> None:
        """Waits for what was submitted and for the background folds, and releases the baseline. What is committed
        stays; a version that is not settled is left to the next Publisher. May be called twice; publishing afterwards
        starts as a new Publisher would.
        """
        self._serial.run(self._forget)
        self._submissions.forget()
        self._submissions.raise_unasked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PulseError:
            if error is None:  # an error that is on its way out is not hidden by one that came before it
                raise

    def _head(self) -> Manifest | None:
        found = self._stream.newest()
        if found.error:
            raise found.error
        return found.manifest

    def _refused(self, version: int, error: PulseError) -> None:
        self._tell(FallbackUsed(self._stream.name, f"version {version}", str(error), error.kind))

    def _forget(self) -> None:
        self._folds.wait()
        self._baseline, self._pending = self._new_baseline(), None
        self._devices.forget()

    # -- in the order of a publish

    def _publish(
        self, order: Order, timer: PhaseTimer, blocked_seconds: float | None = None
    ) -> tuple[Published, Draft]:
        for _ in range(_MAX_STALE_COMMITS):
            self._settle()
            # What no device can compare is copied before `_resume`, which would read it from there once more.
            seen = None if self._devices.follows(self._baseline) else self._devices.look_at(order, self._baseline)
            self._resume(seen.state if seen else order.state)
            timer.end("resume")
            seen = seen or self._devices.look_at(order, self._baseline)
            draft = make_draft(
                self._baseline,
                seen.state,
                codec=self._codec,
                remember=self._remember,
                timer=timer,
                owned=seen.owned,
            )
            long = self._since_anchor + draft.patch_bytes > self._anchor_ratio * draft.state.nbytes
            uploaded = upload(
                self._stream,
                draft,
                with_anchor=order.anchor or long or self._anchor_due,
                shard_bytes=self._shard_bytes,
                threads=self._threads,
                listener=self._listener,
            )
            timer.end("upload")
            history = (
                History() if uploaded.anchor else draft.history(self._baseline, self._committer.next, self._memory)
            )
            content = Content(
                draft.target.root,
                draft.state.elements,
                draft.state.nbytes,
                draft.state.aliases,
                remembers=history.spans,
            )
            manifest = self._committer.manifest(content, uploaded, order.metadata)
            if self._signer:
                manifest = self._signer.sign(manifest)
            # Before it is created for good: what no reader could parse must not be committed.
            manifests.parse(manifest.to_bytes(), stream=manifest.stream, version=manifest.version)
            self._pending = _Pending(manifest, draft, seen, history, time.time())
            if self._commit(self._pending):
                timer.end("commit")
                return self._published(manifest, draft, timer, blocked_seconds, seen.crowded), draft
        raise PublisherConflict(f"{_MAX_STALE_COMMITS} commits of older publishers came between")

    def _settle(self) -> None:
        """Commits what an earlier call has left pending, unless its payloads may have been collected since: then it is
        given up. Its commit may have succeeded all the same, and is found as the head."""
        self._committer.check()
        pending = self._pending
        if pending is None:
            return
        if self._committer.settles(pending.manifest, pending.uploaded):
            self._commit(pending)
        else:
            self._pending = None

    def _commit(self, pending: _Pending) -> bool:
        """Commits, and the baseline follows. False if the version is taken: what was pending is given up then."""
        with shield():
            try:
                committed = self._committer.commit(pending.manifest)
            except PublisherConflict:
                self._pending = None
                raise
            self._pending = None
            if not committed:
                return False
            try:
                pending.draft.take_effect(self._baseline, pending.manifest, pending.history)
                self._devices.follow(pending.seen, self._baseline)
            except BaseException:
                # The version is committed; a baseline that did not follow is given up, and the next call resumes.
                self._baseline = self._new_baseline()
                raise
            if pending.manifest.anchor:
                self._since_anchor, self._anchor_due = 0, False
            else:
                self._since_anchor += pending.draft.patch_bytes
            return True

    def _resume(self, state: State) -> None:
        """Makes the stream's head the baseline, unless it is."""
        baseline, committer = self._baseline, self._committer
        if baseline.version is not None and baseline.version == committer.version and not baseline.poisoned:
            if self._stream.lists(baseline.version):
                return
            committer.reclaim()
            self._baseline = self._new_baseline()
            self._tell(
                BaselineRestored(self._stream.name, baseline.version, "anchored", "the store no longer holds it")
            )
            return
        committer.take()
        if committer.head is None:
            return
        event, self._since_anchor = resume(
            baseline, self._stream, committer.head, state, anchor_ratio=self._anchor_ratio
        )
        if event.how == "anchored":
            self._baseline = self._new_baseline()
        signature = committer.head.signature
        if self._signer and signature and signature.key != self._signer.public_key:
            self._anchor_due = True  # for those who trust the new key only
        self._tell(event)

    def _tell(self, event: Event) -> None:
        if self._listener:
            self._listener(event)

    def _published(
        self, manifest: Manifest, draft: Draft, timer: PhaseTimer, blocked_seconds: float | None, crowded: bool
    ) -> Published:
        published = published_as(manifest, timer, draft.reason, blocked_seconds)
        self._tell(published)
        self._notices.look_at(manifest.version, draft, crowded=crowded)
        return published

    def _new_baseline(self) -> HostState:
        return HostState(threads=self._threads, listener=self._listener, watcher=self._folds)
