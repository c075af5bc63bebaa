"""PULSELoCo and DiLoCo: the parts of a loop, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from .._util.settings import checked_number
from ..errors import InputError, NonFinite
from ..store import Store
from .exchange import (
    Exchange,
    GatedReduction,
    PendingRound,
    Phase,
    StoreExchange,
    exchange_of,
    rank_seconds_of,
    store_exchange_of,
    travel_of,
)
from .gate import Gate
from .group import TrainerGroup
from .loop import OuterLoop
from .outer import OuterState, Residual
from .parameters import Parameters, parts
from .rendezvous import GroupRounds, Round
from .store_rounds import StoreRounds
from .trainer import MAX_LOOKAHEAD


class PulseLoCo(OuterLoop):
    """Keeps trainers in sync by sending only what would change the next forward pass (PULSE,
    Algorithm 2; docs/loco.md).

    ``model``: a module, or a mapping of names to the FP32 or BF16 tensors that ``inner_optimizer``
    trains: one, or a list in the order of their ``step()`` calls, where that of the last one ends
    an inner step. Parameters that none of them trains, and buffers, must be equal on all
    trainers and must not change (docs/loco.md, 4.1).

    After ``sync_every`` inner steps: ``s = (start - w) + residual``; the entries with ``cast(theta)
    != cast(theta - s)`` in ``gate_dtype`` are sent and leave the residual; theta takes
    one Nesterov step (``outer_lr``, ``outer_momentum``) along the mean over all trainers, summed in
    rank order; the model gets the next start.

    ``lookahead``: the inner steps start from ``theta - lookahead * residual``, so that what was
    held back is not learnt again in each round. "auto", the default, is ``outer_lr / (1 -
    outer_momentum)``, what an entry that is sent moves theta by in the end, 1024 at most; 0 is the
    paper's, and gates no sums (docs/loco.md, 4.4). What trainers share, evaluate and publish is
    theta, the global weights: the model holds them while ``on_round`` is called, within
    `global_weights`, and after the loop was left at a round's end; `global_state` has them always.

    ``group``: the trainers, a process group (default: all of torch.distributed; without it, this
    trainer alone), or an `Exchange` that holds one, with the settings of how messages travel.
    ``over``: instead of a group, a store or its address in which the trainers meet, or a
    `StoreExchange` that holds one: who is late in a round is left out of it, and loses nothing; no
    trainer must reach another. ``overlap``: over a store, 1 exchanges a round behind the inner
    steps of the next one: it ends with them, or when the loop is left (docs/loco.md, 7.1). Over a
    store a ``model`` of DTensors (FSDP2), or in DDP, is one trainer: all its ranks make and enter
    this, and the first one has the outer state (docs/loco.md, 7.4). ``on_round`` gets a `Round`
    after each round; only then do all trainers hold the model's state, and only then should it be
    published.

    Memory on the host: 17 bytes per parameter. Raises InputError for settings out of range and for
    parameters that cannot be trained, and UnsupportedTensor, with the name, for those that cannot
    be kept equal; from inside ``step()`` of the last inner optimizer TrainerLost (see `rejoin`),
    NonFinite (see `rewind`), Diverged, CorruptMessage, InputError, and RankLost where another rank
    of this trainer died.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        lookahead: float | Literal["auto"] = "auto",
        gate_dtype: torch.dtype = torch.bfloat16,
        group: dist.ProcessGroup | Exchange | None = None,
        over: Store | str | StoreExchange | None = None,
        overlap: int = 0,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        if group is not None and over is not None:
            raise InputError(
                "trainers meet in a group or over a store", hint="Give group or over, not both."
            )
        stored = None if over is None else store_exchange_of(over)
        exchange = travel_of(stored) if stored else exchange_of(group)
        parameters = Parameters(model, inner_optimizer, rank_seconds_of(stored) if stored else None)
        state = OuterState(parameters, outer_lr, outer_momentum)
        if lookahead == "auto":
            lookahead = min(outer_lr / (1 - outer_momentum), MAX_LOOKAHEAD)
        if overlap not in (0, 1) or (overlap and not stored):
            raise InputError(
                f"overlap is {overlap!r}", hint="Use 0, or, where trainers meet over a store, 1."
            )
        if exchange.sweep and not lookahead:
            raise InputError(
                "a sweep without a lookahead overshoots",
                hint='Leave lookahead at "auto", or sweep out.',
            )
        ahead = checked_number("lookahead", lookahead, maximum=MAX_LOOKAHEAD)
        residual = Residual(state, ahead, overlap=bool(overlap))
        reduction = GatedReduction(state, residual, Gate(gate_dtype, exchange.sweep), exchange)
        meet = (
            partial(StoreRounds, stored, reduction)
            if stored
            else partial(GroupRounds, exchange, reduction)
        )
        super().__init__(state, reduction, meet, sync_every=sync_every, on_round=on_round)
        self.reduction: GatedReduction = reduction
        self.lookahead = residual.lookahead


class DenseReduction:
    """DiLoCo's: an all-reduce of all FP32 pseudo-gradients, without a residual."""

    def __init__(self, state: OuterState) -> None:
        self._state = state
        self.residual = None

    def settings(self) -> dict[str, object]:
        return {}

    def forget(self) -> None:
        pass

    def run(self, group: TrainerGroup, number: int, phase: Phase) -> PendingRound:
        state, parameters = self._state, self._state.parameters
        total = np.empty_like(state.theta)
        with phase("gate"):
            for block in parameters.blocks:
                out, start = block.of(total), parameters.as_written(block, block.of(state.theta))
                for part, segment in parts(block):
                    np.subtract(start[part], parameters.now(segment), out=out[part])
        with phase("exchange"):
            group.all_reduce(total)
        # The sum is the same on all trainers, so all of them raise this, and before theta changes.
        if name := parameters.first_non_finite(total):
            raise NonFinite(f"the sum of the pseudo-gradients of {name!r} is not finite")

        def apply(_: np.float32) -> int:
            state.dense_step(total, group.size)
            parameters.write(state.theta)
            return parameters.count

        return PendingRound(parameters.count, total.nbytes, apply, [])


class DiLoCo(OuterLoop):
    """Dense FP32 pseudo-gradients, summed by an all-reduce (DiLoCo, arXiv 2311.08105).

    ``model``, ``inner_optimizer``, ``sync_every``, ``outer_lr``, ``outer_momentum`` and
    ``on_round`` are those of `PulseLoCo`; of an `Exchange` only ``group`` and ``timeout_seconds``
    count. The model holds theta between rounds."""

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        group: dist.ProcessGroup | Exchange | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        state = OuterState(Parameters(model, inner_optimizer), outer_lr, outer_momentum)
        reduction = DenseReduction(state)
        meet = partial(GroupRounds, exchange_of(group), reduction)
        super().__init__(state, reduction, meet, sync_every=sync_every, on_round=on_round)
