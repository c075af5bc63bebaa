"""The gaps codec in plain, slow Python, written from docs/format.md, section 3.6: the oracle of the
native kernels.

`encode` chooses nothing by itself: it is given boost and levels. `decode` needs no help.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

FULL = (1 << 64) - 1
ABSENT = 63
S = []
for _i in range(513):
    _s = 1 << 40
    for _ in range(16):
        _s = _s * 1024 // (1024 + _i)
    S.append(_s)


def varint(x: int) -> bytes:
    out = bytearray()
    while x >= 128:
        out.append(x & 127 | 128)
        x >>= 7
    return bytes([*out, x])


def varint_at(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def signed(x: int, bits: int) -> int:
    """``x`` modulo 2^bits as a signed number."""
    x %= 1 << bits
    return x - (1 << bits) if x >> (bits - 1) else x


class Kind(NamedTuple):
    width: int
    shift: int
    mask: int
    floating: bool

    def ordered(self, x: int) -> int:
        full, sign = (1 << 8 * self.width) - 1, 1 << 8 * self.width - 1
        if not self.floating:
            return x
        return ~x & full if x & sign else x | sign

    def unordered(self, y: int) -> int:
        full, sign = (1 << 8 * self.width) - 1, 1 << 8 * self.width - 1
        if not self.floating:
            return y
        return y & ~sign if y & sign else ~y & full

    def step(self, a: int, b: int) -> int:
        """From ``a`` to ``b``."""
        return signed(self.ordered(b) - self.ordered(a), 8 * self.width)

    def stepped(self, a: int, step: int) -> int:
        """What ``step`` leads to from ``a``."""
        return self.unordered((self.ordered(a) + step) % (1 << 8 * self.width))


@dataclass
class Bit:
    p: int = 32768
    n: int = 0

    def adapt(self, value: int) -> None:
        rate = 131072 // (2 * self.n + 3)
        self.p += ((65535 - self.p) * rate) >> 16 if value else -((self.p * rate) >> 16)
        self.p = min(max(self.p, 32), 65504)
        self.n = min(self.n + 1, 126)


@dataclass
class Writer:
    """``low`` is kept whole, with all the bytes that are already out, so that carries need no
    care."""

    low: int = 0
    range: int = FULL
    out: int = 0

    def bit(self, model: Bit, value: int) -> int:
        r = (self.range >> 16) * model.p
        if value:
            self.range = r
        else:
            self.low += r
            self.range -= r
        model.adapt(value)
        self._settle()
        return value

    def interval(self, a: int, b: int) -> None:
        r = self.range >> 40
        self.low += r * a
        self.range = r * (b - a)
        self._settle()

    def plain(self, value: int, k: int) -> int:
        self.range >>= k
        self.low += self.range * value
        self._settle()
        return value

    def finish(self) -> bytes:
        for extra in range(1, 9):
            below = (1 << 8 * (8 - extra)) - 1
            value = (self.low + below) & ~below
            if value < self.low + self.range:
                break
        return (value >> 8 * (8 - extra)).to_bytes(self.out + extra, "big")

    def _settle(self) -> None:
        while self.range < 1 << 56:
            self.low <<= 8
            self.range <<= 8
            self.out += 1


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.range = data, 8, FULL
        self.code = int.from_bytes(data[:8].ljust(8, b"\0"), "big")

    def bit(self, model: Bit, value: int = 0) -> int:
        r = (self.range >> 16) * model.p
        value = int(self.code < r)
        if value:
            self.range = r
        else:
            self.code -= r
            self.range -= r
        model.adapt(value)
        self._settle()
        return value

    def place(self) -> int:
        return min(self.code // (self.range >> 40), (1 << 40) - 1)

    def interval(self, a: int, b: int) -> None:
        r = self.range >> 40
        self.code -= r * a
        self.range = r * (b - a)
        self._settle()

    def plain(self, value: int, k: int) -> int:
        self.range >>= k
        value = min(self.code // self.range, (1 << k) - 1)
        self.code -= value * self.range
        self._settle()
        return value

    def _settle(self) -> None:
        while self.range < 1 << 56:
            following = self.data[self.at] if self.at < len(self.data) else 0
            self.code = (self.code << 8 | following) % (1 << 64)
            self.range <<= 8
            self.at += 1


class Waiting:
    def __init__(self) -> None:
        self.beta = 1 << 28

    @property
    def half(self) -> int:
        return (self.beta + 1) >> 1

    def f(self, h: int) -> int:
        if h >= self.half:
            return S[512]
        t = (h * ((1 << 57) // self.beta)) >> 29
        i = t >> 18
        return S[i] - (((S[i] - S[i + 1]) * (t & ((1 << 18) - 1))) >> 18)

    def set(self, beta: int) -> None:
        self.beta = min(max(beta, 1 << 25), 1 << 31)


@dataclass
class Models:
    against: list[Bit] = field(default_factory=lambda: [Bit() for _ in range(4)])
    single: list[Bit] = field(default_factory=list)
    longer: list[Bit] = field(default_factory=lambda: [Bit() for _ in range(288)])
    second: list[Bit] = field(default_factory=lambda: [Bit() for _ in range(288)])


def weights(levels: list[int], boost: int) -> tuple[list[int], list[int]]:
    plain = [((47453133 if h & 1 else 1 << 26) >> (h // 2)) if h <= 44 else 0 for h in levels]
    return plain, [min(w << boost, 1 << 26) for w in plain]


@dataclass
class Near:
    """The models of a number that is coded by what is expected."""

    as_expected: Bit = field(default_factory=Bit)
    lower: Bit = field(default_factory=Bit)
    further: list[Bit] = field(default_factory=lambda: [Bit() for _ in range(8)])

    def code(self, side: Writer | Reader, value: int, expected: int, least: int, most: int) -> int:
        away = value - expected
        if side.bit(self.as_expected, int(away == 0)):
            return min(max(expected, least), most)
        down = side.bit(self.lower, int(away < 0))
        k = 0
        while k < 44 and not side.bit(self.further[min(k, 7)], int(abs(away) - 1 == k)):
            k += 1
        return min(max(expected + (-(k + 1) if down else k + 1), least), most)


def code_levels(side: Writer | Reader, levels: list[int], first: int, count: int) -> None:
    absent, near = Bit(), Near()
    expected = 30
    for c in range(first, first + count):
        if side.bit(absent, int(levels[c] == ABSENT)):
            levels[c] = ABSENT
            continue
        levels[c] = near.code(side, levels[c], expected, 0, 44)
        expected = min(levels[c] + 2, 44)


def code_size(side: Writer | Reader, m: Models, cls: int, size: int) -> int:
    n = size.bit_length() - 1
    if side.bit(m.single[cls], int(n == 0)):
        return 1
    k = 1
    while k < 31 and not side.bit(m.longer[cls + k], int(n == k)):
        k += 1
    read = 2 | side.bit(m.second[cls + k], (size >> max(n - 1, 0)) & 1)
    return code_rest(side, size, read, k - 1)


def code_rest(side: Writer | Reader, value: int, read: int, rest: int) -> int:
    """The lowest ``rest`` bits of ``value``, plain, behind what was ``read``."""
    while rest:
        piece = min(rest, 16)
        rest -= piece
        read = read << piece | side.plain((value >> rest) & ((1 << piece) - 1), piece)
    return read


def code_step(side: Writer | Reader, m: Models, cls: int, tally: int, step: int) -> int:
    down = side.bit(m.against[min(abs(tally), 3)], int((step < 0) != (tally < 0))) != (tally < 0)
    size = code_size(side, m, cls, abs(step))
    return -size if down else size


def row_ends(runs: list[tuple[int, int, int]]) -> Iterator[int]:
    """For every element of a block the position at which its row ends."""
    base = 0
    for elements, row, phase in runs:
        for p in range(elements):
            yield base + min(((p + phase) // row + 1) * row - phase, elements)
        base += elements


def encode(
    old: list[int],
    new: list[int],
    kind: Kind,
    runs: list[tuple[int, int, int]],
    boost: int,
    levels: list[int],
    marked: Collection[int] = (),
    front: Callable[[Writer], None] | None = None,
) -> bytes:
    """The payload with the given boost and levels (256 of them, `ABSENT` where a class has no
    change). What is ``marked`` has no weight and is left as it is; ``front`` codes what stands in
    front of the levels."""
    count = sum(a != b and p not in marked for p, (a, b) in enumerate(zip(old, new, strict=True)))
    out = varint(count)
    side, m, waiting = Writer(), Models(), Waiting()
    if not count:
        if front is None:
            return out
        front(side)
        return out + side.finish()
    present = [c for c, level in enumerate(levels) if level != ABSENT]
    first, span = present[0], present[-1] - present[0] + 1
    out += bytes([boost, first, span - 1])
    if front is not None:
        front(side)
    code_levels(side, levels, first, span)
    m.single = [Bit(64512, 6) if h >= 12 else Bit() for h in levels]
    plain, live_weights = weights(levels, boost)
    passed, live_until, tally, row = 0, 0, 0, -1
    for p, (a, b, end) in enumerate(zip(old, new, row_ends(runs), strict=True)):
        if p in marked:
            continue
        cls = (a >> kind.shift) & kind.mask
        w = (live_weights if p < live_until else plain)[cls]
        if a == b:
            passed += w
            continue
        while passed >= waiting.half:
            side.interval(0, S[512])
            passed -= waiting.half
            waiting.set(waiting.beta + (waiting.beta >> 1))
        side.interval(waiting.f(passed + w), waiting.f(passed))
        waiting.set(waiting.beta - (waiting.beta >> 4) + passed + (w >> 2))
        passed = 0
        tally = tally if end == row else 0
        row, live_until = end, end
        tally += 1 if code_step(side, m, cls, tally, kind.step(a, b)) > 0 else -1
    return out + side.finish()


def decode(
    data: bytes,
    old: list[int],
    kind: Kind,
    runs: list[tuple[int, int, int]],
    marked: Collection[int] = (),
    front: Callable[[Reader], None] | None = None,
    chosen: list[object] | None = None,
) -> list[int]:
    """The new elements; what is ``marked`` is left as it is. ``chosen`` gets the boost and the
    levels."""
    count, at = varint_at(data, 0)
    new = list(old)
    levels = [ABSENT] * 256
    if not count:
        if front is not None:
            front(Reader(data[at:]))
        if chosen is not None:
            chosen[:] = [0, levels]
        return new
    boost, first, span = data[at], data[at + 1], data[at + 2] + 1
    assert boost <= 7
    assert first + span - 1 <= kind.mask
    side, m, waiting = Reader(data[at + 3 :]), Models(), Waiting()
    if front is not None:
        front(side)
    code_levels(side, levels, first, span)
    if chosen is not None:
        chosen[:] = [boost, levels]
    m.single = [Bit(64512, 6) if h >= 12 else Bit() for h in levels]
    plain, live_weights = weights(levels, boost)
    passed, live_until, tally, row, place = 0, 0, 0, -1, None
    for p, (a, end) in enumerate(zip(old, row_ends(runs), strict=True)):
        if not count:
            break
        while place is None:
            if side.place() >= S[512]:
                place = side.place()
            else:
                side.interval(0, S[512])
                passed -= waiting.half
                waiting.set(waiting.beta + (waiting.beta >> 1))
        if p in marked:
            continue
        cls = (a >> kind.shift) & kind.mask
        w = (live_weights if p < live_until else plain)[cls]
        if passed + w <= 0 or waiting.f(passed + w) > place:
            passed += w
            continue
        side.interval(waiting.f(passed + w), waiting.f(passed))
        waiting.set(waiting.beta - (waiting.beta >> 4) + passed + (w >> 2))
        passed, place = 0, None
        tally = tally if end == row else 0
        row, live_until = end, end
        step = code_step(side, m, cls, tally, 0)
        tally += 1 if step > 0 else -1
        new[p] = kind.stepped(a, step)
        count -= 1
    assert not count
    return new
