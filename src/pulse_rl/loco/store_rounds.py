"""Rounds over a store: trainers that share nothing but a folder or a bucket (docs/loco.md, section 7).

A trainer puts its message of a round, and whoever sees enough of them closes the round by creating one object that
names who is in. Everybody reads the same messages in the same order and comes to the same theta. Who is left out keeps
what it has learnt in its residual.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

import numpy as np
import torch
import torch.distributed as dist

from .._util.faults import hit
from .._util.serial import Operation, SerialThread
from .._util.settings import checked_count, checked_number
from .._util.threads import checkpoint
from ..errors import (
    CorruptMessage,
    Diverged,
    InputError,
    NonFinite,
    NotFound,
    PulseError,
    StateMismatch,
    StoreError,
    TrainerLost,
    Untrusted,
)
from ..store import Store, open_store
from ..store.wrappers import BoundedStore
from ..stream.signing import Signer, TrustedKeys, trusted_by
from .exchange import GatedReduction, Phase, require_sweep
from .group import TrainerNote
from .meeting import Round
from .outer import Delivery
from .parameters import Floats
from .run_store import RunStore
from .store_format import (
    HEAD,
    MAX_TRAINERS,
    TRAINER,
    Close,
    Place,
    Post,
    PostedMessage,
    Refused,
    norm_of,
    read_post,
    write_post,
)
from .trainer import Trainer, specs_digest
from .wire import Entries, Unit, Wire, WireName

_MAX_POSTS = 64
"""Of one trainer in a round: its own, and what others put in its name."""
_POLL_SECONDS = (0.05, 5.0)
_TRIES = 3


@dataclass(frozen=True)
class StoreExchange:
    """Trainers that meet in a ``store`` (or its address) instead of a process group: what `PulseLoCo` takes as
    ``over``. All trainers of a run give the same store. Without keys nobody else may write below ``loco/`` in it.

    ``trainer``: this trainer's name, letters, digits, "-" and "_", at most 64; with one of its own a trainer that comes
    back from a checkpoint knows what became of the messages that it had sent. None: a name at random.
    ``quorum``: the fewest trainers that make a round. ``grace_seconds``: how long those that were in the round before
    are waited for once a quorum is there; who is later is left out of this round, and loses nothing.
    ``deadline_seconds``: without a quorum for that long, a round raises TrainerLost. ``wire`` and ``sweep``: how values
    travel, and when all of a block does, as with `Exchange`.

    ``signer``: this trainer's key, with which it signs all that it writes; its name is the public key then.
    ``trusted_keys``: the public keys of all members, its own among them; what others write is refused. ``max_norm`` and
    ``max_entries``: a message with a larger L2 norm, or more entries, is refused by all alike, by its own trainer with
    InputError; one setting of all trainers. ``accept(message, round)`` is called by the trainer that closes the round
    after ``round`` others, with each `PostedMessage` that is good otherwise: what it returns is True, or, as text, why
    the message is left out of this round. Raises InputError.
    """

    store: Store | str
    trainer: str | None = None
    quorum: int = 2
    grace_seconds: float = 60.0
    deadline_seconds: float = 3600.0
    wire: WireName = "FP32"
    sweep: int | None = None
    signer: Signer | None = None
    trusted_keys: Collection[str] | None = None
    max_norm: float | None = None
    max_entries: int | None = None
    accept: Callable[[PostedMessage, int], bool | str] | None = None

    def __post_init__(self) -> None:
        require_sweep(self.sweep, Wire(self.wire))
        checked_count("quorum", self.quorum)
        checked_number("grace_seconds", self.grace_seconds)
        checked_number("deadline_seconds", self.deadline_seconds)
        if self.max_norm is not None:
            checked_number("max_norm", self.max_norm)
        if self.max_entries is not None:
            checked_count("max_entries", self.max_entries)
        if self.trainer is not None and not (isinstance(self.trainer, str) and TRAINER.fullmatch(self.trainer)):
            raise InputError(
                f"trainer is {self.trainer!r}", hint="Give a name of letters, digits, '-' and '_', at most 64."
            )
        if self.signer is None and self.trusted_keys is None:
            return
        if not isinstance(self.signer, Signer) or self.trusted_keys is None:
            raise InputError("members sign, and know each other's keys", hint="Give signer= and trusted_keys=.")
        if self.trainer is not None:
            raise InputError("a trainer that signs is named by its key", hint="Leave trainer= out.")
        if self.signer.public_key not in TrustedKeys(self.trusted_keys).keys:
            raise InputError("this trainer's own key is not among trusted_keys", hint="Add signer.public_key.")


def store_exchange_of(over: Store | str | StoreExchange) -> StoreExchange:
    return over if isinstance(over, StoreExchange) else StoreExchange(over)


class StoreRounds:
    """One trainer's side of the rounds of a run. ``serial`` is the loop's thread: what takes effect does so whole."""

    def __init__(
        self, exchange: StoreExchange, reduction: GatedReduction, trainer: Trainer, serial: SerialThread
    ) -> None:
        self.exchange = exchange
        self._trusted = trusted_by(exchange.trusted_keys)
        self._given_name = exchange.signer.public_key if exchange.signer else exchange.trainer
        trainer.name = self._given_name or f"trainer-{secrets.token_hex(8)}"
        self.joined = False
        self._trainer, self._reduction, self._serial = trainer, reduction, serial
        store = BoundedStore(open_store(exchange.store))
        self._store = RunStore(store, trainer.state, exchange.signer, self._trusted)
        self._state, self._blocks = trainer.state, trainer.parameters.blocks
        self._units = [Unit(block, 0, block.stop - block.start) for block in self._blocks]
        self._members: frozenset[str] = frozenset()
        self._root = ""
        # Of the round under way, by post (one's bytes may be put in another's name): what it holds, or why it cannot
        # count; and what `accept` says of it.
        self._read: dict[Post, PostedMessage | str] = {}
        self._accepted: dict[Post, bool | str] = {}
        self._damaged: Counter[Post] = Counter()
        # Why this trainer's messages were not in the last rounds.
        self._left_out: deque[str] = deque(maxlen=4)
        self._since_snapshot = self._told_bytes = 0
        # The message of the round under way, and, with overlap, the thread that exchanges it and its work.
        self._own: PostedMessage | None = None
        self._data = b""
        self._behind = SerialThread("PulseLoCo exchange").post
        self._under_way: Operation[Close] | None = None

    # -- joining

    def join(self, settings: dict[str, object], lookahead: np.float32, note: TrainerNote) -> None:
        """Begins the run, or takes up its state."""
        trainer = self._trainer
        trainer.name = self._given_name or trainer.name
        if not TRAINER.fullmatch(trainer.name):
            raise StateMismatch(f"the saved state is of a trainer {trainer.name!r}, which is no name")
        trainer.buffers.require()
        run = {
            "specs": specs_digest(trainer.parameters.specs, trainer.buffers.specs),
            "untrained": trainer.buffers.digest(),
            "settings": json.loads(json.dumps(settings | self._bounds())),
        }
        try:
            found = self._store.beginning()
        except NotFound:
            # Whoever creates the run gives it its theta: all others take that.
            self._store.begin({"run": secrets.token_hex(16), **run})
            found = self._store.beginning()
        for key, value in run.items():
            if found.get(key) != value:
                if key == "settings":
                    raise InputError(f"the run has the settings {found.get(key)}, this trainer {value}")
                what = "frozen parameters or buffers" if key == "untrained" else "parameters or buffers"
                raise StateMismatch(
                    f"this trainer's {what} are not those of the run", hint="Start from the same model."
                )
        self._store.run = str(found.get("run"))
        self._root = self._state.digest(self._state.theta).root
        if trainer.round == 0:
            self._load(self._store.snapshot(found.get("snapshot"), 0, unless=self._root), 0, lookahead)
        if trainer.round and self._store.closed(trainer.round - 1) is None:
            raise StateMismatch(
                f"this trainer is after round {trainer.round}, the run in the store has not come so far",
                hint="Give the store of its run, or a new one without rounds below loco/.",
            )
        residual = self._reduction.residual
        pending = residual.pending_message if residual.overlapped and not self._data else None
        if pending is not None:
            # It was saved with its message on the way. One that never arrived is still in the residual.
            arrived = self._store.has_post(trainer.round, trainer.name, pending)
            if not arrived and self._store.closed(trainer.round) is None:
                residual.forget_message()
        self._catch_up(lookahead)
        self._told_bytes = self._store.sent_bytes
        self.joined = True

    def note(self, note: TrainerNote) -> None:
        pass  # others see what is in the store

    def averaged(self) -> Floats:
        raise InputError("over a store there is no averaged state", hint="Keep global_state() instead.")

    def forget_steps(self) -> None:
        if not self._reduction.residual.overlapped:
            self._reduction.residual.forget_message()  # one that was put for the round is of steps that are no more

    def move(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            raise InputError("the trainers meet over a store, not in a group", hint="Call rejoin() without a group.")

    def leave(self, error: BaseException | None = None) -> None:
        self.joined = False
        operation, self._under_way = self._under_way, None
        if operation is not None:
            operation.stop()
        self._read.clear()

    # -- a round

    def run(self, phase: Phase, lookahead: Callable[[], np.float32]) -> Round | None:
        """Ends the round that is due: this trainer's message is put, and counts in this round or stays to be sent in
        the next one."""
        self._trainer.parameters.require()
        return self._told(partial(self._run, phase, lookahead))

    def finish(self, phase: Phase, lookahead: Callable[[], np.float32]) -> Round | None:
        residual = self._reduction.residual
        if not residual.overlapped or residual.pending_message is None:
            return None

        def work() -> Round | None:
            with phase("exchange"):
                return self._end_exchange(lookahead())

        return self._told(work)

    def _told(self, work: Callable[[], Round | None]) -> Round | None:
        """The round that ``work`` has ended, with what this trainer has sent meanwhile, and why it was left out."""
        try:
            done = work()
        except (NonFinite, InputError, StateMismatch):  # before anything was sent
            raise
        except BaseException:
            self.leave()
            raise
        if done is None:
            return None
        left_out = "; ".join(self._left_out)
        self._left_out.clear()
        sent, self._told_bytes = self._store.sent_bytes - self._told_bytes, self._store.sent_bytes
        return replace(done, sent_bytes=sent, left_out=left_out)

    def _run(self, phase: Phase, lookahead: Callable[[], np.float32]) -> Round | None:
        residual = self._reduction.residual
        with phase("buffers"):
            self._trainer.buffers.require_unchanged()
        with phase("exchange"):
            done = self._end_exchange(lookahead())
        if residual.overlapped:
            if done is None:
                self._serial.run(partial(self._take_steps, lookahead()), whole=True)
        elif not self._trainer.inner_step:
            return done  # its steps have counted, in the message of a call that failed, or may have
        # One message a round: where a call failed that had put it, this one puts the same again.
        if residual.pending_message is None:
            with phase("gate"):
                own = self._reduction.message(self._trainer.round)
                if own.bad is not None:
                    raise NonFinite(f"the pseudo-gradient of {own.bad!r} is not finite")
                message = self._reduction.coder(self._trainer.round).encode(self._units, own.entries)
                data = write_post(self._place(self._trainer.name), message, self.exchange.signer)
                judged = self._judged(self._trainer.name, len(data), own.entries)
                if isinstance(judged, str):
                    raise InputError(
                        f"this trainer's message would be refused by all: {judged}",
                        hint="rewind() discards its steps. Bounds are those of a run.",
                    )
                self._own, self._data = judged, data
            residual.pending_message = sha256(self._data).hexdigest()  # first: it may count although this trainer fails
        if residual.overlapped:
            self._trainer.inner_step = 0
            self._under_way = self._behind(self._exchange)
            return done
        with phase("exchange"):
            close = self._exchange()
        with phase("update"):
            return self._apply(close, lookahead())

    def _exchange(self) -> Close:
        """Puts this trainer's message, and waits for the end of the round."""
        digest = self._reduction.residual.pending_message
        if self._data and digest is not None:
            post = Post(self._trainer.name, digest, len(self._data))
            self._store.put_post(self._trainer.round, post, self._data)
            if self._own is not None:
                self._read[post] = self._own
        return self._wait()

    def _end_exchange(self, lookahead: np.float32) -> Round | None:
        """Ends what goes on behind the inner steps, and takes up the rounds that were closed."""
        residual, (operation, self._under_way) = self._reduction.residual, (self._under_way, None)
        if residual.overlapped and residual.pending_message is not None:
            try:
                if operation is None:
                    self._exchange()
                else:
                    operation.wait()
                    operation.result()
            except TrainerLost:
                raise
            except PulseError:  # what has failed behind the steps is tried once more
                if operation is None:
                    raise
                self._exchange()
        return self._catch_up(lookahead)

    def _take_steps(self, lookahead: np.float32) -> None:
        """Before a round with overlap is begun: the inner steps are part of the residual."""
        self._reduction.residual.settle(Delivery.NOT_COUNTED, (), steps=True)
        self._trainer.write_start(lookahead)

    def _catch_up(self, lookahead: np.float32) -> Round | None:
        """Takes up the rounds that were closed since this trainer's last one; the last of them. A message that is due
        stays due, unless it has counted."""
        done = None
        while (close := self._store.closed(self._trainer.round)) is not None:
            due, delivery = self._trainer.inner_step, self._delivery(close)
            try:
                done = self._apply(close, lookahead)
            except NotFound:  # its messages are gone: a later snapshot has what they led to
                delivery = self._load_newest(lookahead)
            if delivery == Delivery.NOT_COUNTED or self._reduction.residual.overlapped:
                self._trainer.inner_step = due
        return done

    def _wait(self) -> Close:
        """Waits until the round is closed, and closes it where enough trainers are in."""
        number, exchange = self._trainer.round, self.exchange
        began = time.monotonic()
        quorum_since: float | None = None
        while True:
            if (close := self._store.closed(number)) is not None:
                return close
            good, refused = self._posts(number)
            now = time.monotonic()
            if len(good) >= exchange.quorum:
                quorum_since = now if quorum_since is None else quorum_since
                if self._members <= good.keys() or now - quorum_since >= exchange.grace_seconds:
                    posts = tuple(good[name] for name in sorted(good))
                    self._store.close(Close(self._store.run, number, self._root, posts, tuple(refused)))
                    continue
            elif now - began >= exchange.deadline_seconds:
                raise TrainerLost(
                    f"round {number + 1}: {len(good)} of {exchange.quorum} trainers in {exchange.deadline_seconds:g} s",
                    hint="Start more trainers, then call rejoin(): nothing that was learnt is lost.",
                )
            hit("round.waits")
            # A tenth of the time that it has waited: each look costs two requests.
            shortest, longest = _POLL_SECONDS
            wake = now + min(max((now - began) / 10, shortest), longest)
            while (left := wake - time.monotonic()) > 0:
                checkpoint()
                time.sleep(min(left, 0.2))

    def _apply(self, close: Close, lookahead: np.float32) -> Round:
        """Takes the outer step of a closed round."""
        state, residual = self._state, self._reduction.residual
        if close.theta != self._root:
            raise Diverged(f"round {close.round + 1} was closed by a trainer with another theta than this one")
        entries: list[list[Entries]] = [[] for _ in self._blocks]
        own: list[Entries] = []
        for post in close.posts:
            found = self._message(post)
            if isinstance(found, str):
                raise CorruptMessage(
                    f"round {close.round + 1} was closed with a message of {post.trainer} that cannot count: {found}",
                    hint="Do all trainers have the same trusted_keys? Else who closed it does not keep to the rules.",
                )
            for block, of_block in zip(entries, found.by_block, strict=True):
                block.append(of_block)
            if post.trainer == self._trainer.name:
                own = found.by_block
        delivery = self._delivery(close)
        if delivery == Delivery.NOT_COUNTED and self._trainer.inner_step:
            self._left_out.append(
                f"round {close.round + 1}: {close.reason(self._trainer.name, residual.pending_message)}"
            )

        def take_effect() -> int:
            # What the message had is in the others' theta now; what stays is in the next residual.
            if residual.overlapped:
                residual.settle(delivery, own, steps=bool(self._trainer.inner_step))
            elif delivery != Delivery.COUNTED:
                self._keep_local_steps(delivery)
            if residual.overlapped or delivery != Delivery.COUNTED:
                np.copyto(residual.next, residual.flat)
            summed = self._reduction.step(close.round, entries, len(close.posts), lookahead)
            self._trainer.complete_round([post.sha256 for post in close.posts])
            return summed

        summed = self._serial.run(take_effect, whole=True)
        self._read.clear()
        self._accepted.clear()
        self._damaged.clear()
        self._members = frozenset(post.trainer for post in close.posts)
        self._root = state.digest(state.theta).root
        self._since_snapshot += sum(post.nbytes for post in close.posts)
        if self._since_snapshot >= 2 * state.theta.nbytes:
            self._since_snapshot = 0
            # By turns: over many rounds each uploads as much for snapshots as for its own messages.
            if close.posts[close.round % len(close.posts)].trainer == self._trainer.name:
                self._store.keep_snapshot(self._trainer.round)
        done = Round(
            number=self._trainer.round,
            trainers=len(close.posts),
            parameters=self._trainer.parameters.count,
            entries=self._own.entries if self._own else 0,
            summed=summed,
            scattered=False,
            payload_bytes=len(self._data),
            sent_bytes=0,  # `run` knows, and why it was left out
            between_bytes=0,
            root=self._root,
            seconds={},  # the caller's
        )
        self._own, self._data = None, b""
        return done

    def _delivery(self, close: Close) -> Delivery:
        """What became of what this trainer had to send, by the end of a round."""
        counted = {post.trainer: post.sha256 for post in close.posts}.get(self._trainer.name)
        if counted is None:
            return Delivery.NOT_COUNTED
        # Else it is a message that this trainer had put before it came back from a checkpoint.
        return Delivery.COUNTED if counted == self._reduction.residual.pending_message else Delivery.UNKNOWN

    def _keep_local_steps(self, delivery: Delivery) -> None:
        """Puts what was learnt since the last round into the residual, all of it or, of what may have counted, none."""
        if self._trainer.inner_step or delivery == Delivery.UNKNOWN:
            self._reduction.residual.catch_up(delivery)

    # -- what is in the store

    def _place(self, trainer: str) -> Place:
        return Place(self._store.run, self._trainer.round, trainer, self._root)

    def _posts(self, number: int) -> tuple[dict[str, Post], list[Refused]]:
        """By trainer, the first message of a round that can count; and what cannot."""
        found: dict[str, Post] = {}
        refused: list[Refused] = []
        tried: Counter[str] = Counter()
        for post in self._store.posts(number):
            tried[post.trainer] += 1
            if post.trainer in found or len(found) == MAX_TRAINERS or tried[post.trainer] > _MAX_POSTS:
                continue
            reason = self._why_not(post)
            if reason is None:
                found[post.trainer] = post
            elif reason:
                refused.append(Refused(post.trainer, post.sha256, reason))
        return found, refused

    def _why_not(self, post: Post) -> str | None:
        """Why this trainer does not name a message when it closes the round; "" where it may be good later. One that
        arrives damaged is read again, and then passed over."""
        if self._damaged[post] >= _TRIES:
            return "it is damaged in the store"
        try:
            message = self._message(post)
        except NotFound:
            return ""
        except CorruptMessage:
            self._damaged[post] += 1
            return ""
        if isinstance(message, str) or self.exchange.accept is None:
            return message if isinstance(message, str) else None
        if post not in self._accepted:
            self._accepted[post] = self.exchange.accept(message, self._trainer.round)
        said = self._accepted[post]
        return None if said is True else f"not accepted: {said}" if isinstance(said, str) else "not accepted"

    def _message(self, post: Post) -> PostedMessage | str:
        """What a post holds, or why it cannot count, which is the same for all trainers. Raises NotFound,
        CorruptMessage where it has arrived damaged, and StoreError."""
        if post not in self._read:
            self._read[post] = self._fetched_message(post)
        return self._read[post]

    def _fetched_message(self, post: Post) -> PostedMessage | str:
        coder, most = self._reduction.coder(self._trainer.round), self.exchange.max_entries
        # An entry takes at most 10 bytes.
        fewer = 0 if most is None else max(0, self._trainer.parameters.count - most)
        if post.nbytes > HEAD + coder.max_bytes(self._units) - 10 * fewer:
            return f"it has {post.nbytes} bytes, more than its entries can need"
        data = self._store.post(self._trainer.round, post)
        try:
            message = read_post(data, self._place(post.trainer), self._trusted)
            entries = [found for (found,) in coder.decode(self._units, [message])]
        except (CorruptMessage, Untrusted) as error:
            return str(error)
        return self._judged(post.trainer, post.nbytes, entries)

    def _judged(self, trainer: str, nbytes: int, entries: list[Entries]) -> PostedMessage | str:
        """The message with these entries, or why it cannot count."""
        most, longest = self.exchange.max_entries, self.exchange.max_norm
        count = sum(len(places) for places, _ in entries)
        if most is not None and count > most:
            return f"it has {count} entries, more than {most}"
        norm = norm_of(entries)
        if longest is not None and norm > longest:
            return f"its norm is {norm:g}, more than {longest:g}"
        return PostedMessage(trainer, nbytes, count, norm, entries, self._dense)

    def _dense(self, entries: Sequence[Entries]) -> dict[str, torch.Tensor]:
        flat = np.zeros_like(self._state.theta)
        for block, (places, values) in zip(self._blocks, entries, strict=True):
            block.of(flat)[places] = values
        return self._trainer.parameters.by_name(flat)

    def _bounds(self) -> dict[str, object]:
        return {"max_norm": self.exchange.max_norm, "max_entries": self.exchange.max_entries}

    def _load_newest(self, lookahead: np.float32) -> Delivery:
        """Takes up the newest snapshot; what became of this trainer's messages in the rounds up to it."""
        began, (newest, fields) = self._trainer.round, self._store.newest_snapshot()
        if newest <= began:
            raise StoreError(
                f"the messages of round {began + 1} are gone, and there is no later snapshot",
                hint="Is the store damaged? Start from another trainer's checkpoint.",
            )
        closes = [self._store.closed(number) for number in range(began, newest)]
        first, *later = [self._delivery(close) for close in closes if close is not None]
        delivery = first if all(each == Delivery.NOT_COUNTED for each in later) else Delivery.UNKNOWN

        def settle() -> None:
            residual = self._reduction.residual
            if residual.overlapped:
                # The message is gone, what it had is not: it follows from theta and the residual.
                own = self._reduction.gate.entries_of(self._state, residual.flat, self._reduction.wire, began)
                residual.settle(delivery, own, steps=bool(self._trainer.inner_step))
            elif delivery == Delivery.COUNTED:
                residual.take_next()
            else:
                self._keep_local_steps(delivery)

        self._load(self._store.snapshot(fields, newest), newest, lookahead, settle)
        return delivery

    def _load(
        self,
        snapshot: tuple[str, Floats, Floats] | None,
        number: int,
        lookahead: np.float32,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes up the theta and momentum of a snapshot after so many rounds, once it has settled the residual."""
        if snapshot is None:
            return
        root, theta, momentum = snapshot

        def take_up() -> None:
            settle()
            self._trainer.take_up(number, theta, momentum, lookahead)

        self._serial.run(take_up, whole=True)
        self._reduction.forget()
        self._members, self._since_snapshot = frozenset(), 0
        self._root = root
