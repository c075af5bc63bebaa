"""What one trainer brings from round to round: the global weights and their momentum, the residual,
and what the next inner steps start from (docs/loco.md, sections 1, 1.2 and 5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np

from .._native import outer_step
from .._util.serial import SerialThread
from .._util.threads import ordered_map
from ..errors import InputError, NonFinite, StateMismatch
from ..state.digest import StateDigest, state_digest
from ..state.tensors import TensorSpec
from .parameters import FlatBlock, Floats, FrozenTensors, Parameters, is_finite, parts

MAX_LOOKAHEAD = 1024.0

T = TypeVar("T")


class OuterState:
    """The global weights and the outer momentum, FP32 in host memory, flat in the order of
    ``parameters``; Nesterov SGD on them.

    Raises InputError for an ``lr`` that is not above 0, and a ``momentum`` out of [0, 1)."""

    def __init__(self, parameters: Parameters, lr: float, momentum: float) -> None:
        if not (lr > 0 and 0 <= momentum < 1):
            raise InputError(f"outer_lr {lr} or outer_momentum {momentum} is out of range")
        self.parameters, self.lr, self.mu = parameters, lr, momentum
        self.threads: int | None = None
        if parameters.ranks:
            parameters.ranks.collect()
        self.weights = parameters.read()
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
        return {"global": self.digest(self.weights), "momentum": self.digest(self.momentum)}

    def dense_step(self, total: Floats, trainers: int) -> None:
        """One step along ``total`` / ``trainers``."""

        def step(block: FlatBlock) -> None:
            arrays = block.of(self.weights), block.of(self.momentum), block.of(total)
            outer_step(*arrays, trainers, self.lr, self.mu)

        self.each_block(step)


class MessageOutcome(Enum):
    """What became of the message that a trainer sent in a round whose end it did not see."""

    COUNTED = "counted"
    NOT_COUNTED = "not counted"
    UNKNOWN = "unknown"


class Residual:
    """What one trainer has not sent: error feedback. ``flat`` is that of the last round; a message
    fills ``next`` and leaves ``flat`` as it is until it is known what became of it.

    ``lookahead``: inner steps start from ``global - lookahead * flat``; ``started_with`` is that of
    the steps under way.
    """

    def __init__(self, state: OuterState, lookahead: float) -> None:
        self._state = state
        self.flat = np.zeros(state.parameters.count, np.float32)
        self.next = np.empty_like(state.weights)
        self.lookahead, self.started_with = np.float32(lookahead), np.float32(0)
        #: The digest of the message that was sent in a round that has not taken effect here.
        self.message: str | None = None

    def sent(self, digest: str | None) -> None:
        """Note the message before it leaves: it may count although this trainer fails."""
        self.message = digest

    def settle(self, outcome: MessageOutcome) -> None:
        """Take up what became of the message, and of the inner steps under way (docs/loco.md,
        section 5). The global weights are still those of the last round."""
        match outcome:
            case MessageOutcome.COUNTED:
                # The old residual's memory takes the next one: two arrays, and no copy.
                self.flat, self.next = self.next, self.flat
            case MessageOutcome.UNKNOWN:
                self.flat.fill(0)
            case MessageOutcome.NOT_COUNTED:
                for block in self._state.parameters.blocks:
                    s = self._steps(block)
                    s += block.of(self.flat)
                    np.copyto(block.of(self.flat), s, where=is_finite(s))
        self.message = None

    def write_start(self, lookahead: np.float32) -> None:
        """Gives the model what its next inner steps start from."""
        state, self.started_with = self._state, lookahead

        def write(block: FlatBlock) -> None:
            for part, segment in parts(block):
                state.parameters.give(segment, partial(self._fill_start, block, part))

        if lookahead:
            state.each_block(write)
        else:
            state.parameters.write(state.weights)

    def require_finite_steps(self) -> None:
        """Raises NonFinite where the model's weights, and so the inner steps, are not finite."""

        def require(block: FlatBlock) -> None:
            if not (finite := is_finite(self._steps(block))).all():
                name = self._state.parameters.name_at(block.start + int(np.argmin(finite)))
                raise NonFinite(f"the pseudo-gradient of {name!r} is not finite")

        self._state.each_block(require)

    def _fill_start(self, block: FlatBlock, part: slice, out: Floats) -> None:
        """Fills ``out`` with what the steps under way start from, with a lookahead."""
        np.multiply(self.started_with, block.of(self.flat)[part], out=out)
        np.subtract(block.of(self._state.weights)[part], out, out=out)

    def _steps(self, block: FlatBlock) -> Floats:
        """The block's local steps: what they started from, less what the model holds."""
        parameters, start = self._state.parameters, block.of(self._state.weights)
        s = np.empty_like(start)
        if self.started_with:
            start = np.empty_like(start)
            self._fill_start(block, slice(0, len(start)), start)
        start = parameters.as_written(block, start)
        parameters.read_block(block, s)
        return np.subtract(start, s, out=s)


def specs_digest(
    specs: Sequence[TensorSpec], untrained: Sequence[tuple[str, str, tuple[int, ...]]] = ()
) -> str:
    """SHA-256 of names, dtypes and shapes in order, of the trained parameters and of ``untrained``
    tensors, 64 hexadecimal digits (docs/loco.md, section 5)."""
    both = [[(s.name, s.dtype.name, s.shape) for s in specs], list(untrained)]
    return sha256(json.dumps(both, separators=(",", ":")).encode()).hexdigest()


class Trainer:
    """The global weights and momentum (``state``), the ``residual`` if there is error feedback,
    what no optimizer trains of the model, and the counters of the round under way."""

    def __init__(self, state: OuterState, residual: Residual | None) -> None:
        self.state, self.residual, self.parameters = state, residual, state.parameters
        self.frozen = FrozenTensors(self.parameters)
        self._serial = SerialThread("PulseLoCo")
        self.round = self.inner_step = 0
        self.name = ""
        #: Whether the name was given, so that another trainer's checkpoint is none of its own.
        self.is_named = False
        #: The digests of the last round's messages.
        self.messages: list[str] = []
        # The others may have completed rounds since this state was saved, with messages that it
        # knows nothing of.
        self.from_checkpoint = False
        #: The run and the name under which this trainer meets others in a store, "" elsewhere.
        #: A checkpoint keeps both.
        self.run = ""
        #: What is to be sent before the next inner step: "round" once inner steps are in the
        #: residual already, "closing" for a closing round; "" while inner steps are taken.
        self.due = ""

    def whole(self, work: Callable[[], T]) -> T:
        """``work``, which no interrupt parts."""
        return self._serial.run(work, whole=True)

    def settled(self, work: Callable[[], T]) -> T:
        """``work``, once all that an interrupt has left behind has ended."""
        return self._serial.run(work)

    # -- what the model holds

    def load_model_weights(self) -> None:
        """Before the first round the global weights are what the model holds: they may have been
        loaded since this was made."""
        if self.round == 0 and not self.from_checkpoint:
            self.state.weights[:] = self.parameters.read()

    def write_start(self, lookahead: np.float32) -> None:
        """Gives the model its local start; all of it, as the model may hold anything."""
        if self.residual is not None:
            self.residual.write_start(lookahead)
        else:
            self.parameters.write(self.state.weights)

    def rewind(self, lookahead: np.float32) -> None:
        """Gives the model the start of the round."""
        self.inner_step, self.due = 0, ""
        self.write_start(lookahead)

    def complete_round(self, messages: list[str]) -> None:
        self.messages = messages
        self.round, self.inner_step, self.due = self.round + 1, 0, ""

    # -- joining

    def take_up(
        self,
        number: int,
        weights: Floats,
        momentum: Floats,
        lookahead: np.float32,
        messages: Sequence[str] = (),
    ) -> None:
        """Takes the outer state after round ``number``; local steps are discarded, the residual
        stays."""
        self.state.weights[:], self.state.momentum[:] = weights, momentum
        self.round, self.messages = number, list(messages)
        self.rewind(lookahead)

    # -- checkpoints

    def saved(self) -> dict[str, Any]:
        """Copies, by name."""
        residual = self.residual
        saved: dict[str, Any] = {
            "round": self.round,
            "inner_step": self.inner_step,
            "messages": list(self.messages),
        }
        if self.name:
            saved |= {"trainer": self.name, "run": self.run}
        for key, flat in self._arrays().items():
            views = self.parameters.by_name(flat)
            saved[key] = {name: view.clone() for name, view in views.items()}
        if residual is not None and residual.started_with:
            saved["started_with"] = float(residual.started_with)
        return saved

    def loaded(self, saved: Mapping[str, Any]) -> Callable[[np.float32], None]:
        """What gives this trainer the state that was ``saved``, and cannot fail; the model starts a
        round with the lookahead that it gets. Raises StateMismatch and NonFinite."""
        fresh = {key: np.empty_like(flat) for key, flat in self._arrays().items()}
        missing = {"round", "inner_step", "messages", *fresh} - saved.keys()
        if missing:
            raise StateMismatch(f"the saved state has no {sorted(missing)}")
        ahead = saved.get("started_with", 0.0)
        if not isinstance(ahead, float) or not 0 <= ahead <= MAX_LOOKAHEAD:
            raise StateMismatch(f"the saved state's steps started with lookahead {ahead!r}")
        counters, messages = (saved["round"], saved["inner_step"]), saved["messages"]
        good = isinstance(messages, list) and all(isinstance(m, str) for m in messages)
        if not (good and all(isinstance(n, int) and n >= 0 for n in counters)):
            raise StateMismatch(
                f"the saved state's counters {counters} or messages are not what they should be"
            )
        owner = saved.get("trainer")
        if self.is_named and owner not in (None, self.name):
            raise StateMismatch(
                f"this is the saved state of trainer {owner!r}, not of {self.name!r}",
                hint="Load each trainer's own checkpoint. A new trainer needs none.",
            )
        for key, flat in fresh.items():
            self.parameters.load(saved[key], flat, f"saved {key}")

        def load(lookahead: np.float32) -> None:
            for key, flat in self._arrays().items():
                flat[:] = fresh[key]
            (self.round, self.inner_step), self.messages = counters, list(messages)
            self.from_checkpoint, self.due = True, ""
            if self.name and isinstance(owner, str):
                self.name, self.run = owner, str(saved.get("run", ""))
            if self.residual is not None:
                self.residual.sent(None)
                self.residual.started_with = np.float32(ahead)
            if self.inner_step == 0:  # in mid-round the model is left to its own checkpoint
                self.rewind(lookahead)

        return load

    def require_finite(self) -> None:
        """Raises NonFinite where the global weights are not finite."""
        if name := self.parameters.first_non_finite(self.state.weights):
            raise NonFinite(
                f"the global weights are not finite at {name!r}",
                hint="Start from weights without NaN and Inf.",
            )

    def _arrays(self) -> dict[str, Floats]:
        """The flat arrays that a checkpoint holds."""
        held_back = {} if self.residual is None else {"residual": self.residual.flat}
        return {"global": self.state.weights, "momentum": self.state.momentum, **held_back}
