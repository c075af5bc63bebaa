"""The outer optimizer: theta and its momentum, the residual, and what the next inner steps start
from (docs/loco.md, sections 1 and 1.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from .._native import outer_step, sparse_outer_step, sum_entries
from .._util.threads import ordered_map
from ..errors import CorruptMessage, InputError, NonFinite
from ..state.cast import Rounding
from ..state.digest import StateDigest, state_digest
from .group import TrainerGroup
from .parameters import BLOCK_ELEMENTS, FlatBlock, Floats, Parameters, is_finite, parts
from .wire import Classes, Entries


class OuterState:
    """Theta and the outer momentum, FP32 in host memory, flat in the order of ``parameters``;
    Nesterov SGD on them.

    Raises InputError for an ``lr`` that is not above 0, and a ``momentum`` out of [0, 1)."""

    def __init__(self, parameters: Parameters, lr: float, momentum: float) -> None:
        if not (lr > 0 and 0 <= momentum < 1):
            raise InputError(f"outer_lr {lr} or outer_momentum {momentum} is out of range")
        self.parameters, self.lr, self.mu = parameters, lr, momentum
        self.threads: int | None = None
        if parameters.ranks:
            parameters.ranks.collect()
        self.theta = parameters.read()
        self.momentum = np.zeros(parameters.count, np.float32)

    def settings(self) -> dict[str, object]:
        """What all trainers must have in common."""
        return {"outer_lr": self.lr, "outer_momentum": self.mu}

    def each_block(self, work: Callable[[FlatBlock], Any]) -> list[Any]:
        """``work`` on every block in threads; results in order."""
        return list(ordered_map(work, self.parameters.blocks, self.threads))

    def digest(self, flat: Floats) -> StateDigest:
        return state_digest(self.parameters.state(flat), threads=self.threads)

    def digests(self) -> dict[str, StateDigest]:
        return {"theta": self.digest(self.theta), "momentum": self.digest(self.momentum)}

    def dense_step(self, total: Floats, trainers: int) -> None:
        """One step along ``total`` / ``trainers``."""

        def step(block: FlatBlock) -> None:
            arrays = block.of(self.theta), block.of(self.momentum), block.of(total)
            outer_step(*arrays, trainers, self.lr, self.mu)

        self.each_block(step)

    def sparse_step(
        self,
        entries: Sequence[Sequence[Entries]],
        trainers: int,
        residual: Residual,
        lookahead: np.float32,
        rounding: Rounding,
        classes: Classes,
        swept: Callable[[FlatBlock], bool],
    ) -> int:
        """One step along the sum of ``entries``, by block and then in the order of the addition, /
        ``trainers``. In the same pass over memory the model gets ``theta - lookahead *
        residual.next``, and parameters their ``classes`` of the next round. A block that is
        ``swept`` first moves by the whole of what its sums move theta by in the end. The number of
        parameters whose sum is not 0."""

        # One pass over memory for all that follows from the sums; a pass is what a round costs a
        # large model.
        def step(block: FlatBlock) -> int:
            summed, found = np.zeros(1, np.int64), entries[block.number]
            # A swept block moves by the whole of its mean at once, past the momentum (1.3); the
            # step that follows takes its sums as 0.
            if swept(block):
                places, sums = sum_entries(found, block.stop - block.start)
                block.of(self.theta)[places] -= residual.lookahead * (sums / np.float32(trainers))
                summed[0], found = len(places), ()
            theta, momentum, held_back = map(block.of, (self.theta, self.momentum, residual.next))
            known, octaves = classes.renewed(block, momentum)
            for part, segment in parts(block):
                # ``start`` is the model's own memory where it is FP32 on the host. All positions of
                # the part count as one granule, so that ``summed`` has one number.
                def fill(start: Floats, part: slice = part) -> None:
                    sparse_outer_step(
                        theta=theta[part],
                        momentum=momentum[part],
                        residual=held_back[part],
                        lookahead=float(lookahead),
                        start=start,
                        from_=part.start,
                        summands=found,
                        trainers=trainers,
                        lr=self.lr,
                        mu=self.mu,
                        offset=0,
                        granule=BLOCK_ELEMENTS,
                        counts=summed,
                        rounding=rounding,
                        octaves=octaves,
                        classes=known[part],
                    )

                self.parameters.give(segment, fill)
            return int(summed[0])

        return sum(self.each_block(step))


class MessageOutcome(Enum):
    """What became of the message that a trainer sent in a round whose end it did not see."""

    COUNTED = "counted"
    NOT_COUNTED = "not counted"
    UNKNOWN = "unknown"


class Residual:
    """What one trainer has not sent: error feedback. ``flat`` is that of the last round; a round
    fills ``next`` and leaves ``flat`` as it is until it takes effect.

    ``lookahead``: inner steps start from ``theta - lookahead * flat``; ``started_with`` is that of
    the steps under way.
    """

    def __init__(self, state: OuterState, lookahead: float, *, overlap: bool = False) -> None:
        self._state = state
        self.flat = np.zeros(state.parameters.count, np.float32)
        self.next = np.empty_like(state.theta)
        self.lookahead, self.started_with = np.float32(lookahead), np.float32(0)
        # The digest of the message that was sent in a round that has not taken effect here.
        self.pending_message: str | None = None
        # Whether ``flat`` is all that has not counted: with the message on its way, and steps that
        # no message had yet. With ``overlap`` it is, else where this trainer was left out of a
        # round.
        self.overlap = self.includes_sent = overlap
        # The entries, by block, of the message on its way, or of one that would be sent now; from
        # theta and ``flat``.
        self.find_sendable_entries: Callable[[], Sequence[Entries]] = tuple
        self._sendable_entries: Sequence[Entries] | None = None
        # Adds what a gate of sums held back here in the round under way.
        self.apply_withheld: Callable[[Floats], None] | None = None

    def write_start(self) -> None:
        """Gives the model what its next inner steps start from."""
        state = self._state

        def write(block: FlatBlock) -> None:
            for part, segment in parts(block):
                state.parameters.give(segment, partial(self._fill_start, block, part))

        if self.started_with:
            self._require_sendable_entries()
            state.each_block(write)
        else:
            state.parameters.write(state.theta)

    def _require_sendable_entries(self) -> None:
        if self.includes_sent and self._sendable_entries is None:
            self._sendable_entries = self.find_sendable_entries()

    def _fill_start(self, block: FlatBlock, part: slice, out: Floats) -> None:
        """Fills ``out`` with what the steps under way start from, with a lookahead. What is due
        counts once: it is as much as any round's steps, and soon moves theta."""
        np.multiply(self.started_with, block.of(self.flat)[part], out=out)
        np.subtract(block.of(self._state.theta)[part], out, out=out)
        if self._sendable_entries is not None:
            places, values = self._sendable_entries[block.number]
            of = slice(*np.searchsorted(places, (part.start, part.stop)))
            out[places[of] - np.uint32(part.start)] += (self.started_with - np.float32(1)) * values[
                of
            ]

    def complete_next(self) -> None:
        """What was held back of sums is part of what the next steps start from."""
        if self.apply_withheld is not None:
            self.apply_withheld(self.next)

    def take_next(self) -> None:
        """The round has taken effect, or its message has counted."""
        # The old residual's memory takes the next one: two arrays, and no copy.
        self.complete_next()
        self.flat, self.next = self.next, self.flat
        self.forget_message()

    def discard(self) -> None:
        """Gives up what was not sent, steps that are part of it among them."""
        self.flat.fill(0)
        self.forget_message()

    def forget_message(self) -> None:
        self.pending_message = self.apply_withheld = self._sendable_entries = None
        self.includes_sent = self.overlap

    def settle(self, outcome: MessageOutcome, sent: Sequence[Entries], *, steps: bool) -> None:
        """The end of a round where ``flat`` includes what was sent. The message that was on its way
        had the entries ``sent``, by block: what has counted, or may have, leaves ``flat``, and the
        inner ``steps`` since, if there are any, enter it. Raises NonFinite, with nothing
        changed."""
        if steps:
            self._require_sendable_entries()
            self._state.each_block(self._require_finite_steps)

        def work(block: FlatBlock) -> None:
            flat = block.of(self.flat)
            learnt = self._steps(block) if steps else np.zeros_like(flat)
            if outcome == MessageOutcome.UNKNOWN:
                flat.fill(0)
            elif outcome == MessageOutcome.COUNTED:
                places, values = sent[block.number]
                flat[places] -= values
            flat += learnt

        self._state.each_block(work)
        self.forget_message()

    def catch_up(self, outcome: MessageOutcome) -> None:
        """After a round whose end this trainer did not see (docs/loco.md, section 5): what it has
        not sent stays, what counted, or may have counted, does not. Theta is still that of the last
        round it has seen."""
        match outcome:
            case MessageOutcome.COUNTED:
                self.take_next()
            case MessageOutcome.UNKNOWN:
                self.flat.fill(0)
            case MessageOutcome.NOT_COUNTED:
                for block in self._state.parameters.blocks:
                    s = self._accumulated(block)
                    np.copyto(block.of(self.flat), s, where=is_finite(s))
        self.forget_message()

    def _accumulated(self, block: FlatBlock) -> Floats:
        """What this trainer has to send of the block in all: its local steps and its residual."""
        s = self._steps(block)
        s += block.of(self.flat)
        return s

    def _require_finite_steps(self, block: FlatBlock) -> None:
        parameters, now = self._state.parameters, block.of(self.next)
        parameters.read_block(block, now)
        if not (finite := is_finite(now)).all():
            name = parameters.name_at(block.start + int(np.argmin(finite)))
            raise NonFinite(f"the pseudo-gradient of {name!r} is not finite")

    def _steps(self, block: FlatBlock) -> Floats:
        """The block's local steps: what they started from, less what the model holds."""
        parameters, start = self._state.parameters, block.of(self._state.theta)
        s = np.empty_like(start)
        if self.started_with:
            start = np.empty_like(start)
            self._fill_start(block, slice(0, len(start)), start)
        start = parameters.as_written(block, start)
        parameters.read_block(block, s)
        return np.subtract(start, s, out=s)


def averaged(group: TrainerGroup, state: OuterState, residual: Residual) -> Floats:
    """``theta - lookahead * (sum of all residuals in rank order / trainers)``, FP32, each operation
    rounded. All trainers call it; each sums a part of every block. Raises TrainerLost, and
    CorruptMessage on all alike."""
    mean = np.empty_like(state.theta)
    problem: CorruptMessage | None = None
    for (
        block
    ) in state.parameters.blocks:  # to the last one, whatever arrives: the others go on as well
        try:
            mean[block.start : block.stop] = _mean(group, block.of(residual.flat))
        except CorruptMessage as error:
            problem = error
    failed = group.failures(problem)
    if problem is not None:
        raise problem
    if failed:
        raise CorruptMessage(
            f"trainer {failed[0]} could not read what it was sent for the averaged state"
        )
    np.multiply(residual.lookahead, mean, out=mean)
    return np.subtract(state.theta, mean, out=mean)


def _mean(group: TrainerGroup, residual: Floats) -> Floats:
    """Both collectives are made in any case."""
    size = group.size
    bounds = [len(residual) * rank // size for rank in range(size + 1)]
    lengths = [residual.itemsize * (stop - start) for start, stop in pairwise(bounds)]
    shares = [residual[start:stop].tobytes() for start, stop in pairwise(bounds)]
    problem: CorruptMessage | None = None
    own = b""
    try:
        arrived = group.all_to_all(shares, max_bytes=lengths)
        own = _mean_of(arrived, lengths[group.rank], size).tobytes()
    except CorruptMessage as error:
        problem = error
    means = group.all_gather(own, max_bytes=max(lengths))
    if problem is not None:
        raise problem
    for rank, share in enumerate(means):
        if len(share) != lengths[rank]:
            raise CorruptMessage(
                f"trainer {rank} could not add its share of the residuals: it sent {len(share)} "
                "bytes"
            )
    return np.frombuffer(b"".join(means), np.float32)


def _mean_of(messages: Sequence[bytes], nbytes: int, trainers: int) -> Floats:
    total = np.zeros(nbytes // 4, np.float32)
    for rank, message in enumerate(messages):
        if len(message) != nbytes:
            raise CorruptMessage(
                f"trainer {rank} sent {len(message)} bytes of its residual, not {nbytes}"
            )
        total += np.frombuffer(message, np.float32)
    return np.divide(total, np.float32(trainers), out=total)
