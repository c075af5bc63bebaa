"""One rank's side of publishing, whatever carries its messages to the others (docs/protocol.md, section 10)."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from concurrent.futures import CancelledError
from hashlib import sha256

import numpy as np

from ..._util.collective import Bytes, RankGroup
from ..._util.serial import shield
from ...codec import Changes
from ...errors import PublisherConflict, RankLost
from ...events import BaselineRestored, Event, Listener, PhaseTimer, Published, progress_to
from ...stream import manifest as manifests
from ...stream.digest_trees import put_digests
from ...stream.manifest import Manifest
from ...stream.signing import Signer
from ...stream.stream import Stream
from ...sync.commit import Content, published_as
from ...sync.submit import Submission, begin
from . import messages
from .draft import Baseline, Built, Draft, hash_shared_leaves, make_draft
from .folds import RankFolds
from .head import Found, Head
from .layout import Layout, difference, make_layout
from .leaves import gather_tree
from .local import LocalState
from .order import Order
from .resume import restore_baseline
from .upload import Stored, store, uploaded

_MAX_STALE_COMMITS = 8
_CALL = struct.Struct("<Q?")  # a call's number, and whether this rank goes on with it


class RankPublisher:
    """Publishes what this rank has of a state, together with the other ``ranks``. The settings are those of
    `ShardedPublisher`. All ranks call its methods in the same order; one thread at a time."""

    def __init__(
        self,
        stream: Stream,
        ranks: RankGroup,
        *,
        codec: str,
        anchor_ratio: float,
        shard_bytes: int,
        folds: Collection[int],
        signer: Signer | None,
        threads: int | None,
        listener: Listener | None,
    ) -> None:
        self._stream = stream
        self._ranks = ranks
        self._codec = codec
        self._shard_bytes = shard_bytes
        self._threads = threads
        self._listener = listener
        self._head_of_all = Head(stream, signer, anchor_ratio)
        self._baseline: Baseline | None = None
        self._pending: Draft | None = None
        self._told: list[bytes] | None = None
        self._messages: list[bytes] = []
        self._layout: tuple[object, Layout] | None = None
        self._untold: list[Event] = []
        self._folds = RankFolds(stream, ranks, folds, codec=codec, threads=threads, tell=self._untold.append)

    def publish(
        self,
        order: Order,
        *,
        number: int = 0,
        submission: Submission | None = None,
        blocked_seconds: float | None = None,
    ) -> Published:
        """Commits the next version; raises what `ShardedPublisher.publish` raises. ``number``: of the call, the same on
        all ranks, which part where it is not. Raises CancelledError, on all, if the ``submission`` is cancelled on
        one."""
        timer = PhaseTimer()
        self.make_folds()
        try:
            local = self._meet(order, number, submission)
            manifest, draft = self._commit_together(order, local, timer)
        except BaseException as error:
            if error is not self._ranks.common_error:
                # The others do not know of it: none of them may mistake its next step for theirs.
                self._baseline, self._pending = None, None
                self._ranks.close()
            raise
        finally:
            self._tell_what_waited()  # a listener that fails must not part the ranks
        published = published_as(manifest, timer, draft.reason, blocked_seconds)
        self._tell(published)
        return published

    def make_folds(self) -> None:
        """Makes the folds that are due; a collective where some are. Without folds readers take the patches."""
        self._folds.make()
        self._tell_what_waited()

    def forget(self) -> None:
        """Makes the folds that are due, and releases all that is held, and the ranks."""
        self.make_folds()
        self._folds.forget()
        self._baseline, self._pending, self._told, self._layout = None, None, None, None
        self._messages = []
        self._ranks.close()

    # -- in the order of a publish

    def _commit_together(self, order: Order, local: LocalState, timer: PhaseTimer) -> tuple[Manifest, Draft]:
        for _ in range(_MAX_STALE_COMMITS):
            self._follow(self._ranks.on_rank0(self._head_of_all.settle))
            self._folds.make()
            found = self._resume()
            timer.end("resume")
            built = self._take_up(local, found, timer) or self._build(local, found, timer)
            manifest = self._store_and_commit(order, built, timer)
            if manifest:
                return manifest, built.draft
        came = f"{_MAX_STALE_COMMITS} commits of older publishers came between"
        raise self._ranks.mark_collective(PublisherConflict(came))

    def _meet(self, order: Order, number: int, submission: Submission | None) -> LocalState:
        """This rank's part of the state. The ranks tell each other what they have, if that is not as it was."""
        made: list[LocalState] = []
        told: list[bytes] = []

        def tell() -> bytes:
            goes = submission is None or begin(submission)
            call = _CALL.pack(number, goes)
            if not goes:
                return call
            made.append(order.local())
            told.append(messages.of_held(made[0].held))
            at = self._baseline
            digest, nbytes = sha256(told[0]).digest(), len(told[0]).to_bytes(8, "little")
            return call + digest + nbytes + (f"{at.version} {at.root}" if at else "").encode()

        said = self._ranks.run_on_all(tell)
        if len({message[: _CALL.size - 1] for message in said}) > 1:
            raise RankLost("the ranks have parted: one was interrupted before a call that the others made")
        if not all(message[_CALL.size - 1] for message in said):
            raise self._ranks.mark_collective(CancelledError())
        if submission:
            submission.set_running_or_notify_cancel()
        said = [message[_CALL.size :] for message in said]
        if len({message[40:] for message in said}) > 1:
            self._baseline = None  # one rank has lost its own
        digests = [message[:32] for message in said]
        if self._told != digests:
            lengths = {rank: int.from_bytes(message[32:40], "little") for rank, message in enumerate(said)}
            first = self._ranks.rank == 0
            came = self._ranks.exchange({0: np.frombuffer(told[0], np.uint8)}, lengths if first else {})
            self._messages = [came[rank].tobytes() for rank in range(len(came))]
            self._told = digests
        return made[0]

    def _resume(self) -> Found:
        """What the head is. The baseline goes unless it is that."""
        version = self._baseline.version if self._baseline else None
        found = Found.from_message(self._ranks.on_rank0(lambda: self._head_of_all.find(version).to_message()))
        if not found.keep:
            self._baseline = None
        if found.lost is not None:
            self._resumed(found.lost, "anchored", "the store no longer holds it")
        return found

    def _build(self, local: LocalState, found: Found, timer: PhaseTimer) -> Built:
        layout, reason = self._layout_of(found), ""
        if self._baseline and (reason := difference(self._baseline.layout, layout)):
            self._baseline = None  # before another is made
        made: list[Draft] = []

        def build() -> bytes:
            total = sum(segment.nbytes for segment in layout.segments(self._ranks.rank))
            draft = make_draft(
                layout,
                self._ranks,
                local,
                self._baseline,
                reason,
                codec=self._codec,
                threads=self._threads,
                progress=progress_to(self._listener, "diff", total),
            )
            made.append(draft)
            return b""

        self._ranks.run_on_all(build)
        patch_bytes = hash_shared_leaves(made[0], self._ranks, self._threads)
        with self._ranks.isolated():
            tree = gather_tree(layout, self._ranks, made[0].leaves)
        root = self._ranks.on_rank0(lambda: tree.root.encode() if tree else b"").decode()
        timer.end("build")
        return Built(made[0], root, tree, patch_bytes)

    def _take_up(self, local: LocalState, found: Found, timer: PhaseTimer) -> Built | None:
        """Makes the head the baseline, where there is one and the ranks have another or none; then the version after
        it. None if that has to be an anchor."""
        if found.version is None:
            return None
        built = self._build(local, found, timer)
        how, reason = "matched", ""
        if built.root == found.root:
            self._baseline = built.draft.take_effect(found.version, found.root)
        else:
            layout = built.draft.layout
            del built  # before another state is restored
            restored = restore_baseline(
                self._stream, self._head_of_all, self._ranks, layout, found.version, found.root, threads=self._threads
            )
            how, reason = "restored", restored if isinstance(restored, str) else ""
            self._baseline = None if isinstance(restored, str) else restored
        self._resumed(found.version, "anchored" if reason else how, reason)
        timer.end("resume")
        return None if reason else self._build(local, Found(keep=True), timer)

    def _layout_of(self, found: Found) -> Layout:
        """Of what all ranks have told rank 0, which makes it, and tells each what it needs of it."""
        assert self._told is not None
        known = frozenset(found.names)
        if self._baseline:
            known = frozenset(spec.name for spec in self._baseline.layout.specs)
        key = tuple(self._told), known
        if self._layout is None or self._layout[0] != key:
            made, views = list[Layout](), dict[int, Bytes]()

            def make() -> bytes:
                made.append(make_layout([messages.to_held(message) for message in self._messages], known))
                for rank in range(1, self._ranks.size):
                    views[rank] = np.frombuffer(messages.of_layout(made[0].of_rank(rank)), np.uint8)
                return json.dumps([0, *(len(view) for view in views.values())]).encode()

            lengths = json.loads(self._ranks.on_rank0(make))
            mine = lengths[self._ranks.rank]
            came = self._ranks.exchange(views, {0: mine} if mine else {})
            self._layout = key, messages.to_layout(came[0].tobytes()) if mine else made[0]
        return self._layout[1]

    def _store_and_commit(self, order: Order, built: Built, timer: PhaseTimer) -> Manifest | None:
        """None if the version's number is taken."""
        draft, layout, base = built.draft, built.draft.layout, built.draft.base

        def decide() -> bytes:
            due = self._head_of_all.needs_anchor(built.patch_bytes, layout.nbytes)
            with_anchor = base is None or order.anchor or due
            if built.tree:
                put_digests(self._stream, built.tree, leaves=with_anchor)
            return b"anchor" if with_anchor else b""

        with_anchor = bool(self._ranks.on_rank0(decide))

        def put() -> bytes:
            return store(
                self._stream,
                draft,
                built.root,
                self._ranks.rank,
                with_anchor=with_anchor,
                shard_bytes=self._shard_bytes,
                threads=self._threads,
            ).to_message()

        stored = [Stored.from_message(message) for message in self._ranks.run_on_all(put)]
        timer.end("upload")

        def commit() -> bytes:
            content = Content(built.root, layout.elements, layout.nbytes, layout.aliases)
            made = uploaded(stored, (base.version, base.root) if base else None)
            return self._head_of_all.commit(content, made, order.metadata)

        self._pending = draft
        manifest = self._follow(self._ranks.on_rank0(commit))
        timer.end("commit")
        return manifest

    def _follow(self, said: bytes) -> Manifest | None:
        """Moves the baseline to the pending version, if rank 0 has committed it; else gives that up."""
        pending, self._pending = self._pending, None
        if not said or pending is None:
            return None
        version = int(json.loads(said)["version"])
        manifest = manifests.parse(said, stream=self._stream.name, version=version)
        with shield():
            self._baseline = None  # should this be interrupted by an error
            undo = dict[int, Changes]() if self._folds.wanted else None
            baseline = pending.take_effect(manifest.version, manifest.root, undo)
            self._folds.advanced(pending.base, manifest, undo or {}, baseline)
            self._baseline = baseline
        self._stream.stream_id = manifest.stream_id
        return manifest

    def _resumed(self, version: int, how: str, reason: str) -> None:
        self._untold.append(BaselineRestored(self._stream.name, version, how, reason))

    def _tell_what_waited(self) -> None:
        while self._untold:
            self._tell(self._untold.pop(0))

    def _tell(self, event: Event) -> None:
        if self._listener:
            self._listener(event)
