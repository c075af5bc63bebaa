"""PULSELoCo: only entries that pass the gate are sent, the rest is carried to the next round (PULSE, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .._native import add_entries
from ..errors import CorruptMessage, NonFinite
from .exchange import Exchange
from .gate import Floats, Positions, is_sound, open_entries, rounding_of
from .membership import Standing
from .outer import Heard, OuterLoop, Round
from .parameters import FlatBlock
from .wire import Entries, Message, Wire, digest_of

_NON_FINITE = b"PLSN"


class PulseLoCo(OuterLoop):
    """Keeps trainers in step by sending what would change the next forward pass (docs/loco.md).

    After ``sync_every`` inner steps: ``s = (theta - w) + residual``; the entries with
    ``cast(theta) != cast(theta - s)`` in ``gate_dtype`` are sent and leave the residual; theta takes one Nesterov step
    along the mean over all trainers, summed in rank order; the model gets theta. With ``wire_dtype=torch.bfloat16``
    values are rounded, and what they lose stays in the residual.

    ``model``: a module, or a mapping of names to the FP32 or BF16 tensors that ``inner_optimizer`` trains. ``group``:
    the trainers (default: all of torch.distributed; alone without it). ``timeout`` in seconds bounds every exchange.
    ``on_round`` gets a `Round` after each one; only then is the model's state common to all, and fit to be published.

    Memory on the host: 16 bytes a parameter. Raises, from inside ``inner_optimizer.step()``: TrainerLost (see
    `rejoin`), NonFinite (see `rewind`), Diverged, CorruptMessage.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        gate_dtype: torch.dtype = torch.bfloat16,
        wire_dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        threads: int | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        self.gate_dtype = gate_dtype
        self._rounding = rounding_of(gate_dtype)
        self._wire = Wire(wire_dtype)
        super().__init__(
            model,
            inner_optimizer,
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            group=group,
            timeout=timeout,
            threads=threads,
            on_round=on_round,
        )
        self.residual_flat = np.zeros_like(self.theta_flat)
        # The residual of the round under way: the old one stays whole until the round is common to all.
        self._next_residual = np.empty_like(self.theta_flat)
        # The digest of the message that this trainer sent in a round that it has not seen the end of.
        self._attempt: str | None = None

    def residual(self) -> dict[str, torch.Tensor]:
        """What was gated off so far, by name, FP32 on the host, in this object's memory."""
        return {name: torch.from_numpy(view) for name, view in self.parameters.views(self.residual_flat).items()}

    # -- a round

    def _outer_round(self, exchange: Exchange) -> Heard:
        with self._phase("gate"):
            message, sent = self._speak()
        messages, heard = self._hear(exchange, message)
        before, digests = exchange.rank, [digest_of(m) for m in messages]  # so many of the others come first

        def update(block: FlatBlock) -> None:
            total = np.zeros(block.stop - block.start, np.float32)
            others = heard[block.number]
            for positions, values in [*others[:before], sent[block.number], *others[before:]]:
                add_entries(total, positions, values)
            self._update(block, total, exchange.size)

        def settle() -> None:
            self.residual_flat, self._next_residual = self._next_residual, self.residual_flat
            self._messages, self._attempt = digests, None

        return Heard(sum(len(positions) for positions, _ in sent), len(message), update, settle)

    def _speak(self) -> tuple[bytes, list[Entries]]:
        """This trainer's message, and what it sends of each block; fills the next residual."""
        self._attempt = None
        try:
            said = self._each_block(self._say)
        except NonFinite as error:
            return _NON_FINITE + str(error).encode(), []
        message = Message.pack(self.round, self._wire, [payload for payload, _ in said])
        self._attempt = digest_of(message)
        return message, [entries for _, entries in said]

    def _say(self, block: FlatBlock) -> tuple[bytes, Entries]:
        theta, momentum = block.of(self.theta_flat), block.of(self.momentum_flat)
        start, now = self.parameters.start_block(block, self.theta_flat), np.empty_like(theta)
        self.parameters.read_block(block, now)
        s = block.of(self._next_residual)
        positions = self._select(theta, start, now, block.of(self.residual_flat), s)
        if positions is None:
            raise NonFinite(self.parameters.name_at(block.start + int(np.argmin(is_sound(s)))))
        values = s[positions]
        sent = self._wire.round(self._values(theta[positions], values))
        if not is_sound(sent).all():
            raise NonFinite(self.parameters.name_at(block.start + int(positions[np.argmin(is_sound(sent))])))
        s[positions] = self._left(values, sent)
        return self._wire.encode(theta, momentum, self._rounding, block.runs, (positions, sent)), (positions, sent)

    def _hear(self, exchange: Exchange, message: bytes) -> tuple[list[bytes], list[list[Entries]]]:
        """All messages, and the entries of each block from each of the others, once all trainers could read all."""
        problem: CorruptMessage | None = None
        messages: list[bytes] = []
        heard: list[list[Entries]] = []
        try:
            with self._phase("exchange"):
                messages = exchange.gather(message, most=self._most_bytes())
            for rank, other in enumerate(messages):
                if other.startswith(_NON_FINITE):
                    name = other.removeprefix(_NON_FINITE).decode(errors="replace")
                    raise NonFinite(f"trainer {rank}: the pseudo-gradient of {name!r} is not finite")
            with self._phase("decode"):
                heard = self._decode([m for rank, m in enumerate(messages) if rank != exchange.rank])
        except CorruptMessage as error:
            problem = error
        with self._phase("exchange"):
            good = exchange.gather_short(b"\0" if problem else b"\1")
        if all(flag == b"\1" for flag in good):
            return messages, heard
        # Theta and momentum are part of the code: a trainer that holds others cannot read it.
        self._name_difference(exchange)
        failed = [rank for rank, flag in enumerate(good) if flag != b"\1"]
        raise CorruptMessage(f"trainers {failed} could not read what was sent: {problem or 'see there'}") from problem

    def _decode(self, messages: list[bytes]) -> list[list[Entries]]:
        unpacked = [Message.unpack(m, len(self.parameters.blocks)) for m in messages]
        for message in unpacked:
            if message.round != self.round or message.wire != self._wire.code:
                raise CorruptMessage(f"a message of round {message.round}, wire {message.wire} in round {self.round}")

        def decode(block: FlatBlock) -> list[Entries]:
            payloads = [message.payloads[block.number] for message in unpacked]
            theta, momentum = block.of(self.theta_flat), block.of(self.momentum_flat)
            return self._wire.decode(payloads, theta, momentum, self._rounding, block.runs)

        return self._each_block(decode)

    # -- what a variant may change

    def _select(self, theta: Floats, start: Floats, now: Floats, residual: Floats, s: Floats) -> Positions | None:
        """Fills ``s`` and says which entries are sent; None if one of ``s`` is not finite."""
        return open_entries(theta, start, now, residual, s, self._rounding)

    def _values(self, theta: Floats, s: Floats) -> Floats:
        """What is sent for the selected entries."""
        return s

    def _left(self, s: Floats, sent: Floats) -> Floats:
        """What stays in the residual of the selected entries."""
        return s - sent

    # -- joining

    def _fall_in(self, leading: Standing, loaded: bool) -> None:
        """What this trainer has not sent stays in its residual; what was counted, or may have been, does not."""
        counted = leading.round == self.round + 1 and self._attempt in leading.messages
        unknown = loaded or (self._attempt is not None and leading.round > self.round + 1)
        if counted:
            self.residual_flat, self._next_residual = self._next_residual, self.residual_flat
        elif unknown:
            self.residual_flat.fill(0)
        else:
            for block in self.parameters.blocks:
                now, residual = np.empty(block.stop - block.start, np.float32), block.of(self.residual_flat)
                self.parameters.read_block(block, now)
                s = (self.parameters.start_block(block, self.theta_flat) - now) + residual
                np.copyto(residual, s, where=is_sound(s))
        self._attempt = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._attempt = None

    # -- state

    def _arrays(self) -> dict[str, Floats]:
        return {**super()._arrays(), "residual": self.residual_flat}

    def _settings(self) -> dict[str, object]:
        told = {"gate_dtype": str(self.gate_dtype), "wire_dtype": str(self._wire.dtype)}
        return {**super()._settings(), **told}

    def _most_bytes(self) -> int:
        """No message is longer: an entry takes at most 10 bytes, a block's head less than 4 KiB."""
        return 10 * self.parameters.count + 4096 * (1 + len(self.parameters.blocks))
