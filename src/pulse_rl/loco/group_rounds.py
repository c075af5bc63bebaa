"""Rounds in a process group (docs/loco.md, sections 4 and 5): how trainers meet, and how a round's
entries travel: to all trainers, or to the owners of shares and back as sums."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Protocol, Self

import msgspec
import numpy as np
import torch.distributed as dist

from ..errors import CorruptMessage, Diverged, InputError, NonFinite, StateMismatch
from .exchange import GroupExchange, Meeting, Phase, Round, first_difference
from .gate import GatedReduction
from .group import TrainerGroup, TrainerNote, logged_wait
from .messages import (
    FORMAT,
    NOTHING,
    Coder,
    Compression,
    Entries,
    Sent,
    Sums,
    Unit,
    digest_of,
    joined,
)
from .outer import MessageOutcome, OuterState, Residual, Trainer, specs_digest
from .parameters import FlatBlock, is_finite, parts

_NON_FINITE = b"PLSN"
_TOO_LARGE = b"PLSH"
_SUMS = b"PLSS"
_SUMS_HEAD = len(_SUMS) + 32
_MAX_HANDSHAKE_BYTES = 1 << 20

# -- meeting


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a trainer sends when trainers meet.

    ``settings`` are those that all must share. ``round`` is its last common round, ``root`` the
    root of the global weights after it, ``momentum`` that of the outer momentum (both 64
    hexadecimal digits). ``messages`` are the digests of that round's messages, one per trainer, and
    ``specs`` is the digest of its parameters (`specs_digest`). ``format`` is that of the handshake
    and of all messages."""

    settings: dict[str, Any]
    round: int
    root: str
    momentum: str
    messages: list[str]
    specs: str
    format: int = FORMAT

    @property
    def state(self) -> tuple[int, str, str]:
        """Round and roots: equal for two trainers that hold the same outer state."""
        return self.round, self.root, self.momentum

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptMessage unless ``data`` is a handshake. Fields that are not known are
        ignored."""
        try:
            found = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptMessage(f"a trainer's handshake cannot be read: {error}") from None
        if found.format != FORMAT:
            raise CorruptMessage(
                f"a trainer's handshake has format {found.format}, this one reads {FORMAT}"
            )
        return found


def outcome_of(
    message: str | None, number: int, leader: Handshake, *, from_checkpoint: bool
) -> MessageOutcome:
    """What became of the message of the round after ``number``, the last one that this trainer has
    completed.

    ``message`` is its digest, None if none was sent. The leader knows the messages of its last
    round alone. Of a trainer that resumed ``from_checkpoint`` and has met nobody since, it is
    unknown what it sent after it was saved.
    """
    if leader.round == number + 1 and message in leader.messages:
        return MessageOutcome.COUNTED
    if from_checkpoint or (message is not None and leader.round > number + 1):
        return MessageOutcome.UNKNOWN
    return MessageOutcome.NOT_COUNTED


class GroupRounds(Meeting):
    """One trainer's side of the rounds: all trainers of the group are in each of them."""

    def __init__(self, exchange: GroupExchange, reduction: Reduction, trainer: Trainer) -> None:
        self.joined = False
        self.group: TrainerGroup | None = None
        self._exchange, self._process_group = exchange, exchange.group
        self._reduction, self._trainer = reduction, trainer

    def join(self, settings: dict[str, object], lookahead: np.float32, note: TrainerNote) -> None:
        trainer, state = self._trainer, self._trainer.state
        group = TrainerGroup(self._process_group, timeout_seconds=self._exchange.timeout_seconds)
        group.progress.note(note)
        try:
            # 1. Handshakes: all have one model and the same settings.
            digests = state.digests()
            own = Handshake(
                settings=settings,
                round=trainer.round,
                root=digests["global"].root,
                momentum=digests["momentum"].root,
                messages=trainer.messages,
                specs=specs_digest(trainer.parameters.specs, trainer.frozen.specs),
            )
            with logged_wait(f"waiting for {group.size - 1} trainers to enter, or to rejoin,"):
                gathered = group.all_gather(own.to_bytes(), max_bytes=_MAX_HANDSHAKE_BYTES)
            handshakes = [Handshake.parse(data) for data in gathered]
            group.progress.met()
            for rank, theirs in enumerate(handshakes):
                if theirs.specs != own.specs:
                    raise StateMismatch(
                        f"trainer {rank} has other parameters or buffers, or trains others: names, "
                        "dtypes or shapes differ"
                    )
                if differs := first_difference(theirs.settings, own.settings):
                    raise InputError(
                        f"trainer {rank} has other settings: {differs}",
                        hint="Give all trainers the same.",
                    )
            # 2. The lowest rank in the latest round leads. Before the first round all states may
            # differ: each trainer still has its own weights.
            latest = max(each.round for each in handshakes)
            leader = next(rank for rank, each in enumerate(handshakes) if each.round == latest)
            lead = handshakes[leader]
            behind = [rank for rank, each in enumerate(handshakes) if each.state != lead.state]
            diverged = [rank for rank in behind if handshakes[rank].round == latest]
            if latest and diverged:
                raise Diverged(
                    f"in round {latest} the state of trainers {diverged} is not that of trainer "
                    f"{leader}"
                )
            trainer.frozen.meet(group)
            # 3. Those behind the leader get its state, into copies: a trainer that is lost leaves
            # the others whole.
            weights, momentum = state.weights, state.momentum
            if group.rank in behind:
                weights, momentum = weights.copy(), momentum.copy()
            if behind:
                group.broadcast(weights, leader)
                group.broadcast(momentum, leader)

            # 4. Nothing that follows waits for another trainer, or can fail.
            def take_up() -> None:
                if group.rank in behind:
                    # What was sent in a round whose end this trainer did not see has counted, or
                    # stays in the residual.
                    residual, number = trainer.residual, trainer.round
                    if residual is not None and lead.round != number:
                        sent, before = residual.message, trainer.from_checkpoint
                        residual.settle(outcome_of(sent, number, lead, from_checkpoint=before))
                    trainer.take_up(lead.round, weights, momentum, lookahead, lead.messages)
                trainer.from_checkpoint = False
                self._reduction.forget()

            trainer.whole(take_up)
        except BaseException:
            group.close()
            raise
        self.joined, self.group = True, group

    def run(self, phase: Phase, lookahead: np.float32) -> Round:
        group, trainer, state = self._met(), self._trainer, self._trainer.state
        sent = group.sent_bytes
        try:
            # 1. What no optimizer trains must not have changed.
            trainer.parameters.require()
            with phase("frozen"):
                message_bytes = trainer.frozen.require_unchanged_on_all(group)
            # 2. Gate, exchange. A failure up to here leaves the global weights, momentum and
            # residual as they were.
            closing = trainer.due == "closing"
            with logged_wait(
                f"round {trainer.round + 1}: waiting for the other {group.size - 1} trainers"
            ):
                pending = self._reduction.run(group, trainer.round, phase, closing=closing)

            # 3. The outer step. No interrupt comes between its parts.
            def take_effect() -> int:
                with phase("update"):
                    summed = pending.apply(lookahead)
                    trainer.complete_round(pending.messages)
                return summed

            summed = trainer.whole(take_effect)
            # 4. All have the same global weights. After it has taken effect here: a trainer lost in
            # the comparison leaves the others in a whole state.
            with phase("verify"):
                weights = state.digest(state.weights)
                group.require_same_root(trainer.round, weights, state.digests)
        except (NonFinite, Diverged, CorruptMessage, StateMismatch):  # on all trainers alike
            trainer.due = ""  # a closing round is asked for again
            raise
        except BaseException as error:
            # This round's message may count with the others: no second try before the trainers have
            # met again.
            self.leave(error)
            raise
        return Round(
            number=trainer.round,
            trainers=group.size,
            parameters=trainer.parameters.count,
            entries=pending.entries,
            summed=summed,
            scattered=pending.scattered,
            payload_bytes=pending.payload_bytes + message_bytes,
            sent_bytes=group.sent_bytes - sent,
            root=weights.root,
            seconds={},  # the caller's
        )

    def note(self, note: TrainerNote) -> None:
        if self.group is not None:
            self.group.progress.note(note)

    def move(self, group: dist.ProcessGroup | None) -> None:
        self._process_group = group
        self.leave()

    def leave(self, error: BaseException | None = None) -> None:
        if self.group is not None:
            try:
                self.group.progress.leave(error)
            finally:
                self.group.close()
                self.joined, self.group = False, None

    def _met(self) -> TrainerGroup:
        if self.group is None:
            raise InputError(
                "the trainers have not met",
                hint="Call it on all trainers, within the loop's `with`.",
            )
        return self.group


# -- a round's reduction


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round whose messages have all arrived. What is left cannot fail: ``apply`` gives the global
    weights, momentum and the model what follows from them, the model's next start by the lookahead
    that it gets, and returns the number of parameters whose sum is not 0. ``entries`` and
    ``payload_bytes`` are those of this trainer's own message; ``messages`` the digests of all
    trainers' messages, by rank."""

    entries: int
    payload_bytes: int
    apply: Callable[[np.float32], int]
    messages: list[str]
    scattered: bool = False


class Reduction(Protocol):
    """How the pseudo-gradients of a group become one outer step: what a method is, apart from the
    loop that all methods share.

    ``residual``: what is not sent, if there is error feedback."""

    @property
    def residual(self) -> Residual | None: ...

    def settings(self) -> dict[str, object]:
        """What all trainers must have in common."""

    def forget(self) -> None:
        """The global weights, momentum or the trainers have become others since the last round."""

    def run(self, group: TrainerGroup, number: int, phase: Phase, *, closing: bool) -> PendingRound:
        """Exchanges the pseudo-gradients of the round after ``number``. The global weights,
        momentum and residual do not change yet. Raises NonFinite, CorruptMessage and Diverged on
        all trainers alike, and TrainerLost."""


class DenseReduction:
    """DiLoCo's: an all-reduce of all FP32 pseudo-gradients, without a residual."""

    def __init__(self, state: OuterState) -> None:
        self._state = state
        self.residual = None

    def settings(self) -> dict[str, object]:
        return {}

    def forget(self) -> None:
        pass

    def run(self, group: TrainerGroup, number: int, phase: Phase, *, closing: bool) -> PendingRound:
        state, parameters = self._state, self._state.parameters
        total = np.empty_like(state.weights)
        with phase("gate"):
            for block in parameters.blocks:
                out, start = block.of(total), parameters.as_written(block, block.of(state.weights))
                for part, segment in parts(block):
                    np.subtract(start[part], parameters.now(segment), out=out[part])
        with phase("exchange"):
            group.all_reduce(total)
        # The sum is the same on all trainers, so all of them raise this, and before the global
        # weights change.
        if name := parameters.first_non_finite(total):
            raise NonFinite(f"the sum of the pseudo-gradients of {name!r} is not finite")

        def apply(_: np.float32) -> int:
            state.dense_step(total, group.size)
            parameters.write(state.weights)
            return parameters.count

        return PendingRound(parameters.count, total.nbytes, apply, [])


class GroupReduction(GatedReduction):
    """PULSELoCo's in a group."""

    def run(self, group: TrainerGroup, number: int, phase: Phase, *, closing: bool) -> PendingRound:
        return Transfer(self, group, number, phase, closing=closing).run()


def striped_shares(blocks: Sequence[FlatBlock], trainers: int) -> list[list[Unit]]:
    """The units of each trainer's share, in order: an equal part of every block, so that shares are
    about as long whichever tensors change. A part may be empty, and is then no unit."""
    shares: list[list[Unit]] = [[] for _ in range(trainers)]
    for block in blocks:
        count = block.stop - block.start
        for owner, share in enumerate(shares):
            first, last = count * owner // trainers, count * (owner + 1) // trainers
            if first < last:
                share.append(Unit(block, first, last))
    return shares


class Transfer:
    """One trainer's side of the transfer of the round after ``number``."""

    def __init__(
        self,
        reduction: GatedReduction,
        group: TrainerGroup,
        number: int,
        phase: Phase,
        *,
        closing: bool,
    ) -> None:
        self._reduction, self._group, self._number, self._phase = reduction, group, number, phase
        self._coder, self._closing = reduction.coder(number), closing
        self._blocks = reduction.state.parameters.blocks
        self._digests: list[str] = []
        self._payload_bytes = 0

    def run(self) -> PendingRound:
        reduction, residual, group = self._reduction, self._reduction.residual, self._group
        # 1. The gate: the entries to send; the others, with what rounding loses, fill the next
        # residual.
        residual.sent(None)
        with self._phase("gate"):
            own = reduction.message(closing=self._closing)
        # 2. To the owners of shares, or to all.
        sums: Sums | None = None
        try:
            if reduction.scatters(group.size) and not self._closing:
                sums = self._scatter(own)
            scattered = sums is not None
            if sums is None:  # by the rule, or for a sum that no message takes
                sums = self._gather(own)
        except (NonFinite, CorruptMessage, Diverged):
            # On all trainers alike: the message has counted with none.
            residual.sent(None)
            raise
        # 3. What is left cannot fail.
        assert isinstance(own, Sent)
        counted = MessageOutcome.COUNTED
        apply = partial(reduction.step, sums, group.size, outcome=counted)
        return PendingRound(own.size, self._payload_bytes, apply, self._digests, scattered)

    def _gather(self, own: Sent | str) -> Sums:
        """Every trainer gets every message. Raises NonFinite, CorruptMessage and Diverged on all of
        them alike."""
        group, units = self._group, [Unit(b, 0, b.stop - b.start) for b in self._blocks]
        # 1. One message to all.
        with self._phase("gate"):
            message = self._message(units, own)
            self._announce(own, digest_of(message), len(message))
        # 2. Read all messages. An error waits until all trainers have answered: none may end the
        # round alone.
        problem: CorruptMessage | None = None
        sums: Sums | None = None
        messages: list[bytes] = []
        bad: str | None = None
        try:
            with self._phase("exchange"):
                messages = group.all_gather(message, max_bytes=self._coder.max_bytes(units))
            bad = _not_finite(messages)
            if bad is None:
                sums = self._added(units, messages, own)
        except CorruptMessage as error:
            problem = error
        # 3. All know what all have read, and raise alike, or none does.
        self._all_read(problem)
        if bad is not None:
            raise NonFinite(bad)
        assert sums is not None
        self._digests = [digest_of(m) for m in messages]
        return sums

    def _scatter(self, own: Sent | str) -> Sums | None:
        """Every trainer gets what falls in its share, and all get the sums. Raises as `_gather`.

        None, on all trainers alike, if a sum is too large for a message: then they gather.
        """
        group, rank = self._group, self._group.rank
        shares = striped_shares(self._blocks, group.size)
        mine = shares[rank]
        # 1. Entries go to the owners of their shares.
        with self._phase("gate"):
            messages = [self._message(units, own) for units in shares]
            digest = sha256(b"".join(sha256(part).digest() for part in messages)).hexdigest()
            self._announce(own, digest, sum(map(len, messages)))
        # 2. This trainer's share is added up. Nobody allocates more than a share can need, whatever
        # a message announces.
        problem: CorruptMessage | None = None
        sums: list[Entries] | None = None
        answer = b""  # nothing: what arrived could not be read
        coder = replace(self._coder, compression=Compression())
        limits = [self._coder.max_bytes(units) for units in shares]
        try:
            with self._phase("exchange"):
                arrived = group.all_to_all(messages, max_bytes=limits)
            bad = _not_finite(arrived)
            if bad is not None:
                answer = _NON_FINITE + bad.encode()
            else:
                sums = self._added(mine, arrived, own).steps
                if not all(is_finite(values).all() for _, values in sums):
                    answer, sums = _TOO_LARGE, None
        except CorruptMessage as error:
            problem = error
        # 3. All get all sums. Whatever went wrong here is said in place of them: the others wait
        # for this trainer.
        if sums is not None:
            with self._phase("gate"):
                answer = self._answer(coder, mine, sums, digest)
        answers: list[bytes] = []
        found: list[list[Entries]] = [[] for _ in self._blocks]
        try:
            with self._phase("exchange"):
                max_answer = max(coder.max_bytes(units) for units in shares) + _SUMS_HEAD
                answers = group.all_gather(answer, max_bytes=max_answer)
            if sums is not None and all(a.startswith(_SUMS) for a in answers):
                with self._phase("decode"):
                    for owner, (units, data) in enumerate(zip(shares, answers, strict=True)):
                        if len(data) < _SUMS_HEAD:
                            raise CorruptMessage("not a message of sums")
                        theirs = sums
                        if owner != rank:
                            theirs = coder.decode(units, data[_SUMS_HEAD:]).entries
                        for unit, entries in zip(units, theirs, strict=True):
                            found[unit.block.number].append(unit.place(entries))
        except CorruptMessage as error:
            problem = problem or error
        # 4. From here on all trainers know the same, and raise alike.
        self._all_read(problem)
        for data in answers:
            if data != _TOO_LARGE and not data.startswith((_SUMS, _NON_FINITE)):
                raise CorruptMessage("a trainer's sums are of no known form")
        for data in answers:
            if data.startswith(_NON_FINITE):
                raise NonFinite(data.removeprefix(_NON_FINITE).decode(errors="replace"))
        if _TOO_LARGE in answers:
            return None
        self._digests = [data[len(_SUMS) : _SUMS_HEAD].hex() for data in answers]
        return Sums(list(map(joined, found)), [NOTHING] * len(found), group.size)

    def _message(self, units: Sequence[Unit], own: Sent | str) -> bytes:
        if isinstance(own, str):
            return _NON_FINITE + own.encode()
        return self._coder.encode(units, own.of(units))

    def _announce(self, own: Sent | str, digest: str, nbytes: int) -> None:
        """Before the message is sent: it may count although this trainer fails."""
        self._reduction.residual.sent(digest if isinstance(own, Sent) else None)
        self._payload_bytes = nbytes

    def _answer(
        self, coder: Coder, units: Sequence[Unit], sums: list[Entries], digest: str
    ) -> bytes:
        """The sums of a share, behind the digest of what this trainer has sent."""
        return _SUMS + bytes.fromhex(digest) + coder.encode(units, Sent(sums))

    def _added(self, units: Sequence[Unit], messages: Sequence[bytes], own: Sent | str) -> Sums:
        """The sums of all trainers' entries, by unit, in rank order: sums of floats depend on it,
        and all trainers must have the same bits. This trainer's own are not decoded."""
        each: list[bytes | Sent] = list(messages)
        if isinstance(own, Sent):
            each[self._group.rank] = own.of(units)
        with self._phase("decode"):
            return self._coder.add_up(units, each)

    def _all_read(self, problem: CorruptMessage | None) -> None:
        """Raises CorruptMessage or Diverged on all trainers unless every one has read
        everything."""
        group = self._group
        with self._phase("exchange"):
            failed = group.failures(problem)
        if failed:
            # The global weights and momentum are part of the code: a trainer that holds others
            # cannot decode it.
            group.require_same_tensors(self._number, self._reduction.state.digests)
            cause = problem or "their own errors say why"
            raise CorruptMessage(
                f"trainers {failed} could not read a message: {cause}"
            ) from problem


def _not_finite(messages: Sequence[bytes]) -> str | None:
    """Words for the first trainer whose pseudo-gradient is not finite."""
    for rank, message in enumerate(messages):
        if message.startswith(_NON_FINITE):
            name = message.removeprefix(_NON_FINITE).decode(errors="replace")
            return f"trainer {rank}: the pseudo-gradient of {name!r} is not finite"
    return None
