"""The two ways of a round's entries: to all, or to the owners of shares and back as sums (docs/loco.md, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import sha256

import torch

from .._native import sum_entries
from .._util.threads import ordered_map
from ..errors import CorruptMessage, NonFinite
from ..state.rounding import Rounding
from .classes import Classes
from .exchange import Exchange
from .gate import Floats, is_finite
from .parameters import FlatBlock
from .shares import Counts, Unit, cut_shares, whole
from .sums import SumsGate
from .wire import Entries, Message, SumsMessage, Wire, digest_of

_NON_FINITE = b"PLSN"
_TOO_LARGE = b"PLSH"
Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Own:
    """What a trainer has to send: its entries by block, or the ``bad`` parameter for which it has none."""

    entries: list[Entries]
    bad: str | None = None


@dataclass(frozen=True, slots=True)
class Transferred:
    """What has arrived, and every trainer has read: ``entries`` by block, to be added in this order.

    ``messages``: the digests of the trainers' messages, by rank. ``lengths``: their bytes. ``sums``: bytes of the
    longest message of sums, times the trainers; None if none were sent.
    """

    entries: list[list[Entries]]
    messages: list[str]
    lengths: list[int]
    sums: int | None


@dataclass(frozen=True)
class Coder:
    """Codes entries against the theta and momentum of the round after ``round``."""

    round: int
    theta: Floats
    momentum: Floats
    rounding: Rounding
    wire: Wire
    classes: Classes
    threads: int | None

    def encode(self, units: Sequence[Unit], entries: Sequence[Entries]) -> bytes:
        """The message of the ``entries`` of each unit."""

        def encode(item: tuple[Unit, Entries]) -> bytes:
            unit, found = item
            theta, momentum = unit.of(self.theta), unit.of(self.momentum)
            return self.wire.encode(theta, momentum, self.rounding, found, self.classes.of(unit))

        payloads = list(ordered_map(encode, list(zip(units, entries, strict=True)), self.threads))
        return Message(self.round, self.wire.code, payloads).to_bytes()

    def decode(self, units: Sequence[Unit], messages: Sequence[bytes]) -> list[list[Entries]]:
        """The entries of each unit, by message. Raises CorruptMessage."""
        parsed = [Message.parse(m, len(units)) for m in messages]
        for message in parsed:
            if message.round != self.round or message.wire != self.wire.code:
                raise CorruptMessage(f"a message of round {message.round}, wire {message.wire} in round {self.round}")

        def decode(number: int) -> list[Entries]:
            unit, payloads = units[number], [message.payloads[number] for message in parsed]
            theta, momentum = unit.of(self.theta), unit.of(self.momentum)
            return self.wire.decode(payloads, theta, momentum, self.rounding, self.classes.of(unit))

        return list(ordered_map(decode, list(range(len(units))), self.threads))

    def max_bytes(self, units: Sequence[Unit]) -> int:
        """No message is longer: an entry takes at most 10 bytes, a unit's head less than 4 KiB."""
        return 10 * sum(unit.stop - unit.start for unit in units) + 4096 * (1 + len(units))


class Transfer:
    """One trainer's side of one round's transfer. ``require_same`` raises Diverged if trainers hold different tensors,
    which is why a message could not be read then. ``announce`` gets the digest of a message before it is sent."""

    def __init__(
        self,
        exchange: Exchange,
        coder: Coder,
        blocks: Sequence[FlatBlock],
        phase: Phase,
        require_same: Callable[[], None],
        announce: Callable[[str], None],
    ) -> None:
        self._exchange, self._coder, self._blocks = exchange, coder, blocks
        self._phase, self._require_same, self._announce = phase, require_same, announce

    def gather(self, own: Own) -> Transferred:
        """Every trainer gets every message. Raises NonFinite, CorruptMessage and Diverged on all of them alike."""
        exchange, units = self._exchange, whole(self._blocks)
        with self._phase("gate"):
            message = self._message(units, own)
            self._announce(digest_of(message))
        problem: CorruptMessage | None = None
        messages: list[bytes] = []
        others: list[list[Entries]] = [[] for _ in units]
        bad: str | None = None
        try:
            with self._phase("exchange"):
                messages = exchange.all_gather(message, max_bytes=self._coder.max_bytes(units))
            bad = _not_finite(messages)
            if bad is None:
                with self._phase("decode"):
                    others = self._coder.decode(units, [m for rank, m in enumerate(messages) if rank != exchange.rank])
        except CorruptMessage as error:
            problem = error
        self._all_read(problem)
        if bad is not None:
            raise NonFinite(bad)
        for found, mine in zip(others, own.entries, strict=True):
            found.insert(exchange.rank, mine)
        return Transferred(others, [digest_of(m) for m in messages], [len(m) for m in messages], None)

    def scatter(self, own: Own, counts: Counts | None, gate: SumsGate | None = None) -> Transferred | None:
        """Every trainer gets what falls in its share, and all get the sums, those that pass ``gate`` if there is one.
        Raises as `gather`.

        None, on all trainers alike, if a sum is too large for a message: then they gather.
        """
        exchange = self._exchange
        shares = cut_shares(self._blocks, exchange.size, counts)
        mine = shares[exchange.rank]
        with self._phase("gate"):
            parts = [self._message(units, own) for units in shares]
            digest = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()
            self._announce(digest)
        problem: CorruptMessage | None = None
        lengths = [0] * exchange.size
        sums: list[Entries] = []
        answer = b""  # nothing: what arrived could not be read
        with self._phase("exchange"):
            most = [self._coder.max_bytes(units) for units in shares]
            try:
                arrived, lengths = exchange.all_to_all(parts, max_bytes=most)
            except CorruptMessage as error:
                problem, arrived = error, []
        coder = replace(self._coder, wire=gate.wire if gate else Wire(torch.float32))
        try:
            if arrived:
                bad = _not_finite(arrived)
                if bad is None:
                    sums = self._sums(mine, arrived, own, gate)
                    with self._phase("gate"):
                        answer = self._answer(coder, mine, sums, digest)
                else:
                    answer = _NON_FINITE + bad.encode()
        except CorruptMessage as error:
            problem = error
        answers: list[bytes] = []
        found: list[list[Entries]] = [[] for _ in self._blocks]
        digests: list[str] = []
        try:
            with self._phase("exchange"):
                most_answer = max(coder.max_bytes(units) for units in shares) + SumsMessage.HEAD
                answers = exchange.all_gather(answer, max_bytes=most_answer)
            if problem is None and all(a.startswith(SumsMessage.MAGIC) for a in answers):
                with self._phase("decode"):
                    digests = self._read_answers(coder, shares, answers, sums, found)
        except CorruptMessage as error:
            problem = problem or error
        self._all_read(problem)
        if not all(_is_answer(a) for a in answers):
            raise CorruptMessage("a trainer's sums are of no known form")
        for a in answers:
            if a.startswith(_NON_FINITE):
                raise NonFinite(a.removeprefix(_NON_FINITE).decode(errors="replace"))
        if _TOO_LARGE in answers:
            return None
        longest = max(len(a) for a in answers) * exchange.size
        return Transferred(found, digests, lengths, longest)

    def _message(self, units: Sequence[Unit], own: Own) -> bytes:
        if own.bad is not None:
            return _NON_FINITE + own.bad.encode()
        return self._coder.encode(units, [unit.take(own.entries[unit.block.number]) for unit in units])

    def _sums(self, units: Sequence[Unit], arrived: list[bytes], own: Own, gate: SumsGate | None) -> list[Entries]:
        """The sums of this trainer's share that are not 0, by unit: of all trainers' entries, in rank order. With a
        ``gate`` those that pass it."""
        rank = self._exchange.rank
        with self._phase("decode"):
            decoded = self._coder.decode(units, [part for source, part in enumerate(arrived) if source != rank])

            def add(item: tuple[Unit, list[Entries]]) -> Entries:
                unit, entries = item
                entries.insert(rank, unit.take(own.entries[unit.block.number]))
                sums = sum_entries(entries, unit.stop - unit.start)
                return gate.pass_on(unit, sums) if gate else sums

            return list(ordered_map(add, list(zip(units, decoded, strict=True)), self._coder.threads))

    def _answer(self, coder: Coder, units: Sequence[Unit], sums: list[Entries], digest: str) -> bytes:
        if not all(is_finite(values).all() for _, values in sums):
            return _TOO_LARGE
        return SumsMessage(digest, coder.encode(units, sums)).to_bytes()

    def _read_answers(
        self,
        coder: Coder,
        shares: Sequence[Sequence[Unit]],
        answers: Sequence[bytes],
        own: list[Entries],
        found: list[list[Entries]],
    ) -> list[str]:
        """Puts all sums into ``found``, by block. Returns the digests that the trainers say they have sent."""
        digests = []
        for owner, (units, data) in enumerate(zip(shares, answers, strict=True)):
            message = SumsMessage.parse(data)
            digests.append(message.digest)
            if owner == self._exchange.rank:
                sums = own
            else:
                sums = [entries for (entries,) in coder.decode(units, [message.sums])]
            for unit, entries in zip(units, sums, strict=True):
                found[unit.block.number].append(unit.place(entries))
        return digests

    def _all_read(self, problem: CorruptMessage | None) -> None:
        """Raises CorruptMessage or Diverged on all trainers unless every one has read everything."""
        with self._phase("exchange"):
            read = self._exchange.all_gather_fixed(b"\0" if problem else b"\1")
        failed = [rank for rank, flag in enumerate(read) if flag != b"\1"]
        if failed:
            # Theta and momentum are part of the code: a trainer that holds others cannot decode it.
            self._require_same()
            cause = problem or "their own errors say why"
            raise CorruptMessage(f"trainers {failed} could not read a message: {cause}") from problem


def _is_answer(data: bytes) -> bool:
    return data.startswith((SumsMessage.MAGIC, _NON_FINITE)) or data == _TOO_LARGE


def _not_finite(messages: Sequence[bytes]) -> str | None:
    """Words for the first trainer whose pseudo-gradient is not finite."""
    for rank, message in enumerate(messages):
        if message.startswith(_NON_FINITE):
            name = message.removeprefix(_NON_FINITE).decode(errors="replace")
            return f"trainer {rank}: the pseudo-gradient of {name!r} is not finite"
    return None
