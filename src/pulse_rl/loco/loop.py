"""The outer loop: local steps, then a round in which all trainers agree on the next theta (docs/loco.md, section 1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist

from .._util.serial import NotCopyable, SerialThread
from ..errors import CorruptMessage, Diverged, InputError, NonFinite, StateMismatch
from ..events import OneLine
from .buffers import FrozenAndBuffers
from .exchange import SCATTER_FROM, Exchange, Sites, Transfer, Transferred, gates_sums
from .gate import Gate, ReduceGate
from .group import Note, TrainerGroup
from .membership import (
    Handshake,
    delivery_of,
    exchange_handshakes,
    find_behind,
    find_leader,
    require_no_divergence,
    require_same_model_and_settings,
    specs_digest,
)
from .outer import OuterState, Residual, averaged
from .parameters import Floats, parts
from .wire import Classes, Coder, Wire

MAX_SCALE = 1024.0
Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, repr=False)
class Round(OneLine):
    """What the finished round ``number``, counted from 1, of so many ``trainers`` did, as one of them saw it.

    ``entries`` of ``parameters`` passed this trainer's gate; its messages took ``payload_bytes``, those about buffers
    and frozen parameters included; ``sent_bytes`` left its process in all (headers, padding, and what it passed on or
    summed for others), and ``between_bytes`` of them went to trainers of another site. ``summed`` parameters have a sum
    that is not 0, and passed its gate if there is one.
    ``scattered``: each trainer summed a share of the parameters (docs/loco.md, 4.3); otherwise all got all messages.
    ``root`` is that of theta, FP32. ``seconds`` by phase: "gate", "exchange", "decode", "update", "verify", and
    "buffers" for buffers and frozen parameters.
    """

    number: int
    trainers: int
    parameters: int
    entries: int
    summed: int
    scattered: bool
    payload_bytes: int
    sent_bytes: int
    between_bytes: int
    root: str
    seconds: dict[str, float]

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
        """What a publisher may note of the round beside its reward: ``pulse report`` draws reward by bytes from it."""
        return {"round": self.number, "loco_sent_bytes": self.sent_bytes, "loco_dense_bytes": self.dense_bytes}


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round whose messages have all arrived. What is left cannot fail: ``apply`` gives theta, momentum and the model
    what follows from them, the model's next start by the lookahead that it gets, and returns the number of parameters
    whose sum is not 0. ``entries`` and ``payload_bytes`` are those of this trainer's own message; ``messages`` the
    digests of all trainers' messages, by rank."""

    entries: int
    payload_bytes: int
    apply: Callable[[np.float32], int]
    messages: list[str]
    scattered: bool = False


class Reduction(Protocol):
    """How pseudo-gradients become one outer step: what a method is, beside the loop that all methods share.

    ``residual``: what is not sent, if there is error feedback."""

    @property
    def residual(self) -> Residual | None: ...

    def settings(self) -> dict[str, object]:
        """What all trainers must have in common."""

    def forget(self) -> None:
        """Theta, momentum or the trainers have become others since the last round."""

    def run(self, group: TrainerGroup, number: int, phase: Phase) -> PendingRound:
        """Exchanges the pseudo-gradients of the round after ``number``. Theta, momentum and residual do not change yet.
        Raises NonFinite, CorruptMessage and Diverged on all trainers alike, and TrainerLost."""


class GatedReduction:
    """PULSELoCo's: entries that pass the gate are sent and summed in rank order, the others stay in the residual."""

    def __init__(self, state: OuterState, residual: Residual, gate: Gate, exchange: Exchange) -> None:
        self.residual, self.gate, self.exchange = residual, gate, exchange
        self._state, self._wire = state, Wire(exchange.wire_dtype)
        self._classes = Classes(state.parameters.blocks)

    def settings(self) -> dict[str, object]:
        travel = {"wire_dtype": str(self._wire.dtype), "gate_sums": self.exchange.gate_sums}
        return {**self.gate.settings(), **travel, "lookahead": float(self.residual.lookahead)}

    def forget(self) -> None:
        self._classes.forget()

    def sites(self, group: TrainerGroup) -> Sites:
        return Sites.of(group.sites)

    def run(self, group: TrainerGroup, number: int, phase: Phase) -> PendingRound:
        state, residual, rounding = self._state, self.residual, self.gate.rounding
        residual.forget_message()
        with phase("gate"):
            own = self.gate.local_message(state, residual, self._wire)

        def announce(digest: str) -> None:  # before the message is sent: it may count although this trainer fails
            residual.pending_message = None if own.bad else digest

        coder = Coder(number, state.theta, state.momentum, rounding, self._wire, self._classes, state.threads)
        require_same = partial(group.require_same_tensors, number, state.digests)
        transfer = Transfer(group, coder, state.parameters.blocks, phase, require_same, announce)
        arrived: Transferred | None = None
        sites, reduce_gate = self.sites(group), None
        try:
            if gates_sums(self.exchange.gate_sums, sites, lookahead=bool(residual.lookahead)):
                reduce_gate = ReduceGate(state.theta, rounding, self.gate.scale, self._wire)
                residual.add_held_back = reduce_gate.add_residual
            if reduce_gate or sites.several or group.size >= SCATTER_FROM:
                arrived = transfer.scatter(own, sites, reduce_gate)
            if arrived is None:  # few trainers, or a sum that no message takes
                residual.add_held_back = None
                arrived = transfer.gather(own)
        except (NonFinite, CorruptMessage, Diverged):  # on all trainers alike: the message has counted with none
            residual.forget_message()
            raise
        return self._pending(group.size, sum(len(positions) for positions, _ in own.entries), arrived)

    def _pending(self, trainers: int, entries: int, arrived: Transferred) -> PendingRound:
        residual, rounding = self.residual, self.gate.rounding

        def apply(lookahead: np.float32) -> int:
            residual.complete_next()
            summed = self._state.sparse_step(arrived.entries, trainers, residual, lookahead, rounding, self._classes)
            residual.started_with = lookahead
            residual.take_next()
            return summed

        return PendingRound(entries, arrived.payload_bytes, apply, arrived.messages, arrived.scattered)


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


class OuterLoop(NotCopyable):
    """Hooks the inner optimizers' ``step``; after every ``sync_every`` steps one outer round runs inside that call.

    A context manager. Entering it joins the other trainers: before the first round all take rank 0's weights, later
    the outer state of the latest round. Leaving it removes the hook. Outer state is FP32 in host memory, wherever the
    model is.

    A loop is made of an outer ``state``, the ``buffers`` of the model, a ``reduction`` and the ``exchange``'s settings:
    `PulseLoCo` and `DiLoCo` put them together. ``threads`` (default: all cores) share a round's blocks. Raises
    InputError for a ``sync_every`` below 1.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        state: OuterState,
        reduction: Reduction,
        exchange: Exchange,
        *,
        sync_every: int,
        on_round: Callable[[Round], None] | None,
    ) -> None:
        if sync_every < 1:
            raise InputError(
                f"sync_every is {sync_every}", hint="Give the number of inner steps in a round, 1 or more."
            )
        self.sync_every, self.on_round = sync_every, on_round
        self.exchange, self.reduction, self.state = exchange, reduction, state
        self.parameters = state.parameters
        self.buffers = FrozenAndBuffers(model, self.parameters.tensors)
        self.round = self.inner_step = 0
        self.last_round: Round | None = None
        self._serial = SerialThread(type(self).__name__)
        self._process_group = exchange.group
        self._group: TrainerGroup | None = None
        self._hooks: list[Any] = []
        self._seconds: dict[str, float] = {}
        self._messages: list[str] = []
        # The others may have completed rounds since this state was saved, with messages that it knows nothing of.
        self._from_checkpoint = False
        self._in_global_weights = False

    @property
    def threads(self) -> int | None:
        """How many threads share the work of a round; None: as many as there are cores."""
        return self.state.threads

    @threads.setter
    def threads(self, threads: int | None) -> None:
        self.state.threads = self.buffers.threads = threads

    # -- a round

    def _after_step(self) -> None:
        self.inner_step += 1
        if self._group is not None:
            self._group.progress.note(self._note())
        if self.inner_step >= self.sync_every:
            self._run_round()

    def _run_round(self) -> None:
        if self._group is None:
            raise InputError(
                "a round is due, but the trainers have not met",
                hint="Enter it as a context manager; after TrainerLost, call rejoin() or rewind().",
            )
        group, self._seconds = self._group, {}
        sent, between = group.sent_bytes, group.between_bytes
        try:
            # 1. What no optimizer trains: buffers are averaged, frozen parameters compared.
            self.parameters.require()
            with self._phase("buffers"):
                buffers = self.buffers.agree(group, self.round + 1)
            # 2. Gate, wire, exchange. A failure up to here leaves theta, momentum and residual as they were.
            pending = self.reduction.run(group, self.round, self._phase)

            # 3. The outer step. No interrupt comes between its parts.
            def take_effect() -> int:
                with self._phase("update"):
                    # Who is told of the round is shown theta.
                    summed = pending.apply(np.float32(0) if self.on_round else self._lookahead())
                    self._messages = pending.messages
                    self.round, self.inner_step = self.round + 1, 0
                    buffers.commit()
                return summed

            summed = self._serial.run(take_effect, whole=True)
            # 4. All have the same theta. After it has taken effect here: a trainer lost in the comparison leaves the
            # others in a whole state.
            with self._phase("verify"):
                theta = self.state.digest(self.state.theta)
                group.require_same_root(self.round, theta, self.state.digests)
        except (NonFinite, Diverged, CorruptMessage, StateMismatch):  # on all trainers alike
            raise
        except BaseException as error:
            # This round's message may count with the others: no second try before the trainers have met again.
            self._leave(error)
            raise
        group.progress.note(self._note())
        self.last_round = Round(
            number=self.round,
            trainers=group.size,
            parameters=self.parameters.count,
            entries=pending.entries,
            summed=summed,
            scattered=pending.scattered,
            payload_bytes=pending.payload_bytes + buffers.payload_bytes,
            sent_bytes=group.sent_bytes - sent,
            between_bytes=group.between_bytes - between,
            root=theta.root,
            seconds=dict(self._seconds),
        )
        if self.on_round:
            with self.global_weights():
                self.on_round(self.last_round)

    # -- joining and leaving

    def __repr__(self) -> str:
        return f"<{type(self).__name__} after round {self.round}, every {self.sync_every} steps>"

    def __enter__(self) -> Self:
        if not self._hooks:
            if self.round == 0 and not self._from_checkpoint:
                self.state.theta[:] = self.parameters.read()  # the model may have been loaded since
                self.buffers.read_common()
            self._join()
            self._hooks = self.parameters.optimizers.hook(self._after_step)
            self._restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._restart()
        finally:
            self._leave(error)

    def close(self) -> None:
        """Removes the hooks and leaves the group; the model holds theta, or the local steps of a round under way. The
        others get TrainerLeft in their next round."""
        self.__exit__(None, None, None)

    def rejoin(self, group: dist.ProcessGroup | None = None) -> None:
        """Continues with the trainers of ``group``, after TrainerLost or when trainers come or go.

        If one has died, torch.distributed must be reinitialised. All trainers must call this or enter. A trainer
        that is behind gets theta and the outer momentum. A round that was due runs at once; local steps that were not
        sent are not lost. Raises TrainerLost, StateMismatch, InputError, Diverged, NonFinite, CorruptMessage.
        """
        self._leave()
        self._process_group = group
        self._join()

    def rewind(self) -> None:
        """Gives the model the start of the round and the last common buffers, and discards the local steps since."""
        self.buffers.require()

        def rewind() -> None:
            self.inner_step = 0
            self._start_steps(self._lookahead())
            self.buffers.restore()

        self._serial.run(rewind, whole=True)

    def _leave(self, error: BaseException | None = None) -> None:
        """Gives the group up. The others are told that it was on purpose, or because of ``error``."""
        if self._group is not None:
            try:
                self._group.progress.leave(error)
            finally:
                self._group.close()
                self._group = None

    def _join(self) -> None:
        """Makes the group, takes up the common state, and runs a round that is due."""
        if name := self.parameters.first_non_finite(self.state.theta):
            raise NonFinite(f"theta is not finite at {name!r}", hint="Start from weights without NaN and Inf.")
        group = TrainerGroup(self._process_group, timeout_seconds=self.exchange.timeout_seconds)
        group.progress.begin(self._note())
        try:
            self._rendezvous(group)
        except BaseException:
            group.close()
            raise
        self._group = group
        group.progress.note(self._note())
        if self.inner_step >= self.sync_every:
            self._run_round()

    def _rendezvous(self, group: TrainerGroup) -> None:
        """Brings all trainers to one outer state. An error leaves this trainer as it was."""
        handshakes = exchange_handshakes(group, self._handshake())
        group.progress.met()
        require_same_model_and_settings(handshakes, group.rank)
        group.sites = [handshake.site for handshake in handshakes]
        leader = find_leader(handshakes)
        require_no_divergence(handshakes, leader)
        behind = find_behind(handshakes, leader)
        take_up_buffers = self.buffers.meet(group, leader)
        theta, momentum = self._fetch_state(group, leader, behind)

        def take_up() -> None:
            from_checkpoint, self._from_checkpoint = self._from_checkpoint, False
            take_up_buffers()
            if group.rank in behind:
                self._take_up(handshakes[leader], theta, momentum, from_checkpoint)
            self.reduction.forget()

        self._serial.run(take_up, whole=True)

    def _handshake(self) -> Handshake:
        digests = self.state.digests()
        return Handshake(
            settings=self._settings(),
            round=self.round,
            root=digests["theta"].root,
            momentum=digests["momentum"].root,
            messages=self._messages,
            specs=specs_digest(self.parameters.specs, self.buffers.specs),
            site=self.exchange.site or "",
        )

    def _fetch_state(self, group: TrainerGroup, leader: int, behind: list[int]) -> tuple[Floats, Floats]:
        """The leader's theta and momentum, if any are ``behind``. All trainers take part; those receive into copies."""
        theta, momentum = self.state.theta, self.state.momentum
        if not behind:
            return theta, momentum
        if group.rank in behind:
            theta, momentum = theta.copy(), momentum.copy()
        group.broadcast(theta, leader)
        group.broadcast(momentum, leader)
        return theta, momentum

    def _take_up(self, leader: Handshake, theta: Floats, momentum: Floats, from_checkpoint: bool) -> None:
        residual = self.reduction.residual
        if leader.round != self.round and residual is not None:
            message = residual.pending_message
            residual.catch_up(delivery_of(message, self.round, leader, from_checkpoint=from_checkpoint))
        self.state.theta[:], self.state.momentum[:] = theta, momentum
        self.round, self.inner_step, self._messages = leader.round, 0, list(leader.messages)
        self._start_steps(self._lookahead())
        self.buffers.restore()

    def _note(self) -> Note:
        return Note(self.round + 1, self.inner_step, self.sync_every)

    # -- what the model holds between rounds

    def _lookahead(self) -> np.float32:
        """With what the next inner steps start: outside the loop, and where it is asked for, the model holds theta."""
        residual = self.reduction.residual
        if residual is None or not self._hooks or self._in_global_weights:
            return np.float32(0)
        return residual.lookahead

    def _start_steps(self, lookahead: np.float32) -> None:
        """Gives the model its local start; all of it, as the model may hold anything."""
        if (residual := self.reduction.residual) is not None:
            residual.started_with = lookahead
            residual.write_start()
        else:
            self.parameters.write(self.state.theta)

    def _restart(self) -> None:
        """Between rounds, gives the model the local start that is due, unless it holds it."""
        residual = self.reduction.residual
        if residual is not None and self.inner_step == 0 and residual.started_with != self._lookahead():
            self._serial.run(lambda: self._start_steps(self._lookahead()), whole=True)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Within, the model holds the global weights, theta, to be evaluated or published; it may hold this trainer's
        own start of the next inner steps otherwise. Between rounds only: raises InputError after the first inner step
        of one. An inner step that is taken within starts from theta."""
        if self.inner_step:
            raise InputError(
                f"{self.inner_step} inner steps of the round are taken: the model is on its way",
                hint="global_state() has theta at any time; on_round is called while the model holds it.",
            )
        if self._in_global_weights:
            yield
            return
        try:
            self._in_global_weights = True
            self._restart()
            yield
        finally:
            self._in_global_weights = False
            self._restart()

    def global_state(self) -> dict[str, torch.Tensor]:
        """Theta by name, FP32 on the host, in this object's memory: copy or cast it, do not write."""
        self._serial.run(lambda: None)  # whatever an interrupt left behind has ended
        return self.parameters.by_name(self.state.theta)

    def residual(self) -> dict[str, torch.Tensor]:
        """What this trainer holds back so far, by name, FP32 on the host, in this object's memory. DiLoCo has none."""
        self._serial.run(lambda: None)
        residual = self.reduction.residual
        return {} if residual is None else self.parameters.by_name(residual.flat)

    def averaged_state(self) -> dict[str, torch.Tensor]:
        """Theta less what all trainers hold back: the mean of what their next inner steps start from, by name, FP32 on
        the host, the same bits on all trainers (docs/loco.md, 1.2). What to keep at the end of a training, when there
        is no round left for what is late; it changes nothing here.

        All trainers call it, within the ``with``, between rounds (else InputError); a call on some only ends their
        processes, as any collective does that others do not take part in. It costs a dense all-reduce, or nothing
        without a lookahead, where it is theta. Raises TrainerLost, CorruptMessage and Diverged as a round does.
        """
        if self.inner_step:
            raise InputError(
                f"{self.inner_step} inner steps of the round are taken: the residual is that of the last one",
                hint="Call it on all trainers after a round, before the next inner step.",
            )
        group, state, residual = self._group, self.state, self.reduction.residual
        if group is None:
            raise InputError("the trainers have not met", hint="Call it on all trainers, within the loop's `with`.")
        try:
            ahead = residual is not None and residual.lookahead
            found = averaged(group, state, residual) if residual is not None and ahead else state.theta.copy()
            tree = state.digest(found)
            group.require_same_root(self.round, tree, lambda: {"the averaged state": tree})
        except (Diverged, CorruptMessage):  # on all trainers alike
            raise
        except BaseException as error:
            self._leave(error)
            raise
        return self.parameters.by_name(found)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Theta, outer momentum, residual, counters and the last round's buffers: copies, by name.

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
        ahead = state.get("started_with", 0.0)
        if not isinstance(ahead, float) or not 0 <= ahead <= MAX_SCALE:
            raise StateMismatch(f"the saved state's steps started with lookahead {ahead!r}")
        buffers = self.buffers.loaded(state["buffers"]) if "buffers" in state else None
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
            self.reduction.forget()
            if (residual := self.reduction.residual) is not None:
                residual.forget_message()
                residual.started_with = np.float32(ahead)
            self.buffers.load(buffers)
            if self.inner_step == 0:
                self._start_steps(self._lookahead())
                self.buffers.restore()

        self._serial.run(load, whole=True)

    def _state_dict(self) -> dict[str, Any]:
        buffers, residual = self.buffers.saved(), self.reduction.residual
        return {
            **({"buffers": buffers} if buffers else {}),
            "round": self.round,
            "inner_step": self.inner_step,
            "messages": list(self._messages),
            **{key: self.parameters.copies(flat) for key, flat in self._arrays().items()},
            **({"started_with": float(residual.started_with)} if residual and residual.started_with else {}),
        }

    def _arrays(self) -> dict[str, Floats]:
        """The flat arrays that a checkpoint holds."""
        residual = self.reduction.residual
        held_back = {} if residual is None else {"residual": residual.flat}
        return {"theta": self.state.theta, "momentum": self.state.momentum, **held_back}

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
