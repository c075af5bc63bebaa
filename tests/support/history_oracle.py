"""The history codec in plain, slow Python, written from docs/format.md, section 3.10: the oracle of the native kernels.

A stretch is a dict from positions to net steps. `encode` chooses nothing by itself: it is given `Choices`, which
`decode` finds in a payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.context_oracle import (
    ABSENT,
    Bit,
    Kind,
    Reader,
    S,
    Waiting,
    Writer,
    code_levels,
    code_rest,
    code_size,
    code_step,
    row_ends,
    weights,
)
from tests.support.context_oracle import Models as StepModels

Steps = dict[int, int]
Past = Sequence[tuple[Steps, int]]
GROUPS = 1 + 8 * 7 * 2
L = dict(zip(range(-4, 11), [8, 7, 7, 6, 5, 4, 4, 3, 3, 2, 2, 1, 1, 1, 0], strict=True))


def signed(x: int, bits: int) -> int:
    """``x`` modulo 2^bits as a signed number."""
    x %= 1 << bits
    return x - (1 << bits) if x >> (bits - 1) else x


def stretch(start: Sequence[int], end: Sequence[int], kind: Kind) -> Steps:
    steps = (signed(kind.ordered(b) - kind.ordered(a), 8) for a, b in zip(start, end, strict=True))
    return {p: d for p, d in enumerate(steps) if d}


def merged(stretches: Sequence[Steps]) -> Steps:
    """The net steps of stretches that follow each other."""
    total = {p: signed(sum(s.get(p, 0) for s in stretches), 8) for s in stretches for p in s}
    return {p: total[p] for p in sorted(total) if total[p]}


class Known(NamedTuple):
    """What the stretches say of an element."""

    age: int
    vigour: int
    turned: bool
    last: int

    @property
    def group(self) -> int:
        return 1 + (7 * self.age + self.vigour) * 2 + self.turned


def what_is_known(past: Past) -> dict[int, Known]:
    known: dict[int, Known] = {}
    longer, later = 0, sum(span for _, span in past)
    for steps, n in past:
        later -= n
        for p, d in steps.items():
            size, sign = abs(d), -1 if d < 0 else 1
            if n > 1:
                vigour = next((v for v in range(4) if size < 2 << v), 4)
                known[p] = Known(7, vigour, False, sign * max(1, (2 * size + n) // (2 * n)))
                continue
            before = known.get(p)
            vigour, turned = 0, False
            if before:
                turned = (d < 0) != (before.last < 0)
                rested = (longer if before.age == 7 else before.age + 1) - (later + 1)
                vigour = min(max(before.vigour + (rested <= 2) - (rested > 4), 0), 6)
            if size > 1:
                vigour = max(vigour, 5)
            known[p] = Known(min(later + 1, 7) - 1, vigour, turned, d)
        if n > 1:
            longer = later + n // 2
    return known


@dataclass
class Choices:
    """What an encoder may choose: ``levels`` of the 256 classes for group 0, ``odds`` by place, ``groups`` the odds of
    those that are not absent, ``cells`` the levels by group and place."""

    used: int = 0
    boost: int = 0
    first: int = 0
    count: int = 0
    levels: list[int] = field(default_factory=lambda: [ABSENT] * 256)
    odds: dict[int, int] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    cells: dict[tuple[int, int], int] = field(default_factory=dict)


class Near:
    """A number near an expected one."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.as_expected, self.lower, self.further = Bit(), Bit(), [Bit() for _ in range(8)]

    def code(self, side: Writer | Reader, value: int, expected: int) -> int:
        away = value - expected
        if side.bit(self.as_expected, int(away == 0)):
            away = 0
        else:
            down = side.bit(self.lower, int(away < 0))
            k = 0
            while k < 44 and not side.bit(self.further[min(k, 7)], int(abs(away) - 1 == k)):
                k += 1
            away = -(k + 1) if down else k + 1
        return min(max(expected + away, self.least), self.most)


def expected_level(x: int) -> int:
    return min(4 - x, 44) if x < -4 else 0 if x > 10 else L[x]


def code_table(side: Writer | Reader, chosen: Choices, there: dict[tuple[int, int], int]) -> None:
    """``there``: the number of elements by group and place."""
    near_class, near_group, near_cell, absent = Near(-21, 21), Near(-21, 21), Near(0, 44), Bit()
    expected = 0
    for place in sorted({place for _, place in there}):
        chosen.odds[place] = near_class.code(side, chosen.odds.get(place, 0), expected)
        expected = chosen.odds[place] - 2
    expected = 0
    for group in sorted({group for group, _ in there}):
        if side.bit(absent, int(group not in chosen.groups)):
            continue
        expected = chosen.groups[group] = near_group.code(side, chosen.groups.get(group, 0), expected)
        for place in sorted(place for g, place in there if g == group):
            level = expected_level(chosen.groups[group] + chosen.odds[place])
            chosen.cells[group, place] = near_cell.code(side, chosen.cells.get((group, place), 0), level)


class Models:
    def __init__(self, levels: list[int]) -> None:
        single = [[Bit(64512, 6) if h >= 12 else Bit() for h in levels] for _ in range(2)]
        self.unknown = StepModels(single=single[0])
        self.known = StepModels(single=single[1])
        self.turned_of_group = [Bit() for _ in range(GROUPS)]
        self.turned_of_class = [Bit() for _ in range(256)]
        self.same = [Bit() for _ in range(256)]
        self.less = [Bit() for _ in range(256)]
        self.apart = [Bit() for _ in range(288)]

    def turned(self, side: Writer | Reader, group: int, cls: int, value: int) -> int:
        models = self.turned_of_group[group], self.turned_of_class[cls]
        value = side.bit(Bit(sum(model.p for model in models) // 2), value)
        for model in models:
            model.adapt(value)
        return value

    def like_last(self, side: Writer | Reader, cls: int, step: int, last: int) -> int:
        """A step where |last| > 1. Not reduced modulo 2^width."""
        sign, expected = -1 if last < 0 else 1, abs(last)
        step *= sign
        if side.bit(self.same[cls], int(step == expected)):
            return sign * expected
        less = side.bit(self.less[cls], int(step < expected))
        away = abs(step - expected)
        n = away.bit_length() - 1
        k = 0
        while k < 31 and not side.bit(self.apart[cls + k], int(n == k)):
            k += 1
        read = code_rest(side, away, 1, k)
        return sign * (expected - read if less else expected + read)

    def step(self, side: Writer | Reader, known: Known | None, cls: int, tally: int, step: int) -> int:
        if known is None:
            return code_step(side, self.unknown, cls, tally, step)
        if abs(known.last) > 1:
            return self.like_last(side, cls, step, known.last)
        down = self.turned(side, known.group, cls, int((step < 0) != (known.last < 0))) != (known.last < 0)
        size = code_size(side, self.known, cls, abs(step))
        return -size if down else size


class Coder:
    """What both directions share: the position, the step, and what they leave for the next change."""

    def __init__(self, side: Writer | Reader, chosen: Choices, old: Sequence[int], kind: Kind, past: Past) -> None:
        self.side, self.old, self.kind, self.chosen = side, old, kind, chosen
        self.known = what_is_known(past[len(past) - chosen.used :])
        there: dict[tuple[int, int], int] = {}
        for p, known in self.known.items():
            place = self.cls(p) - chosen.first
            if p < len(old) and 0 <= place < chosen.count:
                there[known.group, place] = there.get((known.group, place), 0) + 1
        code_levels(side, chosen.levels, chosen.first, chosen.count)
        code_table(side, chosen, there)
        self.models, self.waiting = Models(chosen.levels), Waiting()
        self.of_class = weights(chosen.levels, chosen.boost)
        self.passed, self.live_until, self.tally, self.row = 0, 0, 0, -1
        self.place: int | None = None

    def cls(self, p: int) -> int:
        return (self.old[p] >> self.kind.shift) & self.kind.mask

    def weight(self, p: int) -> int:
        known = self.known.get(p)
        if known is None:
            return self.of_class[p < self.live_until][self.cls(p)]
        level = self.chosen.cells.get((known.group, self.cls(p) - self.chosen.first), ABSENT)
        return weights([level], 0)[0][0]

    def change(self, p: int, end: int, step: int) -> int:
        """The change at ``p``, in a row that ends at ``end``; the step as it is read, modulo 2^width."""
        w, waiting = self.weight(p), self.waiting
        while isinstance(self.side, Writer) and self.passed >= waiting.half:
            self.escape()
        self.side.interval(waiting.f(self.passed + w), waiting.f(self.passed))
        waiting.set(waiting.beta - (waiting.beta >> 4) + self.passed + (w >> 2))
        self.passed, self.place = 0, None
        self.tally = self.tally if end == self.row else 0
        self.row, self.live_until = end, end
        step = self.models.step(self.side, self.known.get(p), self.cls(p), self.tally, step)
        self.tally += 1 if step > 0 else -1
        return step % (1 << 8 * self.kind.width)

    def escape(self) -> None:
        self.side.interval(0, S[512])
        self.passed -= self.waiting.half
        self.waiting.set(self.waiting.beta + (self.waiting.beta >> 1))

    def changes_next(self, p: int) -> bool:
        """Whether a decoder finds the next change at ``p``."""
        assert isinstance(self.side, Reader)
        while self.place is None:
            if self.side.place() >= S[512]:
                self.place = self.side.place()
            else:
                self.escape()
        reached = self.passed + self.weight(p)
        return reached > 0 and self.waiting.f(reached) <= self.place


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def encode(
    old: Sequence[int], new: Sequence[int], kind: Kind, runs: list[tuple[int, int, int]], past: Past, chosen: Choices
) -> bytes:
    """The payload with these choices. Something changes."""
    side = Writer()
    coder = Coder(side, chosen, old, kind, past)
    count = 0
    for p, (a, b, end) in enumerate(zip(old, new, row_ends(runs), strict=True)):
        if a == b:
            coder.passed += coder.weight(p)
            continue
        coder.change(p, end, signed(kind.ordered(b) - kind.ordered(a), 8 * kind.width))
        count += 1
    head = [chosen.used, chosen.boost, chosen.first, chosen.count - 1]
    return varint(count) + bytes(head) + side.finish()


def decode(
    data: bytes, old: Sequence[int], kind: Kind, runs: list[tuple[int, int, int]], past: Past
) -> tuple[list[int], Choices]:
    """The new elements, and what the encoder chose."""
    at = next(k for k, byte in enumerate(data) if byte < 128) + 1
    count = sum((byte & 127) << 7 * k for k, byte in enumerate(data[:at]))
    chosen = Choices(data[at], data[at + 1], data[at + 2], data[at + 3] + 1)
    coder = Coder(Reader(data[at + 4 :]), chosen, old, kind, past)
    new = list(old)
    for p, end in enumerate(row_ends(runs)):
        if not count:
            break
        if not coder.changes_next(p):
            coder.passed += coder.weight(p)
            continue
        step = coder.change(p, end, 0)
        new[p] = kind.unordered((kind.ordered(old[p]) + step) % (1 << 8 * kind.width))
        count -= 1
    assert not count
    return new, chosen


def records(steps: Steps) -> bytes:
    """The kernels' own form of a stretch: three bytes each, the u16 number of elements since the one before and its net
    step; 65535 and 0 skip so many elements."""
    out, at = bytearray(), 0
    for p in sorted(steps):
        while p - at > 65535:
            out += b"\xff\xff\0"
            at += 65535
        out += (p - at).to_bytes(2, "little") + bytes([steps[p] % 256])
        at = p + 1
    return bytes(out)
