"""The history codec in plain, slow Python, written from docs/format.md, section 3.9: the oracle of
the native kernels.

A window is a dict from positions to net steps. `encode` chooses nothing by itself: it is given
`Choices`, which `decode` finds in a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support import gaps_oracle, sparse_oracle
from tests.support.gaps_oracle import ABSENT, Bit, Kind, Near, Reader, Writer, code_rest, signed

Steps = dict[int, int]
Past = Sequence[Steps]
GROUPS = 1 + 7 * 7 * 2


def window(start: Sequence[int], end: Sequence[int], kind: Kind) -> Steps:
    steps = (signed(kind.ordered(b) - kind.ordered(a), 8) for a, b in zip(start, end, strict=True))
    return {p: d for p, d in enumerate(steps) if d}


class Known(NamedTuple):
    """What the windows say of an element."""

    age: int
    activity: int
    turned: bool
    last: int

    @property
    def group(self) -> int:
        return 1 + (7 * self.age + self.activity) * 2 + self.turned


def what_is_known(past: Past) -> dict[int, Known]:
    known: dict[int, Known] = {}
    for later, steps in zip(reversed(range(len(past))), past, strict=True):
        for p, d in steps.items():
            before = known.get(p)
            activity, turned = 0, False
            if before:
                turned = (d < 0) != (before.last < 0)
                rested = before.age - later
                activity = min(max(before.activity + (rested <= 2) - (rested > 4), 0), 6)
            if abs(d) > 1:
                activity = max(activity, 5)
            known[p] = Known(min(later, 6), activity, turned, d)
    return known


@dataclass
class Choices:
    """What an encoder may choose: ``odds`` by place, ``groups`` the odds of those that are not
    absent, ``cells`` the levels by group and place; how the others are coded: ``boost`` and
    ``levels`` for `gaps`, or by ``others``. Then ``steps`` has levels, by the name of the bit and
    what it depends on, of which ``sizes`` and ``distances``."""

    used: int = 1
    first: int = 0
    count: int = 1
    odds: dict[int, int] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    boost: int = 0
    levels: list[int] = field(default_factory=lambda: [ABSENT] * 256)
    others: sparse_oracle.Head | None = None
    steps: dict[tuple[str, int], int] = field(default_factory=dict)
    sizes: int = 0
    distances: int = 0


def code_table(side: Writer | Reader, chosen: Choices, there: set[tuple[int, int]]) -> None:
    """``there``: the cells, (group, place), that have elements."""
    near_class, near_group, near_cell, absent = Near(), Near(), Near(), Bit()
    expected = 0
    for place in sorted({place for _, place in there}):
        chosen.odds[place] = near_class.code(side, chosen.odds.get(place, 0), expected, -21, 21)
        expected = chosen.odds[place] - 2
    expected = 0
    for group in sorted({group for group, _ in there}):
        if side.bit(absent, int(group not in chosen.groups)):
            continue
        expected = chosen.groups[group] = near_group.code(
            side, chosen.groups.get(group, 0), expected, -21, 21
        )
        for place in sorted(place for g, place in there if g == group):
            level = min(max(24 - chosen.groups[group] - chosen.odds[place], 0), 48)
            chosen.cells[group, place] = near_cell.code(
                side, chosen.cells.get((group, place), 0), level, 0, 49
            )


def code_head(
    side: Writer | Reader, chosen: Choices, there: set[tuple[int, int]], large: bool
) -> None:
    code_table(side, chosen, there)
    models = {
        name: Near()
        for name in ("turned", "longer", "further", "second", "differs", "less", "apart")
    }
    classes = range(chosen.first, chosen.first + chosen.count)

    def code(name: str, of: int, expected: int) -> int:
        level = models[name].code(side, chosen.steps.get((name, of), 49), expected, 0, 49)
        chosen.steps[name, of] = level
        return level

    expected = 24
    for c in classes:
        for a in (0, 256):
            expected = code("turned", a + c, expected)
    expected = 49
    for c in classes:
        expected = min(code("longer", c, expected) + 2, 49)
    chosen.sizes = min(side.plain(chosen.sizes, 9), chosen.count + 31)
    expected, before = 24, 24
    for u in range(chosen.first, chosen.first + chosen.sizes):
        expected = min(code("further", u, expected) + 2, 49)
        before = code("second", u, before)
    if not large:
        return
    expected, before = 24, 24
    for c in classes:
        level = code("differs", c, expected)
        expected = min(level + 2, 49)
        if level != 49:
            before = code("less", c, before)
    chosen.distances = min(side.plain(chosen.distances, 9), chosen.count + 31)
    expected = 24
    for u in range(chosen.first, chosen.first + chosen.distances):
        expected = min(code("apart", u, expected) + 2, 49)


class Said(NamedTuple):
    """Of a size that is not as expected: the number, how many of its bits are plain, and whether
    the size is less than expected by it, more, or (0) the number itself."""

    number: int
    plain: int
    sign: int


class Recall:
    """What is said of the remembered elements. ``wanted``: the steps by position, empty for a
    reader; ``found`` gets them."""

    def __init__(
        self, old: Sequence[int], kind: Kind, past: Past, chosen: Choices, wanted: Steps
    ) -> None:
        self.old, self.kind, self.chosen = old, kind, chosen
        known = {
            p: k for p, k in sorted(what_is_known(past[-chosen.used :]).items()) if p < len(old)
        }
        self.known = {p: k for p, k in known.items() if 0 <= self.place(p) < chosen.count}
        self.marked = set(self.known)
        self.there = {(k.group, self.place(p)) for p, k in self.known.items()}
        self.large = any(abs(k.last) > 1 for k in self.known.values())
        self.wanted = {p: step for p, step in wanted.items() if p in self.known}
        self.models: dict[tuple[str, int], Bit] = {}
        self.found: Steps = {}
        self.said: dict[int, Said] = {}

    def cls(self, p: int) -> int:
        return (self.old[p] >> self.kind.shift) & self.kind.mask

    def place(self, p: int) -> int:
        return self.cls(p) - self.chosen.first

    def chance(self, p: int) -> int:
        known = self.known[p]
        if known.group not in self.chosen.groups:
            return 0
        return sparse_oracle.C[self.chosen.cells.get((known.group, self.place(p)), 49)]

    def turned_of(self, p: int) -> tuple[str, int]:
        return "turned", self.cls(p) + (256 if self.known[p].age else 0)

    def is_turned(self, p: int) -> int:
        return int((self.wanted[p] < 0) != (self.known[p].last < 0)) if p in self.wanted else 0

    def expected(self, p: int, turned: int) -> int:
        last = abs(self.known[p].last)
        return 0 if turned or last == 1 else last

    def is_unlikely(self, p: int, expected: int) -> int:
        return int(p in self.wanted and abs(self.wanted[p]) != max(expected, 1))

    def say(self, bit: Callable[[str, int, int], int], p: int, expected: int) -> Said:
        """All but the plain bits; ``bit`` codes by name and what it depends on."""
        c, size = self.cls(p), abs(self.wanted.get(p, 0))
        if not expected:
            n = 1
            while n < 31 and bit("further", c + n, int(size.bit_length() - 1 > n)):
                n += 1
            return Said((2 | bit("second", c + n, (size >> n - 1) & 1)) << n - 1, n - 1, 0)
        sign = -1 if bit("less", c, int(size < expected)) else 1
        n, away = 0, abs(size - expected)
        while n < 31 and bit("apart", c + n, int(away.bit_length() - 1 > n)):
            n += 1
        return Said(1 << n, n, sign)

    def plain_of(self, p: int, expected: int) -> int:
        """The plain bits of a wanted step."""
        said, size = self.said[p], abs(self.wanted[p])
        return (abs(size - expected) if expected else size) - said.number

    def finish(self, p: int, turned: int, unlikely: int, plain: int) -> None:
        expected = self.expected(p, turned)
        size = max(expected, 1)
        if unlikely:
            said = self.said[p]
            number = said.number | plain
            size = expected + said.sign * number if said.sign else number
        assert 0 < size < 1 << 8 * self.kind.width
        self.found[p] = -size if bool(turned) != (self.known[p].last < 0) else size

    def code_adaptive(self, side: Writer | Reader) -> None:
        code_table(side, self.chosen, self.there)
        changing = []
        for p in self.known:
            f = self.chance(p)
            if f and fixed(side, f, int(p in self.wanted)):
                changing.append(p)

        def bit(name: str, of: int, value: int) -> int:
            return side.bit(self.models.setdefault((name, of), Bit()), value)

        for p in changing:
            turned = bit(*self.turned_of(p), self.is_turned(p))
            expected = self.expected(p, turned)
            unlikely = bit(
                "differs" if expected else "longer", self.cls(p), self.is_unlikely(p, expected)
            )
            plain = 0
            if unlikely:
                said = self.said[p] = self.say(bit, p, expected)
                plain = code_rest(
                    side, self.plain_of(p, expected) if p in self.wanted else 0, 0, said.plain
                )
            self.finish(p, turned, unlikely, plain)

    def code(self, side: sparse_oracle.StateWriter | sparse_oracle.StateReader) -> None:
        def level(name: str, of: int) -> int:
            return sparse_oracle.C[self.chosen.steps.get((name, of), 49)]

        changing = [
            p
            for i, p in enumerate(self.known)
            if side.bit(i % 64, self.chance(p), int(p in self.wanted))
        ]
        turned = {
            p: side.bit(i % 64, level(*self.turned_of(p)), self.is_turned(p))
            for i, p in enumerate(changing)
        }
        unlikely = []
        for i, p in enumerate(changing):
            expected = self.expected(p, turned[p])
            f = level("differs" if expected else "longer", self.cls(p))
            if side.bit(i % 64, f, self.is_unlikely(p, expected)):
                unlikely.append(p)
            else:
                self.finish(p, turned[p], 0, 0)
        for i, p in enumerate(unlikely):

            def bit(name: str, of: int, value: int, state: int = i % 64) -> int:
                return side.bit(state, level(name, of), value)

            self.said[p] = self.say(bit, p, self.expected(p, turned[p]))
        self.turned = turned

    def plain(self) -> list[tuple[int, int]]:
        return [
            (self.plain_of(p, self.expected(p, self.turned[p])), s.plain)
            for p, s in self.said.items()
        ]

    def take_plain(self, bits: int) -> int:
        used = 0
        for p, said in self.said.items():
            self.finish(p, self.turned[p], 1, (bits >> used) % (1 << said.plain))
            used += said.plain
        return used


def fixed(side: Writer | Reader, f: int, value: int) -> int:
    """A bit of chance f / 4096 that nothing is learnt from."""
    r = (side.range >> 12) * f
    if isinstance(side, Reader):
        value = int(side.code < r)
    if value:
        side.range = r
    else:
        side.range -= r
        if isinstance(side, Reader):
            side.code -= r
        else:
            side.low += r
    side._settle()
    return value


def steps_between(old: Sequence[int], new: Sequence[int], kind: Kind) -> Steps:
    changed = (p for p, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    return {p: kind.step(old[p], new[p]) for p in changed}


def encode(
    old: list[int],
    new: list[int],
    kind: Kind,
    runs: list[tuple[int, int, int]],
    past: Past,
    chosen: Choices,
) -> bytes:
    """The payload with these choices. A remembered element changes."""
    recall = Recall(old, kind, past, chosen, steps_between(old, new, kind))
    if chosen.others is None:
        front = bytes([chosen.used, chosen.first, chosen.count - 1])
        return front + gaps_oracle.encode(
            old, new, kind, runs, chosen.boost, chosen.levels, recall.marked, recall.code_adaptive
        )
    side = Writer()
    code_head(side, chosen, recall.there, recall.large)
    head = side.finish()
    front = (
        bytes([chosen.used | 128, chosen.first, chosen.count - 1])
        + gaps_oracle.varint(len(head))
        + head
    )
    return front + sparse_oracle.encode(old, new, kind, runs, chosen.others, recall)


def decode(
    data: bytes, old: list[int], kind: Kind, runs: list[tuple[int, int, int]], past: Past
) -> tuple[list[int], Choices]:
    """The new elements, and what the encoder chose."""
    chosen = Choices(data[0] & 127, data[1], data[2] + 1)
    recall = Recall(old, kind, past, chosen, {})
    if data[0] < 128:
        levels: list[object] = []
        new = gaps_oracle.decode(
            data[3:], old, kind, runs, recall.marked, recall.code_adaptive, levels
        )
        chosen.boost, chosen.levels = levels  # type: ignore[assignment]
    else:
        size, end = gaps_oracle.varint_at(data, 3)
        code_head(Reader(data[end : end + size]), chosen, recall.there, recall.large)
        rest = data[end + size :]
        chosen.others = sparse_oracle.read_head(rest, runs)
        new = sparse_oracle.decode(rest, old, kind, runs, recall)
    assert recall.found
    for p, step in recall.found.items():
        new[p] = kind.stepped(old[p], step)
    return new, chosen


def records(steps: Steps, classes: Mapping[int, int] | None = None) -> bytes:
    """The kernels' own form of a window: four bytes each, the u16 number of elements since the one
    before, its net step, 0 where only its class is to be known, and its class at the end (0 without
    ``classes``); 65535, 0 and 0 skip so many elements."""
    out, at = bytearray(), 0
    for p in sorted(steps):
        while p - at >= 65535:
            out += b"\xff\xff\0\0"
            at += 65535
        out += (p - at).to_bytes(2, "little") + bytes(
            [steps[p] % 256, classes[p] if classes else 0]
        )
        at = p + 1
    return bytes(out)
