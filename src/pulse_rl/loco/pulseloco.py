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

    A round follows ``sync_every`` inner steps from ``start`` to ``w``. With ``s = (start - w) +
    residual``, the entries with ``cast(theta) != cast(theta - s)`` are sent and leave the residual,
    where theta stands for the global weights. Theta takes one Nesterov step along the mean over all
    trainers, summed in rank order, and the model gets the next start. Between rounds the model may
    hold this trainer's own start: evaluate and publish the global weights, which the model holds
    while ``on_round`` is called and within `global_weights`.

    Memory on the host: 17 bytes per parameter, and 8 for each entry that a round receives.

    Args:
        model: A module, or a mapping of names to the FP32 or BF16 tensors that are trained. Frozen
            parameters and buffers must be equal on all trainers and must not change. Over a store a
            model of DTensors (FSDP2), or in DDP, is one trainer: all its ranks make and enter this
            (docs/loco.md, 7.4).
        inner_optimizer: One optimizer, or a list in the order of their ``step()`` calls; the last
            one's call ends an inner step.
        sync_every: Inner steps in a round.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step, in [0, 1).
        lookahead: The inner steps start from ``theta - lookahead * residual``, so that no trainer
            learns again what it holds back. "auto" is ``outer_lr / (1 - outer_momentum)``, at most
            1024; 0 is the paper's (docs/loco.md, 1.1).
        gate_dtype: The dtype that inference computes in.
        group: The trainers: a process group, or an `Exchange`. Default: all of torch.distributed;
            without it, this trainer alone.
        over: A store in which trainers meet instead of a group: its address, a store, or a
            `StoreExchange`. A round does not wait for stragglers; they lose nothing.
        overlap: 1 exchanges a round over a store behind the inner steps of the next one
            (docs/loco.md, 7.1).
        on_round: Called with a `Round` after each round, while the model holds the global weights.
    Raises: InputError for settings out of range and parameters that cannot be trained, and
        UnsupportedTensor, with the name, for tensors that cannot be kept equal. From inside the
        last optimizer's ``step()``: TrainerLost (see `rejoin`), NonFinite (see `rewind`), Diverged,
        StateMismatch, CorruptMessage, InputError, and RankLost where another rank of this trainer
        died.
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

    The model holds the global weights between rounds.

    Args:
        model: As for `PulseLoCo`.
        inner_optimizer: As for `PulseLoCo`.
        sync_every: Inner steps in a round.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step, in [0, 1).
        group: A process group, or an `Exchange`, of which ``group`` and ``timeout_seconds`` count.
        on_round: Called with a `Round` after each round.
    Raises: As `PulseLoCo`.
    """

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
