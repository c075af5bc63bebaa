"""The outer loop: local steps, then a round in which all trainers agree on the next theta (docs/loco.md, section 1)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from .._native import outer_step
from .._util.serial import SerialThread, Unique
from .._util.threads import ordered_map
from ..errors import CorruptMessage, Diverged, InputError, NonFinite, StateMismatch
from ..state.digest import StateDigest, state_digest
from .exchange import Exchange
from .gate import Floats
from .membership import (
    Handshake,
    exchange_handshakes,
    find_behind,
    find_leader,
    require_no_divergence,
    require_same_model_and_settings,
    require_same_root,
    require_same_tensors,
    specs_digest,
)
from .parameters import FlatBlock, Parameters
from .progress import Note
from .rounds import Received, Round
from .untrained import Untrained


class OuterLoop(Unique, ABC):
    """Hooks the inner optimizers' ``step``; after every ``sync_every`` steps one outer round runs inside that call.

    A context manager. Entering it joins the other trainers: before the first round all take rank 0's weights, later
    the outer state of the latest round. Leaving it removes the hook. Outer state is FP32 in host memory, wherever the
    model is. Subclasses define what is exchanged.

    ``model``: a module, or a mapping of names to the FP32 or BF16 tensors that ``inner_optimizer`` trains: one, or a
    list in the order of their ``step()`` calls, where that of the last one ends an inner step. Parameters that none of
    them trains must stay equal on all trainers; buffers are averaged after each round (docs/loco.md, 4.1).
    ``outer_lr`` and ``outer_momentum`` are those of the Nesterov step (DiLoCo's 0.7 and 0.9). ``group``: the trainers
    (default: all of torch.distributed; without it, this trainer alone). A trainer that dies, or stalls for more than
    ``timeout_seconds``, raises TrainerLost on the others, and one that leaves before them raises TrainerLeft.
    ``threads`` (default: all cores) share a round's blocks. ``on_round`` gets a `Round` after each round; only then do
    all trainers hold the model's state, and only then should it be published.

    Raises InputError for settings out of range and for parameters that cannot be trained, and UnsupportedTensor, with
    the name, for parameters and buffers that cannot be kept equal.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
        threads: int | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        if sync_every < 1:
            raise InputError(
                f"sync_every is {sync_every}", hint="Give the number of inner steps in a round, 1 or more."
            )
        if not (outer_lr > 0 and 0 <= outer_momentum < 1):
            raise InputError(f"outer_lr {outer_lr} or outer_momentum {outer_momentum} is out of range")
        self.sync_every = sync_every
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.parameters = Parameters(model, inner_optimizer)
        self.threads, self.on_round = threads, on_round
        self.untrained = Untrained(model, self.parameters.tensors, threads)
        self._serial = SerialThread(type(self).__name__)
        self.round = 0
        self.inner_step = 0
        self.last_round: Round | None = None
        self._group, self._timeout_seconds = group, timeout_seconds
        self._exchange: Exchange | None = None
        self._hooks: list[Any] = []
        self._seconds: dict[str, float] = {}
        self._messages: list[str] = []
        # The others may have completed rounds since this state was saved, with messages that it knows nothing of.
        self._from_checkpoint = False
        self.theta_flat = self.parameters.read()
        self.momentum_flat = np.zeros_like(self.theta_flat)

    # -- joining and leaving

    def __enter__(self) -> Self:
        if not self._hooks:
            if self.round == 0 and not self._from_checkpoint:
                self.theta_flat[:] = self.parameters.read()  # the model may have been loaded since
                self.untrained.read_common()
            self._join()
            self._hooks = self.parameters.optimizers.hook(self._after_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._unhook()
        finally:
            self._leave(error)

    def close(self) -> None:
        """Removes the hooks and leaves the group; the model holds theta, or the local steps of a round under way. The
        others get TrainerLeft in their next round."""
        self.__exit__(None, None, None)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def rejoin(self, group: dist.ProcessGroup | None = None) -> None:
        """Continues with the trainers of ``group``, after TrainerLost or when trainers come or go.

        If one has died, torch.distributed must be reinitialised. All trainers must call this or enter. A trainer
        that is behind gets theta and the outer momentum. A round that was due runs at once; local steps that were not
        sent are not lost. Raises TrainerLost, StateMismatch, InputError, Diverged, NonFinite, CorruptMessage.
        """
        self._leave()
        self._group = group
        self._join()

    def rewind(self) -> None:
        """Gives the model the start of the round and the last common buffers, and discards the local steps since."""
        self.untrained.require()

        def rewind() -> None:
            self.inner_step = 0
            self._start_steps()
            self.untrained.restore()

        self._serial.run(rewind, whole=True)

    def _leave(self, error: BaseException | None = None) -> None:
        """Gives the group up. The others are told that it was on purpose, or because of ``error``."""
        if self._exchange is not None:
            try:
                self._exchange.progress.leave(error)
            finally:
                self._exchange.close()
                self._exchange = None

    def _join(self) -> None:
        """Makes the group, takes up the common state, and runs a round that is due."""
        if name := self.parameters.first_non_finite(self.theta_flat):
            raise NonFinite(f"theta is not finite at {name!r}", hint="Start from weights without NaN and Inf.")
        exchange = Exchange(self._group, timeout_seconds=self._timeout_seconds)
        exchange.progress.begin(self._note())
        try:
            self._rendezvous(exchange)
        except BaseException:
            exchange.close()
            raise
        self._exchange = exchange
        exchange.progress.note(self._note())
        if self.inner_step >= self.sync_every:
            self._run_round()

    def _rendezvous(self, exchange: Exchange) -> None:
        """Brings all trainers to one outer state. An error leaves this trainer as it was."""
        handshakes = exchange_handshakes(exchange, self._handshake())
        exchange.progress.met()
        require_same_model_and_settings(handshakes, exchange.rank)
        exchange.sites = [handshake.site for handshake in handshakes]
        leader = find_leader(handshakes)
        require_no_divergence(handshakes, leader)
        behind = find_behind(handshakes, leader)
        take_up_untrained = self.untrained.meet(exchange, leader)
        theta, momentum = self._fetch_state(exchange, leader, behind)

        def take_up() -> None:
            from_checkpoint, self._from_checkpoint = self._from_checkpoint, False
            take_up_untrained()
            if exchange.rank in behind:
                self._take_up(handshakes[leader], theta, momentum, from_checkpoint)
            self._met(handshakes)

        self._serial.run(take_up, whole=True)

    def _met(self, handshakes: list[Handshake]) -> None:  # optional hook
        """Called when all trainers hold one outer state; must not fail."""

    def _handshake(self) -> Handshake:
        return Handshake(
            settings=self._settings(),
            round=self.round,
            root=self._digest(self.theta_flat).root,
            momentum=self._digest(self.momentum_flat).root,
            messages=self._messages,
            specs=specs_digest(self.parameters.specs, self.untrained.specs),
        )

    def _fetch_state(self, exchange: Exchange, leader: int, behind: list[int]) -> tuple[Floats, Floats]:
        """The leader's theta and momentum, if any are ``behind``. All trainers take part; those receive into copies."""
        theta, momentum = self.theta_flat, self.momentum_flat
        if not behind:
            return theta, momentum
        if exchange.rank in behind:
            theta, momentum = theta.copy(), momentum.copy()
        exchange.broadcast(theta, leader)
        exchange.broadcast(momentum, leader)
        return theta, momentum

    def _take_up(self, leader: Handshake, theta: Floats, momentum: Floats, from_checkpoint: bool) -> None:
        if leader.round != self.round:
            self._catch_up(leader, from_checkpoint)
        self.theta_flat[:], self.momentum_flat[:] = theta, momentum
        self.round, self.inner_step, self._messages = leader.round, 0, list(leader.messages)
        self._start_steps()
        self.untrained.restore()

    def _after_step(self) -> None:
        self.inner_step += 1
        if self._exchange is not None:
            self._exchange.progress.note(self._note())
        if self.inner_step >= self.sync_every:
            self._run_round()

    def _note(self) -> Note:
        return Note(self.round + 1, self.inner_step, self.sync_every)

    def _run_round(self) -> None:
        if self._exchange is None:
            raise InputError(
                "a round is due, but the trainers have not met",
                hint="Enter it as a context manager; after TrainerLost, call rejoin() or rewind().",
            )
        exchange, self._seconds = self._exchange, {}
        sent, between = exchange.sent_bytes, exchange.between_bytes
        try:
            self.parameters.require()
            with self._phase("untrained"):
                agreed = self.untrained.agree(exchange, self.round + 1)
            received = self._outer_round(exchange)

            def take_effect() -> int:
                with self._phase("update"):
                    summed = received.apply()
                    self.round, self.inner_step = self.round + 1, 0
                    agreed.commit()
                return summed

            summed = self._serial.run(take_effect, whole=True)
            # After it has taken effect here: a trainer lost in the comparison leaves the others in a whole state.
            with self._phase("verify"):
                digest = self._digest(self.theta_flat)
                require_same_root(exchange, self.round, digest, lambda: self._require_same_tensors(exchange))
        except (NonFinite, Diverged, CorruptMessage, StateMismatch):  # on all trainers alike
            raise
        except BaseException as error:
            # This round's message may count with the others: no second try before the trainers have met again.
            self._leave(error)
            raise
        exchange.progress.note(self._note())
        self.last_round = Round(
            number=self.round,
            trainers=exchange.size,
            parameters=self.parameters.count,
            entries=received.entries,
            summed=summed,
            scattered=received.scattered,
            payload_bytes=received.payload_bytes + agreed.payload_bytes,
            sent_bytes=exchange.sent_bytes - sent,
            between_bytes=exchange.between_bytes - between,
            root=digest.root,
            seconds=dict(self._seconds),
        )
        if self.on_round:
            self._tell(self.on_round, self.last_round)

    def _start_steps(self) -> None:  # what the next inner steps start from
        self.parameters.write(self.theta_flat)

    def _tell(self, on_round: Callable[[Round], None], done: Round) -> None:
        on_round(done)

    @abstractmethod
    def _outer_round(self, exchange: Exchange) -> Received:
        """Exchanges pseudo-gradients. Theta, momentum and residual do not change yet."""

    def _catch_up(self, leader: Handshake, from_checkpoint: bool) -> None:  # optional hook
        """Called before theta is replaced by that of the leader's later round. ``from_checkpoint``: this state was
        loaded, and no trainer has been met since."""

    def _update(self, block: FlatBlock, total: Floats, trainers: int) -> None:
        """One block of the outer step: Nesterov SGD on the mean."""
        theta, momentum = block.of(self.theta_flat), block.of(self.momentum_flat)
        outer_step(theta, momentum, total, trainers, self.outer_lr, self.outer_momentum)

    def _require_same_tensors(self, exchange: Exchange) -> None:
        """Raises Diverged, naming the first tensor of theta or momentum that differs. All trainers must call it."""
        trees = {"theta": self.theta_flat, "momentum": self.momentum_flat}
        require_same_tensors(exchange, self.round, {name: self._digest(flat) for name, flat in trees.items()})

    # -- state

    def theta(self) -> dict[str, torch.Tensor]:
        """Theta by name, FP32 on the host, in this object's memory: copy or cast it, do not write."""
        self._serial.run(lambda: None)  # whatever an interrupt left behind has ended
        return self.parameters.by_name(self.theta_flat)

    def state_dict(self) -> dict[str, Any]:
        """Theta, outer momentum, counters, the last round's buffers and what the subclass keeps: copies, by name.

        Mid-round (``inner_step`` above 0) save the model and the inner optimizer with it; the three together resume
        to the same bits.
        """
        return self._serial.run(self._state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the saved ``state``, before the first round or after it. Raises StateMismatch and NonFinite, with
        nothing changed.

        At a round's boundary (``inner_step`` 0) the model gets theta and the buffers; mid-round it is left to its own
        checkpoint, as frozen parameters always are. A state without buffers leaves the model's.
        """
        fresh = {key: np.empty_like(flat) for key, flat in self._arrays().items()}
        missing = {"round", "inner_step", "messages", *fresh} - state.keys()
        if missing:
            raise StateMismatch(f"the saved state has no {sorted(missing)}")
        buffers = self.untrained.loaded(state["buffers"]) if "buffers" in state else None
        counters, messages = (state["round"], state["inner_step"]), state["messages"]
        if not (isinstance(messages, list) and all(isinstance(m, str) for m in messages)) or not all(
            isinstance(n, int) and n >= 0 for n in counters
        ):
            raise StateMismatch(f"the saved state's counters {counters} or messages are not what they should be")
        for key, flat in fresh.items():
            self.parameters.load(state[key], flat, f"saved {key}")

        def load() -> None:
            for key, flat in self._arrays().items():
                flat[:] = fresh[key]
            (self.round, self.inner_step), self._messages, self._from_checkpoint = counters, list(messages), True
            self._loaded(state)
            self.untrained.load(buffers)
            if self.inner_step == 0:
                self._start_steps()
                self.untrained.restore()

        self._serial.run(load, whole=True)

    def _loaded(self, state: Mapping[str, Any]) -> None:  # optional hook
        """Takes what else a subclass needs from a ``state`` that is being loaded; must not fail."""

    def _state_dict(self) -> dict[str, Any]:
        buffers = self.untrained.saved()
        return {
            **({"buffers": buffers} if buffers else {}),
            "round": self.round,
            "inner_step": self.inner_step,
            "messages": list(self._messages),
            **{key: self.parameters.copies(flat) for key, flat in self._arrays().items()},
        }

    def _arrays(self) -> dict[str, Floats]:
        """The flat arrays that a checkpoint holds."""
        return {"theta": self.theta_flat, "momentum": self.momentum_flat}

    def _settings(self) -> dict[str, object]:
        """What all trainers must have in common."""
        return {
            "method": type(self).__name__,
            "sync_every": self.sync_every,
            "outer_lr": self.outer_lr,
            "outer_momentum": self.outer_momentum,
        }

    def _digest(self, flat: Floats) -> StateDigest:
        return state_digest(self.parameters.state(flat), threads=self.threads)

    def _each_block(self, work: Callable[[FlatBlock], Any]) -> list[Any]:
        """``work`` on every block in threads; results in order."""
        return list(ordered_map(work, self.parameters.blocks, self.threads))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
