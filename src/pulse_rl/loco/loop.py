"""PULSELoCo and DiLoCo. Both are one outer loop: local steps, then a round in which all trainers
agree on the next global weights (docs/loco.md, section 1)."""

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
from .exchange import GroupExchange, Meeting, Phase, Round, StoreExchange
from .gate import Gate, GatedReduction
from .group import TrainerNote
from .group_rounds import DenseReduction, GroupReduction, GroupRounds, Reduction
from .messages import Compression, CompressionName
from .outer import MAX_LOOKAHEAD, OuterState, Residual, Trainer
from .parameters import Parameters
from .store_rounds import StoreRounds

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
    def run(self) -> str:
        """The ID of the run in the store that this trainer has joined, 32 hexadecimal digits; ""
        before it has, and in a group."""
        return self.trainer.run

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
        if self._is_due:
            self._run_round()

    @property
    def _is_due(self) -> bool:
        return bool(self.trainer.due) or self.inner_step >= self.sync_every

    def _run_round(self, *, closing: bool = False) -> None:
        def run() -> Round | None:
            if not self.meeting.joined:
                raise InputError(
                    "a round is due, but the trainers have not met",
                    hint="Enter it as a context manager; after TrainerLost, call rejoin() or "
                    "rewind().",
                )
            if closing:
                self.trainer.due = "closing"
            return self._end_round(self.meeting.run)

        closes = closing or self.trainer.due == "closing"
        self._lead_round(run, reported=not closes)

    def _lead_round(self, run: Callable[[], Round | None], *, reported: bool) -> None:
        # Each rank of a sharded trainer calls its own ``on_round``; all agree on what the model
        # holds meanwhile.
        wanted = self.on_round is not None and reported
        self._callback_wanted = self._ranks.any(wanted) if self._ranks else wanted
        done = self._lead(run, reads=True)
        if done is None:
            return
        self.last_round = done
        if self._callback_wanted:
            with self.global_weights():
                if self.on_round:
                    self.on_round(done)

    def _end_round(self, call: Callable[[Phase, np.float32], Round | None]) -> Round | None:
        self._seconds = {}
        # The callback gets the global weights in the model.
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

        def counters() -> list[Any]:
            return [trainer.round, trainer.inner_step, trainer.due, trainer.run]

        def take(found: list[Any]) -> None:
            trainer.round, trainer.inner_step, trainer.due, trainer.run = found

        found = ranks.lead(led, counters, take)
        return Round(**found) if found else None

    def _require_state(self) -> None:
        """Raises InputError on a rank without outer state."""
        if self._ranks and not self._ranks.leads:
            raise InputError(
                "the first rank of this trainer has the outer state, and this is another one",
                hint="On all ranks the model holds the global weights within global_weights(), and "
                "while on_round is called.",
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
            if self._together(error):
                self._restart()
        finally:
            self.meeting.leave(error)

    def _together(self, error: BaseException | None) -> bool:
        """Whether the ranks of a sharded trainer are known to go on together after ``error``."""
        return error is None or self._ranks is None or self._ranks.is_common(error)

    def close(self) -> None:
        """Removes the hooks and leaves the group; the model holds the global weights, or the local
        steps of a round under way. The others get TrainerLost in their next round."""
        self.__exit__(None, None, None)

    def rejoin(self, group: dist.ProcessGroup | None = None) -> None:
        """Continues with the trainers of ``group``, after TrainerLost or when trainers come or go.

        If one has died, torch.distributed must be reinitialized. All trainers must call this or
        enter. A trainer that is behind gets the global weights and the outer momentum. A round that
        was due runs at once; local steps that were not sent are not lost.

        Args:
            group: The trainers that go on. Default: all of torch.distributed.
        Raises: TrainerLost, StateMismatch, InputError, Diverged, NonFinite, CorruptMessage.
        """

        self._join(lambda: self.meeting.move(group))

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
        if self._is_due:
            self._run_round()

    def _note(self) -> TrainerNote:
        return TrainerNote(self.round + 1, self.inner_step, self.sync_every)

    # -- what the model holds between rounds

    def _lookahead(self) -> np.float32:
        """With what the next inner steps start: outside the loop, and where it is asked for, the
        model holds the global weights."""
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
        """Within, the model holds the global weights, to be evaluated or published.

        Otherwise the model may hold this trainer's own start of the next inner steps. An inner step
        that is taken within starts from the global weights.

        Raises: InputError after the first inner step of a round.
        """
        if self.inner_step:
            raise InputError(
                f"{self.inner_step} inner steps of the round are taken: the model is on its way",
                hint="global_state() has the global weights at any time; on_round is called while "
                "the model holds them.",
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
        """The global weights.

        Returns: Tensors by name, FP32 on the host, in this object's memory: copy or cast them, do
            not write.
        Raises: InputError on a rank of a sharded trainer that is not the first.
        """
        self._require_state()
        return self.trainer.settled(lambda: self.parameters.by_name(self.state.weights))

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
        """The global weights once nothing is held back: the mean of what the trainers' next inner
        steps start from.

        Runs a closing round, in which each trainer sends its whole residual once (docs/loco.md,
        1.2). Call it at the end of a training, on all trainers, between rounds. The training may go
        on from there. Without a lookahead nothing is sent: these are the global weights as they
        are.

        Returns: Tensors by name, FP32 on the host, the same bits on all trainers. Of a sharded
            trainer the first rank has them, the others nothing.
        Raises: InputError during a round; what a round raises.
        """
        if self.inner_step:
            raise InputError(
                f"{self.inner_step} inner steps of the round are taken: the residual is that of "
                "the last one",
                hint="Call it on all trainers after a round, before the next inner step.",
            )
        residual = self.reduction.residual
        if residual is not None and residual.lookahead:
            self._run_round(closing=True)
        return {} if self._ranks and not self._ranks.leads else self.global_state()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The global weights, outer momentum, residual and counters.

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

        At a round's boundary (``inner_step`` 0) the model gets the global weights; mid-round it is
        left to its own checkpoint, as frozen parameters and buffers always are. All ranks of a
        sharded trainer call it.

        Args:
            state: What was saved. Of a sharded trainer the first rank's counts.
        Raises: StateMismatch and NonFinite, with nothing changed.
        """

        def restore() -> None:
            load = self.trainer.loaded(state)

            def take_up() -> None:
                load(self._lookahead())
                self.meeting.reset()
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
    residual``, the entries with ``cast(global) != cast(global - s)`` are sent and leave the
    residual, where ``global`` stands for the global weights. These take one Nesterov step along the
    mean over all trainers, summed in rank order, and the model gets the next start. Between rounds
    the model may hold this trainer's own start: evaluate and publish the global weights, which the
    model holds while ``on_round`` is called and within `global_weights`.

    Memory on the host next to the model: 17 bytes per parameter, 8 for each entry that this trainer
    sends and for each parameter that anybody sends, and the messages. They are decoded block by
    block.

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
        lookahead: The inner steps start from ``global - lookahead * residual``, so that no trainer
            learns again what it holds back. "auto" is ``outer_lr / (1 - outer_momentum)``, at most
            1024; 0 is the paper's (docs/loco.md, 1.1).
        gate_dtype: The dtype that inference computes in.
        exchange: How the trainers meet. A process group, or a `GroupExchange`; default: all of
            torch.distributed, without it this trainer alone. Or a store: its address, a store, or
            a `StoreExchange`. Over a store a round does not wait for stragglers; they lose nothing.
        compression: How values travel: "fp32" exactly; "bf16", "e8m2" and "e8m0" rounded to 7, 2
            and 0 explicit bits of mantissa next to sign and exponent. Entropy coded, a value takes
            about nine, four and two bits. The residual keeps what rounding loses.
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
        sync_every: int = 8,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        lookahead: float | Literal["auto"] = "auto",
        gate_dtype: torch.dtype = torch.bfloat16,
        exchange: dist.ProcessGroup | GroupExchange | Store | str | StoreExchange | None = None,
        compression: CompressionName = "e8m2",
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        rank_seconds: float | None = None
        if exchange is None or isinstance(exchange, dist.ProcessGroup):
            exchange = GroupExchange(exchange)
        elif not isinstance(exchange, (GroupExchange, StoreExchange)):
            exchange = StoreExchange(exchange)
        if isinstance(exchange, StoreExchange):
            # The ranks of a trainer wait for that which speaks for them, and may wait for two
            # rounds.
            seconds = 600 + 2 * (exchange.timeout_seconds + exchange.grace_seconds)
            rank_seconds = min(seconds, _MAX_SECONDS)
        parameters = Parameters(model, inner_optimizer, rank_seconds)
        state = OuterState(parameters, outer_lr, outer_momentum)
        if lookahead == "auto":
            lookahead = min(outer_lr / (1 - outer_momentum), MAX_LOOKAHEAD)
        ahead = checked_number("lookahead", lookahead, maximum=MAX_LOOKAHEAD)
        residual = Residual(state, ahead)
        trainer, gate = Trainer(state, residual), Gate(gate_dtype)
        self.reduction: GatedReduction
        meeting: Meeting
        if isinstance(exchange, StoreExchange):
            reduction = GatedReduction(state, residual, gate, Compression(compression))
            meeting = StoreRounds(exchange, reduction, trainer)
        else:
            reduction = GroupReduction(state, residual, gate, Compression(compression))
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
        exchange: A process group, or a `GroupExchange`; default: all of torch.distributed.
        on_round: Called with a `Round` after each round.
    Raises: As `PulseLoCo`.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        sync_every: int = 8,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        exchange: dist.ProcessGroup | GroupExchange | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        state = OuterState(Parameters(model, inner_optimizer), outer_lr, outer_momentum)
        trainer, reduction = Trainer(state, None), DenseReduction(state)
        if not isinstance(exchange, GroupExchange):
            exchange = GroupExchange(exchange)
        meeting = GroupRounds(exchange, reduction, trainer)
        super().__init__(trainer, reduction, meeting, sync_every=sync_every, on_round=on_round)
