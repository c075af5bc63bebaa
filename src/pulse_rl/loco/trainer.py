"""What one trainer brings from round to round: it is saved, restored, and brought to the others' by
joining them (docs/loco.md, section 5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Self

import numpy as np

from ..errors import CorruptMessage, Diverged, InputError, NonFinite, StateMismatch
from ..state.tensors import TensorSpec
from .frozen import FrozenTensors
from .group import TrainerGroup
from .outer import MessageOutcome, OuterState, Residual
from .parameters import Floats
from .wire import FORMAT

MAX_LOOKAHEAD = 1024.0

_MAX_HANDSHAKE_BYTES = 1 << 20
_FIELDS: dict[str, type] = {
    "settings": dict,
    "round": int,
    "root": str,
    "momentum": str,
    "messages": list,
    "specs": str,
    "format": int,
}


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a trainer sends when trainers meet.

    ``settings`` are those that all must share. ``round`` is its last common round, ``root`` the
    root of theta after it, ``momentum`` that of the outer momentum (both 64 hexadecimal digits).
    ``messages`` are the digests of that round's messages, one per trainer, and ``specs`` is the
    digest of its parameters (`specs_digest`). ``format`` is that of the handshake and of all
    messages.
    """

    settings: dict[str, Any]
    round: int
    root: str
    momentum: str
    messages: list[str]
    specs: str
    format: int = FORMAT

    @property
    def state(self) -> tuple[int, str, str]:
        """Round and roots: equal for two trainers that hold the same outer state."""
        return self.round, self.root, self.momentum

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptMessage unless ``data`` is a handshake. Fields that are not known are
        ignored."""
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise CorruptMessage(f"a trainer's handshake is not JSON: {error}") from None
        if not isinstance(fields, dict) or any(
            not isinstance(fields.get(k), t) for k, t in _FIELDS.items()
        ):
            raise CorruptMessage(f"a trainer's handshake lacks one of {', '.join(_FIELDS)}")
        if fields["format"] != FORMAT:
            raise CorruptMessage(
                f"a trainer's handshake has format {fields['format']}, this one reads {FORMAT}"
            )
        return cls(**{name: fields[name] for name in _FIELDS})


def specs_digest(
    specs: Sequence[TensorSpec], untrained: Sequence[tuple[str, str, tuple[int, ...]]] = ()
) -> str:
    """SHA-256 of names, dtypes and shapes in order, of the trained parameters and of ``untrained``
    tensors, 64 hexadecimal digits (docs/loco.md, section 5)."""
    both = [[(s.name, s.dtype.name, s.shape) for s in specs], list(untrained)]
    return sha256(json.dumps(both, separators=(",", ":")).encode()).hexdigest()


def exchange_handshakes(group: TrainerGroup, own: Handshake) -> list[Handshake]:
    """The handshakes of all trainers. Raises TrainerLost and CorruptMessage."""
    return [
        Handshake.parse(data)
        for data in group.all_gather(own.to_bytes(), max_bytes=_MAX_HANDSHAKE_BYTES)
    ]


def require_same_model_and_settings(handshakes: Sequence[Handshake], own_rank: int) -> None:
    """Raises StateMismatch if a trainer has other parameters than ``own_rank``, InputError if it
    has other settings."""
    own = handshakes[own_rank]
    for rank, handshake in enumerate(handshakes):
        if handshake.specs != own.specs:
            raise StateMismatch(
                f"trainer {rank} has other parameters or buffers, or trains others: names, "
                "dtypes or shapes differ"
            )
        if handshake.settings != own.settings:
            raise InputError(
                f"trainer {rank} runs with {handshake.settings}, this one with {own.settings}"
            )


def find_leader(handshakes: Sequence[Handshake]) -> int:
    """The rank whose state all take up: the lowest one in the latest round."""
    latest = max(handshake.round for handshake in handshakes)
    return next(rank for rank, handshake in enumerate(handshakes) if handshake.round == latest)


def find_behind(handshakes: Sequence[Handshake], leader: int) -> list[int]:
    """The ranks that hold another state than the leader."""
    return [
        rank
        for rank, handshake in enumerate(handshakes)
        if handshake.state != handshakes[leader].state
    ]


def require_no_divergence(handshakes: Sequence[Handshake], leader: int) -> None:
    """Raises Diverged if the leader's round, past round 0, left another trainer with another state.

    Before the first round all states may differ: each trainer still has its own weights.
    """
    latest = handshakes[leader].round
    diverged = [
        rank for rank in find_behind(handshakes, leader) if handshakes[rank].round == latest
    ]
    if latest and diverged:
        raise Diverged(
            f"in round {latest} the state of trainers {diverged} is not that of trainer {leader}"
        )


def outcome_of(
    message: str | None, number: int, leader: Handshake, *, from_checkpoint: bool
) -> MessageOutcome:
    """What became of the message of the round after ``number``, the last one that this trainer has
    completed.

    ``message`` is its digest, None if none was sent. The leader knows the messages of its last
    round alone. Of a trainer that resumed ``from_checkpoint`` and has met nobody since, it is
    unknown what it sent after it was saved.
    """
    if leader.round == number + 1 and message in leader.messages:
        return MessageOutcome.COUNTED
    if from_checkpoint or (message is not None and leader.round > number + 1):
        return MessageOutcome.UNKNOWN
    return MessageOutcome.NOT_COUNTED


class Trainer:
    """Theta and momentum (``state``), the ``residual`` if there is error feedback, what no
    optimizer trains of the model, and the counters of the round under way."""

    def __init__(self, state: OuterState, residual: Residual | None) -> None:
        self.state, self.residual, self.parameters = state, residual, state.parameters
        self.frozen = FrozenTensors(self.parameters.model, self.parameters.tensors)
        self.round = self.inner_step = 0
        self.name = ""
        """Among trainers that meet in a store; a checkpoint keeps it."""
        self.messages: list[str] = []
        """The digests of the last round's messages."""
        # The others may have completed rounds since this state was saved, with messages that it
        # knows nothing of.
        self._from_checkpoint = False
        self.restored_in: int | None = None
        """The round in which it came back from a checkpoint of inner steps."""

    # -- what the model holds

    def load_model_weights(self) -> None:
        """Before the first round theta is what the model holds: it may have been loaded since this
        was made."""
        if self.round == 0 and not self._from_checkpoint:
            self.state.theta[:] = self.parameters.read()

    def write_start(self, lookahead: np.float32) -> None:
        """Gives the model its local start; all of it, as the model may hold anything."""
        if self.residual is not None:
            self.residual.started_with = lookahead
            self.residual.write_start()
        else:
            self.parameters.write(self.state.theta)

    def rewind(self, lookahead: np.float32) -> None:
        """Gives the model the start of the round."""
        self.inner_step = 0
        self.restored_in = None
        self.write_start(lookahead)

    def complete_round(self, messages: list[str]) -> None:
        self.messages = messages
        self.round, self.inner_step = self.round + 1, 0

    # -- joining

    def take_up(self, number: int, theta: Floats, momentum: Floats, lookahead: np.float32) -> None:
        """Takes the outer state after round ``number``; local steps are discarded, the residual
        stays."""
        self.state.theta[:], self.state.momentum[:] = theta, momentum
        self.round, self.messages = number, []
        self.rewind(lookahead)

    def meet(
        self,
        group: TrainerGroup,
        settings: dict[str, object],
        lookahead: np.float32,
    ) -> Callable[[], None]:
        """Agrees with the others on one outer state. What is returned takes it up, and cannot fail;
        an error before leaves this trainer as it was.

        ``settings``: those that all must share; ``lookahead``: with what the next inner steps start
        where another state is taken up. Raises TrainerLost, CorruptMessage, Diverged,
        StateMismatch, InputError and NonFinite.
        """
        # 1. Handshakes: all have one model and the same settings, and none that is in the latest
        # round has diverged.
        handshakes = exchange_handshakes(group, self._handshake(settings))
        group.progress.met()
        require_same_model_and_settings(handshakes, group.rank)
        leader = find_leader(handshakes)
        require_no_divergence(handshakes, leader)
        self.frozen.meet(group)
        # 2. Those behind the leader get its state, into copies: a trainer that is lost leaves the
        # others whole.
        behind = find_behind(handshakes, leader)
        theta, momentum = self._fetch_state(group, leader, behind)

        # 3. Nothing that follows waits for another trainer.
        def take_up() -> None:
            from_checkpoint, self._from_checkpoint = self._from_checkpoint, False
            if group.rank in behind:
                self._settle_message(handshakes[leader], from_checkpoint)
                self.state.theta[:], self.state.momentum[:] = theta, momentum
                self.round, self.messages = (
                    handshakes[leader].round,
                    list(handshakes[leader].messages),
                )
                self.rewind(lookahead)

        return take_up

    def _handshake(self, settings: dict[str, object]) -> Handshake:
        digests = self.state.digests()
        return Handshake(
            settings=settings,
            round=self.round,
            root=digests["theta"].root,
            momentum=digests["momentum"].root,
            messages=self.messages,
            specs=specs_digest(self.parameters.specs, self.frozen.specs),
        )

    def _fetch_state(
        self, group: TrainerGroup, leader: int, behind: list[int]
    ) -> tuple[Floats, Floats]:
        """The leader's theta and momentum, if any are ``behind``. All trainers take part."""
        theta, momentum = self.state.theta, self.state.momentum
        if not behind:
            return theta, momentum
        if group.rank in behind:
            theta, momentum = theta.copy(), momentum.copy()
        group.broadcast(theta, leader)
        group.broadcast(momentum, leader)
        return theta, momentum

    def _settle_message(self, leader: Handshake, from_checkpoint: bool) -> None:
        """What was sent in a round whose end this trainer did not see has counted, or stays in the
        residual."""
        if self.residual is not None and leader.round != self.round:
            message = self.residual.pending_message
            self.residual.catch_up(
                outcome_of(message, self.round, leader, from_checkpoint=from_checkpoint)
            )

    # -- checkpoints

    def saved(self) -> dict[str, Any]:
        """Copies, by name."""
        residual = self.residual
        return {
            "round": self.round,
            "inner_step": self.inner_step,
            "messages": list(self.messages),
            **({"trainer": self.name} if self.name else {}),
            **{key: self.parameters.copies(flat) for key, flat in self._arrays().items()},
            **(
                {"started_with": float(residual.started_with)}
                if residual and residual.started_with
                else {}
            ),
            **(
                {"message": residual.pending_message} if residual and residual.includes_sent else {}
            ),
        }

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
        message = saved.get("message")
        if message is not None and not isinstance(message, str):
            raise StateMismatch(f"the saved state's message is {message!r}, no digest")
        counters, messages = (saved["round"], saved["inner_step"]), saved["messages"]
        if not (
            isinstance(messages, list) and all(isinstance(m, str) for m in messages)
        ) or not all(isinstance(n, int) and n >= 0 for n in counters):
            raise StateMismatch(
                f"the saved state's counters {counters} or messages are not what they should be"
            )
        for key, flat in fresh.items():
            self.parameters.load(saved[key], flat, f"saved {key}")

        def load(lookahead: np.float32) -> None:
            for key, flat in self._arrays().items():
                flat[:] = fresh[key]
            (self.round, self.inner_step), self.messages, self._from_checkpoint = (
                counters,
                list(messages),
                True,
            )
            self.restored_in = self.round if self.inner_step else None
            if self.name and isinstance(saved.get("trainer"), str):
                self.name = saved["trainer"]
            if self.residual is not None:
                self.residual.forget_message()
                if self.name:  # over a store
                    self.residual.pending_message, self.residual.includes_sent = (
                        message,
                        "message" in saved,
                    )
                self.residual.started_with = np.float32(ahead)
            if self.inner_step == 0:  # in mid-round the model is left to its own checkpoint
                self.rewind(lookahead)

        return load

    def require_finite(self) -> None:
        """Raises NonFinite where theta is not finite."""
        if name := self.parameters.first_non_finite(self.state.theta):
            raise NonFinite(
                f"theta is not finite at {name!r}", hint="Start from weights without NaN and Inf."
            )

    def _arrays(self) -> dict[str, Floats]:
        """The flat arrays that a checkpoint holds."""
        held_back = {} if self.residual is None else {"residual": self.residual.flat}
        return {"theta": self.state.theta, "momentum": self.state.momentum, **held_back}
