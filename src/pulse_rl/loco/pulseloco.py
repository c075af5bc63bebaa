"""PULSELoCo: only entries that pass the gate are sent, the rest is carried to the next round (PULSE, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from .._native import sparse_outer_step
from .._util.settings import checked_number
from ..errors import CorruptMessage, Diverged, InputError, NonFinite, StateMismatch
from .classes import Classes
from .exchange import Exchange
from .feedback import ErrorFeedbackLoop
from .gate import Floats, Positions, is_finite, open_entries, rounding_of, scaled_open_entries
from .membership import Handshake
from .parameters import FlatBlock, parts
from .rounds import Received, Round
from .shares import GRANULE, Counts, Known, counts_digest, estimated_sums, granules, granules_of, scatters
from .sites import Sites
from .sums import SumsGate
from .transfer import Coder, Own, Transfer, Transferred
from .wire import FORMAT, Entries, Wire

_MOST_SCALE = 1024.0
_GATE_SUMS_FROM = 8


class PulseLoCo(ErrorFeedbackLoop):
    """Keeps trainers in sync by sending only what would change the next forward pass (docs/loco.md).

    After ``sync_every`` inner steps: ``s = (theta - w) + residual``; the entries with
    ``cast(theta) != cast(theta - s)`` in ``gate_dtype`` are sent and leave the residual; theta takes one Nesterov step
    along the mean over all trainers, summed in rank order; the model gets the next start. With
    ``wire_dtype=torch.bfloat16`` values are rounded, and what they lose stays in the residual.

    ``lookahead``: the inner steps start from ``theta - lookahead * residual``, so that what was held back is not learnt
    again in each round. "auto", the default, is ``outer_lr / (1 - outer_momentum)``, what an entry that is sent moves
    theta by in the end, 1024 at most; 0 is the paper's. What trainers share, evaluate and publish is theta: the model
    holds it while ``on_round`` is called, within `at_theta`, and after the loop was left at a round's end; `theta` has
    it always.
    ``gate_scale``: the gate asks ``cast(theta) != cast(theta - gate_scale * s)``; 1 is the paper's, less sends less.
    ``gate_sums``: all rounds are scattered, and whoever sums a share of the parameters sends back only those sums whose
    mean passes the gate, in ``wire_dtype``, and carries the rest in its own residual: what leaves a process does not
    grow with the trainers. "auto", the default, is from 8 trainers on, or among several sites, if there is a lookahead;
    False is the paper's.
    ``site``: the name of this trainer's site, a node or a region whose trainers have fast links among them. Its members
    then sum their entries before these go to the owners of shares elsewhere: over the slow links a site costs about as
    much as one trainer (docs/loco.md, 4.5). All trainers have one, or none has; ranks of one site should follow each
    other.

    The other arguments are those of `OuterLoop`. Memory on the host: 17 bytes per parameter. Raises, from inside
    ``step()`` of the last inner optimizer: TrainerLost and TrainerLeft (see `rejoin`), NonFinite (see `rewind`),
    Diverged, CorruptMessage, InputError.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        gate_dtype: torch.dtype = torch.bfloat16,
        wire_dtype: torch.dtype = torch.float32,
        lookahead: float | Literal["auto"] = "auto",
        gate_scale: float = 1.0,
        gate_sums: bool | Literal["auto"] = "auto",
        site: str | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
        threads: int | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        self.gate_dtype = gate_dtype
        self._rounding = rounding_of(gate_dtype)
        self._wire = Wire(wire_dtype)
        if lookahead == "auto":
            in_range = outer_lr > 0 and 0 <= outer_momentum < 1  # or else refused below
            lookahead = min(outer_lr / (1 - outer_momentum), _MOST_SCALE) if in_range else 0.0
        self.lookahead = np.float32(checked_number("lookahead", lookahead, most=_MOST_SCALE))
        self.gate_scale = np.float32(checked_number("gate_scale", gate_scale, least=1 / _MOST_SCALE, most=_MOST_SCALE))
        if not isinstance(gate_sums, bool) and gate_sums != "auto":
            raise InputError(f"gate_sums is {gate_sums!r}", hint='Use True, False or "auto".')
        self.gate_sums = gate_sums
        if site is not None and not (isinstance(site, str) and site):
            raise InputError(f"site is {site!r}", hint="Give the name of this trainer's site, or None on all trainers.")
        self.site = site
        super().__init__(
            model,
            inner_optimizer,
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            group=group,
            timeout_seconds=timeout_seconds,
            threads=threads,
            on_round=on_round,
        )
        # What this trainer keeps of the sums of the round under way, if they pass a gate.
        self._sums_gate: SumsGate | None = None
        # What all trainers of the group know of its last round, and by what they cut shares.
        self._known: Known | None = None
        self._counts: Counts | None = None
        self._classes = Classes(self.parameters.blocks)
        # The lookahead with which the inner steps under way have started.
        self._started_with = np.float32(0)
        self._at_theta = False

    @contextmanager
    def at_theta(self) -> Iterator[None]:
        """Within, the model holds theta, to be evaluated or published. Between rounds only: raises InputError after the
        first inner step of one. An inner step that is taken within starts from theta."""

        def give(lookahead: np.float32) -> None:
            if self.inner_step == 0 and self._started_with != lookahead:
                self._start_steps(lookahead)

        if self.inner_step:
            raise InputError(
                f"{self.inner_step} inner steps of the round are taken: the model is on its way",
                hint="loco.theta() has theta at any time; on_round is called while the model holds it.",
            )
        if not self.lookahead or self._at_theta:
            yield
            return
        try:
            self._at_theta = True
            self._serial.run(lambda: give(np.float32(0)), whole=True)
            yield
        finally:
            self._at_theta = False
            self._serial.run(lambda: give(self._ahead_now()), whole=True)

    def consensus(self) -> dict[str, torch.Tensor]:
        """Theta less what all trainers hold back: the mean of what their next inner steps start from, by name, FP32 on
        the host, the same bits on all trainers (docs/loco.md, 1.2). What to keep at the end of a training, when there
        is no round left for what is late; it changes nothing here.

        All trainers call it, within the ``with``, between rounds (else InputError); a call on some only ends their
        processes, as any collective does that others do not take part in. It costs a dense all-reduce, or nothing
        without a lookahead, where it is theta. Raises TrainerLost, CorruptMessage and Diverged as a round does.
        """
        return self._consensus(self.lookahead)

    # -- a round

    def _join(self) -> None:
        super()._join()
        inside = np.float32(0) if self._at_theta else self.lookahead
        if self.inner_step == 0 and self._started_with != inside:
            self._serial.run(lambda: self._start_steps(inside), whole=True)

    def _met(self, handshakes: list[Handshake]) -> None:
        self._known = None  # others may come from other rounds
        self._classes.forget()
        if len({handshake.shares for handshake in handshakes}) > 1:
            self._counts = None

    def _handshake(self) -> Handshake:
        return replace(super()._handshake(), shares=counts_digest(self._counts), site=self.site or "")

    def _unhook(self) -> None:
        super()._unhook()
        if self.inner_step == 0 and self._started_with:
            self._serial.run(self._start_steps, whole=True)

    def _outer_round(self, exchange: Exchange) -> Received:
        self._forget_message()
        with self._phase("gate"):
            own = self._gate()
        coder = Coder(
            self.round, self.theta_flat, self.momentum_flat, self._rounding, self._wire, self._classes, self.threads
        )

        def announce(digest: str) -> None:
            self._pending_message = None if own.bad else digest

        transfer = Transfer(
            exchange, coder, self.parameters.blocks, self._phase, lambda: self._require_same_tensors(exchange), announce
        )
        arrived: Transferred | None = None
        sites = self._sites(exchange)
        try:
            if self._gates_sums(sites):
                self._sums_gate = SumsGate(self.theta_flat, self._rounding, self.gate_scale, self._wire)
            if self._sums_gate or sites.several or scatters(exchange.size, self._known):
                arrived = transfer.scatter(own, self._counts, sites, self._sums_gate)
            if arrived is None:
                self._sums_gate = None
                arrived = transfer.gather(own)
        except (NonFinite, CorruptMessage, Diverged):  # on all trainers alike: nobody has counted it
            self._forget_message()
            raise
        return self._received(exchange, own, arrived)

    def _received(self, exchange: Exchange, own: Own, arrived: Transferred) -> Received:
        def apply() -> int:
            if self._sums_gate is not None:
                self._sums_gate.add_withheld(self._next_residual)  # it is part of what the next steps start from
            ahead = np.float32(0) if self.on_round else self._ahead_now()  # who is told of the round is shown theta
            update = partial(self._update_sparsely, arrived=arrived, trainers=exchange.size, lookahead=float(ahead))
            self._counts = np.zeros(granules(self.parameters.count), np.int64)
            for first, found in self._each_block(update):
                self._counts[first : first + len(found)] += found
            self._started_with = ahead
            self._take_next_residual()
            self._messages = arrived.messages
            summed = int(self._counts.sum())
            self._known = self._learnt(arrived, summed)
            return summed

        entries = sum(len(positions) for positions, _ in own.entries)
        return Received(entries, arrived.lengths[exchange.rank], apply, arrived.sums is not None)

    def _update_sparsely(
        self, block: FlatBlock, *, arrived: Transferred, trainers: int, lookahead: float
    ) -> tuple[int, Counts]:
        """The outer step of one block, and what the model's next steps start from. (First granule, what it and those
        behind it have of the sum's entries.)"""
        first, before, touched = granules_of(block)
        counts = np.zeros(touched, np.int64)
        theta, momentum, residual = map(block.of, (self.theta_flat, self.momentum_flat, self._next_residual))
        classes, octaves = self._classes.renewed(block, momentum)
        for part, segment in parts(block):

            def step(start: Floats, part: slice = part) -> None:
                arrays = theta[part], momentum[part], residual[part]
                outer = trainers, self.outer_lr, self.outer_momentum
                entries, place = arrived.entries[block.number], before + part.start
                sparse_outer_step(
                    *(*arrays, lookahead, start, part.start, entries, *outer, place, GRANULE, counts),
                    *(self._rounding, octaves, classes[part]),
                )

            self.parameters.give(segment, step)
        return first, counts

    def _learnt(self, arrived: Transferred, summed: int) -> Known:
        sums = arrived.sums
        if sums is None:
            entries = sum(len(positions) for by_rank in arrived.entries for positions, _ in by_rank)
            sums = estimated_sums(sum(arrived.lengths), entries, summed, bf16=self._wire.bf16)
        return Known(arrived.sums is not None, max(arrived.lengths), sums)

    def _gate(self) -> Own:
        """What this trainer has to send; fills the next residual."""
        try:
            return Own(self._each_block(self._gate_block))
        except NonFinite as error:
            return Own([], str(error))

    def _gate_block(self, block: FlatBlock) -> Entries:
        """The block's entries. Raises NonFinite with the parameter's name alone."""
        theta, s = block.of(self.theta_flat), block.of(self._next_residual)
        positions = self._select(block, block.of(self.residual_flat), s)
        if positions is None:
            raise NonFinite(self.parameters.name_at(block.start + int(np.argmin(is_finite(s)))))
        selected = s[positions]
        sent = self._wire.round(self._values(theta[positions], selected))
        finite = is_finite(sent)
        if not finite.all():
            raise NonFinite(self.parameters.name_at(block.start + int(positions[np.argmin(finite)])))
        s[positions] = self._remainder(selected, sent)
        return positions, sent

    # -- where the inner steps start

    def _ahead_now(self) -> np.float32:
        """With what the next inner steps shall start: outside the loop the model holds theta."""
        return self.lookahead if self._hooks and not self._at_theta else np.float32(0)

    def _start_steps(self, lookahead: np.float32 | None = None) -> None:
        self._started_with = self._ahead_now() if lookahead is None else lookahead
        if not self._started_with:
            self.parameters.write(self.theta_flat)
            return

        def write(block: FlatBlock) -> None:
            theta, residual = block.of(self.theta_flat), block.of(self.residual_flat)
            for part, segment in parts(block):

                def start(out: Floats, part: slice = part) -> None:
                    np.multiply(self._started_with, residual[part], out=out)
                    np.subtract(theta[part], out, out=out)

                self.parameters.give(segment, start)

        self._each_block(write)

    def _tell(self, on_round: Callable[[Round], None], done: Round) -> None:
        with self.at_theta():
            on_round(done)

    def _gates_sums(self, sites: Sites) -> bool:
        if self.gate_sums == "auto":
            return bool(self.lookahead) and (sites.several or sites.trainers >= _GATE_SUMS_FROM)
        return self.gate_sums and sites.trainers > 1

    def _forget_message(self) -> None:
        super()._forget_message()
        self._sums_gate = None

    def _take_next_residual(self) -> None:
        if self._sums_gate is not None:
            self._sums_gate.add_withheld(self._next_residual)
        super()._take_next_residual()

    # -- what a variant may change

    def _sites(self, exchange: Exchange) -> Sites:
        return Sites.of(exchange.sites)

    def _select(self, block: FlatBlock, residual: Floats, s: Floats) -> Positions | None:
        """Fills ``s`` and returns the positions of the entries to send; None if an entry of ``s`` is not finite."""
        theta, found = block.of(self.theta_flat), list[Positions]()
        for part, segment in parts(block):
            positions = open_entries(
                theta[part],
                self.parameters.now(segment),
                residual[part],
                s[part],
                self._rounding,
                lookahead=float(self._started_with),
                bf16_start=self.parameters.is_bf16(segment),
                base=part.start,
            )
            if positions is None:
                return None
            found.append(positions)
        if self.gate_scale == 1:
            return np.concatenate(found)
        return scaled_open_entries(theta, s, self.gate_scale, self._rounding)

    def _values(self, theta: Floats, s: Floats) -> Floats:
        """The values to send for the selected entries ``s``, before they are rounded to the wire dtype."""
        return s

    def _remainder(self, s: Floats, sent: Floats) -> Floats:
        """What stays in the residual of the selected entries ``s``."""
        return s - sent

    # -- state

    def _accumulated(self, block: FlatBlock) -> Floats:
        s = np.empty(block.stop - block.start, np.float32)
        theta, residual = block.of(self.theta_flat), block.of(self.residual_flat)
        start = self.parameters.as_written(
            block, theta - self._started_with * residual if self._started_with else theta
        )
        self.parameters.read_block(block, s)
        np.subtract(start, s, out=s)
        s += residual
        return s

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ahead = state.get("started_with", 0.0)
        if not isinstance(ahead, float) or not 0 <= ahead <= _MOST_SCALE:
            raise StateMismatch(f"the saved state's steps started with lookahead {ahead!r}")
        counts, expected = state.get("sums"), (granules(self.parameters.count),)
        if counts is not None:
            if not (
                isinstance(counts, torch.Tensor)
                and (counts.dtype, counts.shape) == (torch.int64, expected)
                and not ((counts < 0) | (counts > GRANULE)).any()
            ):
                raise StateMismatch(f"the saved state's counts of sums are not {expected[0]} integers up to {GRANULE}")
            state = {**state, "sums": counts.to("cpu", copy=True)}
        super().load_state_dict(state)

    def _loaded(self, state: Mapping[str, Any]) -> None:
        super()._loaded(state)
        self._classes.forget()
        self._started_with = np.float32(state.get("started_with", 0.0))
        counts = state.get("sums")
        self._counts = None if counts is None else counts.numpy()

    def _settings(self) -> dict[str, object]:
        dtypes = {"gate_dtype": str(self.gate_dtype), "wire_dtype": str(self._wire.dtype)}
        scales = {"lookahead": float(self.lookahead), "gate_scale": float(self.gate_scale)}
        return {**super()._settings(), **dtypes, **scales, "gate_sums": self.gate_sums, "message_format": FORMAT}

    def _state_dict(self) -> dict[str, Any]:
        ahead = {"started_with": float(self._started_with)} if self._started_with else {}
        sums = {} if self._counts is None else {"sums": torch.from_numpy(self._counts.copy())}
        return {**super()._state_dict(), **ahead, **sums}
