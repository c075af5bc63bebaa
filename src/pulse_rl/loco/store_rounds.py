"""Rounds over a store: trainers that share nothing but a folder or a bucket (docs/loco.md, section
7).

A trainer puts its message of a round. A trainer that sees enough of them closes the round: it
creates one object that names who is in. All trainers read the same messages in the same order, or,
among many, the sums that the owners of shares make of them, and come to the same theta. A trainer
that is left out keeps what it has learned in its residual.
"""

# The states of a trainer, and the values of the flags that mean them. ``pending``, ``includes`` and
# ``overlap`` are the residual's (`pending_message`, `includes_sent`, `overlap`), ``inner_step`` and
# ``restored_in`` are `Trainer`'s; the others are this class's.
#
# | state    | pending | includes | _own | _under_way | _late | _refused | inner_step              |
# |----------|---------|----------|------|------------|-------|----------|-------------------------|
# | waiting  | None    | overlap  | None | None       | False | False    | below sync_every        |
# | posted   | digest  | False    | set  | None       | False | False    | sync_every              |
# | posted*  | digest  | True     | set  | running    | False | False    | of the next steps       |
# | late     | digest  | True     | set  | running    | True  | False    | of the next steps       |
# | counted  | None    | overlap  | None | None       | False | False    | 0, a new round begins   |
# | refused  | None    | False    | None | None       | any   | True     | sync_every              |
#
# posted*: with overlap, the round ends behind the next inner steps.
# counted: what `_apply` makes of a close that names the message; waiting, before a first step.
# refused: all would refuse the message (not finite, or above max_norm), and the steps are in the
#   residual already: `rewind` discards both. In lockstep (no overlap, not late) the steps are still
#   in the model alone, and the flags stay those of waiting.
# includes: `residual.flat` holds all that has not counted, also what was sent; `settle` takes the
#   message out once it has counted. Without it `residual.next` holds what remains of a message.
# A checkpoint of posted or late keeps ``pending`` and ``includes``, not ``_own``: `join` asks the
#   store whether the post arrived. ``restored_in`` is the round of a checkpoint with inner steps,
#   which may be part of an earlier message.
# joined is False from an error in `_report` until `join`; no other flag changes then.

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch.distributed as dist

from .._util.serial import Operation, SerialThread
from .._util.threads import ordered_map
from ..errors import (
    Diverged,
    FormatError,
    InputError,
    NonFinite,
    NotFound,
    PulseError,
    StateMismatch,
    StoreError,
    TrainerLost,
)
from ..store import open_store
from ..store.base import BoundedStore
from ..stream.signing import trusted_by
from .exchange import Meeting, Phase, Round, StoreExchange
from .gate import GatedReduction
from .group import TrainerNote
from .outer import MessageOutcome, Trainer, specs_digest
from .parameters import Floats
from .round_posts import RoundPosts, RoundSums, cannot_count, contiguous_shares
from .store_format import MAX_TRAINERS, TRAINER, Close, RoundKey, RunStore, Snapshot, Upload, pause
from .wire import Entries

_FIRST_TRAINERS = 16
_SNAPSHOT_TRIES = 10
_NOTHING: Entries = (np.empty(0, np.uint32), np.empty(0, np.float32))


class StoreRounds(Meeting):
    """One trainer's side of the rounds of a run."""

    def __init__(
        self, exchange: StoreExchange, reduction: GatedReduction, trainer: Trainer
    ) -> None:
        self.exchange, self.joined = exchange, False
        self._given_name = exchange.signer.public_key if exchange.signer else exchange.trainer
        trainer.name = self._given_name or f"trainer-{secrets.token_hex(8)}"
        self._trainer, self._reduction = trainer, reduction
        store, trusted = BoundedStore(open_store(exchange.store)), trusted_by(exchange.trusted_keys)
        self._store = RunStore(store, trainer.state, exchange.signer, trusted)
        self._state, self._blocks = trainer.state, trainer.parameters.blocks
        reduction.residual.find_sendable_entries = self._find_sendable_entries
        # Of the round before.
        self._members: frozenset[str] = frozenset()
        self._root = ""
        # Of the round under way: what was posted, and what owners of shares have made of it.
        self._posts: RoundPosts | None = None
        self._sums: RoundSums | None = None
        # Why this trainer's messages were not in the last rounds.
        self._excluded_reasons: deque[str] = deque(maxlen=4)
        self._since_snapshot = self._reported_bytes = 0
        # Whether its last message was made while others had closed a round without it; whether what
        # it has not sent makes a message that all would refuse.
        self._late = self._refused = False
        # The post of the round under way, and, with overlap, the thread that exchanges it and its
        # work.
        self._own: tuple[Upload, bytes] | None = None
        self._behind = SerialThread("PulseLoCo exchange").post
        self._under_way: Operation[Close] | None = None

    # -- joining

    def join(self, settings: dict[str, object], lookahead: np.float32, note: TrainerNote) -> None:
        """Begins the run, or takes up its state."""
        trainer = self._trainer
        trainer.name = self._given_name or trainer.name
        if not TRAINER.fullmatch(trainer.name):
            raise StateMismatch(
                f"the saved state is of a trainer {trainer.name!r}, which is no name"
            )
        run = {
            "specs": specs_digest(trainer.parameters.specs, trainer.frozen.specs),
            "untrained": trainer.frozen.digest(),
            "settings": json.loads(json.dumps({**settings, "max_norm": self.exchange.max_norm})),
        }
        try:
            found = self._store.beginning()
        except NotFound:
            # The trainer that creates the run gives it its theta: all others take that.
            self._store.begin({"run": secrets.token_hex(16), **run})
            found = self._store.beginning()
        for key, what in (("specs", "parameters"), ("untrained", "frozen parameters")):
            if found.get(key) != run[key]:
                raise StateMismatch(
                    f"this trainer's {what} or buffers are not those of the run",
                    hint="Start from the same model.",
                )
        if found.get("settings") != run["settings"]:
            raise InputError(
                f"the run has the settings {found.get('settings')}, this trainer {run['settings']}"
            )
        self._store.run = str(found.get("run"))
        self._root = self._state.digest(self._state.theta).root
        residual = self._reduction.residual
        is_new = not (trainer.round or trainer.inner_step or residual.pending_message)
        if is_new and (newest := self._newest_snapshot(0)) is not None:
            self._load(*newest, lookahead)
        elif trainer.round == 0:
            first = self._store.snapshot(found.get("snapshot"), 0, unless=self._root)
            if first is not None:
                self._load(0, first, lookahead)
        if trainer.round and self._store.closed(trainer.round - 1) is None:
            raise StateMismatch(
                f"this trainer is after round {trainer.round}, the run in the store has not come "
                "so far",
                hint="Give the store of its run, or a new one without rounds below loco/.",
            )
        # What was made of the round before it was known who was in the last one has other shares.
        self._members, self._posts = self._store.members_before(trainer.round), None
        if self._own is not None and self._own[0].sha256 != residual.pending_message:
            self._own = None  # of a state before the one that was loaded
        pending = residual.pending_message if residual.includes_sent and not self._own else None
        if pending is not None:
            # It was saved with its message on the way. One that never arrived is still in the
            # residual.
            arrived = self._store.has_post(trainer.round, trainer.name, pending)
            if not arrived and self._store.closed(trainer.round) is None:
                residual.forget_message()
                residual.includes_sent = True  # as it was: so its steps began
        self._catch_up(lookahead)
        self._reported_bytes = self._store.sent_bytes
        self.joined = True

    def note(self, note: TrainerNote) -> None:
        pass  # others see what is in the store

    def averaged(self) -> Floats:
        raise InputError(
            "over a store there is no averaged state", hint="Keep global_state() instead."
        )

    def forget_steps(self) -> None:
        residual = self._reduction.residual
        if self._refused:
            residual.discard()  # the steps are part of it
        elif not residual.includes_sent:
            residual.forget_message()  # one that was put for the round is of steps that are no more
        self._refused = False

    def move(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            raise InputError(
                "the trainers meet over a store, not in a group",
                hint="Call rejoin() without a group.",
            )

    def leave(self, error: BaseException | None = None) -> None:
        self.joined = False
        self._stop()
        self._posts = None

    def rest(self) -> None:
        self._refused = False
        self._stop()

    def _stop(self) -> None:
        operation, self._under_way = self._under_way, None
        if operation is not None:
            operation.stop()

    # -- a round

    def run(self, phase: Phase, lookahead: np.float32) -> Round | None:
        """Ends the round that is due: this trainer's message is put, and counts in this round or
        stays to be sent in the next one."""
        self._trainer.parameters.require()
        return self._report(partial(self._run, phase, lookahead))

    def finish(self, phase: Phase, lookahead: np.float32) -> Round | None:
        residual = self._reduction.residual
        if not residual.includes_sent or residual.pending_message is None:
            return None

        def work() -> Round | None:
            with phase("exchange"):
                if residual.overlap and not self._late:
                    return self._end_exchange(lookahead)[0]
                self._put()  # it counts if the others go on
                return None

        return self._report(work)

    def _report(self, work: Callable[[], Round | None]) -> Round | None:
        """The round that ``work`` has ended, with what this trainer has sent meanwhile, and why it
        was left out."""
        try:
            done = work()
        except (NonFinite, InputError, StateMismatch):  # before anything was sent
            raise
        except BaseException:
            self.leave()
            raise
        if done is None:
            return None
        reason = "; ".join(self._excluded_reasons)
        self._excluded_reasons.clear()
        sent = self._store.sent_bytes - self._reported_bytes
        self._reported_bytes += sent
        return replace(done, sent_bytes=sent, excluded_reason=reason)

    def _run(self, phase: Phase, lookahead: np.float32) -> Round | None:
        residual = self._reduction.residual
        with phase("frozen"):
            self._trainer.frozen.require_unchanged()
        # 1. The round before ends, if its message was sent behind these steps; rounds that others
        # have closed meanwhile are taken up.
        with phase("exchange"):
            done, outcome = self._end_exchange(lookahead)
        if not self._trainer.inner_step:
            return done  # its steps have counted, in the message of a call that failed, or may have
        late = self._late = outcome is MessageOutcome.NOT_COUNTED
        if outcome is not None and not late and not residual.overlap:
            # What was late has counted: it is in step with the others again. Its steps are in the
            # residual.
            self._trainer.inner_step = 0
            return done
        # 2. The gate makes the message, and its digest is noted before it leaves. A trainer that
        # finds a round closed without it does not wait for the next one.
        behind = residual.overlap or late
        # One message a round: where a call failed that had put it, this one puts the same again.
        if residual.pending_message is None:
            with phase("gate"):
                if residual.includes_sent or behind:
                    self._trainer.whole(partial(self._take_steps, lookahead))
                    self._refused = True  # unless it is not
                own = self._reduction.message(self._trainer.round)
                if isinstance(own, str):
                    raise NonFinite(f"the pseudo-gradient of {own!r} is not finite")
                written = self._round_posts().write(own)
                if isinstance(written, str):
                    raise InputError(
                        f"this trainer's message would be refused by all: {written}",
                        hint="rewind() discards its steps, and all it holds back where they are "
                        "part of that. Bounds are those of a run.",
                    )
                self._own, self._refused = written, False
            # First: it may count although this trainer fails.
            residual.pending_message, residual.includes_sent = written[0].sha256, behind
        # 3. Behind the next steps with overlap or when late; else this trainer waits for the close,
        # and takes the outer step.
        if residual.includes_sent:

            def go_on() -> None:
                self._trainer.inner_step = 0
                self._trainer.write_start(lookahead)

            self._trainer.whole(go_on)
            self._under_way = self._behind(self._exchange)
            return done
        with phase("exchange"):
            close = self._exchange()
        with phase("update"):
            try:
                return self._apply(close, lookahead)
            except NotFound:  # the others are far ahead already
                return self._catch_up(lookahead)[0]

    def _exchange(self) -> Close:
        """Puts this trainer's message, and waits for the end of the round."""
        self._put()
        close = self._wait()
        with suppress(NotFound):  # it is long over: a snapshot has what it led to
            self._gathered(close)
        return close

    def _put(self) -> None:
        if self._own is not None and self._reduction.residual.pending_message is not None:
            self._store.put_post(self._trainer.round, *self._own)

    def _end_exchange(self, lookahead: np.float32) -> tuple[Round | None, MessageOutcome | None]:
        """Ends what goes on behind the inner steps, and takes up the rounds that were closed, as
        `_catch_up`."""
        residual, operation = self._reduction.residual, self._under_way
        if residual.includes_sent and residual.pending_message is not None:
            try:
                if operation is None:
                    self._exchange()
                else:
                    operation.wait()  # interrupted, it is stopped by `leave`
                    self._under_way = None
                    operation.result()
            except TrainerLost:
                raise
            except PulseError:  # what has failed behind the steps is tried once more
                if operation is None:
                    raise
                self._exchange()
        return self._catch_up(lookahead)

    def _take_steps(self, lookahead: np.float32) -> None:
        """Before a message is made of all that the residual has: the inner steps are part of it."""
        residual = self._reduction.residual
        residual.settle(MessageOutcome.NOT_COUNTED, (), steps=True)
        residual.includes_sent = False
        self._trainer.write_start(lookahead)

    def _catch_up(self, lookahead: np.float32) -> tuple[Round | None, MessageOutcome | None]:
        """Takes up the rounds that were closed since this trainer's last one: the last of them, and
        what became of its message in that. A message that is due stays due, unless it has
        counted."""
        trainer, residual = self._trainer, self._reduction.residual
        done, outcome = None, None
        while (close := self._store.closed(trainer.round)) is not None:
            due, outcome = trainer.inner_step, self._outcome(close)
            included, restored = residual.includes_sent, trainer.restored_in == trainer.round
            try:
                done = self._apply(close, lookahead)
            except NotFound:  # its messages are gone: a later snapshot has what they led to
                outcome = self._load_newest(lookahead)
            may_have_counted = restored and outcome is MessageOutcome.UNKNOWN
            if outcome is MessageOutcome.NOT_COUNTED or (included and not may_have_counted):
                trainer.inner_step = due
        return done, outcome

    def _wait(self) -> Close:
        """Waits until the round is closed, and closes it where enough trainers are in."""
        number, exchange = self._trainer.round, self.exchange
        # No crowd at once, whose messages those who were there would have to read.
        most = min(max(_FIRST_TRAINERS, 4 * len(self._members), exchange.quorum), MAX_TRAINERS)
        began = time.monotonic()
        quorum_since: float | None = None
        while True:
            if (close := self._store.closed(number)) is not None:
                return close
            good, refused = self._round_posts().good(self._members, most)
            now = time.monotonic()
            if len(good) >= exchange.quorum:
                quorum_since = now if quorum_since is None else quorum_since
                if self._members <= good.keys() or now - quorum_since >= exchange.grace_seconds:
                    posts = tuple(good[name] for name in sorted(good))
                    self._store.close(
                        Close(self._store.run, number, self._root, posts, tuple(refused))
                    )
                    continue
            elif now - began >= exchange.deadline_seconds:
                raise TrainerLost(
                    f"round {number + 1}: {len(good)} of {exchange.quorum} trainers in "
                    f"{exchange.deadline_seconds:g} s",
                    hint="Start more trainers, then call rejoin(): nothing that was learned is "
                    "lost.",
                )
            pause(began, now)

    def _round_posts(self) -> RoundPosts:
        number, trainer = self._trainer.round, self._trainer
        place = RoundKey(self._store.run, number, trainer.name, self._root)
        if self._posts is None or self._posts.place != place:
            # Fixed by the round before: a message has its parts before it is known who will be in.
            members = len(self._members)
            gated = self._reduction.gates_sums(members)
            shares = contiguous_shares(self._blocks, members if gated else 1)
            self._posts = RoundPosts(
                self._store, self.exchange.max_norm, self._reduction, place, shares, self._own
            )
        return self._posts

    def _gathered(self, close: Close) -> list[list[Entries]]:
        """What theta moves against in a closed round, by block, in the order of the addition."""
        if close.theta != self._root:
            raise Diverged(
                f"round {close.round + 1} was closed by a trainer with another theta than this one"
            )
        posts = self._round_posts()
        if len(posts.shares) > 1:
            if self._sums is None or self._sums.close != close:
                self._sums = RoundSums(posts, close)
            self._sums.gather(self.exchange.grace_seconds)
            return self._sums.entries()
        self._sums = None
        messages: list[list[Entries]] = []
        reads = ordered_map(posts.message, close.posts, posts.threads)
        for post, found in zip(close.posts, reads, strict=True):
            if isinstance(found, str):
                raise cannot_count(close, post.trainer, found)
            messages.append(found)
        return [list(of_block) for of_block in zip(*messages, strict=True)]

    def _apply(self, close: Close, lookahead: np.float32) -> Round:
        """Takes the outer step of a closed round."""
        state, residual, trainer = self._state, self._reduction.residual, self._trainer
        # 1. What theta moves against, and what became of this trainer's message.
        included, entries = residual.includes_sent, self._gathered(close)
        outcome = self._outcome(close)
        counted, steps = outcome is MessageOutcome.COUNTED, self._has_new_steps(outcome)
        posts, sums = self._round_posts(), self._sums
        refused = sums.leaves_out(trainer.name) if counted and sums else None
        own: list[Entries] = []
        back: list[Entries] = []
        if counted and (included or refused is not None):
            # The entries of its own message that were taken, by block, and those that no owner of a
            # share could read.
            post = next(post for post in close.posts if post.trainer == trainer.name)
            taken, left = list[list[Entries]](), list[list[Entries]]()
            for share, units in enumerate(posts.shares):
                nothing = [_NOTHING] * len(units)
                is_left = sums is not None and trainer.name in sums.left_out[share]
                # With overlap what is left is in the residual, whatever it is.
                found = posts.part(post, share) if self._own or not is_left else nothing
                if isinstance(found, str):
                    raise cannot_count(close, trainer.name, found)
                taken.append(nothing if is_left else found)
                left.append(found if is_left else nothing)
            own, back = posts.by_block(taken), posts.by_block(left)
        if refused is not None:
            why = f"a part of this trainer's message was refused: {refused}"
            self._excluded_reasons.append(f"round {close.round + 1}: {why}")
        elif outcome is MessageOutcome.NOT_COUNTED and trainer.inner_step:
            why = close.reason(trainer.name, residual.pending_message)
            self._excluded_reasons.append(f"round {close.round + 1}: {why}")

        # 2. The outer step. No interrupt comes between its parts.
        def take_effect() -> int:
            # What the message had is in the others' theta now; what stays is in the next residual.
            if included:
                residual.settle(outcome, own, steps=steps)
            elif not counted:
                self._keep_local_steps(outcome)
            if included or not counted:
                np.copyto(residual.next, residual.flat)
            elif back:
                for block, (places, values) in zip(self._blocks, back, strict=True):
                    block.of(residual.next)[places] += values  # exact: s = sent + residual
            residual.apply_withheld = sums.add_withheld if sums else None
            summed = self._reduction.step(close.round, entries, len(close.posts), lookahead)
            trainer.complete_round([post.sha256 for post in close.posts])
            # Steps without a message of their own are in the residual now: with them it includes
            # what a gate lets through. So it does where a message has not counted, which stays
            # in it until the next one is made.
            residual.includes_sent |= (included and steps) or (
                outcome == MessageOutcome.NOT_COUNTED and (included or steps)
            )
            if residual.includes_sent:
                trainer.write_start(lookahead)
            return summed

        summed = trainer.whole(take_effect)
        # 3. The next round begins.
        sent, nbytes = posts.own_entries, len(posts.own[1]) if posts.own else 0
        self._own = self._posts = self._sums = None
        self._members = frozenset(post.trainer for post in close.posts)
        self._root = state.digest(state.theta).root
        self._since_snapshot += sum(post.nbytes for post in close.posts)
        if self._since_snapshot >= 2 * state.theta.nbytes:
            self._since_snapshot = 0
            # By turns: over many rounds each uploads as much for snapshots as for its own messages.
            if close.posts[close.round % len(close.posts)].trainer == trainer.name:
                self._store.keep_snapshot(trainer.round)
        return Round(
            number=trainer.round,
            trainers=len(close.posts),
            parameters=trainer.parameters.count,
            entries=sent,
            summed=summed,
            scattered=sums is not None,
            payload_bytes=nbytes,
            sent_bytes=0,  # `run` knows, and why it was left out
            root=self._root,
            seconds={},  # the caller's
        )

    def _outcome(self, close: Close) -> MessageOutcome:
        """What became of what this trainer had to send, by the end of a round."""
        counted = {post.trainer: post.sha256 for post in close.posts}.get(self._trainer.name)
        if counted is None:
            return MessageOutcome.NOT_COUNTED
        if counted == self._reduction.residual.pending_message:
            return MessageOutcome.COUNTED
        # A message that this trainer had put before it came back from a checkpoint.
        return MessageOutcome.UNKNOWN

    def _has_new_steps(self, outcome: MessageOutcome) -> bool:
        """Whether there are inner steps, none of which may be part of a message that has this
        ``outcome``."""
        may_be = (
            outcome == MessageOutcome.UNKNOWN and self._trainer.restored_in == self._trainer.round
        )
        return bool(self._trainer.inner_step) and not may_be

    def _keep_local_steps(self, outcome: MessageOutcome) -> None:
        """Puts what was learned since the last round into the residual, all of it or, of what may
        have counted, none."""
        if self._trainer.inner_step or outcome == MessageOutcome.UNKNOWN:
            self._reduction.residual.catch_up(outcome)

    # -- what is in the store

    def _load_newest(self, lookahead: np.float32) -> MessageOutcome:
        """Takes up the newest snapshot; what became of this trainer's messages in the rounds up to
        it."""
        began = self._trainer.round
        found = self._newest_snapshot(began)
        if found is None:
            raise StoreError(
                f"the messages of round {began + 1} are gone, and there is no later snapshot "
                "that can be read",
                hint="Is the store damaged? Start from another trainer's checkpoint.",
            )
        rounds, threads = range(began, found[0]), self._round_posts().threads
        closes = ordered_map(self._store.closed, rounds, threads)
        first, *later = [self._outcome(close) for close in closes if close is not None]
        if any(each is not MessageOutcome.NOT_COUNTED for each in later):
            first = MessageOutcome.UNKNOWN
        self._load(*found, lookahead, first)
        return first

    def _newest_snapshot(self, after: int) -> tuple[int, Snapshot] | None:
        """The newest snapshot of more than ``after`` rounds that can be read, and of how many it
        is; None where there is none."""
        for _ in range(_SNAPSHOT_TRIES):
            newest = None
            for number, fields in self._store.snapshots():
                newest = newest or number
                if number <= after:
                    break
                with suppress(FormatError, NotFound):  # or deleted meanwhile
                    snapshot = self._store.snapshot(fields, number)
                    assert snapshot is not None
                    return number, snapshot
            if next(self._store.snapshots(), (None, {}))[0] == newest:
                break  # no later ones have taken their place
        return None

    def _find_sendable_entries(self) -> list[Entries]:
        """What the message on its way has, or would have, which is part of the residual."""
        reduction = self._reduction
        return reduction.gate.entries_of(
            self._state, reduction.residual.flat, reduction.wire, self._trainer.round
        )

    def _load(
        self,
        number: int,
        snapshot: Snapshot,
        lookahead: np.float32,
        outcome: MessageOutcome | None = None,
    ) -> None:
        """Takes up the theta and momentum of a snapshot after so many rounds; the residual first
        settles the ``outcome`` of this trainer's messages, if it had any."""
        root, theta, momentum = snapshot

        def take_up() -> None:
            if outcome is not None:
                self._settle_before_snapshot(outcome)
            self._trainer.take_up(number, theta, momentum, lookahead)

        self._trainer.whole(take_up)
        self._reduction.forget()
        self._own = self._posts = self._sums = None
        self._since_snapshot = 0
        self._members, self._root = self._store.members_before(number), root

    def _settle_before_snapshot(self, outcome: MessageOutcome) -> None:
        residual = self._reduction.residual
        if residual.includes_sent:
            # The message is gone, what it had is not: it follows from theta and the residual.
            sent = self._find_sendable_entries()
            residual.settle(outcome, sent, steps=self._has_new_steps(outcome))
        elif outcome is MessageOutcome.COUNTED:
            residual.take_next()
        else:
            self._keep_local_steps(outcome)
        residual.includes_sent = True
        if self._sums is not None and outcome is not MessageOutcome.UNKNOWN:
            self._sums.add_withheld(residual.flat)
