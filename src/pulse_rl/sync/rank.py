"""One rank's side of publishing; a publisher of one process is the only rank (docs/protocol.md,
sections 3 and 10).

A publish reads in one direction: `_meet`, settle and resume (`commit`, `baseline`), build
(`pending`), upload, commit, and the baseline follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from .. import codec as codecs
from .._util.collective import Bytes, RankGroup
from .._util.serial import shield
from ..errors import DigestMismatch, NotFound, PublisherConflict, PulseError
from ..events import (
    BaselineRestored,
    Event,
    FallbackUsed,
    Listener,
    PhaseTimer,
    Published,
    fell_back,
    progress_shown,
    progress_to,
)
from ..state.companions import of_quantised
from ..state.quantise_formats import Shared
from ..state.tensors import Segment, State
from ..stream import manifest as manifests
from ..stream.anchor import DEFAULT_SHARD_BYTES
from ..stream.digest_trees import put_digests
from ..stream.manifest import FileRef, Manifest, Payload
from ..stream.signing import Signer
from ..stream.stream import Stream
from .attested import WholeState
from .baseline import KeptPart, kept_part, part_of, restore_baseline, restore_whole
from .calls import make_call
from .commit import Content, Found, StreamHead, published_as
from .device_diff import DeviceDiff, Scan
from .folds import FoldMaker
from .gc import Retention
from .history_policy import START_SPAN, HistoryPolicy, Note
from .host_state import HostState, adopt_kept
from .layout import (
    Layout,
    difference,
    held_from_bytes,
    held_to_bytes,
    layout_from_bytes,
    layout_to_bytes,
    make_layout,
    whole_layout,
)
from .leaves import gather_tree
from .notices import Notices
from .payloads import Stored, store_anchor, store_patch, store_while_filled, uploaded
from .pending import NO_SMALLER, Baseline, Built, PendingVersion, hash_shared_leaves, make_pending
from .quantised_shards import Blocks, agree, quantised
from .request import LocalState, PublishRequest
from .state_folder import StateFolder
from .submissions import Submission

_MAX_STALE_COMMITS = 8
_SMALL = 1 << 16
"""Bytes: below that a request costs more than what it carries, and a patch needs no larger
state."""


class Settings(NamedTuple):
    """Those of `Publisher`; ``keys`` are all that are trusted."""

    codec: str
    anchor_ratio: float
    folds: Collection[int]
    keep: int | None
    keys: tuple[str, ...]
    signer: Signer | None
    attest: bool
    threads: int | None


class RankPublisher:
    """Publishes what this rank has of a state, together with the other ``ranks``. All ranks call
    its methods in the same order; one thread at a time."""

    def __init__(
        self,
        stream: Stream,
        ranks: RankGroup,
        settings: Settings,
        *,
        listener: Listener | None,
        folder: StateFolder | None = None,
    ) -> None:
        self.shard_bytes = DEFAULT_SHARD_BYTES
        self.history = HistoryPolicy(ranks.size, min(settings.folds, default=START_SPAN))
        self._stream = stream
        self._ranks = ranks
        self._settings = settings
        self._threads = settings.threads
        self._listener = self._shown_to = listener
        self._folder = folder
        self._head = StreamHead(
            stream,
            settings.signer,
            settings.anchor_ratio,
            attest=settings.attest,
            together=ranks.size > 1,
        )
        self._baseline: Baseline | None = None
        self._pending: PendingVersion | None = None
        self._held_digests: list[bytes] | None = None
        self._held: list[bytes] = []  # of all ranks, on rank 0 alone
        self._layout: tuple[object, Layout] | None = None
        self._events: list[Event] = []  # of a step in which a listener's error would part the ranks
        self._devices = DeviceDiff()
        self._notices = Notices(stream.name, listener, first=ranks.rank == 0)
        self._folds = FoldMaker(
            stream,
            ranks,
            settings.folds,
            codec=settings.codec,
            threads=settings.threads,
            tell=self._events.append,
        )
        first = ranks.rank == 0
        self._retention = Retention(
            stream, settings.keep if first else None, settings.keys, listener
        )

    def publish(
        self,
        request: PublishRequest,
        *,
        number: int = 0,
        submission: Submission | None = None,
        blocked_seconds: float | None = None,
        progress: bool = False,
    ) -> tuple[Published, bool]:
        """Commits the next version; returns what it cost, and whether the request's memory has
        become the baseline. Raises what `Publisher.publish` raises. ``number``: of the call, the
        same on all ranks, which part where it is not. Raises CancelledError, on all, if the
        ``submission`` is cancelled on one. ``progress``: rank 0 shows it."""
        with progress_shown(progress and self.first, self._listener) as self._shown_to:
            return self._publish(request, number, submission, blocked_seconds)

    def _publish(
        self,
        request: PublishRequest,
        number: int,
        submission: Submission | None,
        blocked_seconds: float | None,
    ) -> tuple[Published, bool]:
        timer = PhaseTimer()
        if self._folder:
            self._folder.open()
        # What the version before left to do: a fold is coded from its bits, which the commit
        # changes in place.
        self.keep_up()
        try:
            with self._with_others(), self._stream.limited():
                local = self._meet(request, number, submission)
                if request.files and local.config:
                    request = replace(request, files=of_quantised(request.files, local.config))
                manifest, draft, scan = self._commit_together(request, local, timer)
        finally:
            request.let_go()
            self._emit_events()  # a listener that fails must not part the ranks
        # It is committed. What follows concerns no other rank, and may fail without parting them.
        self._retention.committed(manifest)
        published = published_as(manifest, timer, draft.reason, blocked_seconds)
        self._tell(published)
        self._notices.look_at(
            manifest.version,
            draft,
            local.source,
            out_of_memory=scan.out_of_memory or request.out_of_memory,
        )
        # As an anchor, or as the head that a publisher which resumes has found it to be.
        return published, scan.owned and draft.state is scan.state

    @contextmanager
    def _with_others(self) -> Iterator[None]:
        """Around what all ranks do together: an error that is not raised on all of them ends
        that."""
        try:
            yield
        except BaseException as error:
            if self.together and error is not self._ranks.common_error:
                # The others do not know of it: none of them may mistake its next step for theirs.
                self._baseline, self._pending = None, None
                self._ranks.close()
            raise
        finally:
            self._ranks.common_error = None  # it would keep what the call worked on

    @property
    def together(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks.size > 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which commits."""
        return self._ranks.rank == 0

    @property
    def has_upkeep(self) -> bool:
        """Whether there is anything that `keep_up` may do."""
        return self._folds.wanted or self._retention.keep is not None

    def keep_up(self) -> None:
        """Makes the folds that are due, a collective where some are, and deletes what is not to be
        kept. Without folds readers take the patches."""
        self._folds.make()
        self._emit_events()
        self._retention.collect()

    def forget(self) -> None:
        """Makes the folds that are due, and releases all that is held, and the ranks."""
        self.keep_up()
        self._folds.forget()
        self._devices.forget()
        self._baseline, self._pending, self._held_digests, self._layout = None, None, None, None
        self._held = []
        self._ranks.close()
        if self._folder:
            self._folder.close()

    # -- in the order of a publish

    def prepare(
        self,
        request: PublishRequest,
        work: Callable[[], None],
        *,
        number: int,
        submission: Submission | None,
    ) -> None:
        """Does ``work``, which raises on all ranks what it raises on one, before any stream of a
        call is published. Raises as `publish` what has to do with the call: other arguments of
        other ranks, or a cancelled one."""
        with self._with_others():
            make_call(self._ranks, self._stream.name, request, work, number, submission)

    def _meet(
        self, request: PublishRequest, number: int, submission: Submission | None
    ) -> LocalState:
        """This rank's part of the state. The ranks tell each other what they were called with,
        which must be the same, and what they have, if that is not as it was."""
        made: list[LocalState] = []
        held: list[bytes] = []
        shared: dict[str, tuple[Shared, Blocks]] = {}

        def describe() -> tuple[str, int, str] | None:
            made.append(request.arrived())
            if made[0].quantise is not None:
                made[0], of_blocks = quantised(made[0])
                shared.update(of_blocks)
            if not self.together:
                return None
            held.append(held_to_bytes(made[0].held))
            at = self._baseline
            known = f"{at.version} {at.root} {len(at.history.windows)}" if at else ""
            return sha256(held[0]).hexdigest(), len(held[0]), known

        # 1. One message each: the call's number, its arguments, and a digest of what the rank has.
        met = make_call(self._ranks, self._stream.name, request, describe, number, submission)
        if not self.together:
            return made[0]
        if len({at for *_, at in met}) > 1:
            self._baseline = None  # one rank has lost its own
        # 2. In a steady state that is all. Rank 0 gets the descriptions where one has changed:
        # megabytes, once.
        digests = [digest.encode() for digest, _, _ in met]
        if self._held_digests != digests:
            lengths = {rank: nbytes for rank, (_, nbytes, _) in enumerate(met)}
            first = self._ranks.rank == 0
            came = self._ranks.exchange(
                {0: np.frombuffer(held[0], np.uint8)}, lengths if first else {}
            )
            self._held = [came[rank].tobytes() for rank in range(len(came))]
            self._held_digests = digests
        return (
            made[0] if request.quantise is None else agree(made[0], shared, self._ranks.run_on_all)
        )

    def _commit_together(
        self, request: PublishRequest, local: LocalState, timer: PhaseTimer
    ) -> tuple[Manifest, PendingVersion, Scan]:
        """The manifest of the version that was committed, and what it was made of."""
        for _ in range(_MAX_STALE_COMMITS):
            # 1. Settle: a commit whose reply was lost has happened or has not; the baseline is then
            # the head's, or not.
            self._advance(self._ranks.from_rank0(self._head.settle, _to_message, self._parsed))
            self._folds.make()
            # 2. Resume: what is the head, and is the baseline it? Else the head is restored, or an
            # anchor starts over.
            found = self._resume()
            self._require_head(request.after, found)
            timer.end("resume")
            # 3. Build: what lies on devices is compared there; then compare, code, decode as a
            # check, and hash.
            scan = self._scan(local)
            built = self._take_up(local, scan, found, timer) or self._build(
                local, scan, found, timer, stored=True
            )
            # 4. Upload, then commit. None: an older publisher took the number, and all looks at the
            # head again.
            manifest = self._store_and_commit(request, built, timer)
            if manifest:
                return manifest, built.draft, scan
        came = f"{_MAX_STALE_COMMITS} commits of older publishers came between"
        raise self._ranks.mark_collective(PublisherConflict(came))

    def _resume(self) -> Found:
        """What the head is. The baseline goes unless it is that."""
        version = self._baseline.version if self._baseline else None
        found = self._ranks.from_rank0(
            lambda: self._head.find(version), Found.to_message, Found.from_message
        )
        if not found.keep:
            self._baseline = None
        if found.lost is not None:
            self._resumed(found.lost, "anchored", "the store no longer holds it")
        return found

    def _require_head(self, after: int | None, found: Found) -> None:
        """Raises PublisherConflict, on all ranks, where another version than ``after`` is the
        newest."""
        known = found.version if found.version is not None else found.lost
        head = (
            self._baseline.version
            if found.keep and self._baseline
            else -1
            if known is None
            else known
        )
        if after is not None and head != after:
            raise self._ranks.mark_collective(
                PublisherConflict(
                    f"the newest version of {self._stream.name!r} is "
                    f"{'none' if head < 0 else head}, not "
                    f"{'none' if after < 0 else after}",
                    hint="Look at head(): another publisher was faster, or this version is "
                    "published already.",
                )
            )

    def _scan(self, local: LocalState) -> Scan:
        """What the version is to hold, once what lies on devices is compared there or copied."""
        made: list[Scan] = []

        def scan() -> bytes:
            made.append(self._devices.scan(local, self._baseline))
            return b""

        self._ranks.run_on_all(scan)
        return made[0]

    def _take_up(
        self, local: LocalState, scan: Scan, found: Found, timer: PhaseTimer
    ) -> Built | None:
        """Makes the head the baseline, where there is one and the ranks have another or none; then
        the version after it. None if that has to be an anchor."""
        if found.version is None:
            return None
        # What is kept in the folder is the head, or a version before it, from where some patches
        # lead there.
        host = HostState(threads=self._threads, listener=self._shown_to, folder=self._folder)
        how, reason = "kept", ""
        head = self._ranks.from_rank0(lambda: self._head.committer.head, _to_message, self._parsed)
        assert head is not None
        restored: Baseline | str | None = None
        if self._ranks.size > 1:
            restored = self._kept_together(self._layout_of(local, scan, found), head)
        elif adopt_kept(host, self._stream, self._stream.manifest, newest=found.version):
            restored = restore_whole(self._stream, found.version, found.root, host)
        if restored is None:
            # A trainer that starts again often has the head's own weights: built as a full state
            # they have its root, and nothing is fetched.
            built = self._build(local, scan, found, timer, stored=False)
            how = "matched"
            if built.root == found.root:
                restored, _ = built.draft.advance_baseline(
                    found.version, found.root, threads=self._threads
                )
                self._keep(restored, head)
            else:
                layout = built.draft.layout
                del built  # before another state is restored
                how, restored = "restored", self._restored(layout, head, host)
        reason = restored if isinstance(restored, str) else ""
        self._baseline = None if isinstance(restored, str) else restored
        if self._baseline and self._baseline.history.windows:
            self.history.on = True  # until it is measured
        self._resumed(found.version, "anchored" if reason else how, reason)
        timer.end("resume")
        return None if reason else self._build(local, scan, Found(keep=True), timer, stored=True)

    def _kept_together(self, layout: Layout, head: Manifest) -> Baseline | None:
        """The head, if some ranks have their parts in their folders: the others read theirs from
        the store."""
        parts: list[KeptPart] = []

        def look() -> bytes:
            try:
                if self._folder and (part := kept_part(self._ranks, layout, head, self._folder)):
                    parts.append(part)
            except PulseError as error:
                self._not_used(error)
            return b"kept" if parts else b""

        if not any(self._ranks.run_on_all(look)):
            return None
        restored = self._joined(layout, head, parts[0] if parts else None)
        if isinstance(restored, Baseline):
            return restored
        # One of the parts is not what its record says, and nobody can tell which.
        if parts:
            self._not_used(DigestMismatch(restored))
        return None

    def _not_used(self, error: PulseError) -> None:
        """Drops what the folder keeps."""
        assert self._folder is not None
        self._folder.drop()
        fell_back(
            self._events.append, self._stream.name, f"the state in {self._folder.path}", error
        )

    def _restored(self, layout: Layout, head: Manifest, host: HostState) -> Baseline | str:
        if self._ranks.size > 1:
            return self._joined(layout, head, None)
        return restore_whole(self._stream, head.version, head.root, host)

    def _joined(self, layout: Layout, head: Manifest, kept: KeptPart | None) -> Baseline | str:
        """This rank's part of the head, once all have theirs."""
        empty = self._folder.empty if self._folder else State.empty
        restored = restore_baseline(
            self._stream, self._ranks, layout, head, kept=kept, empty=empty, threads=self._threads
        )
        if isinstance(restored, Baseline):
            self._keep(restored, head)
        return restored

    def _build(
        self, local: LocalState, scan: Scan, found: Found, timer: PhaseTimer, *, stored: bool
    ) -> Built:
        """The next version: a patch from the baseline, or all of the state, where there is none, or
        one of other tensors, or where a patch would be no smaller. ``stored``: a full state is sure
        to be an anchor, and is stored while it is copied."""
        layout, reason = self._layout_of(local, scan, found), ""
        if self._baseline and (reason := difference(self._baseline.layout, layout)):
            self._baseline = None  # before another is made
        draft, patch_bytes = self._drafted(layout, scan, self._baseline, reason, stored)
        if draft.base and patch_bytes >= max(layout.nbytes, _SMALL):
            reason = f"{NO_SMALLER} {patch_bytes} bytes, the state has {layout.nbytes}"
            del draft  # before the state is copied
            draft, patch_bytes = self._drafted(layout, scan, None, reason, stored)
        # The root is of the whole state, whoever has it: each rank hashed its leaves, and rank 0
        # joins them.
        with self._ranks.isolated():
            tree = gather_tree(layout, self._ranks, draft.leaves)
        root = self._ranks.from_rank0(lambda: tree.root if tree else "", str.encode, bytes.decode)
        timer.end("build")
        return Built(draft, root, tree, patch_bytes)

    def _drafted(
        self, layout: Layout, scan: Scan, base: Baseline | None, reason: str, stored: bool
    ) -> tuple[PendingVersion, int]:
        """This rank's part of a version, and the bytes of the blocks of all parts."""
        made: list[PendingVersion] = []
        total = sum(segment.nbytes for segment in layout.segments(self._ranks.rank))
        remembers = self._may_remember and self.history.remembers

        def store(draft: PendingVersion, filled: Iterator[Sequence[Segment]]) -> list[Payload]:
            return store_while_filled(
                self._stream,
                draft,
                filled,
                shard_bytes=self.shard_bytes,
                threads=self._threads,
                listener=self._shown_to,
            )

        def build() -> bytes:
            draft = make_pending(
                layout,
                self._ranks,
                scan.state,
                base,
                reason,
                owned=scan.owned and self._ranks.size == 1 and not self._folder,
                empty=self._folder.empty if self._folder else State.empty,
                store=store if stored and self._ranks.size == 1 else None,
                codec=self._settings.codec,
                history=base.history if base and remembers else None,
                recorder=self.history.recorder(base) if base and self._may_remember else None,
                threads=self._threads,
                progress=progress_to(self._shown_to, "diff" if base else "digest", total),
            )
            draft.resident = scan.resident
            draft.remembers = remembers
            made.append(draft)
            return b""

        self._ranks.run_on_all(build)
        return made[0], hash_shared_leaves(made[0], self._ranks, self._threads)

    def _layout_of(self, local: LocalState, scan: Scan, found: Found) -> Layout:
        """Who publishes what. Rank 0 makes it of the descriptions of all ranks, and sends each its
        part."""
        known = frozenset(found.names)
        if self._baseline:
            known = frozenset(spec.name for spec in self._baseline.layout.specs)
        # A tied tensor is stored under the name that it had: under another one no patch would lead
        # there.
        if self._ranks.size == 1 and not local.boxes:
            state = scan.state.stored_as(known)
            return whole_layout(state.specs, state.aliases)
        digests = (
            self._held_digests if self._held_digests is not None else [held_to_bytes(local.held)]
        )
        key = tuple(digests), known
        if self._layout is None or self._layout[0] != key:
            made, views = list[Layout](), dict[int, Bytes]()

            def make() -> bytes:
                made.append(
                    make_layout(
                        [held_from_bytes(message) for message in self._held or digests], known
                    )
                )
                for rank in range(1, self._ranks.size):
                    views[rank] = np.frombuffer(layout_to_bytes(made[0].of_rank(rank)), np.uint8)
                return json.dumps([0, *(len(view) for view in views.values())]).encode()

            lengths = json.loads(self._ranks.on_rank0(make))
            mine = lengths[self._ranks.rank]
            came = self._ranks.exchange(views, {0: mine} if mine else {})
            self._layout = key, layout_from_bytes(came[0].tobytes()) if mine else made[0]
        return self._layout[1]

    def _store_and_commit(
        self, request: PublishRequest, built: Built, timer: PhaseTimer
    ) -> Manifest | None:
        """None if the version's number is taken."""
        draft, layout, base = built.draft, built.draft.layout, built.draft.base
        # 1. Rank 0 decides what the version needs, and its number.
        files: list[tuple[FileRef, ...]] = [()]

        def decide() -> bytes:
            files[0], lost = self._head.store_files(request.files)
            for ref in lost:
                reason = "the store no longer holds it, and no version names it from now on"
                self._events.append(
                    FallbackUsed(self._stream.name, f"file {ref.name!r}", reason, NotFound.kind)
                )
            due = self._head.needs_anchor(built.patch_bytes, layout.nbytes)
            with_anchor = base is None or request.anchor or due
            # Before the manifest: who selects tensors of the version looks for them at once.
            if built.tree:
                put_digests(self._stream, built.tree, leaves=with_anchor)
            return json.dumps([with_anchor, self._head.next]).encode()

        with_anchor, version = json.loads(self._ranks.on_rank0(decide))
        remembers = base is not None and not with_anchor and self._may_remember
        # 2. Each rank stores its own parts. Nothing refers to them yet: a rank that is lost here
        # leaves no version.
        stored: list[Stored] = []

        def put() -> bytes:
            parts, shards = [], []
            if layout.has_file(self._ranks.rank):
                if base:
                    chunks = draft.file(
                        built.root, codec=self._settings.codec, threads=self._threads
                    )
                    parts.append(store_patch(self._stream, chunks))
                if with_anchor and draft.shards is not None:
                    shards = draft.shards
                elif with_anchor:
                    shards = store_anchor(
                        self._stream,
                        draft,
                        shard_bytes=self.shard_bytes,
                        threads=self._threads,
                        listener=self._shown_to,
                    )
            note = Note()
            if remembers:
                assert base is not None
                note = self.history.note(
                    draft, base, version, built.patch_bytes, threads=self._threads
                )
            stored.append(Stored(parts, shards, draft.changed, note))
            return b"" if self._ranks.size == 1 else stored[0].to_message()

        said = self._ranks.run_on_all(put)
        if self._ranks.size > 1:
            stored = [Stored.from_message(message) for message in said]
        if remembers:
            self.history.agree(draft, [of.note for of in stored])
        timer.end("upload")

        # 3. The manifest makes the version. Whether it was created may stay unknown: `_pending` is
        # kept until that is settled, here or at the begin of the next publish.
        def commit() -> Manifest | None:
            state = built.root, layout.elements, layout.nbytes, layout.aliases
            made = uploaded(stored, (base.version, base.root) if base else None)
            content = Content(*state, *made, len(draft.history.windows), files[0])
            whole = (
                WholeState(built.tree, draft.whole() if self._ranks.size == 1 else None)
                if built.tree
                else None
            )
            return self._head.commit(content, request.metadata, whole)

        self._pending = draft
        manifest = self._advance(self._ranks.from_rank0(commit, _to_message, self._parsed))
        timer.end("commit")
        return manifest

    @property
    def _may_remember(self) -> bool:
        """Whether what changed before may code what changes now."""
        return self._settings.codec == codecs.AUTO

    def _advance(self, manifest: Manifest | None) -> Manifest | None:
        """Moves the baseline to the pending version, if rank 0 has committed it; else gives that
        up."""
        pending, self._pending = self._pending, None
        if manifest is None or pending is None:
            return None
        with shield():
            self._baseline = None  # should this be interrupted by an error
            journal = self._folder.journal(pending.state) if self._folder and pending.base else None
            baseline, undo = pending.advance_baseline(
                manifest.version, manifest.root, journal=journal, threads=self._threads
            )
            self._keep(baseline, manifest)
            if self._folds.wanted:
                self._folds.advanced(pending.base, manifests.patch_bytes(manifest), undo, baseline)
            self._devices.follow(pending.resident, baseline)
            self._baseline = baseline
        self._stream.stream_id = manifest.stream_id
        return manifest

    def _keep(self, baseline: Baseline, manifest: Manifest) -> None:
        """Has the baseline found again in the folder, as the version of ``manifest``."""
        if self._folder:
            part = part_of(baseline.layout, self._ranks)
            self._folder.keep(baseline.state, manifest, baseline.history, part)

    def _parsed(self, message: bytes) -> Manifest | None:
        """The manifest that rank 0 has sent; None where there is none."""
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
