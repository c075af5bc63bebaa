"""The two ways of a round's entries: to all, or to the owners of shares and back as sums (docs/loco.md, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

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
from .sites import Sites
from .sums import SumsGate
from .wire import Entries, Message, SumsMessage, Wire, digest_of

_NON_FINITE = b"PLSN"
_TOO_LARGE = b"PLSH"
Phase = Callable[[str], AbstractContextManager[None]]

Sums = list[Entries] | bytes
"""The sums of a share that are not 0, by unit; or what is said in place of them (`_is_word`)."""


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


class _Near(NamedTuple):
    """What a trainer has after its site's parts: ``sums`` over the site by the owner of the share, the ``digest`` of
    the parts that it has sent itself, the ``lengths`` of all trainers' parts together, and the ``problem`` with those
    that it could not read."""

    sums: dict[int, Sums]
    digest: str
    lengths: list[int]
    problem: CorruptMessage | None


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

    def scatter(
        self, own: Own, counts: Counts | None, sites: Sites, gate: SumsGate | None = None
    ) -> Transferred | None:
        """Every trainer gets what falls in its share, and all get the sums, those that pass ``gate`` if there is one.
        Among several ``sites`` each first sums its own entries. Raises as `gather`.

        None, on all trainers alike, if a sum is too large for a message: then they gather.
        """
        exchange, rank = self._exchange, self._exchange.rank
        shares = cut_shares(self._blocks, exchange.size, counts)
        mine = shares[rank]
        coder = replace(self._coder, wire=gate.wire if gate else Wire(torch.float32))
        near, digest, lengths, problem = self._sum_parts(own, shares, sites)
        sums = near[rank]
        if sites.several:
            try:
                sums = self._sum_sites(coder, shares, sites, near, gate)
            except CorruptMessage as error:
                sums, problem = b"", problem or error
        with self._phase("gate"):
            sums = self._pass_on(gate, mine, sums, exchange.size)
            answer = self._answer(coder, mine, sums, digest)
        answers: list[bytes] = []
        found: list[list[Entries]] = [[] for _ in self._blocks]
        digests: list[str] = []
        try:
            with self._phase("exchange"):
                most_answer = max(coder.max_bytes(units) for units in shares) + SumsMessage.HEAD
                answers = exchange.all_gather(answer, max_bytes=most_answer)
            if not isinstance(sums, bytes) and all(a.startswith(SumsMessage.MAGIC) for a in answers):
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

    def _sum_parts(self, own: Own, shares: Sequence[list[Unit]], sites: Sites) -> _Near:
        """Sends this trainer's entries to those who sum them for its site, and sums what it gets."""
        exchange, rank = self._exchange, self._exchange.rank
        everyone, beside = range(exchange.size), sites.beside(rank)
        units = [[unit for owner in sites.forwards(to) for unit in shares[owner]] for to in everyone]
        with self._phase("gate"):
            parts = [self._message(units[to], own) if to in beside else b"" for to in everyone]
            digest = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()
            self._announce(digest)
        most = [self._coder.max_bytes(of) for of in units]
        limits = [[most[to] if to in sites.beside(source) else 0 for to in everyone] for source in everyone]
        lengths = [0] * exchange.size
        sums: dict[int, Sums] = dict.fromkeys(sites.forwards(rank), b"")  # nothing: what arrived could not be read
        try:
            with self._phase("exchange"):
                arrived, lengths = exchange.all_to_all(parts, max_bytes=limits)
            bad = _not_finite(arrived)
            if bad is not None:
                return _Near(dict.fromkeys(sums, _NON_FINITE + bad.encode()), digest, lengths, None)
            with self._phase("decode"):
                ours = [unit.take(own.entries[unit.block.number]) for unit in units[rank]]
                others = [arrived[source] for source in beside if source != rank]
                found = iter(self._add(self._coder, units[rank], others, ours, beside.index(rank)))
        except CorruptMessage as error:
            return _Near(sums, digest, lengths, error)
        return _Near({owner: list(islice(found, len(shares[owner]))) for owner in sums}, digest, lengths, None)

    def _sum_sites(
        self, coder: Coder, shares: Sequence[list[Unit]], sites: Sites, near: dict[int, Sums], gate: SumsGate | None
    ) -> Sums:
        """Sends the ``near`` sums of shares of other sites to their owners, those that pass ``gate`` if there is one.
        Returns the sums of this trainer's share over all sites. Raises CorruptMessage."""
        exchange, rank = self._exchange, self._exchange.rank
        site, everyone = sites.number_of(rank), range(exchange.size)
        messages = [b""] * exchange.size
        with self._phase("gate"):
            for owner, sums in near.items():
                if owner != rank:
                    passed = self._pass_on(gate, shares[owner], sums, len(sites.beside(rank)))
                    messages[owner] = passed if isinstance(passed, bytes) else coder.encode(shares[owner], passed)
        most = [coder.max_bytes(units) for units in shares]
        froms = [sites.forwarders(owner) for owner in everyone]
        limits = [[most[owner] if source in froms[owner] else 0 for owner in everyone] for source in everyone]
        with self._phase("exchange"):
            arrived, _ = exchange.all_to_all(messages, max_bytes=limits)
        ours, others = near[rank], [arrived[source] for source in froms[rank]]
        words = [said for said in (ours, *others) if isinstance(said, bytes) and _is_word(said)]
        if isinstance(ours, bytes) or words:
            return words[0]
        with self._phase("decode"):
            return self._add(coder, shares[rank], others, ours, site)

    def _message(self, units: Sequence[Unit], own: Own) -> bytes:
        if own.bad is not None:
            return _NON_FINITE + own.bad.encode()
        return self._coder.encode(units, [unit.take(own.entries[unit.block.number]) for unit in units])

    def _add(
        self, coder: Coder, units: Sequence[Unit], messages: Sequence[bytes], own: Sequence[Entries], place: int
    ) -> list[Entries]:
        """By unit, the sums that are not 0 of the entries of ``messages``, in order, with this trainer's ``own`` at
        their ``place`` among them. Raises CorruptMessage."""

        def add(item: tuple[Unit, list[Entries], Entries]) -> Entries:
            unit, entries, ours = item
            entries.insert(place, ours)
            return sum_entries(entries, unit.stop - unit.start)

        decoded = coder.decode(units, messages)
        return list(ordered_map(add, list(zip(units, decoded, own, strict=True)), coder.threads))

    def _pass_on(self, gate: SumsGate | None, units: Sequence[Unit], sums: Sums, trainers: int) -> Sums:
        """What is sent of ``sums`` over so many ``trainers``: those that pass ``gate``, if there is one."""
        if isinstance(sums, bytes):
            return sums

        def pass_on(item: tuple[Unit, Entries]) -> Entries:
            return gate.pass_on(*item, trainers) if gate else item[1]

        sent = list(ordered_map(pass_on, list(zip(units, sums, strict=True)), self._coder.threads))
        return sent if all(is_finite(values).all() for _, values in sent) else _TOO_LARGE

    def _answer(self, coder: Coder, units: Sequence[Unit], sums: Sums, digest: str) -> bytes:
        return sums if isinstance(sums, bytes) else SumsMessage(digest, coder.encode(units, sums)).to_bytes()

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


def _is_word(data: bytes) -> bool:
    """Whether something is said in place of sums."""
    return data in (b"", _TOO_LARGE) or data.startswith(_NON_FINITE)


def _is_answer(data: bytes) -> bool:
    return data.startswith(SumsMessage.MAGIC) or (data != b"" and _is_word(data))


def _not_finite(messages: Sequence[bytes]) -> str | None:
    """Words for the first trainer whose pseudo-gradient is not finite."""
    for rank, message in enumerate(messages):
        if message.startswith(_NON_FINITE):
            name = message.removeprefix(_NON_FINITE).decode(errors="replace")
            return f"trainer {rank}: the pseudo-gradient of {name!r} is not finite"
    return None
