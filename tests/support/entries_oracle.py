"""PULSELoCo's payloads in plain, slow Python, written from docs/loco.md, sections 2 and 3: the native kernels' oracle.

Numbers are FP32 bit patterns. `encode` chooses nothing by itself: it is given the head's numbers and the levels.
`decode` needs no help.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from tests.support.context_oracle import ABSENT, Bit, S, Waiting, row_ends, weights
from tests.support.context_oracle import Reader as RangeReader
from tests.support.context_oracle import Writer as RangeWriter

SIGN, MAGNITUDE = 1 << 31, (1 << 31) - 1


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


class Head(NamedTuple):
    boost: int
    first: int
    classes: int
    d: int
    m: int
    b: int


def exponent(x: int) -> int:
    return x >> 23 & 255


def significand(x: int) -> int:
    return x & 0x7FFFFF | (0x800000 if exponent(x) else 0)


def near(sides: tuple[int, int]) -> int:
    return max(min(sides), 1)


def log2(n: int) -> int:
    return n.bit_length() - 1


def class_of(x: int, m: int, rounding: Rounding, head: Head) -> int:
    sides = rounding.sides(x)
    d = min(max(log2(near(sides)) + exponent(x) - head.d, 0), 15)
    k = min(max(exponent(m) - head.m, 1), 7) if exponent(m) else 0
    n = (sides[0] <= sides[1]) == ((x ^ m) >> 31 == 1)
    return 16 * d + 2 * k + n


class Shares:
    """32 symbols that share 2^16."""

    def __init__(self) -> None:
        self.a = [65408 * i // 32 for i in range(33)]
        self.n = 0

    def bound(self, i: int) -> int:
        return self.a[i] + 4 * i

    def adapt(self, symbol: int) -> None:
        h = next((h for h, until in enumerate((1, 3, 7, 15, 31, 47), 1) if self.n < until), 7)
        for i in range(32):
            self.a[i] += -(self.a[i] >> h) if i <= symbol else (65408 - self.a[i]) >> h
        self.n = min(self.n + 1, 47)


class Writer(RangeWriter):
    def __init__(self) -> None:
        super().__init__()
        self.beside: list[int] = []

    def symbol(self, model: Shares, value: int) -> int:
        r = self.range >> 16
        self.low += r * model.bound(value)
        self.range = r * (model.bound(value + 1) - model.bound(value))
        model.adapt(value)
        self._settle()
        return value

    def plain(self, value: int, k: int) -> int:
        self.beside += [value >> i & 1 for i in range(k)]
        return value

    def plain_bytes(self) -> bytes:
        ones = sum(bit << i for i, bit in enumerate(self.beside))
        return ones.to_bytes(-(-len(self.beside) // 8), "little")


class Reader(RangeReader):
    def __init__(self, data: bytes, beside: bytes) -> None:
        super().__init__(data)
        self.beside, self.taken = int.from_bytes(beside, "little"), 0

    def symbol(self, model: Shares, value: int = 0) -> int:
        r = self.range >> 16
        place = min(self.code // r, (1 << 16) - 1)
        value = next(i for i in range(32) if place < model.bound(i + 1))
        self.code -= r * model.bound(value)
        self.range = r * (model.bound(value + 1) - model.bound(value))
        model.adapt(value)
        self._settle()
        return value

    def plain(self, value: int, k: int) -> int:
        value = self.beside >> self.taken & ((1 << k) - 1)
        self.taken += k
        return value


@dataclass
class Models:
    near: list[Bit] = field(default_factory=lambda: [Bit() for _ in range(26 * 16)])
    sizes: list[Shares] = field(default_factory=lambda: [Shares() for _ in range(512)])


def code_levels(side: Writer | Reader, levels: list[int], first: int, count: int) -> None:
    absent, as_expected, lower, further = Bit(), Bit(), Bit(), [Bit() for _ in range(8)]
    for c in range(first, first + count):
        if side.bit(absent, int(levels[c] == ABSENT)):
            levels[c] = ABSENT
            continue
        known = [levels[c - back] for back in (2, 16, 1) if c - back >= first and levels[c - back] != ABSENT]
        expected = known[0] if known else 10
        away = levels[c] - expected
        if side.bit(as_expected, int(away == 0)):
            levels[c] = expected
            continue
        down = side.bit(lower, int(away < 0))
        k = 0
        while k < 44 and not side.bit(further[min(k, 7)], int(abs(away) - 1 == k)):
            k += 1
        levels[c] = min(max(expected + (-(k + 1) if down else k + 1), 0), 44)


def code_value(
    side: Writer | Reader, models: Models, x: int, cls: int, rounding: Rounding, head: Head, bf16: bool, v: int
) -> int:
    sides = rounding.sides(x)
    up_is_near = sides[0] <= sides[1]
    r = log2(near(sides))
    goes_up = (x ^ v) >> 31
    is_near = side.bit(models.near[16 * r + cls % 16], int(goes_up == up_is_near))
    goes_up = is_near == up_is_near
    sign = (x & SIGN) ^ (SIGN if goes_up else 0)
    if bf16:
        size = exponent(v) - head.b
        size = side.symbol(models.sizes[2 * cls + is_near], size if 0 <= size <= 30 else 31)
        if size == 31:
            return sign | side.plain((v & MAGNITUDE) >> 16, 15) << 16
        return sign | (head.b + size) << 23 | side.plain(v >> 16 & 127, 7) << 16
    need = sides[0] if goes_up else sides[1]
    place = min(max(exponent(x) - head.b, 0), 15)
    step = max(exponent(x), 1) - 150
    q = Fraction(significand(v)) * Fraction(2) ** (max(exponent(v), 1) - 150 - step)
    fits = q.denominator == 1 and q > 0 and 0 <= q - need < (1 << 31) - 1
    more = int(q) - need + 1 if fits else 0
    size = side.symbol(models.sizes[32 * place + 2 * (cls % 16) + is_near], log2(more) if fits else 31)
    if size == 31:
        return sign | side.plain(v & MAGNITUDE, 31)
    more = 1 << size | side.plain(more & ((1 << size) - 1), size)
    return sign | bits_of(Fraction(more - 1 + need) * Fraction(2) ** step)


def bits_of(x: Fraction) -> int:
    """The FP32 bits of a number that has some."""
    e = 1
    while x / Fraction(2) ** (e - 150) >= 1 << 24:
        e += 1
    s = x / Fraction(2) ** (e - 150)
    assert s.denominator == 1
    return int(s) if s < 1 << 23 else e << 23 | int(s) & 0x7FFFFF


def encode(
    theta: list[int],
    momentum: list[int],
    rounding: Rounding,
    runs: list[tuple[int, int, int]],
    entries: dict[int, int],
    bf16: bool,
    head: Head,
    levels: list[int],
) -> bytes:
    """The payload with the given head and levels (256 of them, `ABSENT` where a class has no entry)."""
    out = bytearray()
    left = len(entries)
    while left >= 128:
        out.append(left & 127 | 128)
        left >>= 7
    out.append(left)
    if not entries:
        return bytes(out)
    out += bytes([head.boost, head.first, head.classes - 1, head.d, head.m, head.b])
    side, models, waiting = Writer(), Models(), Waiting()
    code_levels(side, levels, head.first, head.classes)
    plain, live_weights = weights(levels, head.boost)
    passed, live_until = 0, 0
    for p, (x, m, end) in enumerate(zip(theta, momentum, row_ends(runs), strict=True)):
        cls = class_of(x, m, rounding, head)
        w = (live_weights if p < live_until else plain)[cls]
        if p not in entries:
            passed += w
            continue
        while passed >= waiting.half:
            side.interval(0, S[512])
            passed -= waiting.half
            waiting.set(waiting.beta + (waiting.beta >> 1))
        side.interval(waiting.f(passed + w), waiting.f(passed))
        waiting.set(waiting.beta - (waiting.beta >> 4) + passed + (w >> 2))
        passed, live_until = 0, end
        code_value(side, models, x, cls, rounding, head, bf16, entries[p])
    code = side.finish()
    return bytes(out) + len(code).to_bytes(4, "little") + code + side.plain_bytes()


def head_of(data: bytes) -> tuple[int, Head, bytes, bytes]:
    """(entries, head, code, plain bits) of a payload that has some."""
    count = at = 0
    while True:
        byte = data[at]
        count |= (byte & 127) << 7 * at
        at += 1
        if byte < 128:
            break
    head = Head(data[at], data[at + 1], data[at + 2] + 1, *data[at + 3 : at + 6])
    code = int.from_bytes(data[at + 6 : at + 10], "little")
    return count, head, data[at + 10 : at + 10 + code], data[at + 10 + code :]


def levels_of(data: bytes) -> list[int]:
    _, head, code, beside = head_of(data)
    levels = [ABSENT] * 256
    code_levels(Reader(code, beside), levels, head.first, head.classes)
    return levels


def decode(
    data: bytes,
    theta: list[int],
    momentum: list[int],
    rounding: Rounding,
    runs: list[tuple[int, int, int]],
    bf16: bool,
) -> dict[int, int]:
    """The values by their positions."""
    entries: dict[int, int] = {}
    if data == b"\0":
        return entries
    count, head, code, beside = head_of(data)
    side, models, waiting, levels, place = Reader(code, beside), Models(), Waiting(), [ABSENT] * 256, None
    code_levels(side, levels, head.first, head.classes)
    plain, live_weights = weights(levels, head.boost)
    passed, live_until = 0, 0
    for p, (x, m, end) in enumerate(zip(theta, momentum, row_ends(runs), strict=True)):
        if len(entries) == count:
            break
        while place is None:
            if side.place() >= S[512]:
                place = side.place()
            else:
                side.interval(0, S[512])
                passed -= waiting.half
                waiting.set(waiting.beta + (waiting.beta >> 1))
        cls = class_of(x, m, rounding, head)
        w = (live_weights if p < live_until else plain)[cls]
        if passed + w <= 0 or waiting.f(passed + w) > place:
            passed += w
            continue
        side.interval(waiting.f(passed + w), waiting.f(passed))
        waiting.set(waiting.beta - (waiting.beta >> 4) + passed + (w >> 2))
        passed, place, live_until = 0, None, end
        entries[p] = code_value(side, models, x, cls, rounding, head, bf16, 0)
    assert len(entries) == count
    return entries
