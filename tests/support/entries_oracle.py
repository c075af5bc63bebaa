"""PULSELoCo's payloads in plain, slow Python, written from docs/loco.md, sections 2 and 3: the
native kernels' oracle.

Numbers are FP32 bit patterns. `encode` chooses nothing by itself: it is given `Choices`. `decode`
needs no help, and raises `Refused` for what a reader must refuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from tests.support.gaps_oracle import Bit, Near, weights
from tests.support.gaps_oracle import Reader as RangeReader
from tests.support.gaps_oracle import Writer as RangeWriter
from tests.support.sparse_oracle import StateWriter
from tests.support.table_oracle import LOW, SCALE, STATES, varint

SIGN, MAGNITUDE, TOO_LARGE = 1 << 31, (1 << 31) - 1, (127 + 64) << 23
EXACT = 23  # explicit bits of mantissa: FP32
# fmt: off
#: Of an entry, by the level of its class.
FREQUENCIES = [
    0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256,
    362, 512, 724, 1024, 1448, 2048, 2648, 3072, 3372, 3584, 3734, 3840, 3936, 4032, 4080,
]
# fmt: on

#: None is absent.
Levels = list[int | None]


class Refused(Exception):
    """The payload is none."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(what)


class Rounding(NamedTuple):
    mantissa: int
    least: int
    largest: int
    beyond: int

    def sides(self, x: int) -> tuple[int, int]:
        """(up, down): from x to its two boundaries, in units of its last place."""
        t = min(23 - self.mantissa + max(0, self.least - max(exponent(x), 1)), 25)
        up = ((1 << (t - 1)) - significand(x)) % (1 << t)
        return up, (1 << t) - up


@dataclass
class Choices:
    """What an encoder may choose. ``classes``: levels of the classes from ``first`` on.
    ``symbols``: levels of the 2 * s + 2 symbols for each of c contexts, all None where a context
    has none. ``top``: E."""

    d: int
    m: int
    first: int
    classes: Levels
    b: int
    s: int
    c: int
    top: int
    symbols: list[Levels]

    def frequency(self, cls: int) -> int:
        """Of an entry at a parameter of this class, of 4096."""
        i = cls - self.first
        return FREQUENCIES[self.classes[i] or 0] if 0 <= i < len(self.classes) else 0

    def context(self, cls: int, x: int, mantissa: int) -> int:
        """Of a value of an entry of class ``cls`` at theta ``x``."""
        if self.c == 1:
            return 0
        if self.c == 16:
            return cls % 16
        band = min(max((self.top - exponent(x)) // 2, 0), 3)
        d, k, n = cls // 16, cls // 2 % 8, cls % 2
        if mantissa < EXACT:
            return 16 * (max(d, 8) - 8) + 4 * (k // 2) + 2 * n + (band > 1)
        return 32 * band + 16 * (d >= 12) + 2 * k + n


class Value(NamedTuple):
    """A value as it is coded: its symbol, and ``length`` plain bits."""

    symbol: int
    plain: int
    length: int


def exponent(x: int) -> int:
    return x >> 23 & 255


def significand(x: int) -> int:
    return x & 0x7FFFFF | (0x800000 if exponent(x) else 0)


def log2(n: int) -> int:
    return n.bit_length() - 1


def class_of(x: int, m: int, rounding: Rounding, d: int, momentum: int) -> int:
    """``d`` and ``momentum`` are D and M."""
    up, down = rounding.sides(x)
    octave = log2(max(min(up, down), 1)) + exponent(x)
    speed = min(max(exponent(m) - momentum, 1), 7) if exponent(m) else 0
    towards = (up <= down) == bool((x ^ m) & SIGN)
    return 16 * min(max(octave - d, 0), 15) + 2 * speed + towards


# -- levels


@dataclass
class LevelModels:
    least: int = 0
    most: int = 44
    absent: Bit = field(default_factory=Bit)
    near: Near = field(default_factory=Near)

    def code(self, side: RangeWriter | RangeReader, level: int | None, expected: int) -> int | None:
        if side.bit(self.absent, int(level is None)):
            return None
        return self.near.code(side, level or 0, expected, self.least, self.most)


def code_classes(side: RangeWriter | RangeReader, levels: Levels) -> Levels:
    """The levels, which a reader does not know before, but how many they are."""
    models, coded = LevelModels(1, 31), Levels()
    for i, level in enumerate(levels):
        known = [e for e in (coded[i - back] for back in (2, 16, 1) if back <= i) if e is not None]
        coded.append(models.code(side, level, known[0] if known else 10))
    return coded


def code_symbols(side: RangeWriter | RangeReader, contexts: list[Levels]) -> list[Levels]:
    none, absent_there, present_there, alone = Bit(), LevelModels(), LevelModels(), LevelModels()
    coded = list[Levels]()
    for c, levels in enumerate(contexts):
        if side.bit(none, int(not has_any(levels))):
            coded.append([None] * len(levels))
            continue
        alike = next(
            (coded[c - back] for back in (16, 2, 1) if back <= c and has_any(coded[c - back])), None
        )
        now = Levels()
        for i, level in enumerate(levels):
            there = alike[i] if alike else None
            models = alone if alike is None else absent_there if there is None else present_there
            below = now[i - 2] if i >= 2 else None
            expected = there if there is not None else below if below is not None else 6
            now.append(models.code(side, level, expected))
        coded.append(now)
    return coded


def has_any(levels: Levels) -> bool:
    return any(level is not None for level in levels)


def write_levels(chosen: Choices) -> bytes:
    side = RangeWriter()
    code_classes(side, chosen.classes)
    code_symbols(side, chosen.symbols)
    return side.finish()


def intervals(levels: Levels) -> list[tuple[int, int]]:
    """(start, frequency) of each symbol of a context."""
    weight = [0 if level is None else weights([level], 0)[0][0] for level in levels]
    total = sum(weight)
    if not total:
        return [(0, 0)] * len(levels)
    frequencies = [max(SCALE * w // total, 1) if w else 0 for w in weight]
    frequencies[frequencies.index(max(frequencies))] += SCALE - sum(frequencies)
    return [(sum(frequencies[:i]), f) for i, f in enumerate(frequencies)]


# -- values


def code_of(x: int, v: int, rounding: Rounding, mantissa: int, b: int, s: int) -> Value:
    """How value ``v`` at theta ``x`` is coded; ``b`` and ``s`` are B and S."""
    up, down = rounding.sides(x)
    goes_up = bool((x ^ v) & SIGN)
    near = int(goes_up == (up <= down))
    if mantissa < EXACT:
        size, whole = exponent(v) - b, (v & MAGNITUDE) >> EXACT - mantissa
        if 0 <= size < s:
            return Value(2 * size + near, whole & (1 << mantissa) - 1, mantissa)
        return Value(2 * s + near, whole, 8 + mantissa)
    e = max(exponent(x), 1)
    shift = max(exponent(v), 1) - e
    q, rest = (significand(v) << shift, 0) if shift >= 0 else divmod(significand(v), 1 << -shift)
    more = q - (up if goes_up else down) + 1
    if q > 0 and not rest and 1 <= more < 1 << 31:
        low = log2(more)
        if 0 <= low + e - b < s:
            return Value(2 * (low + e - b) + near, more - (1 << low), low)
    return Value(2 * s + near, v & MAGNITUDE, 31)


def value_of(
    x: int, symbol: int, rounding: Rounding, mantissa: int, b: int, s: int, bits: Bits
) -> int:
    up, down = rounding.sides(x)
    size, near = divmod(symbol, 2)
    goes_up = bool(near) == (up <= down)
    sign = (x & SIGN) ^ (SIGN if goes_up else 0)
    if size == s:
        v = bits.take(8 + mantissa) << EXACT - mantissa
    elif mantissa < EXACT:
        v = (b + size) << 23 | bits.take(mantissa) << EXACT - mantissa
    else:
        e = max(exponent(x), 1)
        low = size + b - e
        require(0 <= low <= 30, "L is out of range")
        q = (1 << low | bits.take(low)) - 1 + (up if goes_up else down)
        v = bits_of(q, e)
    require(v < TOO_LARGE, "a value of 2^64 or more")
    return sign | v


def bits_of(q: int, e: int) -> int:
    """The FP32 bits of q * 2^(e - 150), to the nearest, ties to even. (What an encoder writes needs
    no rounding.)"""
    dropped = max(q.bit_length() - 24, 0)
    q, e = round(Fraction(q, 1 << dropped)), e + dropped
    while q < 1 << 23 and e > 1:
        q, e = 2 * q, e - 1
    return q if q < 1 << 23 else (e << 23) + q - (1 << 23)


class Bits:
    """Reads plain bits."""

    def __init__(self, data: bytes) -> None:
        self.bits, self.left, self.size = int.from_bytes(data, "little"), 8 * len(data), len(data)

    def take(self, count: int) -> int:
        require(count <= self.left, "plain bits are missing")
        found = self.bits & (1 << count) - 1
        self.bits >>= count
        self.left -= count
        return found

    def finish(self) -> None:
        require(self.left < 8 and not self.bits, "plain bits are left over")


# -- payloads


def encode(
    theta: list[int],
    momentum: list[int],
    rounding: Rounding,
    entries: dict[int, int],
    mantissa: int,
    chosen: Choices,
) -> bytes:
    """The payload with these choices, in which each entry's class and symbol has a level. There is
    an entry."""
    operations, values = StateWriter(), StateWriter()
    beside = taken = 0
    tables = [intervals(levels) for levels in chosen.symbols]
    for i, (x, m) in enumerate(zip(theta, momentum, strict=True)):
        cls = class_of(x, m, rounding, chosen.d, chosen.m)
        f = chosen.frequency(cls)
        operations.noted.append((i % STATES, *((f, 0) if i in entries else (SCALE - f, f))))
        if i in entries:
            value = code_of(x, entries[i], rounding, mantissa, chosen.b, chosen.s)
            start, f = tables[chosen.context(cls, x, mantissa)][value.symbol]
            values.noted.append((len(values.noted) % STATES, f, start))
            beside |= value.plain << taken
            taken += value.length
    states = [LOW] * STATES
    assert all(f for _, f, _ in operations.noted + values.noted), "what is coded has a level"
    words = StateWriter(operations.noted + values.noted).finish(states)
    levels = write_levels(chosen)
    head = [
        chosen.d,
        chosen.m,
        chosen.first,
        len(chosen.classes) - 1,
        chosen.b,
        chosen.s,
        chosen.c,
        chosen.top,
    ]
    return (
        varint(len(entries))
        + bytes(head)
        + varint(len(levels))
        + levels
        + b"".join(varint(x - LOW) for x in states)
        + varint(len(words) // 2)
        + words
        + beside.to_bytes(-(-taken // 8), "little")
    )


class Bytes:
    """Reads the head of a payload."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        require(count <= len(self.data) - self.at, "the payload is cut")
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                require(shift <= 70 and (byte > 0 or shift == 7), "a varint is too long")
                return value


def read_choices(head: Bytes) -> Choices:
    d, m, first, count, b, s, c, top = head.take(8)
    require(
        first + count < 256 and 1 <= s <= 30 and b + s <= 255 and c in (1, 16, 128),
        "the head is out of range",
    )
    code = head.take(head.varint())
    side = RangeReader(code)
    classes = code_classes(side, [None] * (count + 1))
    chosen = Choices(
        d, m, first, classes, b, s, c, top, code_symbols(side, [[None] * (2 * s + 2)] * c)
    )
    require(side.at - 8 < len(code) <= side.at, "the code of the levels has another length")
    return chosen


def decode(
    data: bytes, theta: list[int], momentum: list[int], rounding: Rounding, mantissa: int
) -> tuple[dict[int, int], Choices | None]:
    """The values by their positions, and what the encoder chose, None if there are no entries."""
    head = Bytes(data)
    count = head.varint()
    if not count:
        require(head.at == len(data), "something follows no entries")
        return {}, None
    chosen = read_choices(head)
    states = [head.varint() + LOW for _ in range(STATES)]
    require(max(states) < 1 << 32, "a state is out of range")
    words = Bytes(head.take(2 * head.varint()))
    bits = Bits(data[head.at :])

    def settle(i: int, x: int) -> None:
        states[i] = x << 16 | int.from_bytes(words.take(2), "little") if x < LOW else x

    classes, entries = list[int](), dict[int, int]()
    for i, (x, m) in enumerate(zip(theta, momentum, strict=True)):
        cls = class_of(x, m, rounding, chosen.d, chosen.m)
        f = chosen.frequency(cls)
        upper, slot = divmod(states[i % STATES], SCALE)
        if slot < f:
            settle(i % STATES, f * upper + slot)
            entries[i] = 0
            classes.append(cls)
        else:
            settle(i % STATES, (SCALE - f) * upper + slot - f)
    require(len(entries) == count, "another number of entries")
    tables = [intervals(levels) for levels in chosen.symbols]
    for j, (i, cls) in enumerate(zip(entries, classes, strict=True)):
        upper, slot = divmod(states[j % STATES], SCALE)
        table = tables[chosen.context(cls, theta[i], mantissa)]
        symbol = next((k for k, (start, f) in enumerate(table) if start <= slot < start + f), -1)
        require(symbol >= 0, "a symbol in a context that has none")
        start, f = table[symbol]
        settle(j % STATES, f * upper + slot - start)
        entries[i] = value_of(theta[i], symbol, rounding, mantissa, chosen.b, chosen.s, bits)
    require(set(states) == {LOW}, "the states do not end as they began")
    require(words.at == len(words.data), "words are left over")
    bits.finish()
    return entries, chosen
