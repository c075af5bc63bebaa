"""What the trainers of a run meet in: a process group here, a store in `store_rounds`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch.distributed as dist

from .._util.serial import SerialThread
from ..errors import CorruptMessage, Diverged, InputError, NonFinite, StateMismatch
from ..events import OneLine
from .exchange import Exchange, Phase, Reduction
from .group import TrainerGroup, TrainerNote
from .outer import averaged
from .parameters import Floats
from .trainer import Trainer


@dataclass(frozen=True, slots=True, repr=False)
class Round(OneLine):
    """What the finished round ``number``, counted from 1, of so many ``trainers`` did, as one of
    them saw it.

    ``entries`` of ``parameters`` passed this trainer's gate; its messages took ``payload_bytes``,
    those about frozen parameters and buffers included; ``sent_bytes`` left its process in all
    (headers, padding, and what it passed on or summed for others). ``summed`` parameters have a sum
    that is not 0, and passed its gate if there is one. ``scattered``: each trainer summed a share
    of the parameters (docs/loco.md, 4.3); otherwise all got all messages. ``root`` is that of
    theta, FP32. ``seconds`` by phase: "gate", "exchange", "decode", "update", "verify", and
    "frozen" for frozen parameters and buffers. ``excluded_reason``: over a store, why messages of
    this trainer were not in this round, or in those that it took up before it; "" where it was not
    left out.
    """

    number: int
    trainers: int
    parameters: int
    entries: int
    summed: int
    scattered: bool
    payload_bytes: int
    sent_bytes: int
    root: str
    seconds: dict[str, float]
    excluded_reason: str = ""

    @property
    def density(self) -> float:
        """Entries sent / parameters."""
        return self.entries / self.parameters

    @property
    def dense_bytes(self) -> int:
        """What would have left this process in a ring all-reduce of FP32 values, as DiLoCo's."""
        return 2 * (self.trainers - 1) * 4 * self.parameters // self.trainers

    @property
    def metadata(self) -> dict[str, int]:
        """What a publisher may note of the round beside its reward: ``pulse report`` draws reward
        by bytes from it."""
        return {
            "round": self.number,
            "loco_sent_bytes": self.sent_bytes,
            "loco_dense_bytes": self.dense_bytes,
        }


class RoundProtocol(Protocol):
    """One trainer's side of what the trainers of a run meet in.

    ``joined``: whether the trainer is among them, and may run a round. An error of `run` after
    which it may not says so here."""

    @property
    def joined(self) -> bool: ...

    def join(self, settings: dict[str, object], lookahead: np.float32, note: TrainerNote) -> None:
        """Meets the others, who must have the same ``settings``, and takes up the common state,
        whose next inner steps start with ``lookahead``. After an error this trainer is as it was.
        Raises InputError, StateMismatch, Diverged, CorruptMessage, NonFinite, TrainerLost and
        StoreError."""

    def run(self, phase: Phase, lookahead: Callable[[], np.float32]) -> Round | None:
        """Runs the round that is due; its ``seconds`` are the caller's. With overlap it ends the
        one before, if there is any, and begins the one that is due. Raises what `PulseLoCo`
        does."""

    def finish(self, phase: Phase, lookahead: Callable[[], np.float32]) -> Round | None:
        """Ends the round that was begun, if there is any. Raises what `run` does."""

    def note(self, note: TrainerNote) -> None:
        """Where this trainer is, for the others' errors."""

    def averaged(self) -> Floats:
        """Theta less what all trainers hold back on average. Raises InputError where it cannot be
        had."""

    def rest(self) -> None:
        """Ends what goes on behind the inner steps, before another state is loaded."""

    def forget_steps(self) -> None:
        """The inner steps under way are discarded."""

    def move(self, group: dist.ProcessGroup | None) -> None:
        """The next `join` is in ``group``."""

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the others, who hear that it was on purpose, or because of ``error``."""


class GroupRounds:
    """Rounds in a process group (docs/loco.md, section 4): all of its trainers are in each
    round."""

    def __init__(
        self, exchange: Exchange, reduction: Reduction, trainer: Trainer, serial: SerialThread
    ) -> None:
        self.group: TrainerGroup | None = None
        self._process_group = exchange.group
        self._exchange, self._reduction, self._trainer, self._serial = (
            exchange,
            reduction,
            trainer,
            serial,
        )

    @property
    def joined(self) -> bool:
        return self.group is not None

    def join(self, settings: dict[str, object], lookahead: np.float32, note: TrainerNote) -> None:
        group = TrainerGroup(self._process_group, timeout_seconds=self._exchange.timeout_seconds)
        group.progress.begin(note)
        try:
            # Agreed with the others first, taken over at once afterwards: a failure leaves this
            # trainer as it was.
            take_up = self._trainer.meet(group, settings, lookahead)

            def begin() -> None:
                take_up()
                self._reduction.forget()

            self._serial.run(begin, whole=True)
        except BaseException:
            group.close()
            raise
        self.group = group

    def run(self, phase: Phase, lookahead: Callable[[], np.float32]) -> Round:
        group, trainer, state = self._met(), self._trainer, self._trainer.state
        sent = group.sent_bytes
        try:
            # 1. What no optimizer trains must not have changed.
            trainer.parameters.require()
            with phase("frozen"):
                message_bytes = trainer.frozen.require_unchanged_on_all(group)
            # 2. Gate, wire, exchange. A failure up to here leaves theta, momentum and residual as
            # they were.
            pending = self._reduction.run(group, trainer.round, phase)

            # 3. The outer step. No interrupt comes between its parts.
            def take_effect() -> int:
                with phase("update"):
                    summed = pending.apply(lookahead())
                    trainer.complete_round(pending.messages)
                return summed

            summed = self._serial.run(take_effect, whole=True)
            # 4. All have the same theta. After it has taken effect here: a trainer lost in the
            # comparison leaves the others in a whole state.
            with phase("verify"):
                theta = state.digest(state.theta)
                group.require_same_root(trainer.round, theta, state.digests)
        except (NonFinite, Diverged, CorruptMessage, StateMismatch):  # on all trainers alike
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
            root=theta.root,
            seconds={},  # the caller's
        )

    def finish(self, phase: Phase, lookahead: Callable[[], np.float32]) -> Round | None:
        return None

    def note(self, note: TrainerNote) -> None:
        if self.group is not None:
            self.group.progress.note(note)

    def averaged(self) -> Floats:
        group, state, residual = self._met(), self._trainer.state, self._reduction.residual
        try:
            ahead = residual is not None and residual.lookahead
            found = (
                averaged(group, state, residual)
                if residual is not None and ahead
                else state.theta.copy()
            )
            tree = state.digest(found)
            group.require_same_root(self._trainer.round, tree, lambda: {"the averaged state": tree})
        except (Diverged, CorruptMessage):  # on all trainers alike
            raise
        except BaseException as error:
            self.leave(error)
            raise
        return found

    def rest(self) -> None:
        pass

    def forget_steps(self) -> None:
        # a message that was sent may have counted with the others, who say so when they meet again
        pass

    def move(self, group: dist.ProcessGroup | None) -> None:
        self._process_group = group

    def leave(self, error: BaseException | None = None) -> None:
        if self.group is not None:
            try:
                self.group.progress.leave(error)
            finally:
                self.group.close()
                self.group = None

    def _met(self) -> TrainerGroup:
        if self.group is None:
            raise InputError(
                "the trainers have not met",
                hint="Call it on all trainers, within the loop's `with`.",
            )
        return self.group
