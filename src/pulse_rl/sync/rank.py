"""One publish, step by step (docs/protocol.md, section 3).

The steps are the same for a single process and for each rank of several. `sharded.ShardedRank`
overrides what several ranks do together.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from .._util.collective import RankGroup
from .._util.serial import shield
from ..errors import ChainGap, DigestMismatch, NotFound, PublisherConflict, StoreFull
from ..events import (
    BaselineRestored,
    CallFailed,
    Event,
    FallbackUsed,
    PhaseTimer,
    Published,
    progress_shown,
    progress_to,
)
from ..hints import Notices
from ..history import HistoryPolicy, RankReport
from ..patch.blocks import Block, cut
from ..patch.tree import hashed_together, numbered_leaves, tree_of
from ..state.tensors import Segment, State
from ..store.base import UNREADABLE
from ..stream import manifest as manifests
from ..stream.anchor import DEFAULT_SHARD_BYTES
from ..stream.manifest import FileRef, Manifest, Payload
from ..stream.stream import Stream
from .commit import (
    Committer,
    Content,
    HeadState,
    Stored,
    published_as,
    store_anchor,
    store_patch,
    uploaded,
)
from .host_state import HostState, catch_up
from .pending import (
    NO_SMALLER,
    Baseline,
    PublishLayout,
    PublishState,
    difference,
    make_pending,
)
from .request import LocalState, PublishRequest

if TYPE_CHECKING:
    from ..follow.state_folder import StateFolder
    from ..ops.fleet import StuckWorkers
    from ..ops.gc import Retention
    from ..submit import Submission
    from .publisher import PublisherSettings

R = TypeVar("R")

_log = logging.getLogger("pulse_rl")
# Each stale commit is of an older publisher that did not know of its successor; more than a few in
# a row mean that publishers fight over the stream.
_MAX_STALE_COMMITS = 8
# Bytes. Below this a request costs more than its payload, so even a patch larger than the state is
# stored as a patch.
_SMALL = 1 << 16


# Why a version gets an anchor. Without one that is wanted, new workers replay more patches.
REQUIRED, WANTED = "required", "wanted"


# How a publisher that starts made the head its baseline; ANCHORED: it did not.
KEPT, MATCHED, RESTORED, ANCHORED = "kept", "matched", "restored", "anchored"


class RankPublisher:
    """Publishes this rank's part of a state, together with the other ranks in ``ranks``.

    All ranks call its methods in the same order. One thread at a time may use it.
    """

    def __init__(
        self,
        stream: Stream,
        ranks: RankGroup,
        settings: PublisherSettings,
        *,
        folder: StateFolder | None = None,
    ) -> None:
        self.shard_bytes = DEFAULT_SHARD_BYTES
        self.history = HistoryPolicy(ranks.size)
        #: Whether the stream must have no versions before the first one from here.
        self.new = False
        #: Deletes old versions, on rank 0 with ``keep``.
        self.retention: Retention | None = None
        #: Reads the heartbeats of workers, on rank 0.
        self.stuck_workers: StuckWorkers | None = None
        self._stream = stream
        self._ranks = ranks
        self._threads = settings.threads
        self._listener = self._shown_to = settings.on_event
        self._folder = folder
        self._committer = Committer(
            stream,
            settings.signer,
            settings.anchor_ratio,
            settings.keep,
            together=self.together,
        )
        self._baseline: Baseline | None = None
        self._pending: PublishState | None = None
        self._events: list[Event] = []  # held back: a failing listener would part the ranks
        self._notices = Notices(stream.name, self._listener, first=self.first)

    @property
    def together(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks.size > 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which commits."""
        return self._ranks.rank == 0

    def publish(
        self,
        request: PublishRequest,
        *,
        number: int = 0,
        submission: Submission | None = None,
        blocked_seconds: float | None = None,
        progress: bool = False,
    ) -> tuple[Published, bool]:
        """Commit the next version; return its cost, and whether the request's memory became the
        baseline.

        Raises what `Publisher.publish` raises. ``number`` is the number of the call, equal on all
        ranks; ranks with different numbers have diverged. If the ``submission`` is cancelled on one
        rank, all raise CancelledError. ``progress``: rank 0 shows a bar.
        """
        with progress_shown(progress and self.first, self._listener) as self._shown_to:
            timer = PhaseTimer()
            if self._folder:
                self._folder.open()
            try:
                with self._as_one(), self._stream.limited():
                    manifest, state, local = self._commit_next(request, number, submission, timer)
            finally:
                self._emit_events()  # after the step: a failing listener must not part the ranks
        # The version is committed. The rest concerns no other rank, and may fail here alone.
        if self.retention:
            self.retention.committed(manifest)
        published = published_as(manifest, timer, state.reason, blocked_seconds)
        self._tell(published)
        self._notices.check_published(manifest.version, state, local.source, local.mixed)
        # The memory became the baseline: as an anchor, or because it equals the head of a publisher
        # that starts again.
        return published, local.owned and state.state is local.source

    def _commit_next(
        self,
        request: PublishRequest,
        number: int,
        submission: Submission | None,
        timer: PhaseTimer,
    ) -> tuple[Manifest, PublishState, LocalState]:
        """Commit the next version; return its manifest, and what it was made of."""
        # Agree with all ranks on the call, and on what each of them has of the state.
        local = self._agree_arguments(request, number, submission)
        if request.files and local.config:
            from ..follow.aux_files import of_quantized

            request = replace(request, files=of_quantized(request.files, local.config))
        for _ in range(_MAX_STALE_COMMITS):
            manifest, state = self._try_commit(request, local, timer)
            if manifest:
                return manifest, state, local
            # An older publisher took the number: all ranks find the head again.
        came = f"{_MAX_STALE_COMMITS} commits of older publishers came between"
        raise self._ranks.mark_collective(PublisherConflict(came))

    def _try_commit(
        self, request: PublishRequest, local: LocalState, timer: PhaseTimer
    ) -> tuple[Manifest | None, PublishState]:
        """Try to commit the next version; the manifest is None if its number was taken."""
        ranks, committer = self._ranks, self._committer
        # 1. Settle: find out whether a commit whose reply was lost has happened. If it has, the
        # baseline moves to it.
        self._advance(ranks.from_first(committer.settle, _to_message, self._parsed))
        # 2. Resume: compare the head with the baseline. If they differ the head is restored, or an
        # anchor starts over.
        version = self._baseline.version if self._baseline else None
        found = ranks.from_first(
            lambda: committer.find(version), HeadState.to_message, HeadState.from_message
        )
        if not found.keep:
            self._baseline = None
        if found.lost is not None:
            self._resumed(found.lost, ANCHORED, "the store no longer holds it")
        self._require_head(-1 if self.new and request.after is None else request.after, found)
        if self.first and committer.head:
            self._notices.continues(committer.head, request.metadata)
        timer.end("resume")
        # 3. Build: compare, encode, decode as a check, and hash; or copy the whole state.
        state = self._recover(local, found, timer) if found.version is not None else None
        if state is None:
            state = self._build(local, found, timer, stored=True)
        # 4. Decide, on rank 0: files, anchor and number of the version.
        layout, base, made = state.layout, state.base, state
        files, anchor, next_version = ranks.from_first(
            lambda: self._decide(request, made), _decided_to_message, json.loads
        )
        # 5. Upload: each rank stores its own parts. Nothing refers to them yet, so a rank that is
        # lost here leaves no version.
        stored = ranks.each(
            lambda: self._store(made, anchor, next_version),
            Stored.to_message,
            Stored.from_message,
        )
        if base is not None and not anchor:
            self.history.agree(state, [of.note for of in stored])
        timer.end("upload")
        # 6. Commit: the manifest makes the version. If the reply is lost, `_pending` stays until
        # the next publish settles it (step 1).
        patch, shards = uploaded(stored, (base.version, base.root) if base else None)
        if anchor and shards is None:
            committer.found_no_room()
        content = Content(
            root=state.root,
            elements=layout.elements,
            nbytes=layout.nbytes,
            aliases=layout.aliases,
            patch=patch,
            anchor=shards,
            remembers=len(state.history.windows),
            files=files,
        )
        self._pending = state
        manifest = ranks.from_first(
            lambda: committer.commit(content, request.metadata), _to_message, self._parsed
        )
        # 7. Move the baseline to the committed version.
        manifest = self._advance(manifest)
        self.new = self.new and manifest is None
        if self.stuck_workers and manifest and manifest.anchor:
            self.stuck_workers.anchored()
        timer.end("commit")
        return manifest, state

    # -- what several ranks do in another way

    def _agree_arguments(
        self, request: PublishRequest, number: int, submission: Submission | None
    ) -> LocalState:
        """Wait for this rank's part of the state."""
        if submission and not submission.begin():
            raise CancelledError
        local = request.arrived()
        if submission:
            submission.set_running_or_notify_cancel()
        return local

    def _layout_of(self, local: LocalState, known: frozenset[str]) -> PublishLayout:
        """Which rank publishes what. Tied tensors are stored under the names that are ``known``."""
        state = local.state.stored_as(known)
        return PublishLayout(state.specs, state.aliases)

    @contextmanager
    def _new_elements(
        self, layout: PublishLayout, local: State, blocks: Sequence[Block]
    ) -> Iterator[Iterator[tuple[range, State]]]:
        """Groups of ``blocks`` that are hashed at once, each with a state that has their new
        elements."""
        yield ((group, local) for group in hashed_together(blocks, self._threads))

    def _allocate(self, segments: Sequence[Segment]) -> State:
        """Uninitialized memory for what this rank publishes."""
        empty = self._folder.empty if self._folder else State.empty
        return empty(tuple(segment.spec for segment in segments), None)

    def _hash(self, state: PublishState) -> None:
        """Set the ``patch_bytes`` of ``state``, and on rank 0 its ``tree``."""
        state.patch_bytes = state.own_patch_bytes
        state.tree = tree_of(state.layout.specs, state.leaves)

    def _restored(
        self, layout: PublishLayout | None, head: Manifest, host: HostState
    ) -> tuple[Baseline | None, str]:
        """Restore the baseline at the ``head`` from the store.

        Returns (the baseline or None, why it failed).
        """
        try:
            catch_up(host, self._stream, head.version)
        except (ChainGap, *UNREADABLE) as error:
            return None, str(error)
        layout = PublishLayout(host.state.specs, host.state.aliases)
        blocks = cut(layout.specs)
        return Baseline(
            head.version,
            head.root,
            layout,
            layout.segments(0),
            blocks,
            host.state,
            numbered_leaves(host.digest),
            host.history.of(blocks),
        ), ""

    # -- steps of a publish

    def _require_head(self, after: int | None, found: HeadState) -> None:
        """Raise PublisherConflict, on all ranks, if the newest version is not ``after``."""
        if found.keep and self._baseline:
            head: int | None = self._baseline.version
        else:
            head = found.version if found.version is not None else found.lost
        if after is not None and after != (-1 if head is None else head):
            raise self._ranks.mark_collective(
                PublisherConflict(
                    f"the newest version of {self._stream.name!r} is "
                    f"{'none' if head is None else head}, not {'none' if after < 0 else after}",
                    hint="Look at head(): another publisher was faster, or this version is "
                    "published already.",
                )
            )

    def _recover(
        self, local: LocalState, found: HeadState, timer: PhaseTimer
    ) -> PublishState | None:
        """Make the head the baseline, and build the version after it.

        This runs on a publisher that starts, or whose number was taken by another. Returns None if
        no baseline could be made: then the version must be an anchor.
        """
        head = self._ranks.from_first(lambda: self._committer.head, _to_message, self._parsed)
        assert head is not None
        # 1. Kept: the folder holds the head, or an earlier version from which patches lead to the
        # head. `_restored` follows these.
        host = HostState(threads=self._threads, listener=self._shown_to, folder=self._folder)
        how = KEPT
        reason = ""
        if self._is_kept(host, head.version):
            self._baseline, reason = self._restored(None, head, host)
        else:
            # 2. Matched: a restarted trainer often has the head's own weights. Built as a full
            # state they have the head's root, and nothing is fetched.
            state = self._build(local, found, timer, stored=False)
            if state.root == head.root:
                how = MATCHED
                self._baseline = state.advance_baseline(
                    head.version, head.root, threads=self._threads
                )
                self._keep(self._baseline, head)
            else:
                # 3. Restored: the trainer has other weights, so the head is read from the store.
                how, layout = RESTORED, state.layout
                del state  # before another state is restored
                self._baseline, reason = self._restored(layout, head, host)
        if self._baseline is None:
            how = ANCHORED
        elif self._baseline.history.windows:
            # The readers have this history too, so the next patch is coded by it until its gain is
            # measured.
            self.history.on = True
        self._resumed(head.version, how, reason)
        timer.end("resume")
        if self._baseline is None:
            return None
        return self._build(local, HeadState(keep=True), timer, stored=True)

    def _is_kept(self, host: HostState, newest: int) -> bool:
        """Whether the folder holds a version of the stream up to ``newest``; ``host`` then has
        it."""
        if self._folder is None:
            return False
        from ..follow.state_folder import adopt_kept

        return adopt_kept(host, self._stream, self._stream.manifest, newest=newest)

    def _build(
        self, local: LocalState, found: HeadState, timer: PhaseTimer, *, stored: bool
    ) -> PublishState:
        """Build the next version: a patch from the baseline, or the whole state.

        The whole state is used without a baseline, if the tensors differ, or if a patch would be no
        smaller. ``stored``: a whole state will be an anchor for sure, so it is stored while it is
        copied.
        """
        # A tied tensor keeps its stored name. Under another name no patch would lead there.
        known = frozenset(found.names)
        if self._baseline:
            known = frozenset(spec.name for spec in self._baseline.layout.specs)
        layout, reason = self._layout_of(local, known), ""
        if self._baseline and (reason := difference(self._baseline.layout, layout)):
            self._baseline = None  # before another is made
        try:
            state = self._compared(local, layout, self._baseline, reason, stored)
        except DigestMismatch as error:  # on all ranks alike
            reason = f"anchor: {error}"
        if self._baseline and reason:
            # The disk has changed the baseline: a patch from it would lead nowhere.
            self._ranks.common_error = self._baseline = None
            state = self._compared(local, layout, None, reason, stored)
        if state.base and state.patch_bytes >= max(layout.nbytes, _SMALL):
            reason = f"{NO_SMALLER} {state.patch_bytes} bytes, the state has {layout.nbytes}"
            del state  # before the state is copied
            state = self._compared(local, layout, None, reason, stored)
        # All ranks need the root of the whole state; rank 0 has it.
        tree = state.tree
        state.root = self._ranks.from_first(
            lambda: tree.root if tree else "", str.encode, bytes.decode
        )
        timer.end("build")
        return state

    def _compared(
        self,
        local: LocalState,
        layout: PublishLayout,
        base: Baseline | None,
        reason: str,
        stored: bool,
    ) -> PublishState:
        """This rank's part of a version, compared with ``base`` and hashed."""
        segments = base.segments if base else layout.segments(self._ranks.rank)
        blocks = base.blocks if base else cut(layout.specs, segments)
        remembers = self.history.remembers
        nbytes = sum(segment.nbytes for segment in segments)
        own_memory = local.owned and not self.together and not self._folder

        def build() -> PublishState:
            with self._new_elements(layout, local.state, blocks) as tasks:
                return make_pending(
                    layout,
                    segments,
                    blocks,
                    tasks,
                    base,
                    reason,
                    owned=local.state if own_memory else None,
                    allocate=self._allocate,
                    store=self._store_anchor if stored and not self.together else None,
                    history=base.history if base and remembers else None,
                    recorder=self.history.recorder(base) if base else None,
                    check=self._folder.check_of(base) if self._folder and base else None,
                    threads=self._threads,
                    progress=progress_to(self._shown_to, "diff" if base else "digest", nbytes),
                )

        # If the build fails on one rank, it fails on all: none may go on to the upload.
        state = self._ranks.together(build)
        state.remembers = remembers
        self._hash(state)
        return state

    def _decide(
        self, request: PublishRequest, state: PublishState
    ) -> tuple[tuple[FileRef, ...], str, int]:
        """Decide on rank 0: (files of the next version, stored; `REQUIRED`, `WANTED` or no anchor;
        its number)."""
        files, lost = self._committer.store_files(request.files)
        for ref in lost:
            reason = "the store no longer holds it, and no version names it from now on"
            self._events.append(
                FallbackUsed(self._stream.name, f"file {ref.name!r}", reason, NotFound.kind)
            )
        anchor = ""
        if state.base is None or request.anchor or self._committer.anchor_due:
            anchor = REQUIRED
        elif self._committer.wants_anchor(state.patch_bytes, state.layout.nbytes) or (
            self.stuck_workers and self.stuck_workers.need_anchor()
        ):
            anchor = WANTED
        # Before the manifest: workers that select tensors read the digests as soon as they see it.
        if state.tree:
            self._stream.put_digests(state.tree, leaves=bool(anchor))
        return files, anchor, self._committer.next

    def _store(self, state: PublishState, anchor: str, version: int) -> Stored:
        """Store this rank's parts of the version with this number."""
        parts: list[Payload] = []
        shards: list[Payload] | None = []
        note = RankReport()
        if state.layout.has_file(self._ranks.rank):
            if state.base:
                parts.append(store_patch(self._stream, state.file()))
            if anchor and state.shards is None:
                try:
                    state.shards = self._store_anchor(state, [state.segments])
                except StoreFull as error:
                    # The patch leads to the version: training need not stop for an anchor.
                    if anchor == REQUIRED:
                        raise
                    name = self._stream.name
                    self._events.append(CallFailed(name, "anchor", error.kind, str(error)))
                    _log.warning("stream %s: no room for an anchor: %s", name, error)
            shards = state.shards
        if state.base is not None and not anchor:
            note = self.history.note(
                state, state.base, version, state.patch_bytes, threads=self._threads
            )
        return Stored(parts, shards if anchor else [], state.changed, note)

    def _store_anchor(
        self, state: PublishState, filled: Iterable[Sequence[Segment]]
    ) -> list[Payload]:
        return store_anchor(
            self._stream,
            state,
            filled,
            shard_bytes=self.shard_bytes,
            threads=self._threads,
            listener=self._shown_to,
        )

    def _advance(self, manifest: Manifest | None) -> Manifest | None:
        """Move the baseline to the pending version if rank 0 has committed it, else give that
        version up."""
        pending, self._pending = self._pending, None
        if manifest is None or pending is None:
            return None
        with shield():
            # Until the move is complete there is no baseline: after an error the next publish must
            # not code against a state between two versions.
            self._baseline = None
            journal = self._folder.journal(pending.state) if self._folder and pending.base else None
            baseline = pending.advance_baseline(
                manifest.version, manifest.root, journal=journal, threads=self._threads
            )
            self._keep(baseline, manifest)
            self._baseline = baseline
        self._stream.stream_id = manifest.stream_id
        return manifest

    def _keep(self, baseline: Baseline, manifest: Manifest) -> None:
        """Record the baseline in the folder as the version of ``manifest``, for the next start."""
        if self._folder:
            self._folder.keep(baseline.state, manifest, baseline.history)

    # -- around a publish

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        """Around what all ranks do together: an error on one rank alone closes the group."""
        try:
            yield
        except BaseException as error:
            if self.together and error is not self._ranks.common_error:
                # The other ranks do not know of the error. None of them may take its next step for
                # theirs.
                self._baseline, self._pending = None, None
                self._ranks.close()
            raise
        finally:
            self._ranks.common_error = None  # it would keep what the call worked on

    def forget(self) -> None:
        """Release everything that is held, and the ranks."""
        self._baseline, self._pending = None, None
        self._ranks.close()
        if self._folder:
            self._folder.close()

    def _parsed(self, message: bytes) -> Manifest | None:
        """The manifest that rank 0 has sent, or None."""
        if not message:
            return None
        return manifests.parse(
            message, stream=self._stream.name, version=int(json.loads(message)["version"])
        )

    def _resumed(self, version: int, how: str, reason: str) -> None:
        self._events.append(BaselineRestored(self._stream.name, version, how, reason))

    def _emit_events(self) -> None:
        while self._events:
            self._tell(self._events.pop(0))

    def _tell(self, event: Event) -> None:
        if self._listener:
            self._listener(event)


def _to_message(manifest: Manifest | None) -> bytes:
    return manifest.to_bytes() if manifest else b""


def _decided_to_message(decided: tuple[tuple[FileRef, ...], str, int]) -> bytes:
    """The decision without the files, which only rank 0 needs."""
    return json.dumps([[], *decided[1:]]).encode()
