"""PULSELoCo and DiLoCo. Both are one outer loop: local steps, then a round in which all trainers
agree on the next theta (docs/loco.md, section 1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist

from .._util.serial import NotCopyable
from .._util.settings import checked_number
from ..errors import InputError
from ..store import Store
from .exchange import Exchange, Meeting, Phase, Round, StoreExchange
from .gate import Gate, GatedReduction
from .group import TrainerNote
from .group_rounds import DenseReduction, GroupReduction, GroupRounds, Reduction
from .outer import MAX_LOOKAHEAD, OuterState, Residual, Trainer
from .parameters import Parameters
from .store_rounds import StoreRounds
from .wire import Wire

_MAX_SECONDS = 30 * 86400.0  # torch counts in microseconds


class OuterLoop(NotCopyable):
    """Hooks the inner optimizers' ``step``; after every ``sync_every`` steps one outer round runs
    inside that call.

    A context manager. Entering it joins the other trainers: before the first round all take rank
    0's weights, later the outer state of the latest round. Leaving it removes the hook. Outer state
    is FP32 in host memory, wherever the model is.

    A loop is made of a ``trainer``, a ``reduction``, and the ``meeting`` of the trainers:
    `PulseLoCo` and `DiLoCo` put them together. ``threads`` (default: all cores) share a round's
    blocks. Raises InputError for a ``sync_every`` below 1.
    """

    def __init__(
        self,
        trainer: Trainer,
        reduction: Reduction | GatedReduction,
        meeting: Meeting,
        *,
        sync_every: int,
        on_round: Callable[[Round], None] | None,
    ) -> None:
        if sync_every < 1:
            raise InputError(
                f"sync_every is {sync_every}",
                hint="Give the number of inner steps in a round, 1 or more.",
            )
        self.sync_every, self.on_round = sync_every, on_round
        self.trainer, self.reduction, self.meeting = trainer, reduction, meeting
        self.state, self.parameters, self.frozen = trainer.state, trainer.parameters, trainer.frozen
        #: The processes of this trainer, where its model is sharded over several.
        self._ranks = trainer.parameters.ranks
        self.last_round: Round | None = None
        self._hooks: list[Any] = []
        self._seconds: dict[str, float] = {}
        self._in_global_weights = self._callback_wanted = False

    @property
    def round(self) -> int:
        """Rounds that are completed."""
        return self.trainer.round

    @property
    def inner_step(self) -> int:
        """Inner steps of the round under way that are taken."""
        return self.trainer.inner_step

    @property
    def threads(self) -> int | None:
        """How many threads share the work of a round; None: as many as there are cores."""
        return self.state.threads

    @threads.setter
    def threads(self, threads: int | None) -> None:
        self.state.threads = self.frozen.threads = threads

    # -- a round

    def _after_step(self) -> None:
        self.trainer.inner_step += 1
        self.meeting.note(self._note())
        if self.inner_step >= self.sync_every:
            self._run_round()

    def _run_round(self) -> None:
        def run() -> Round | None:
            if not self.meeting.joined:
                raise InputError(
                    "a round is due, but the trainers have not met",
                    hint="Enter it as a context manager; after TrainerLost, call rejoin() or "
                    "rewind().",
                )
            return self._end_round(self.meeting.run)

        self._lead_round(run, reads=True)

    def _lead_round(self, run: Callable[[], Round | None], *, reads: bool = False) -> None:
        # Each rank of a sharded trainer calls its own ``on_round``; all agree on what the model
        # holds meanwhile.
        wanted = self.on_round is not None
        self._callback_wanted = self._ranks.any(wanted) if self._ranks else wanted
        done = self._lead(run, reads=reads)
        if done is None:
            return
        self.last_round = done
        if self._callback_wanted:
            with self.global_weights():
                if self.on_round:
                    self.on_round(done)

    def _end_round(self, call: Callable[[Phase, np.float32], Round | None]) -> Round | None:
        self._seconds = {}
        # The callback gets theta in the model.
        done = call(self._phase, np.float32(0) if self._callback_wanted else self._lookahead())
        self.meeting.note(self._note())
        if done is None:
            self._write_start()
            return None
        return replace(done, seconds=dict(self._seconds))

    def _lead(self, work: Callable[[], Round | None], *, reads: bool = False) -> Round | None:
        """``work``, which may change the model, and with ``reads`` looks at it. Of a sharded
        trainer one rank does it, and all have what follows."""
        ranks, trainer = self._ranks, self.trainer
        if ranks is None:
            return work()
        if reads:
            ranks.collect()

        def led() -> dict[str, Any] | None:
            done = work()
            return asdict(done) if done else None

        def take(counters: list[int]) -> None:
            trainer.round, trainer.inner_step = counters

        found = ranks.lead(led, lambda: [trainer.round, trainer.inner_step], take)
        return Round(**found) if found else None

    def _require_state(self) -> None:
        """Raises InputError on a rank without outer state."""
        if self._ranks and not self._ranks.leads:
            raise InputError(
                "the first rank of this trainer has the outer state, and this is another one",
                hint="On all ranks the model holds theta within global_weights(), and while "
                "on_round is called.",
            )

    # -- joining and leaving

    def __repr__(self) -> str:
        return f"<{type(self).__name__} after round {self.round}, every {self.sync_every} steps>"

    def __enter__(self) -> Self:
        if not self._hooks:
            self._join(self.trainer.load_model_weights)
            self._hooks = self.parameters.optimizers.hook(self._after_step)
            self._restart()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            if error is None:
                self._lead_round(self._finish)
            if self._together(error):
                self._restart()
        finally:
            self.meeting.leave(error)

    def _together(self, error: BaseException | None) -> bool:
        """Whether the ranks of a sharded trainer are known to go on together after ``error``."""
        return error is None or self._ranks is None or self._ranks.is_common(error)

    def _finish(self) -> Round | None:
        due = self.meeting.joined and not self.inner_step
        return self._end_round(self.meeting.finish) if due else None

    def close(self) -> None:
        """Removes the hooks and leaves the group; the model holds theta, or the local steps of a
        round under way. The others get TrainerLost in their next round."""
        self.__exit__(None, None, None)

    def rejoin(self, group: dist.ProcessGroup | None = None) -> None:
        """Continues with the trainers of ``group``, after TrainerLost or when trainers come or go.

        If one has died, torch.distributed must be reinitialized. All trainers must call this or
        enter. A trainer that is behind gets theta and the outer momentum. A round that was due runs
        at once; local steps that were not sent are not lost.

        Args:
            group: The trainers that go on. Default: all of torch.distributed.
        Raises: TrainerLost, StateMismatch, InputError, Diverged, NonFinite, CorruptMessage.
        """

        def move() -> None:
            self.meeting.move(group)
            self.meeting.leave()

        self._join(move)

    def rewind(self) -> None:
        """Gives the model the start of the round, and discards the local steps since; where these
        are in a message that all would refuse, also what was held back, which they are part of."""

        def rewind() -> None:
            self.meeting.forget_steps()
            self.trainer.whole(lambda: self.trainer.rewind(self._lookahead()))

        self._lead(rewind)

    def _join(self, begin: Callable[[], None]) -> None:
        """Meets the others, after ``begin``, and runs a round that is due."""

        def join() -> None:
            begin()
            self.trainer.require_finite()
            self.meeting.join(self._settings(), self._lookahead(), self._note())
            self.meeting.note(self._note())

        self._lead(join, reads=True)
        # A trainer whose round failed has taken all its inner steps: it owes the round before it
        # may take another.
        if self.inner_step >= self.sync_every:
            self._run_round()

    def _note(self) -> TrainerNote:
        return TrainerNote(self.round + 1, self.inner_step, self.sync_every)

    # -- what the model holds between rounds

    def _lookahead(self) -> np.float32:
        """With what the next inner steps start: outside the loop, and where it is asked for, the
        model holds theta."""
        residual = self.reduction.residual
        if residual is None or not self._hooks or self._in_global_weights:
            return np.float32(0)
        return residual.lookahead

    def _restart(self) -> None:
        self._lead(self._write_start)

    def _write_start(self) -> None:
        """Between rounds, gives the model the local start that is due, unless it holds it."""
        residual = self.reduction.residual
        if residual is None or self.inner_step:
            return
        if residual.started_with != self._lookahead():
            self.trainer.whole(lambda: self.trainer.write_start(self._lookahead()))

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Within, the model holds the global weights, theta, to be evaluated or published.

        Otherwise the model may hold this trainer's own start of the next inner steps. An inner step
        that is taken within starts from theta.

        Raises: InputError after the first inner step of a round.
        """
        if self.inner_step:
            raise InputError(
                f"{self.inner_step} inner steps of the round are taken: the model is on its way",
                hint="global_state() has theta at any time; on_round is called while the model "
                "holds it.",
            )
        if self._in_global_weights:
            yield
            return
        failure: BaseException | None = None
        try:
            self._in_global_weights = True
            self._restart()
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self._in_global_weights = False
            if self._together(failure):
                self._restart()
            failure = None

    def global_state(self) -> dict[str, torch.Tensor]:
        """Theta, the global weights.

        Returns: Tensors by name, FP32 on the host, in this object's memory: copy or cast them, do
            not write.
        Raises: InputError on a rank of a sharded trainer that is not the first.
        """
        self._require_state()
        return self.trainer.settled(lambda: self.parameters.by_name(self.state.theta))

    def residual(self) -> dict[str, torch.Tensor]:
        """What this trainer holds back so far; DiLoCo holds nothing back.

        Returns: Tensors by name, FP32 on the host, in this object's memory.
        Raises: InputError on a rank of a sharded trainer that is not the first.
        """
        self._require_state()
        residual = self.reduction.residual
        if residual is None:
            return {}
        return self.trainer.settled(lambda: self.parameters.by_name(residual.flat))

    def averaged_state(self) -> dict[str, torch.Tensor]:
        """Theta less what all trainers hold back: the mean of what their next inner steps start
        from (docs/loco.md, 1.2).

        Keep it at the end of a training, when there is no round left for what is late; it changes
        nothing here. All trainers call it, within the ``with``, between rounds; a call on some only
        ends their processes, as any collective does that others do not take part in. It costs a
        dense all-reduce, or nothing without a lookahead, where it is theta.

        Returns: Tensors by name, FP32 on the host, the same bits on all trainers.
        Raises: InputError during a round, and where trainers meet over a store. TrainerLost,
            CorruptMessage and Diverged as a round does.
        """
        if self.inner_step:
            raise InputError(
                f"{self.inner_step} inner steps of the round are taken: the residual is that of "
                "the last one",
                hint="Call it on all trainers after a round, before the next inner step.",
            )
        return self.parameters.by_name(self.meeting.averaged())

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Theta, outer momentum, residual and counters.

        Mid-round (``inner_step`` above 0) save the model and the inner optimizer with it; the three
        together resume to the same bits.

        Returns: Copies, by name. Of a sharded trainer the first rank has all of them, the others
            only the counters.
        """
        if self._ranks and not self._ranks.leads:
            return {"round": self.round, "inner_step": self.inner_step}
        return self.trainer.settled(self.trainer.saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, before the first round or after it.

        At a round's boundary (``inner_step`` 0) the model gets theta; mid-round it is left to its
        own checkpoint, as frozen parameters and buffers always are. All ranks of a sharded trainer
        call it.

        Args:
            state: What was saved. Of a sharded trainer the first rank's counts.
        Raises: StateMismatch and NonFinite, with nothing changed.
        """

        def restore() -> None:
            load = self.trainer.loaded(state)
            self.meeting.rest()

            def take_up() -> None:
                load(self._lookahead())
                self.reduction.forget()

            self.trainer.whole(take_up)

        self._lead(restore)

    def _settings(self) -> dict[str, object]:
        """What all trainers must have in common."""
        own = {"method": type(self).__name__, "sync_every": self.sync_every}
        return {**own, **self.state.settings(), **self.reduction.settings()}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began


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
        over: What the trainers meet over. A process group, or an `Exchange`; default: all of
            torch.distributed, without it this trainer alone. Or a store: its address, a store, or
            a `StoreExchange`. Over a store a round does not wait for stragglers; they lose nothing.
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
        over: dist.ProcessGroup | Exchange | Store | str | StoreExchange | None = None,
        overlap: int = 0,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        exchange: Exchange | StoreExchange
        rank_seconds: float | None = None
        if over is None or isinstance(over, (dist.ProcessGroup, Exchange)):
            exchange = _exchange_of(over)
        elif isinstance(over, StoreExchange):
            exchange = over
        else:
            exchange = StoreExchange(over)
        if isinstance(exchange, StoreExchange):
            # The ranks of a trainer wait for that which speaks for them, and may wait for two
            # rounds.
            seconds = 600 + 2 * (exchange.deadline_seconds + exchange.grace_seconds)
            rank_seconds = min(seconds, _MAX_SECONDS)
        parameters = Parameters(model, inner_optimizer, rank_seconds)
        state = OuterState(parameters, outer_lr, outer_momentum)
        if lookahead == "auto":
            lookahead = min(outer_lr / (1 - outer_momentum), MAX_LOOKAHEAD)
        if overlap not in (0, 1) or (overlap and not isinstance(exchange, StoreExchange)):
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
        trainer, gate = Trainer(state, residual), Gate(gate_dtype, exchange.sweep)
        self.reduction: GatedReduction
        meeting: Meeting
        if isinstance(exchange, StoreExchange):
            reduction = GatedReduction(state, residual, gate, Wire(exchange.wire))
            meeting = StoreRounds(exchange, reduction, trainer)
        else:
            reduction = GroupReduction(state, residual, gate, Wire(exchange.wire))
            meeting = GroupRounds(exchange, reduction, trainer)
        super().__init__(trainer, reduction, meeting, sync_every=sync_every, on_round=on_round)
        self.lookahead = residual.lookahead


class DiLoCo(OuterLoop):
    """Dense FP32 pseudo-gradients, summed by an all-reduce (DiLoCo, arXiv 2311.08105).

    The model holds the global weights between rounds.

    Args:
        model: As for `PulseLoCo`.
        inner_optimizer: As for `PulseLoCo`.
        sync_every: Inner steps in a round.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step, in [0, 1).
        over: A process group, or an `Exchange`, of which ``group`` and ``timeout_seconds`` count.
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
        over: dist.ProcessGroup | Exchange | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        state = OuterState(Parameters(model, inner_optimizer), outer_lr, outer_momentum)
        trainer, reduction = Trainer(state, None), DenseReduction(state)
        meeting = GroupRounds(_exchange_of(over), reduction, trainer)
        super().__init__(trainer, reduction, meeting, sync_every=sync_every, on_round=on_round)


def _exchange_of(over: dist.ProcessGroup | Exchange | None) -> Exchange:
    """A process group gets the default settings."""
    return over if isinstance(over, Exchange) else Exchange(group=over)
