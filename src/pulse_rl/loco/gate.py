"""PULSELoCo's reduction: the gate, which entries of a pseudo-gradient, and which sums of them,
would change the next forward pass, and the outer step along these (docs/loco.md, sections 1, 2 and
4.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .._native import add_entries, sparse_outer_step, sum_entries
from .._native import gate as _gate
from .._util.threads import ordered_map
from ..errors import InputError, NonFinite
from ..state.cast import ROUNDINGS as BY_NAME
from ..state.cast import Rounding
from .outer import OuterState, Residual
from .parameters import BLOCK_ELEMENTS, FlatBlock, Floats, Positions, is_finite, parts
from .wire import Classes, Coder, Entries, Unit, Wire

#: Trainers from which on each sums a share: (1 - 1/R) of a message and of all sums leave a process
#: then, not R - 1 messages, which is more as soon as trainers send some of the same entries. But
#: sums that are not gated are FP32, and messages of few bits are less than these until there are
#: many of them.
SCATTER_FROM, SCATTER_FEW_BITS_FROM = 4, 8
#: Trainers from which on sums pass a gate: earlier with a sweep, of which all sums of a block in
#: FP32 would be most.
GATE_SUMS_FROM, GATE_SWEPT_SUMS_FROM = 8, 4
# Finite for the gate, and as much as any parameter that is.
_OPENS = np.float32(2.0**63)

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
    theta: Floats,
    now: Floats,
    residual: Floats,
    s: Floats,
    rounding: Rounding,
    *,
    lookahead: float = 0.0,
    bf16_start: bool = False,
    base: int = 0,
) -> Positions | None:
    """Fills ``s = (start - now) + residual`` and returns the positions where ``cast(theta) !=
    cast(theta - s)``, plus ``base``.

    ``start`` is ``theta - lookahead * residual``, with ``bf16_start`` as a BF16 model holds it. All
    arrays are flat FP32 of one length. Compared as bits, so that -0 and 0 differ (PULSE, Algorithm
    2, line "M_r"). None if an entry of ``s`` is not finite (`is_finite`).
    """
    return _gate(theta, now, residual, lookahead, bf16_start, s, rounding, base)


def _nonzero(values: Floats) -> Positions:
    return np.flatnonzero(values).astype(np.uint32)


def changing_entries(theta: Floats, s: Floats, rounding: Rounding) -> Positions:
    """The positions where ``cast(theta) != cast(theta - s)``, of ``s`` without NaN."""
    # Beyond the limit any entry changes the cast; the kernel takes nothing above 2^64.
    limited = np.clip(s, -_OPENS, _OPENS)
    positions = open_entries(theta, theta, limited, np.empty_like(s), rounding)
    assert positions is not None
    return positions


class Gate:
    """Selects what a trainer sends of ``s``, its local steps and its residual (PULSE, Algorithm 2).

    Open where ``cast(theta) != cast(theta - s)`` in ``dtype``, and with a ``sweep`` for all
    of a block in one round of so many. An ablation replaces one of the three methods.
    """

    def __init__(self, dtype: torch.dtype, sweep: int | None = None) -> None:
        self.dtype, self.rounding = dtype, rounding_of(dtype)
        self.sweep = sweep

    def settings(self) -> dict[str, object]:
        """What all trainers must have in common."""
        return {
            "gate": type(self).__name__,
            "gate_dtype": str(self.dtype),
            "sweep": self.sweep,
        }

    def sweeps(self, block: FlatBlock, number: int) -> bool:
        """Whether all of a block passes in the round after ``number`` (docs/loco.md, section
        1.3)."""
        return self.sweep is not None and (block.number + number) % self.sweep == 0

    def local_message(
        self, state: OuterState, residual: Residual, wire: Wire, number: int
    ) -> list[Entries] | str:
        """What this trainer has to send in the round after ``number``, by block, or the name of a
        parameter whose pseudo-gradient is not finite; fills the next residual."""
        parameters = state.parameters

        def of(block: FlatBlock) -> Entries:
            # 1. s and the open entries, in one pass over memory.
            theta, s = block.of(state.theta), block.of(residual.next)
            positions = self.select(state, block, block.of(residual.flat), s, residual.started_with)
            if positions is None:
                raise NonFinite(parameters.name_at(block.start + int(np.argmin(is_finite(s)))))
            if self.sweeps(block, number):
                positions = _nonzero(wire.round(s))
            # 2. What they are on the wire. A value may become infinite there, which no theta
            # survives.
            selected = s[positions]
            sent = wire.round(self.values(theta[positions], selected))
            finite = is_finite(sent)
            if not finite.all():
                place = int(positions[np.argmin(finite)])
                raise NonFinite(parameters.name_at(block.start + place))
            # 3. s = sent + residual holds exactly: nothing is lost.
            s[positions] = self.remainder(selected, sent)
            return positions, sent

        try:
            return state.each_block(of)
        except NonFinite as error:  # with the name alone
            return str(error)

    def entries_of(self, state: OuterState, flat: Floats, wire: Wire, number: int) -> list[Entries]:
        """What a message for the round after ``number`` has, by block, where ``flat`` is all there
        was to send."""

        def of(block: FlatBlock) -> Entries:
            s = block.of(flat)
            if self.sweeps(block, number):
                positions = _nonzero(wire.round(s))
            else:
                positions = changing_entries(block.of(state.theta), s, self.rounding)
            return positions, wire.round(s[positions])

        return state.each_block(of)

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
        theta, parameters = block.of(state.theta), state.parameters
        found: list[Positions] = []
        for part, segment in parts(block):
            positions = open_entries(
                theta[part],
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

    def values(self, theta: Floats, s: Floats) -> Floats:
        """The values to send for the selected entries ``s``, before they are rounded to the wire
        dtype."""
        return s

    def remainder(self, s: Floats, sent: Floats) -> Floats:
        """What stays in the residual of the selected entries ``s``."""
        return s - sent


class ReduceGate:
    """Lets through, of the sums that one trainer makes in the round after ``number``, those whose
    mean would change the next forward pass, and all of what is swept. The rest is the ``residual``,
    by unit, which goes into that trainer's own."""

    def __init__(self, theta: Floats, gate: Gate, wire: Wire, number: int) -> None:
        self.wire = wire
        self.residual: list[tuple[Unit, Entries]] = []
        self._theta, self._gate, self._number = theta, gate, number

    def filter(self, unit: Unit, sums: Entries, trainers: int) -> Entries:
        """The unit's entries to send, of sums over so many ``trainers``, rounded to the wire dtype.
        Sums that are not finite all pass: no message takes them. Units may be filtered in threads,
        each once."""
        places, values = sums
        if not len(places) or not is_finite(values).all():
            return sums
        if self._gate.sweeps(unit.block, self._number):
            kept = _nonzero(self.wire.round(values))
        else:
            # The mean is what theta moves by, as it is for the gate of a trainer's own entries.
            mean, theta = values / np.float32(trainers), unit.of(self._theta)[places]
            kept = changing_entries(theta, mean, self._gate.rounding)
        sent, rest = self.wire.round(values[kept]), values.copy()
        rest[kept] -= sent
        left = np.flatnonzero(rest)
        self.residual.append((unit, (places[left], rest[left])))
        return places[kept], sent

    def add_residual(self, flat: Floats) -> None:
        """Adds what was held back to the trainer's ``flat`` residual, once."""
        held_back, self.residual = self.residual, []
        for unit, (places, values) in held_back:
            add_entries(unit.of(flat), places, values)


def add_up(
    units: Sequence[Unit],
    summands: Sequence[Sequence[Entries]],
    trainers: int,
    gate: ReduceGate | None,
    threads: int | None,
) -> list[Entries] | None:
    """The sums of a share's ``summands``, by unit, each added up in their order; those that pass
    ``gate`` if there is one. None where a sum is too large for a message."""

    def add(item: tuple[Unit, Sequence[Entries]]) -> Entries:
        unit, found = item
        sums = sum_entries(found, unit.stop - unit.start)
        return gate.filter(unit, sums, trainers) if gate else sums

    sums = list(ordered_map(add, list(zip(units, summands, strict=True)), threads))
    return sums if all(is_finite(values).all() for _, values in sums) else None


class GatedReduction:
    """PULSELoCo's: entries that pass the gate are sent and summed in rank order, the others stay in
    the residual."""

    def __init__(self, state: OuterState, residual: Residual, gate: Gate, wire: Wire) -> None:
        self.residual: Residual = residual
        self.gate, self.wire = gate, wire
        self.state, self.classes = state, Classes(state.parameters.blocks)

    def settings(self) -> dict[str, object]:
        return {
            **self.gate.settings(),
            "wire": self.wire.name,
            "lookahead": float(self.residual.lookahead),
        }

    def forget(self) -> None:
        self.classes.forget()

    def gates_sums(self, trainers: int) -> bool:
        """Whether the sums that so many trainers send pass a gate; without a lookahead, which feels
        what is withheld, none."""
        fewest = GATE_SWEPT_SUMS_FROM if self.gate.sweep else GATE_SUMS_FROM
        return bool(self.residual.lookahead) and trainers >= fewest

    def scatters(self, trainers: int) -> bool:
        """Whether each trainer sums a share; otherwise all get all messages."""
        fewest = SCATTER_FEW_BITS_FROM if self.wire.few_bits else SCATTER_FROM
        return self.gates_sums(trainers) or trainers >= fewest

    def reduce_gate(self, number: int) -> ReduceGate:
        """A gate for sums of the round after ``number``."""
        return ReduceGate(self.state.theta, self.gate, self.wire, number)

    def message(self, number: int) -> list[Entries] | str:
        """As `Gate.local_message`."""
        return self.gate.local_message(self.state, self.residual, self.wire, number)

    def coder(self, number: int) -> Coder:
        """Codes the messages of the round after ``number``."""
        state, rounding = self.state, self.gate.rounding
        return Coder(
            number, state.theta, state.momentum, rounding, self.wire, self.classes, state.threads
        )

    def step(
        self,
        number: int,
        entries: Sequence[Sequence[Entries]],
        trainers: int,
        lookahead: np.float32,
    ) -> int:
        """The outer step of the round after ``number``, along the sum of ``entries``, by block and
        then in the order of the addition, / ``trainers``. The residual takes effect, the model gets
        the next start, ``theta - lookahead * residual``, and parameters their classes of the next
        round. The number of parameters whose sum is not 0."""
        state, residual = self.state, self.residual
        residual.complete_next()

        # One pass over memory for all that follows from the sums; a pass is what a round costs a
        # large model.
        def step(block: FlatBlock) -> int:
            summed, found = np.zeros(1, np.int64), entries[block.number]
            # A swept block moves by the whole of its mean at once, past the momentum (1.3); the
            # step that follows takes its sums as 0.
            if self.gate.sweeps(block, number):
                places, sums = sum_entries(found, block.stop - block.start)
                block.of(state.theta)[places] -= residual.lookahead * (sums / np.float32(trainers))
                summed[0], found = len(places), ()
            theta, momentum, held_back = map(block.of, (state.theta, state.momentum, residual.next))
            known, octaves = self.classes.renewed(block, momentum)
            for part, segment in parts(block):
                # ``start`` is the model's own memory where it is FP32 on the host. All positions of
                # the part count as one granule, so that ``summed`` has one number.
                def fill(start: Floats, part: slice = part) -> None:
                    sparse_outer_step(
                        theta=theta[part],
                        momentum=momentum[part],
                        residual=held_back[part],
                        lookahead=float(lookahead),
                        start=start,
                        from_=part.start,
                        summands=found,
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
        residual.take_next()
        return summed
