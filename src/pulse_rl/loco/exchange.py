"""How a round's entries travel: to all trainers, or to the owners of shares and back as sums
(docs/loco.md, sections 4.3 and 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Protocol

import numpy as np
import torch.distributed as dist

from .._native import sum_entries
from .._util.settings import checked_count, checked_number
from .._util.threads import ordered_map
from ..errors import CorruptMessage, Diverged, InputError, NonFinite
from ..store import Store
from ..stream.signing import Signer, TrustedKeys
from .gate import Gate, ReduceGate
from .group import TrainerGroup
from .outer import OuterState, Residual
from .parameters import FlatBlock, is_finite
from .store_format import TRAINER
from .wire import (
    Classes,
    Coder,
    Entries,
    LocalMessage,
    SumsMessage,
    Unit,
    Wire,
    WireName,
    digest_of,
)

_NON_FINITE = b"PLSN"
_TOO_LARGE = b"PLSH"
SCATTER_FROM, SCATTER_FEW_BITS_FROM = 4, 8
"""Trainers from which on each sums a share: (1 - 1/R) of a message and of all sums leave a process
then, not R - 1 messages, which is more as soon as trainers send some of the same entries. But sums
that are not gated are FP32, and messages of few bits are less than these until there are many of
them."""
GATE_SUMS_FROM, GATE_SWEPT_SUMS_FROM = 8, 4
"""Trainers from which on sums pass a gate: earlier with a sweep, of which all sums of a block in
FP32 would be most."""
Phase = Callable[[str], AbstractContextManager[None]]

Sums = list[Entries] | bytes
"""The sums of a share that are not 0, by unit; or the control word in place of them
(`_is_control`)."""


@dataclass(frozen=True)
class Exchange:
    """Who takes part, and how messages travel between them: what a loop takes as ``group``. All
    trainers have the same settings.

    Args:
        group: The trainers. Default: all of torch.distributed; without it, this trainer alone.
        wire: How values travel: "FP32" exactly; "BF16", "int4" and "int2" rounded to 7, 2 and 0
            explicit bits of mantissa, for about nine, four and two bits a value once they are
            coded. The residual keeps what rounding loses.
        sweep: Every so many rounds the gates let all of a block of parameters pass, each block in
            its turn. For "int4" and "int2", and with a lookahead (docs/loco.md, 1.3).
        timeout_seconds: A trainer that dies, or stalls for longer, raises TrainerLost on the
            others.
    Raises: InputError.
    """

    group: dist.ProcessGroup | None = None
    wire: WireName = "FP32"
    sweep: int | None = None
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        require_sweep(self.sweep, Wire(self.wire))
        if self.timeout_seconds <= 0:
            raise InputError(
                f"timeout_seconds is {self.timeout_seconds}",
                hint="Give a number of seconds above 0.",
            )


def require_sweep(sweep: int | None, wire: Wire) -> None:
    """Raises InputError for a ``sweep`` that is no number of rounds, or that the wire is too wide
    for."""
    if sweep is None:
        return
    checked_count("sweep", sweep)
    if not wire.few_bits:
        raise InputError(
            "a sweep sends every value of a block, which is for few bits, not for wire "
            f"{wire.name!r}",
            hint='Set wire="int4" or wire="int2".',
        )


def exchange_of(group: dist.ProcessGroup | Exchange | None) -> Exchange:
    """By the ``group`` of a loop: a process group gets the default settings."""
    return group if isinstance(group, Exchange) else Exchange(group=group)


def cut_shares(blocks: Sequence[FlatBlock], trainers: int) -> list[list[Unit]]:
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


@dataclass(frozen=True, slots=True)
class Transferred:
    """What has arrived, and every trainer has read: ``entries`` by block, to be added in this
    order.

    ``messages``: the digests of the trainers' messages, by rank. ``payload_bytes``: those of this
    trainer's own.
    """

    entries: list[list[Entries]]
    messages: list[str]
    payload_bytes: int
    scattered: bool


class Transfer:
    """One trainer's side of one round's transfer. ``require_same`` raises Diverged if trainers hold
    different tensors, which is why a message could not be read then. ``announce`` gets the digest
    of a message before it is sent."""

    def __init__(
        self,
        group: TrainerGroup,
        coder: Coder,
        blocks: Sequence[FlatBlock],
        phase: Phase,
        require_same: Callable[[], None],
        announce: Callable[[str], None],
    ) -> None:
        self._group, self._coder, self._blocks = group, coder, blocks
        self._phase, self._require_same, self._announce = phase, require_same, announce

    def gather(self, own: LocalMessage) -> Transferred:
        """Every trainer gets every message. Raises NonFinite, CorruptMessage and Diverged on all of
        them alike."""
        group, units = (
            self._group,
            [Unit(block, 0, block.stop - block.start) for block in self._blocks],
        )
        # 1. One message to all. Its digest is noted before it leaves: it may count although this
        # trainer fails.
        with self._phase("gate"):
            message = self._message(units, own)
            self._announce(digest_of(message))
        # 2. Read all messages. An error waits until all trainers have answered: none may end the
        # round alone.
        problem: CorruptMessage | None = None
        messages: list[bytes] = []
        others: list[list[Entries]] = [[] for _ in units]
        bad: str | None = None
        try:
            with self._phase("exchange"):
                messages = group.all_gather(message, max_bytes=self._coder.max_bytes(units))
            bad = _not_finite(messages)
            if bad is None:
                with self._phase("decode"):
                    others = self._coder.decode(
                        units, [m for rank, m in enumerate(messages) if rank != group.rank]
                    )
        except CorruptMessage as error:
            problem = error
        # 3. All know what all have read, and raise alike, or none does.
        self._all_read(problem)
        if bad is not None:
            raise NonFinite(bad)
        # In rank order: sums of floats depend on it, and all trainers must have the same bits.
        for found, mine in zip(others, own.entries, strict=True):
            found.insert(group.rank, mine)
        return Transferred(others, [digest_of(m) for m in messages], len(message), scattered=False)

    def scatter(self, own: LocalMessage, gate: ReduceGate | None = None) -> Transferred | None:
        """Every trainer gets what falls in its share, and all get the sums, those that pass
        ``gate`` if there is one. Raises as `gather`.

        None, on all trainers alike, if a sum is too large for a message: then they gather.
        """
        group, rank = self._group, self._group.rank
        shares = cut_shares(self._blocks, group.size)
        mine = shares[rank]
        coder = replace(self._coder, wire=gate.wire if gate else Wire())
        # 1. Entries go to the owners of their shares.
        with self._phase("gate"):
            parts = [self._message(units, own) for units in shares]
            digest = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()
            self._announce(digest)
        problem: CorruptMessage | None = None
        sums: Sums = b""  # nothing: what arrived could not be read
        try:
            sums = self._sum_parts(own, shares, parts)
        except CorruptMessage as error:
            problem = error
        # 2. All get all sums. Whatever went wrong here is said in place of them: the others wait
        # for this trainer.
        with self._phase("gate"):
            sums = self._filter(gate, mine, sums)
            answer = self._answer(coder, mine, sums, digest)
        answers: list[bytes] = []
        found: list[list[Entries]] = [[] for _ in self._blocks]
        digests: list[str] = []
        try:
            with self._phase("exchange"):
                max_answer = max(coder.max_bytes(units) for units in shares) + SumsMessage.HEAD
                answers = group.all_gather(answer, max_bytes=max_answer)
            if not isinstance(sums, bytes) and all(
                a.startswith(SumsMessage.MAGIC) for a in answers
            ):
                with self._phase("decode"):
                    digests = self._read_answers(coder, shares, answers, sums, found)
        except CorruptMessage as error:
            problem = problem or error
        # 3. From here on all trainers know the same, and raise alike.
        self._all_read(problem)
        if not all(_is_answer(a) for a in answers):
            raise CorruptMessage("a trainer's sums are of no known form")
        for a in answers:
            if a.startswith(_NON_FINITE):
                raise NonFinite(a.removeprefix(_NON_FINITE).decode(errors="replace"))
        if _TOO_LARGE in answers:
            return None
        return Transferred(found, digests, sum(map(len, parts)), scattered=True)

    def _sum_parts(
        self, own: LocalMessage, shares: Sequence[list[Unit]], parts: Sequence[bytes]
    ) -> Sums:
        """Sends this trainer's ``parts`` to the owners of their shares, and sums what it gets.
        Raises CorruptMessage."""
        group, rank = self._group, self._group.rank
        # Nobody allocates more than a share can need, whatever a message announces.
        limits = [self._coder.max_bytes(units) for units in shares]
        with self._phase("exchange"):
            arrived = group.all_to_all(parts, max_bytes=limits)
        bad = _not_finite(arrived)
        if bad is not None:
            return _NON_FINITE + bad.encode()
        with self._phase("decode"):
            # One's own entries are not coded: they stand in the sum where a message of this rank
            # would.
            units, coder = shares[rank], self._coder
            ours = [unit.take(own.entries[unit.block.number]) for unit in units]
            decoded = coder.decode(units, [m for source, m in enumerate(arrived) if source != rank])

            def add(item: tuple[Unit, list[Entries], Entries]) -> Entries:
                unit, entries, mine = item
                entries.insert(rank, mine)
                return sum_entries(entries, unit.stop - unit.start)

            items = list(zip(units, decoded, ours, strict=True))
            return list(ordered_map(add, items, coder.threads))

    def _message(self, units: Sequence[Unit], own: LocalMessage) -> bytes:
        if own.bad is not None:
            return _NON_FINITE + own.bad.encode()
        return self._coder.encode(
            units, [unit.take(own.entries[unit.block.number]) for unit in units]
        )

    def _filter(self, gate: ReduceGate | None, units: Sequence[Unit], sums: Sums) -> Sums:
        """What is sent of ``sums``: those that pass ``gate``, if there is one."""
        if isinstance(sums, bytes):
            return sums

        def sent_of(item: tuple[Unit, Entries]) -> Entries:
            return gate.filter(*item, self._group.size) if gate else item[1]

        sent = list(ordered_map(sent_of, list(zip(units, sums, strict=True)), self._coder.threads))
        return sent if all(is_finite(values).all() for _, values in sent) else _TOO_LARGE

    def _answer(self, coder: Coder, units: Sequence[Unit], sums: Sums, digest: str) -> bytes:
        return (
            sums
            if isinstance(sums, bytes)
            else SumsMessage(digest, coder.encode(units, sums)).to_bytes()
        )

    def _read_answers(
        self,
        coder: Coder,
        shares: Sequence[Sequence[Unit]],
        answers: Sequence[bytes],
        own: list[Entries],
        found: list[list[Entries]],
    ) -> list[str]:
        """Puts all sums into ``found``, by block. Returns the digests that the trainers say they
        have sent."""
        digests = []
        for owner, (units, data) in enumerate(zip(shares, answers, strict=True)):
            message = SumsMessage.parse(data)
            digests.append(message.digest)
            mine = owner == self._group.rank
            sums = own if mine else coder.decode_one(units, message.sums)
            for unit, entries in zip(units, sums, strict=True):
                found[unit.block.number].append(unit.place(entries))
        return digests

    def _all_read(self, problem: CorruptMessage | None) -> None:
        """Raises CorruptMessage or Diverged on all trainers unless every one has read
        everything."""
        with self._phase("exchange"):
            failed = self._group.failures(problem)
        if failed:
            # Theta and momentum are part of the code: a trainer that holds others cannot decode it.
            self._require_same()
            cause = problem or "their own errors say why"
            raise CorruptMessage(
                f"trainers {failed} could not read a message: {cause}"
            ) from problem


def _is_control(data: bytes) -> bool:
    """Whether something is said in place of sums."""
    return data in (b"", _TOO_LARGE) or data.startswith(_NON_FINITE)


def _is_answer(data: bytes) -> bool:
    return data.startswith(SumsMessage.MAGIC) or (data != b"" and _is_control(data))


def _not_finite(messages: Sequence[bytes]) -> str | None:
    """Words for the first trainer whose pseudo-gradient is not finite."""
    for rank, message in enumerate(messages):
        if message.startswith(_NON_FINITE):
            name = message.removeprefix(_NON_FINITE).decode(errors="replace")
            return f"trainer {rank}: the pseudo-gradient of {name!r} is not finite"
    return None


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round whose messages have all arrived. What is left cannot fail: ``apply`` gives theta,
    momentum and the model what follows from them, the model's next start by the lookahead that it
    gets, and returns the number of parameters whose sum is not 0. ``entries`` and ``payload_bytes``
    are those of this trainer's own message; ``messages`` the digests of all trainers' messages, by
    rank."""

    entries: int
    payload_bytes: int
    apply: Callable[[np.float32], int]
    messages: list[str]
    scattered: bool = False


class Reduction(Protocol):
    """How pseudo-gradients become one outer step: what a method is, beside the loop that all
    methods share.

    ``residual``: what is not sent, if there is error feedback."""

    @property
    def residual(self) -> Residual | None: ...

    def settings(self) -> dict[str, object]:
        """What all trainers must have in common."""

    def forget(self) -> None:
        """Theta, momentum or the trainers have become others since the last round."""

    def run(self, group: TrainerGroup, number: int, phase: Phase) -> PendingRound:
        """Exchanges the pseudo-gradients of the round after ``number``. Theta, momentum and
        residual do not change yet. Raises NonFinite, CorruptMessage and Diverged on all trainers
        alike, and TrainerLost."""


class GatedReduction:
    """PULSELoCo's: entries that pass the gate are sent and summed in rank order, the others stay in
    the residual."""

    def __init__(
        self, state: OuterState, residual: Residual, gate: Gate, exchange: Exchange
    ) -> None:
        self.residual: Residual = residual
        self.gate, self.exchange = gate, exchange
        self._state, self.wire = state, Wire(exchange.wire)
        self.classes = Classes(state.parameters.blocks)

    def settings(self) -> dict[str, object]:
        return {
            **self.gate.settings(),
            "wire": self.wire.name,
            "lookahead": float(self.residual.lookahead),
        }

    def forget(self) -> None:
        self.classes.forget()

    def gates_sums(self, trainers: int) -> bool:
        """Whether the sums that so many trainers send pass a gate; without a lookahead, which feels
        what is withheld, none."""
        fewest = GATE_SWEPT_SUMS_FROM if self.exchange.sweep else GATE_SUMS_FROM
        return bool(self.residual.lookahead) and trainers >= fewest

    def scatters(self, trainers: int) -> bool:
        """Whether each trainer sums a share; otherwise all get all messages."""
        fewest = SCATTER_FEW_BITS_FROM if self.wire.few_bits else SCATTER_FROM
        return self.gates_sums(trainers) or trainers >= fewest

    def message(self, number: int) -> LocalMessage:
        """What this trainer has to send in the round after ``number``; fills the next residual."""
        return self.gate.local_message(self._state, self.residual, self.wire, number)

    def coder(self, number: int) -> Coder:
        """Codes the messages of the round after ``number``."""
        state, rounding = self._state, self.gate.rounding
        return Coder(
            number, state.theta, state.momentum, rounding, self.wire, self.classes, state.threads
        )

    def step(
        self,
        number: int,
        entries: Sequence[Sequence[Entries]],
        trainers: int,
        lookahead: np.float32,
    ) -> int:
        """The outer step of the round after ``number``, along the sum of ``entries`` /
        ``trainers``; the residual takes effect, and the model gets the next start, by
        ``lookahead``. The number of parameters whose sum is not 0."""
        residual = self.residual
        residual.complete_next()
        swept = partial(self.gate.sweeps, number=number)
        summed = self._state.sparse_step(
            entries, trainers, residual, lookahead, self.gate.rounding, self.classes, swept
        )
        residual.started_with = lookahead
        residual.take_next()
        return summed

    def run(self, group: TrainerGroup, number: int, phase: Phase) -> PendingRound:
        state, residual = self._state, self.residual
        # 1. The gate: the entries to send; the others, with what rounding loses, fill the next
        # residual.
        residual.forget_message()
        with phase("gate"):
            own = self.message(number)

        def announce(
            digest: str,
        ) -> None:  # before the message is sent: it may count although this trainer fails
            residual.pending_message = None if own.bad else digest

        # 2. To the owners of shares, or to all.
        require_same = partial(group.require_same_tensors, number, state.digests)
        transfer = Transfer(
            group, self.coder(number), state.parameters.blocks, phase, require_same, announce
        )
        arrived: Transferred | None = None
        reduce_gate: ReduceGate | None = None
        try:
            if self.gates_sums(group.size):
                reduce_gate = ReduceGate(state.theta, self.gate, self.wire, number)
                residual.apply_withheld = reduce_gate.add_residual
            if self.scatters(group.size):
                arrived = transfer.scatter(own, reduce_gate)
            if arrived is None:  # by the rule, or for a sum that no message takes
                residual.apply_withheld = None
                arrived = transfer.gather(own)
        except (
            NonFinite,
            CorruptMessage,
            Diverged,
        ):  # on all trainers alike: the message has counted with none
            residual.forget_message()
            raise
        entries = sum(len(positions) for positions, _ in own.entries)
        apply = partial(self.step, number, arrived.entries, group.size)
        return PendingRound(
            entries, arrived.payload_bytes, apply, arrived.messages, arrived.scattered
        )


# -- trainers that meet in a store


_MOST_SECONDS = 30 * 86400.0  # torch counts in microseconds


@dataclass(frozen=True)
class StoreExchange:
    """Trainers that meet in a ``store`` (or its address) instead of a process group: what
    `PulseLoCo` takes as ``over``. All trainers of a run give the same store. Without keys nobody
    else may write below ``loco/`` in it.

    Among many trainers each sums a share of the parameters for all (docs/loco.md, 7.3). Sums that
    are not there after ``grace_seconds`` are made by others than their owner.

    Args:
        store: The store, or its address.
        trainer: This trainer's name: letters, digits, "-" and "_", at most 64. With a name of its
            own a trainer that resumes from a checkpoint knows which of its messages counted.
            Default: a random name.
        quorum: The fewest trainers that make a round.
        grace_seconds: How long a round that has a quorum waits for the trainers of the round
            before. Stragglers are not in this round, and lose nothing.
        deadline_seconds: Without a quorum for that long, a round raises TrainerLost.
        wire: As for `Exchange`.
        sweep: As for `Exchange`.
        signer: This trainer's key, with which it signs all that it writes. Its name is the public
            key then.
        trusted_keys: The public keys of all members, its own among them. What others write is
            refused.
        max_norm: All refuse a message with a larger L2 norm, its own trainer with InputError. One
            setting of all trainers.
    Raises: InputError.
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

    def __post_init__(self) -> None:
        travel_of(self)
        checked_count("quorum", self.quorum)
        checked_number("grace_seconds", self.grace_seconds)
        checked_number("deadline_seconds", self.deadline_seconds)
        if self.max_norm is not None:
            checked_number("max_norm", self.max_norm)
        if self.trainer is not None and not (
            isinstance(self.trainer, str) and TRAINER.fullmatch(self.trainer)
        ):
            raise InputError(
                f"trainer is {self.trainer!r}",
                hint="Give a name of letters, digits, '-' and '_', at most 64.",
            )
        if self.signer is None and self.trusted_keys is None:
            return
        if not isinstance(self.signer, Signer) or self.trusted_keys is None:
            raise InputError(
                "members sign, and know each other's keys", hint="Give signer= and trusted_keys=."
            )
        if self.trainer is not None:
            raise InputError("a trainer that signs is named by its key", hint="Leave trainer= out.")
        if self.signer.public_key not in TrustedKeys(self.trusted_keys).keys:
            raise InputError(
                "this trainer's own key is not among trusted_keys", hint="Add signer.public_key."
            )


def travel_of(exchange: StoreExchange) -> Exchange:
    """How its messages travel. Raises InputError."""
    return Exchange(wire=exchange.wire, sweep=exchange.sweep)


def rank_seconds_of(exchange: StoreExchange) -> float:
    """How long the ranks of a trainer wait for that which speaks for them: it may wait for two
    rounds."""
    return min(600 + 2 * (exchange.deadline_seconds + exchange.grace_seconds), _MOST_SECONDS)


def store_exchange_of(over: Store | str | StoreExchange) -> StoreExchange:
    return over if isinstance(over, StoreExchange) else StoreExchange(over)
