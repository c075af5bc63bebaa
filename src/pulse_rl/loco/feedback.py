"""What loops with error feedback have in common: the residual, and what becomes of it when trainers are lost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ..errors import CorruptMessage, Diverged, InputError
from .consensus import consensus
from .gate import Floats, is_finite
from .membership import Delivery, Handshake, delivery_of, require_same_root, require_same_tensors
from .outer import OuterLoop
from .parameters import FlatBlock


class ErrorFeedbackLoop(OuterLoop):
    """What a round does not send stays in the residual. After a round whose end this trainer did not see, what it has
    not sent stays, and what counted, or may have counted, does not (docs/loco.md, section 5)."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.residual_flat = np.zeros_like(self.theta_flat)
        # Of the round under way; the old residual stays as it is until the round takes effect.
        self._next_residual = np.empty_like(self.theta_flat)
        # The digest of the message that was sent in a round that has not taken effect here.
        self._pending_message: str | None = None

    def residual(self) -> dict[str, torch.Tensor]:
        """What is held back so far, by name, FP32 on the host, in this object's memory."""
        self._serial.run(lambda: None)  # whatever an interrupt left behind has ended
        return self.parameters.by_name(self.residual_flat)

    def _consensus(self, lookahead: np.float32) -> dict[str, torch.Tensor]:
        if self.inner_step:
            raise InputError(
                f"{self.inner_step} inner steps of the round are taken: the residual is that of the last one",
                hint="Call it on all trainers after a round, before the next inner step.",
            )
        exchange = self._exchange
        if exchange is None:
            raise InputError("the trainers have not met", hint="Call it on all trainers, within the loop's `with`.")
        theta, residual, blocks = self.theta_flat, self.residual_flat, self.parameters.blocks
        try:
            found = consensus(exchange, blocks, theta, residual, lookahead) if lookahead else theta.copy()
            tree = self._digest(found)
            different = partial(require_same_tensors, exchange, self.round, {"the consensus": tree})
            require_same_root(exchange, self.round, tree, different)
        except (Diverged, CorruptMessage):  # on all trainers alike
            raise
        except BaseException as error:
            self._leave(error)
            raise
        return self.parameters.by_name(found)

    @abstractmethod
    def _accumulated(self, block: FlatBlock) -> Floats:
        """What this trainer has to send of the block in all: its local steps and its residual."""

    def _forget_message(self) -> None:
        self._pending_message = None

    def _take_next_residual(self) -> None:
        """The round has taken effect, or its message has counted."""
        self.residual_flat, self._next_residual = self._next_residual, self.residual_flat
        self._forget_message()

    def _catch_up(self, leader: Handshake, from_checkpoint: bool) -> None:
        match delivery_of(self._pending_message, self.round, leader, from_checkpoint=from_checkpoint):
            case Delivery.COUNTED:
                self._take_next_residual()
            case Delivery.UNKNOWN:
                self.residual_flat.fill(0)
            case Delivery.NOT_COUNTED:
                for block in self.parameters.blocks:
                    s = self._accumulated(block)
                    np.copyto(block.of(self.residual_flat), s, where=is_finite(s))
        self._forget_message()

    def _loaded(self, state: Mapping[str, Any]) -> None:
        self._forget_message()

    def _arrays(self) -> dict[str, Floats]:
        return {**super()._arrays(), "residual": self.residual_flat}
