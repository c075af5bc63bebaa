"""Rounds over a store: trainers that share nothing but a folder or a bucket (docs/loco.md, section
7).

A trainer puts its message of a round. A trainer that sees enough of them closes the round: it
creates one object that names who is in. All trainers read the same messages in the same order, and
come to the same global weights. A trainer that is left out keeps what it has trained in its
residual."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import numpy as np
import torch.distributed as dist

from .._util.threads import ordered_map
from ..errors import (
    Diverged,
    FormatError,
    InputError,
    NonFinite,
    NotFound,
    StateMismatch,
    StoreError,
    TrainerLost,
)
from ..store import open_store
from ..store.base import BoundedStore
from ..stream.signing import trusted_by
from .exchange import Meeting, Phase, Round, StoreExchange, first_difference
from .gate import GatedReduction
from .group import TrainerNote
from .outer import MessageOutcome, Trainer, specs_digest
from .round_posts import Own, RoundPosts
from .store_format import MAX_TRAINERS, TRAINER, Close, RoundKey, RunStore, Snapshot, pause

_log = logging.getLogger("pulse_rl")
_FIRST_TRAINERS = 16
#: A new trainer of other weights than the run began with may join in its first rounds: those that
#: start at once with weights of their own take the first one's.
_FIRST_ROUNDS = 2
#: After how many seconds a wait is logged, and then again.
_LOG_AFTER, _LOG_EVERY = 30.0, 60.0
_ID = re.compile("[0-9a-f]{32}")
_SNAPSHOT_TRIES = 10


class State(Enum):
    """Where a trainer is in the round that is next, or under way.

    | state    | its message          | residual `flat`      | model            | then            |
    |----------|----------------------|----------------------|------------------|-----------------|
    | TRAINING | none                 | of the last round    | its inner steps  | POSTED or LATE  |
    | POSTED   | put, or may be       | of the last round    | its inner steps  | COUNTED or LATE |
    | COUNTED  | named by the close   | `next`, what is left | the next start   | TRAINING        |
    | LATE     | of no round          | with its inner steps | start of a round | POSTED          |
    | REFUSED  | above the bound      | with its inner steps | start of a round | rewind()        |

    A close takes a trainer from one round to the next, whatever its state is. One without its
    message makes it LATE if it has inner steps, and LATE it puts a message at once: no inner step
    is taken before one has counted. COUNTED lasts for one call. A message in its name that it does
    not know, of its process before a checkpoint, makes it COUNTED as well, with a residual of 0.
    """

    TRAINING = "training"
    POSTED = "posted"
    COUNTED = "counted"
    LATE = "late"
    REFUSED = "refused"


class StoreRounds(Meeting):
    """One trainer's side of the rounds of a run."""

    def __init__(
        self, exchange: StoreExchange, reduction: GatedReduction, trainer: Trainer
    ) -> None:
        self.exchange, self.joined, self.state = exchange, False, State.TRAINING
        self._settings = {
            "min_trainers": exchange.min_trainers,
            "grace_seconds": float(exchange.grace_seconds),
        }
        self._given_name = exchange.signer.public_key if exchange.signer else exchange.trainer
        trainer.name = self._given_name or f"trainer-{secrets.token_hex(8)}"
        trainer.is_named = self._given_name is not None
        self._trainer, self._reduction, self._outer = trainer, reduction, trainer.state
        store, trusted = BoundedStore(open_store(exchange.store)), trusted_by(exchange.trusted_keys)
        self._store = RunStore(store, trainer.state, exchange.signer, trusted)
        # Of the round before.
        self._members: frozenset[str] = frozenset()
        self._root = ""
        # Of the round under way: the posts that were read, and this trainer's own, by the residual
        # that `Residual.sent` knows.
        self._posts: RoundPosts | None = None
        self._own: Own | None = None
        # Why this trainer's messages were not in the last rounds, and why the last one was refused.
        self._excluded_reasons: deque[str] = deque(maxlen=4)
        self._refused = ""
        # The first round that this process of the trainer was in: of earlier ones, and of that one,
        # an earlier process may have sent messages. And messages whose steps were discarded.
        self._first_round: int | None = None
        self._discarded: set[str] = set()
        self._since_snapshot = self._reported_bytes = 0
        #: Whether the last wait ended because all trainers of the round before have left.
        self._left_alone = False

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
            "settings": json.loads(json.dumps({**settings, **self._settings})),
        }
        found = self._beginning(run)
        for key, what in (("specs", "parameters"), ("untrained", "frozen parameters")):
            if found.get(key) != run[key]:
                raise StateMismatch(
                    f"this trainer's {what} or buffers are not those of the run",
                    hint="Start from the same model.",
                )
        if differs := first_difference(found.get("settings"), run["settings"]):
            raise InputError(
                f"the run has other settings: {differs}", hint="Give all trainers the same."
            )
        self._root = self._outer.digest(self._outer.weights).root
        is_new = not (trainer.round or trainer.inner_step or trainer.due)
        if is_new:
            self._require_asked(found)
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
        # The global weights may be others than at the last call, as may who was in the round
        # before.
        self._members, self._posts = self._store.members_before(trainer.round), None
        if self.state is State.REFUSED:
            self.state = State.LATE
        while (close := self._store.closed(trainer.round)) is not None:
            self._take_up(close, lookahead)
            if self.state is State.COUNTED:
                self.state = State.TRAINING
        if self._first_round is None:
            self._first_round = trainer.round
        with suppress(StoreError):  # of a member that may not delete
            self._store.come_back(trainer.round, trainer.name)
        log = _log.warning if is_new and trainer.round else _log.info
        name, run_id = found.get("name"), self._store.run
        where = f"{name} ({run_id})" if name else run_id, trainer.round, found.get("begun")
        log("trainer %s joined run %s at round %d, begun %s", trainer.name, *where)
        self._reported_bytes = self._store.sent_bytes
        self.joined = True

    def _beginning(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """What the run began with. The trainer that creates it gives it its weights. Raises
        StateMismatch where it is not the one that was asked for, or that of the checkpoint."""
        exchange, trainer = self.exchange, self._trainer
        try:
            found = self._store.beginning()
        except NotFound:
            if exchange.run is not None and _ID.fullmatch(exchange.run):
                raise StateMismatch(
                    f"there is no run in the store, and {exchange.run} is a run's ID",
                    hint="Give the store of that run, or a name for a new one.",
                ) from None
            begun = datetime.now(UTC).isoformat(timespec="seconds")
            new = {"run": secrets.token_hex(16), "name": exchange.run or "", "begun": begun}
            self._store.begin({**new, **run})
            found = self._store.beginning()
        self._store.run = str(found.get("run"))
        name = found.get("name") or "without a name"
        for asked, whose in ((exchange.run, "this trainer's"), (trainer.run, "its saved state's")):
            if asked and asked not in (found.get("name"), self._store.run):
                raise StateMismatch(
                    f"the store has run {self._store.run} ({name}), and {whose} is {asked}",
                    hint="Give the store of its run, or a new one for a new run.",
                )
        trainer.run = self._store.run
        return found

    def _require_asked(self, found: Mapping[str, Any]) -> None:
        """Raises StateMismatch where a new trainer of other weights meets a run that has begun,
        and has not asked for it: by its name, or, where members have keys, by its ID, as a name may
        be that of an old run."""
        run, snapshot = self.exchange.run, found.get("snapshot")
        first = snapshot.get("global", {}).get("root") if isinstance(snapshot, dict) else None
        asked = run == self._store.run or (run is not None and self._store.trusted is None)
        if asked or first == self._root or self._store.closed(_FIRST_ROUNDS - 1) is None:
            return
        raise StateMismatch(
            f"the store has run {self._store.run} ({found.get('name') or 'without a name'}), begun "
            f"{found.get('begun')} with other weights than this trainer's",
            hint="Give a new run a store of its own. To join this one, and take its weights, give "
            f"run={self._store.run!r}.",
        )

    def note(self, note: TrainerNote) -> None:
        pass  # others see what is in the store

    def forget_steps(self) -> None:
        residual = self._reduction.residual
        if self.state in (State.LATE, State.REFUSED):
            residual.flat.fill(0)  # the steps are part of it
        if residual.message is not None:
            self._discarded.add(residual.message)  # it was put, of steps that are no more
        residual.sent(None)
        self._own, self.state = None, State.TRAINING

    def reset(self) -> None:
        self._own, self._posts, self.state = None, None, State.TRAINING
        self._first_round = None

    def move(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            raise InputError(
                "the trainers meet over a store, not in a group",
                hint="Call rejoin() without a group.",
            )
        self.joined, self._posts = False, None

    def leave(self, error: BaseException | None = None) -> None:
        joined, self.joined, self._posts = self.joined, False, None
        # The others wait for it no longer. A store that has failed is not asked again.
        if joined and not isinstance(error, StoreError):
            with suppress(StoreError):
                self._store.leave(self._trainer.round, self._trainer.name)

    # -- a round

    def run(self, phase: Phase, lookahead: np.float32) -> Round | None:
        """Ends the round that is due: takes up what was closed without this trainer, and puts its
        message until one has counted."""
        self._trainer.parameters.require()
        try:
            done = self._run(phase, lookahead)
        except (NonFinite, InputError, StateMismatch):  # it may go on, or rewind
            raise
        except BaseException:
            self.joined, self._posts = False, None
            raise
        if done is None:
            return None
        reason = "; ".join(self._excluded_reasons)
        self._excluded_reasons.clear()
        sent = self._store.sent_bytes - self._reported_bytes
        self._reported_bytes += sent
        return replace(done, sent_bytes=sent, excluded_reason=reason)

    def _run(self, phase: Phase, lookahead: np.float32) -> Round | None:
        with phase("frozen"):
            self._trainer.frozen.require_unchanged()
        close, done = self._store.closed(self._trainer.round), None
        while True:
            # 1. What is closed is taken up, one round after the other.
            with phase("update"):
                done = self._take_up(close, lookahead) or done
            if self.state is State.COUNTED:
                self.state = State.TRAINING
                return done
            if self.state is State.REFUSED:
                raise InputError(
                    self._refused,
                    hint="rewind() discards what it has trained and not sent; rejoin() sends it "
                    "again.",
                )
            # 2. One message a round: where a call failed that had put it, this one puts the same
            # again.
            if self.state is not State.POSTED:
                with phase("gate"):
                    self._write()
            with phase("exchange"):
                assert self._own is not None
                self._store.put_post(self._trainer.round, self._own.post, self._own.data)
                try:
                    close = self._wait()
                except TrainerLost:
                    # The others have ended before this straggler: it has all that they did. The
                    # next call raises this.
                    if done is None or not self._left_alone:
                        raise
                    return done

    def _write(self) -> None:
        """Makes this trainer's message, and notes it before it leaves: it may count although this
        trainer fails."""
        sent = self._reduction.message(closing=self._trainer.due == "closing")
        if isinstance(sent, str):
            raise NonFinite(f"the pseudo-gradient of {sent!r} is not finite")
        self._own = self._round_posts().write(sent)
        self._reduction.residual.sent(self._own.post.sha256)
        self.state = State.POSTED

    def _wait(self) -> Close:
        """Waits until the round is closed, and closes it where enough trainers are in."""
        number, exchange = self._trainer.round, self.exchange
        self._left_alone = False
        # No crowd at once, whose messages those who were there would have to read.
        most = min(
            max(_FIRST_TRAINERS, 4 * len(self._members), exchange.min_trainers), MAX_TRAINERS
        )
        began = time.monotonic()
        enough_since: float | None = None
        log_at = began + _LOG_AFTER
        while True:
            if (close := self._store.closed(number)) is not None:
                return close
            good, refused = self._round_posts().good(self._members, most)
            now, missing = time.monotonic(), self._members - good.keys()
            left = self._store.left(number, missing) if missing else set[str]()
            if len(good) >= exchange.min_trainers:
                enough_since = now if enough_since is None else enough_since
                if missing <= left or now - enough_since >= exchange.grace_seconds:
                    posts = tuple(good[name] for name in sorted(good))
                    self._store.close(
                        Close(self._store.run, number, self._root, posts, tuple(refused))
                    )
                    continue
            elif (gone := bool(left) and missing <= left) or (
                now - began >= exchange.timeout_seconds
            ):
                names = f"{', '.join(sorted(left))} left before it; " if left else ""
                self._left_alone = gone
                raise TrainerLost(
                    f"round {number + 1}: {names}{len(good)} of {exchange.min_trainers} trainers "
                    f"in {now - began:.0f} s",
                    hint="Start more trainers, then call rejoin(): nothing that was trained is "
                    "lost.",
                )
            if now >= log_at:
                log_at = now + _LOG_EVERY
                _log.warning(
                    "round %d: waiting for %s since %.0f s: %d trainers of at least %d are here",
                    *(number + 1, ", ".join(sorted(missing)) or "more trainers", now - began),
                    *(len(good), exchange.min_trainers),
                )
            pause(began, now)

    def _round_posts(self) -> RoundPosts:
        trainer = self._trainer
        place = RoundKey(self._store.run, trainer.round, trainer.name, self._root)
        if self._posts is None or self._posts.place != place:
            self._posts = RoundPosts(self._store, self._reduction, place, self._own)
        return self._posts

    # -- the end of a round

    def _take_up(self, close: Close | None, lookahead: np.float32) -> Round | None:
        """Takes up ``close``, and the rounds that were closed after it until this trainer's message
        has counted: the last of them."""
        done = None
        while close is not None:
            try:
                done = self._apply(close, lookahead)
            except NotFound:  # its messages are gone: a later snapshot has what they led to
                done = None
                self._load_newest(lookahead)
            if self.state is State.COUNTED:
                break
            close = self._store.closed(self._trainer.round)
        return done

    def _apply(self, close: Close, lookahead: np.float32) -> Round:
        """Takes the outer step of a closed round."""
        trainer, own = self._trainer, self._own
        if close.root != self._root:
            raise Diverged(
                f"round {close.round + 1} was closed by a trainer of other global weights than this"
            )
        # 1. What the global weights move against, and what became of this trainer's message.
        posts = self._round_posts()
        sums, outcome, has_steps = posts.sums(close), self._outcome(close), self._has_steps
        above = None
        if outcome is MessageOutcome.NOT_COUNTED and has_steps:
            self._reduction.residual.require_finite_steps()
            above = posts.bound(close, own.post) if own else None
            why = close.reason(trainer.name, own.post.sha256 if own else None)
            self._excluded_reasons.append(f"round {close.round + 1}: {above or why}")
        if outcome is MessageOutcome.UNKNOWN:
            why = (
                "a message of an earlier process in this trainer's name counted: its residual is 0"
            )
            self._excluded_reasons.append(f"round {close.round + 1}: {why}")
        settles = has_steps or outcome is not MessageOutcome.NOT_COUNTED

        # 2. The outer step. No interrupt comes between its parts.
        def take_effect() -> int:
            due = trainer.due or "round"
            summed = self._reduction.step(
                sums, len(close.posts), lookahead, outcome if settles else None
            )
            trainer.complete_round([post.sha256 for post in close.posts])
            self._settled(outcome, due if has_steps else "")
            return summed

        summed = trainer.whole(take_effect)
        # 3. The next round begins.
        self._members = frozenset(post.trainer for post in close.posts)
        self._root = self._outer.digest(self._outer.weights).root
        self._since_snapshot += sum(post.nbytes for post in close.posts)
        if self._since_snapshot >= 2 * self._outer.weights.nbytes:
            self._since_snapshot = 0
            # By turns: over many rounds each uploads as much for snapshots as for its own messages.
            if close.posts[close.round % len(close.posts)].trainer == trainer.name:
                self._store.keep_snapshot(trainer.round)
        if above is not None:
            self.state = State.REFUSED
            self._refused = f"round {close.round + 1} was closed without this trainer's message: "
            self._refused += above
        return Round(
            number=trainer.round,
            trainers=len(close.posts),
            parameters=trainer.parameters.count,
            entries=own.sent.size if own else 0,
            summed=summed,
            scattered=False,
            payload_bytes=len(own.data) if own else 0,
            sent_bytes=0,  # `run` knows, and why it was left out
            root=self._root,
            seconds={},  # the caller's
        )

    @property
    def _has_steps(self) -> bool:
        """Whether there is something that this trainer has to send."""
        return bool(self._trainer.inner_step or self._trainer.due)

    def _outcome(self, close: Close) -> MessageOutcome:
        """What became of what this trainer had to send, by the end of a round."""
        counted = {post.trainer: post.sha256 for post in close.posts}.get(self._trainer.name)
        if counted is None:
            return MessageOutcome.NOT_COUNTED
        if counted == self._reduction.residual.message:
            return MessageOutcome.COUNTED
        # A message that this trainer had put before it came back from a checkpoint, or discarded
        # its steps.
        first = close.round if self._first_round is None else self._first_round
        if close.round > first and counted not in self._discarded:
            raise InputError(
                f"round {close.round + 1} has a message of another trainer with the name "
                f"{self._trainer.name!r}",
                hint="Give each trainer a name of its own, and stop all but one of these.",
            )
        return MessageOutcome.UNKNOWN

    def _settled(self, outcome: MessageOutcome, due: str) -> None:
        """After the residual has settled the ``outcome``: what is ``due`` is sent in the next
        round if it has not counted."""
        self._own = self._posts = None
        if outcome is MessageOutcome.NOT_COUNTED:
            self._trainer.due = due
            self.state = State.LATE if due else State.TRAINING
        else:
            self.state = State.COUNTED

    # -- snapshots

    def _load_newest(self, lookahead: np.float32) -> None:
        """Takes up the newest snapshot, and what became of this trainer's messages in the rounds
        before it."""
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
        if first is MessageOutcome.NOT_COUNTED and self._has_steps:
            self._reduction.residual.require_finite_steps()
        self._load(*found, lookahead, first)

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

    def _load(
        self,
        number: int,
        snapshot: Snapshot,
        lookahead: np.float32,
        outcome: MessageOutcome | None = None,
    ) -> None:
        """Takes up the global weights and momentum of a snapshot after so many rounds; the residual
        first settles the ``outcome`` of this trainer's messages, if it had any."""
        root, weights, momentum = snapshot

        def take_up() -> None:
            due = (self._trainer.due or "round") if self._has_steps else ""
            if outcome is not None and (due or outcome is not MessageOutcome.NOT_COUNTED):
                self._reduction.residual.settle(outcome)
            self._trainer.take_up(number, weights, momentum, lookahead)
            if outcome is not None:
                self._settled(outcome, due)

        self._trainer.whole(take_up)
        self._reduction.forget()
        self._own = self._posts = None
        self._since_snapshot = 0
        self._members, self._root = self._store.members_before(number), root
