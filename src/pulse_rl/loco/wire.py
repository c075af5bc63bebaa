"""The bytes of a round: messages, a payload for each block or part of one, and the classes of
parameters that they are coded by (docs/loco.md, section 3)."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from .._native import Malformed, decode_entries, encode_entries, shared_octaves
from .._util.threads import ordered_map
from ..errors import CorruptMessage, InputError
from ..state.cast import Rounding
from .parameters import FlatBlock, Floats, Positions

MAGIC = b"PLSL"
FORMAT = 1
_HEADER = struct.Struct("<4sBBHQQI")
WireName = Literal["FP32", "BF16", "int4", "int2"]
_MANTISSA: dict[WireName, int] = {"FP32": 23, "BF16": 7, "int4": 2, "int2": 0}

#: The classes of some parameters (docs/loco.md, section 3.1), and the octaves D and M that they are
#: for.
KnownClasses = tuple[npt.NDArray[np.uint8], tuple[int, int]]

N = TypeVar("N", np.float32, np.uint8)

#: Ascending positions in a block and the FP32 values there.
Entries = tuple[Positions, Floats]


class Unit(NamedTuple):
    """Parameters [start, stop) of a block, counted from its first one: what one payload codes."""

    block: FlatBlock
    start: int
    stop: int

    def of(self, flat: npt.NDArray[N]) -> npt.NDArray[N]:
        return flat[self.block.start + self.start : self.block.start + self.stop]

    def take(self, entries: Entries) -> Entries:
        """Those of the block's ``entries`` that are in the unit, by their positions in it."""
        positions, values = entries
        # Ends of another dtype than the positions' would have all of these converted.
        first, last = positions.searchsorted(np.array((self.start, self.stop), np.uint32))
        return positions[first:last] - np.uint32(self.start), values[first:last]

    def place(self, entries: Entries) -> Entries:
        """The unit's ``entries`` by their positions in the block."""
        return entries[0] + np.uint32(self.start), entries[1]


@dataclass(frozen=True, slots=True)
class Wire:
    """How values travel: FP32 exactly, or rounded to fewer bits of mantissa, to nearest, ties to
    even."""

    name: WireName = "FP32"

    def __post_init__(self) -> None:
        if self.name not in _MANTISSA:
            raise InputError(f"wire is {self.name!r}", hint=f"Use one of: {', '.join(_MANTISSA)}.")

    @property
    def mantissa(self) -> int:
        """Explicit bits of the values' mantissa: what a message says of its wire."""
        return _MANTISSA[self.name]

    @property
    def few_bits(self) -> bool:
        """Whether messages are so short that a sweep can be paid for, and that FP32 sums would be
        most of a round."""
        return self.mantissa <= 2

    def round(self, values: Floats) -> Floats:
        """The finite ``values`` as they will arrive. What a value loses stays with the sender."""
        dropped = np.uint32(23 - self.mantissa)
        if not dropped:
            return values
        # In integers: a carry goes on into the exponent, as it should, and nothing depends on the
        # processor's modes.
        bits, half = values.view(np.uint32), np.uint32(1) << (dropped - np.uint32(1))
        rounded = (
            (bits + (half - np.uint32(1) + (bits >> dropped & np.uint32(1)))) >> dropped << dropped
        )
        return rounded.view(np.float32)


@dataclass(frozen=True, slots=True)
class Message:
    """What one trainer sends in a round: a payload for each block, in order. ``wire`` is
    `Wire.mantissa`."""

    round: int
    wire: int
    payloads: Sequence[bytes | memoryview]

    def to_bytes(self) -> bytes:
        """The message with a random number in it: two trainers may send the same payloads, and
        their messages must still differ (docs/loco.md, section 5)."""
        # A trainer that was lost asks by the digest whether its message has counted
        # (`group_rounds.outcome_of`).
        nonce = int.from_bytes(os.urandom(8), "little")
        header = _HEADER.pack(MAGIC, FORMAT, self.wire, 0, self.round, nonce, len(self.payloads))
        lengths = struct.pack(f"<{len(self.payloads)}I", *map(len, self.payloads))
        return b"".join([header, lengths, *self.payloads])

    @classmethod
    def parse(cls, data: bytes, blocks: int) -> Self:
        """Raises CorruptMessage unless ``data`` is a message of ``blocks`` payloads that tile
        it."""
        if len(data) < _HEADER.size + 4 * blocks:
            raise CorruptMessage(f"a message of {len(data)} bytes is too short for {blocks} blocks")
        magic, format_, wire, reserved, number, _, count = _HEADER.unpack_from(data)
        if (magic, format_, reserved, count) != (MAGIC, FORMAT, 0, blocks):
            raise CorruptMessage("not a message of this format for these parameters")
        lengths = struct.unpack_from(f"<{blocks}I", data, _HEADER.size)
        at = _HEADER.size + 4 * blocks
        if at + sum(lengths) != len(data):
            raise CorruptMessage("the payload lengths do not add up to the message")
        view, payloads = memoryview(data), []
        for length in lengths:
            payloads.append(view[at : at + length])
            at += length
        return cls(number, wire, payloads)


def digest_of(message: bytes) -> str:
    """SHA-256 of a message, which tells it from all others of its round; 64 hexadecimal digits."""
    return sha256(message).hexdigest()


class Classes:
    """The classes of all parameters of ``blocks`` by their present theta and momentum, as far as
    they are known: a byte for each. What changes theta or momentum must renew or forget them."""

    def __init__(self, blocks: Sequence[FlatBlock]) -> None:
        self._flat = np.empty(blocks[-1].stop, np.uint8)
        self._octaves: list[tuple[int, int] | None] = [None] * len(blocks)

    def forget(self) -> None:
        self._octaves = [None] * len(self._octaves)

    def renewed(self, block: FlatBlock, momentum: Floats) -> KnownClasses:
        """Where the block's new classes go, and for which octaves; ``momentum`` is the block's, and
        may be the old one, which suggests the octaves."""
        octaves = self._octaves[block.number] = shared_octaves(momentum)
        return self._flat[block.start : block.stop], octaves

    def of(self, unit: Unit) -> KnownClasses | None:
        octaves = self._octaves[unit.block.number]
        return None if octaves is None else (unit.of(self._flat), octaves)


@dataclass(frozen=True)
class Coder:
    """Codes entries against the theta and momentum of the round after ``round``."""

    round: int
    theta: Floats
    momentum: Floats
    rounding: Rounding
    wire: Wire
    classes: Classes
    threads: int | None

    def encode(self, units: Sequence[Unit], entries: Sequence[Entries]) -> bytes:
        """The message of the ``entries`` of each unit; values must be results of `Wire.round`."""
        return self.encode_each([units], [entries])[0]

    def encode_each(
        self, shares: Sequence[Sequence[Unit]], entries: Sequence[Sequence[Entries]]
    ) -> list[bytes]:
        """A message for each share, of the ``entries`` of each of its units."""

        def encode(item: tuple[Unit, Entries]) -> bytes:
            unit, found = item
            theta, momentum = unit.of(self.theta), unit.of(self.momentum)
            known = self.classes.of(unit)
            return encode_entries(theta, momentum, self.rounding, *found, self.wire.mantissa, known)

        items = [
            each for pair in zip(shares, entries, strict=True) for each in zip(*pair, strict=True)
        ]
        payloads = ordered_map(encode, items, self.threads)
        return [
            Message(self.round, self.wire.mantissa, list(islice(payloads, len(units)))).to_bytes()
            for units in shares
        ]

    def decode(self, units: Sequence[Unit], messages: Sequence[bytes]) -> list[list[Entries]]:
        """The entries of each unit, by message. Raises CorruptMessage."""
        # All that is fixed is checked before any payload is decoded.
        parsed = [Message.parse(m, len(units)) for m in messages]
        for message in parsed:
            if message.round != self.round or message.wire != self.wire.mantissa:
                raise CorruptMessage(
                    f"a message of round {message.round}, wire {message.wire} in round {self.round}"
                )

        def decode(number: int) -> list[Entries]:
            unit = units[number]
            views = [np.frombuffer(message.payloads[number], np.uint8) for message in parsed]
            theta, momentum = unit.of(self.theta), unit.of(self.momentum)
            known = self.classes.of(unit)
            try:
                return decode_entries(
                    views, theta, momentum, self.rounding, self.wire.mantissa, known
                )
            except Malformed as error:
                raise CorruptMessage(str(error)) from None

        return list(ordered_map(decode, list(range(len(units))), self.threads))

    def decode_one(self, units: Sequence[Unit], message: bytes) -> list[Entries]:
        """The entries of each unit in one message. Raises CorruptMessage."""
        return [entries for (entries,) in self.decode(units, [message])]

    def max_bytes(self, units: Sequence[Unit]) -> int:
        """No message is longer: an entry takes at most 10 bytes, a unit's head less than 4 KiB."""
        return 10 * sum(unit.stop - unit.start for unit in units) + 4096 * (1 + len(units))
