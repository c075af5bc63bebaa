"""The bytes of a round: messages, a payload for each block or part of one, and the classes of
parameters that they are coded by (docs/loco.md, section 3)."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from .._native import Malformed, decode_entries, encode_entries, shared_octaves, sum_entries
from .._util.threads import ordered_map
from ..errors import CorruptMessage, InputError
from ..state.cast import Rounding
from .parameters import FlatBlock, Floats, Positions

MAGIC = b"PLSL"
FORMAT = 1
_HEADER = struct.Struct("<4sBBHQQI")
_CLOSING = 1
CompressionName = Literal["fp32", "bf16", "e8m2", "e8m0"]
_MANTISSA: dict[CompressionName, int] = {"fp32": 23, "bf16": 7, "e8m2": 2, "e8m0": 0}

#: The classes of some parameters (docs/loco.md, section 3.1), and the octaves D and M that they are
#: for.
KnownClasses = tuple[npt.NDArray[np.uint8], tuple[int, int]]

N = TypeVar("N", np.float32, np.uint8)

#: Ascending positions in a block and the FP32 values there.
Entries = tuple[Positions, Floats]
NOTHING: Entries = (np.empty(0, np.uint32), np.empty(0, np.float32))


def joined(entries: Sequence[Entries]) -> Entries:
    """Those of the units of a block, which follow each other, as one."""
    if len(entries) == 1:
        return entries[0]
    places, values = zip(*entries, strict=True) if entries else ((NOTHING[0],), (NOTHING[1],))
    return np.concatenate(places), np.concatenate(values)


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
class Compression:
    """How values travel: FP32 exactly, or rounded to fewer bits of mantissa, to nearest, ties to
    even."""

    name: CompressionName = "fp32"

    def __post_init__(self) -> None:
        if self.name not in _MANTISSA:
            raise InputError(
                f"compression is {self.name!r}", hint=f"Use one of: {', '.join(_MANTISSA)}."
            )

    @property
    def mantissa(self) -> int:
        """Explicit bits of the values' mantissa: what a message says of it."""
        return _MANTISSA[self.name]

    @property
    def few_bits(self) -> bool:
        """Whether messages are so short that FP32 sums would be most of a round."""
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
    """What one trainer sends in a round: a payload for each block, in order. ``mantissa``
    is `Compression.mantissa`; ``closing``: it is all of a residual (docs/loco.md, 1.2)."""

    round: int
    mantissa: int
    payloads: Sequence[bytes | memoryview]
    closing: bool = False

    def to_bytes(self) -> bytes:
        """The message with a random number in it: two trainers may send the same payloads, and
        their messages must still differ (docs/loco.md, section 5)."""
        # A trainer that was lost asks by the digest whether its message has counted
        # (`group_rounds.outcome_of`).
        nonce = int.from_bytes(os.urandom(8), "little")
        header = _HEADER.pack(
            MAGIC, FORMAT, self.mantissa, self.closing, self.round, nonce, len(self.payloads)
        )
        lengths = struct.pack(f"<{len(self.payloads)}I", *map(len, self.payloads))
        return b"".join([header, lengths, *self.payloads])

    @classmethod
    def parse(cls, data: bytes, blocks: int) -> Self:
        """Raises CorruptMessage unless ``data`` is a message of ``blocks`` payloads that tile
        it."""
        if len(data) < _HEADER.size + 4 * blocks:
            raise CorruptMessage(f"a message of {len(data)} bytes is too short for {blocks} blocks")
        magic, format_, mantissa, flags, number, _, count = _HEADER.unpack_from(data)
        if (magic, format_, count) != (MAGIC, FORMAT, blocks) or flags > _CLOSING:
            raise CorruptMessage("not a message of this format for these parameters")
        lengths = struct.unpack_from(f"<{blocks}I", data, _HEADER.size)
        at = _HEADER.size + 4 * blocks
        if at + sum(lengths) != len(data):
            raise CorruptMessage("the payload lengths do not add up to the message")
        view, payloads = memoryview(data), []
        for length in lengths:
            payloads.append(view[at : at + length])
            at += length
        return cls(number, mantissa, payloads, bool(flags))


def digest_of(message: bytes) -> str:
    """SHA-256 of a message, which tells it from all others of its round; 64 hexadecimal digits."""
    return sha256(message).hexdigest()


class Classes:
    """The classes of all parameters of ``blocks`` by the present global weights and momentum, as
    far as they are known: a byte for each. What changes these must renew or forget them."""

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


class Sent(NamedTuple):
    """The entries of one message, by unit; ``closing`` as in `Message`."""

    entries: list[Entries]
    closing: bool = False

    def of(self, units: Sequence[Unit]) -> Sent:
        """Those of a message by block that are in the ``units``."""
        found = [unit.take(self.entries[unit.block.number]) for unit in units]
        return Sent(found, self.closing)

    @property
    def size(self) -> int:
        return sum(len(positions) for positions, _ in self.entries)


class Sums(NamedTuple):
    """Sums of the entries of messages, added up in their order: those of ``steps``, by unit, of
    so many ``steppers``; and those of ``closing`` messages."""

    steps: list[Entries]
    closing: list[Entries]
    steppers: int


@dataclass(frozen=True)
class Coder:
    """Codes entries against the global weights and momentum of the round after ``round``."""

    round: int
    weights: Floats
    momentum: Floats
    rounding: Rounding
    compression: Compression
    classes: Classes
    threads: int | None

    def encode(self, units: Sequence[Unit], sent: Sent) -> bytes:
        """The message of the entries of each unit; values are results of `Compression.round`."""

        def encode(item: tuple[Unit, Entries]) -> bytes:
            unit, found = item
            weights, momentum = unit.of(self.weights), unit.of(self.momentum)
            known = self.classes.of(unit)
            return encode_entries(
                weights, momentum, self.rounding, *found, self.compression.mantissa, known
            )

        payloads = ordered_map(encode, list(zip(units, sent.entries, strict=True)), self.threads)
        return Message(
            self.round, self.compression.mantissa, list(payloads), closing=sent.closing
        ).to_bytes()

    def decode(self, units: Sequence[Unit], message: bytes) -> Sent:
        """The entries of a message. Raises CorruptMessage."""
        parsed = self._parsed(units, message)
        found = ordered_map(
            lambda number: self._entries(units[number], number, [parsed])[0],
            list(range(len(units))),
            self.threads,
        )
        return Sent(list(found), parsed.closing)

    def add_up(self, units: Sequence[Unit], messages: Sequence[bytes | Sent]) -> Sums:
        """The sums of all messages. Decodes a unit of all of them, adds it up, and goes on to the
        next: entries of all messages at once would be most of a round's memory. Raises
        CorruptMessage."""
        # All that is fixed is checked before any payload is decoded.
        parsed = [m if isinstance(m, Sent) else self._parsed(units, m) for m in messages]
        coded = [message for message in parsed if isinstance(message, Message)]

        def add(number: int) -> tuple[Entries, Entries]:
            unit = units[number]
            decoded = iter(self._entries(unit, number, coded))
            found: tuple[list[Entries], list[Entries]] = ([], [])
            for message in parsed:
                own = message.entries[number] if isinstance(message, Sent) else next(decoded)
                found[message.closing].append(own)
            steps, closing = (sum_entries(each, unit.stop - unit.start) for each in found)
            return steps, closing

        sums = list(ordered_map(add, list(range(len(units))), self.threads))
        steppers = sum(not message.closing for message in parsed)
        return Sums([steps for steps, _ in sums], [closing for _, closing in sums], steppers)

    def max_bytes(self, units: Sequence[Unit]) -> int:
        """No message is longer: an entry takes at most 10 bytes, a unit's head less than 4 KiB."""
        return 10 * sum(unit.stop - unit.start for unit in units) + 4096 * (1 + len(units))

    def _parsed(self, units: Sequence[Unit], data: bytes) -> Message:
        message = Message.parse(data, len(units))
        if message.round != self.round or message.mantissa != self.compression.mantissa:
            raise CorruptMessage(
                f"a message of round {message.round}, of {message.mantissa} bits of mantissa, in "
                f"round {self.round}"
            )
        return message

    def _entries(self, unit: Unit, number: int, messages: Sequence[Message]) -> list[Entries]:
        """What each message has for a unit."""
        views = [np.frombuffer(message.payloads[number], np.uint8) for message in messages]
        weights, momentum = unit.of(self.weights), unit.of(self.momentum)
        known = self.classes.of(unit)
        try:
            return decode_entries(
                views, weights, momentum, self.rounding, self.compression.mantissa, known
            )
        except Malformed as error:
            raise CorruptMessage(str(error)) from None
