"""What one trainer brings from round to round: it is saved, restored, and brought to the others' by joining them
(docs/loco.md, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import NonFinite, StateMismatch
from .buffers import FrozenAndBuffers
from .group import TrainerGroup
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
from .outer import OuterState, Residual
from .parameters import Floats

MAX_SCALE = 1024.0
"""Of a lookahead, and of a gate's scale."""


class Trainer:
    """Theta and momentum (``state``), the ``residual`` if there is error feedback, what no optimizer trains of
    ``model``, and the counters of the round under way."""

    def __init__(
        self, model: torch.nn.Module | Mapping[str, torch.Tensor], state: OuterState, residual: Residual | None
    ) -> None:
        self.state, self.residual, self.parameters = state, residual, state.parameters
        self.buffers = FrozenAndBuffers(model, self.parameters.tensors)
        self.round = self.inner_step = 0
        self.messages: list[str] = []
        """The digests of the last round's messages."""
        # The others may have completed rounds since this state was saved, with messages that it knows nothing of.
        self._from_checkpoint = False

    # -- what the model holds

    def take_initial(self) -> None:
        """Before the first round theta is what the model holds: it may have been loaded since this was made."""
        if self.round == 0 and not self._from_checkpoint:
            self.state.theta[:] = self.parameters.read()
            self.buffers.read_common()

    def write_start(self, lookahead: np.float32) -> None:
        """Gives the model its local start; all of it, as the model may hold anything."""
        if self.residual is not None:
            self.residual.started_with = lookahead
            self.residual.write_start()
        else:
            self.parameters.write(self.state.theta)

    def rewind(self, lookahead: np.float32) -> None:
        """Gives the model the start of the round and the last common buffers."""
        self.inner_step = 0
        self.write_start(lookahead)
        self.buffers.restore()

    def complete_round(self, messages: list[str]) -> None:
        self.messages = messages
        self.round, self.inner_step = self.round + 1, 0

    # -- joining

    def meet(
        self, group: TrainerGroup, settings: dict[str, object], site: str | None, lookahead: np.float32
    ) -> Callable[[], None]:
        """Agrees with the others on one outer state. What is returned takes it up, and cannot fail; an error before
        leaves this trainer as it was.

        ``settings``: those that all must share; ``site``: the name of this trainer's; ``lookahead``: with what the next
        inner steps start where another state is taken up. Raises TrainerLost, CorruptMessage, Diverged, StateMismatch,
        InputError and NonFinite.
        """
        # 1. Handshakes: all have one model and the same settings, and none that is in the latest round has diverged.
        handshakes = exchange_handshakes(group, self._handshake(settings, site))
        group.progress.met()
        require_same_model_and_settings(handshakes, group.rank)
        group.sites = [handshake.site for handshake in handshakes]
        leader = find_leader(handshakes)
        require_no_divergence(handshakes, leader)
        # 2. Those behind the leader get its state, into copies: a trainer that is lost leaves the others whole.
        behind = find_behind(handshakes, leader)
        take_up_buffers = self.buffers.meet(group, leader)
        theta, momentum = self._fetch_state(group, leader, behind)

        # 3. Nothing that follows waits for another trainer.
        def take_up() -> None:
            from_checkpoint, self._from_checkpoint = self._from_checkpoint, False
            take_up_buffers()
            if group.rank in behind:
                self._settle_message(handshakes[leader], from_checkpoint)
                self.state.theta[:], self.state.momentum[:] = theta, momentum
                self.round, self.messages = handshakes[leader].round, list(handshakes[leader].messages)
                self.rewind(lookahead)

        return take_up

    def _handshake(self, settings: dict[str, object], site: str | None) -> Handshake:
        digests = self.state.digests()
        return Handshake(
            settings=settings,
            round=self.round,
            root=digests["theta"].root,
            momentum=digests["momentum"].root,
            messages=self.messages,
            specs=specs_digest(self.parameters.specs, self.buffers.specs),
            site=site or "",
        )

    def _fetch_state(self, group: TrainerGroup, leader: int, behind: list[int]) -> tuple[Floats, Floats]:
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
        """What was sent in a round whose end this trainer did not see has counted, or stays in the residual."""
        if self.residual is not None and leader.round != self.round:
            message = self.residual.pending_message
            self.residual.catch_up(delivery_of(message, self.round, leader, from_checkpoint=from_checkpoint))

    # -- checkpoints

    def saved(self) -> dict[str, Any]:
        """Copies, by name."""
        buffers, residual = self.buffers.saved(), self.residual
        return {
            **({"buffers": buffers} if buffers else {}),
            "round": self.round,
            "inner_step": self.inner_step,
            "messages": list(self.messages),
            **{key: self.parameters.copies(flat) for key, flat in self._arrays().items()},
            **({"started_with": float(residual.started_with)} if residual and residual.started_with else {}),
        }

    def loaded(self, saved: Mapping[str, Any]) -> Callable[[np.float32], None]:
        """What gives this trainer the state that was ``saved``, and cannot fail; the model starts a round with the
        lookahead that it gets. Raises StateMismatch and NonFinite."""
        fresh = {key: np.empty_like(flat) for key, flat in self._arrays().items()}
        missing = {"round", "inner_step", "messages", *fresh} - saved.keys()
        if missing:
            raise StateMismatch(f"the saved state has no {sorted(missing)}")
        ahead = saved.get("started_with", 0.0)
        if not isinstance(ahead, float) or not 0 <= ahead <= MAX_SCALE:
            raise StateMismatch(f"the saved state's steps started with lookahead {ahead!r}")
        buffers = self.buffers.loaded(saved["buffers"]) if "buffers" in saved else None
        counters, messages = (saved["round"], saved["inner_step"]), saved["messages"]
        if not (isinstance(messages, list) and all(isinstance(m, str) for m in messages)) or not all(
            isinstance(n, int) and n >= 0 for n in counters
        ):
            raise StateMismatch(f"the saved state's counters {counters} or messages are not what they should be")
        for key, flat in fresh.items():
            self.parameters.load(saved[key], flat, f"saved {key}")

        def load(lookahead: np.float32) -> None:
            for key, flat in self._arrays().items():
                flat[:] = fresh[key]
            (self.round, self.inner_step), self.messages, self._from_checkpoint = counters, list(messages), True
            if self.residual is not None:
                self.residual.forget_message()
                self.residual.started_with = np.float32(ahead)
            self.buffers.load(buffers)
            if self.inner_step == 0:  # in mid-round the model is left to its own checkpoint
                self.rewind(lookahead)

        return load

    def require_finite(self) -> None:
        """Raises NonFinite where theta is not finite."""
        if name := self.parameters.first_non_finite(self.state.theta):
            raise NonFinite(f"theta is not finite at {name!r}", hint="Start from weights without NaN and Inf.")

    def _arrays(self) -> dict[str, Floats]:
        """The flat arrays that a checkpoint holds."""
        held_back = {} if self.residual is None else {"residual": self.residual.flat}
        return {"theta": self.state.theta, "momentum": self.state.momentum, **held_back}
