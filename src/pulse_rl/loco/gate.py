"""PULSELoCo's reduction: the gate, which entries of a pseudo-gradient would change the next forward
pass, and the outer step along their sums (docs/loco.md, sections 1 and 2)."""

from __future__ import annotations

import numpy as np
import torch

from .._native import gate as _gate
from .._native import sparse_outer_step
from ..errors import InputError, NonFinite
from ..state.cast import ROUNDINGS as BY_NAME
from ..state.cast import Rounding
from .messages import Classes, Coder, Compression, Entries, Sent, Sums
from .outer import MessageOutcome, OuterState, Residual
from .parameters import BLOCK_ELEMENTS, FlatBlock, Floats, Positions, is_finite, parts

#: Trainers from which on each sums a share: (1 - 1/R) of a message and of all sums leave a process
#: then, not R - 1 messages, which is more as soon as trainers send some of the same entries. But
#: sums are FP32, and messages of few bits are less than these until there are many of them.
SCATTER_FROM, SCATTER_FEW_BITS_FROM = 4, 8

#: How FP32 rounds to each gate dtype.
ROUNDINGS: dict[torch.dtype, Rounding] = {
    torch.bfloat16: BY_NAME["BF16"],
    torch.float16: BY_NAME["F16"],
    torch.float8_e4m3fn: BY_NAME["F8_E4M3"],
    torch.float8_e5m2: BY_NAME["F8_E5M2"],
}


def rounding_of(dtype: torch.dtype) -> Rounding:
    """How FP32 rounds to a gate dtype. Raises InputError for a dtype that is not a compute
    dtype."""
    if dtype not in ROUNDINGS:
        known = ", ".join(str(d).removeprefix("torch.") for d in ROUNDINGS)
        raise InputError(f"gate_dtype {dtype} is not supported", hint=f"Use one of: {known}.")
    return ROUNDINGS[dtype]


def open_entries(
    weights: Floats,
    now: Floats,
    residual: Floats,
    s: Floats,
    rounding: Rounding,
    *,
    lookahead: float = 0.0,
    bf16_start: bool = False,
    base: int = 0,
) -> Positions | None:
    """Fills ``s = (start - now) + residual`` and returns the positions where ``cast(global) !=
    cast(global - s)``, plus ``base``.

    ``start`` is ``global - lookahead * residual``, with ``bf16_start`` as a BF16 model holds it.
    All arrays are flat FP32 of one length. Compared as bits, so that -0 and 0 differ (PULSE,
    Algorithm 2, line "M_r"). None if an entry of ``s`` is not finite (`is_finite`)."""
    return _gate(weights, now, residual, lookahead, bf16_start, s, rounding, base)


def _nonzero(values: Floats) -> Positions:
    return np.flatnonzero(values).astype(np.uint32)


class Gate:
    """Selects what a trainer sends of ``s``, its local steps and its residual (PULSE, Algorithm 2).

    Open where ``cast(global) != cast(global - s)`` in ``dtype``. An ablation replaces one of the
    three methods below `local_message`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.rounding = dtype, rounding_of(dtype)

    def settings(self) -> dict[str, object]:
        """What all trainers must have in common."""
        return {"gate": type(self).__name__, "gate_dtype": str(self.dtype)}

    def local_message(
        self,
        state: OuterState,
        residual: Residual,
        compression: Compression,
        *,
        closing: bool = False,
    ) -> Sent | str:
        """What this trainer has to send, by block, or the name of a parameter whose
        pseudo-gradient is not finite; fills the next residual. A ``closing`` message has all that
        rounding leaves."""
        parameters = state.parameters

        def of(block: FlatBlock) -> Entries:
            # 1. s and the open entries, in one pass over memory.
            weights, s = block.of(state.weights), block.of(residual.next)
            positions = self.select(state, block, block.of(residual.flat), s, residual.started_with)
            if positions is None:
                raise NonFinite(parameters.name_at(block.start + int(np.argmin(is_finite(s)))))
            if closing:
                positions = np.flatnonzero(compression.round(s)).astype(np.uint32)
            # 2. What they are as they travel. A value may become infinite there, which no weight
            # survives.
            selected = s[positions]
            sent = compression.round(self.values(weights[positions], selected))
            finite = is_finite(sent)
            if not finite.all():
                place = int(positions[np.argmin(finite)])
                raise NonFinite(parameters.name_at(block.start + place))
            # 3. s = sent + residual holds exactly: nothing is lost.
            s[positions] = self.remainder(selected, sent)
            return positions, sent

        try:
            return Sent(state.each_block(of), closing)
        except NonFinite as error:  # with the name alone
            return str(error)

    def select(
        self,
        state: OuterState,
        block: FlatBlock,
        residual: Floats,
        s: Floats,
        lookahead: np.float32,
    ) -> Positions | None:
        """Fills ``s`` and returns the positions of the entries to send; None if an entry of ``s``
        is not finite."""
        weights, parameters = block.of(state.weights), state.parameters
        found: list[Positions] = []
        for part, segment in parts(block):
            positions = open_entries(
                weights[part],
                parameters.now(segment),
                residual[part],
                s[part],
                self.rounding,
                lookahead=float(lookahead),
                bf16_start=parameters.tensors[segment.spec.name].dtype == torch.bfloat16,
                base=part.start,
            )
            if positions is None:
                return None
            found.append(positions)
        return np.concatenate(found)

    def values(self, weights: Floats, s: Floats) -> Floats:
        """The values to send for the selected entries ``s``, before they are rounded."""
        return s

    def remainder(self, s: Floats, sent: Floats) -> Floats:
        """What stays in the residual of the selected entries ``s``."""
        return s - sent


class GatedReduction:
    """PULSELoCo's: entries that pass the gate are sent and summed in rank order, the others stay in
    the residual."""

    def __init__(
        self, state: OuterState, residual: Residual, gate: Gate, compression: Compression
    ) -> None:
        self.residual: Residual = residual
        self.gate, self.compression = gate, compression
        self.state, self.classes = state, Classes(state.parameters.blocks)

    def settings(self) -> dict[str, object]:
        return {
            **self.gate.settings(),
            "compression": self.compression.name,
            "lookahead": float(self.residual.lookahead),
        }

    def forget(self) -> None:
        self.classes.forget()

    def scatters(self, trainers: int) -> bool:
        """Whether each trainer sums a share; otherwise all get all messages."""
        return trainers >= (SCATTER_FEW_BITS_FROM if self.compression.few_bits else SCATTER_FROM)

    def message(self, *, closing: bool) -> Sent | str:
        """As `Gate.local_message`."""
        return self.gate.local_message(self.state, self.residual, self.compression, closing=closing)

    def coder(self, number: int) -> Coder:
        """Codes the messages of the round after ``number``."""
        state, rounding = self.state, self.gate.rounding
        return Coder(
            number,
            state.weights,
            state.momentum,
            rounding,
            self.compression,
            self.classes,
            state.threads,
        )

    def step(
        self, sums: Sums, trainers: int, lookahead: np.float32, outcome: MessageOutcome | None
    ) -> int:
        """The outer step along ``sums``, by block, / ``trainers``. The residual settles the
        ``outcome`` of this trainer's message, if it has any. The model gets the next start,
        ``global - lookahead * residual``, and parameters their classes of the next round. The
        number of parameters whose sum is not 0."""
        state, residual = self.state, self.residual
        if outcome is not None:
            residual.settle(outcome)

        # What closing messages have moves the global weights by the whole of its mean at once, past
        # the momentum (docs/loco.md, 1.2).
        def close(block: FlatBlock) -> int:
            places, values = sums.closing[block.number]
            block.of(state.weights)[places] -= residual.lookahead * (values / np.float32(trainers))
            return len(places)

        if not sums.steppers:  # the momentum rests
            moved: int = sum(state.each_block(close))
            self.classes.forget()
            residual.write_start(lookahead)
            return moved

        # One pass over memory for all that follows from the sums; a pass is what a round costs a
        # large model.
        def step(block: FlatBlock) -> int:
            summed = np.array([close(block)], np.int64)
            weights, momentum, held_back = map(
                block.of, (state.weights, state.momentum, residual.flat)
            )
            known, octaves = self.classes.renewed(block, momentum)
            for part, segment in parts(block):
                # ``start`` is the model's own memory where it is FP32 on the host. All positions of
                # the part count as one granule, so that ``summed`` has one number.
                def fill(start: Floats, part: slice = part) -> None:
                    sparse_outer_step(
                        theta=weights[part],
                        momentum=momentum[part],
                        residual=held_back[part],
                        lookahead=float(lookahead),
                        start=start,
                        from_=part.start,
                        summands=[sums.steps[block.number]],
                        trainers=trainers,
                        lr=state.lr,
                        mu=state.mu,
                        offset=0,
                        granule=BLOCK_ELEMENTS,
                        counts=summed,
                        rounding=self.gate.rounding,
                        octaves=octaves,
                        classes=known[part],
                    )

                state.parameters.give(segment, fill)
            return int(summed[0])

        summed: int = sum(state.each_block(step))
        residual.started_with = lookahead
        return summed
