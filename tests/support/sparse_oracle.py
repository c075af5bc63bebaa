"""The sparse codec in plain, slow Python, written from docs/format.md, section 3.7: the oracle of
the native kernels.

`encode` chooses no model by itself: it is given that of a payload, which `read_head` reads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from tests.support.gaps_oracle import Bit, Kind, Near, Reader, Writer, row_ends
from tests.support.sparse_payload import Parts, cut, joined
from tests.support.table_oracle import LOW, SCALE, STATES

GROUP, BATCH, TILE = 8, 512, 1 << 18
RARITIES, LEVELS, EVEN, SHIFTS, HAZARDS = 88, 49, 24, 12, 63
Q = [16384, 13777, 11585, 9742]
MAJORITIES = 12
IN_STATES = 2 * STATES


def frequency(chance: float) -> int:
    return min(max(round(SCALE * chance), 1), SCALE - 1)


C = [*(frequency(1 / (1 + 2 ** ((i - EVEN) / 2))) for i in range(LEVELS)), 0]
E = [frequency(1 - math.exp(-(2 ** ((i + 1 / 2) / 4 - 13)))) for i in range(HAZARDS + 1)]

Runs = Sequence[tuple[int, int, int]]


class Head(NamedTuple):
    """What a writer chooses."""

    first: int
    rarities: list[
        int | None
    ]  # of the classes from `first` up; None: no element of the class changes
    longer: list[int]  # of the classes that are not None above
    lengths: list[tuple[int, int]]  # (further, second) of first + 1, first + 2, …
    against: list[int]
    shifts: list[int]  # of the runs that `shifted` names


def shifted(runs: Runs) -> list[int]:
    """The runs that hold the first element of a batch."""
    found, base = [], 0
    for number, (elements, _, _) in enumerate(runs):
        if -base % BATCH < elements:
            found.append(number)
        base += elements
    return found


def code_head(
    side: Writer | Reader, head: Head | None, first: int, classes: int, runs: Runs
) -> Head:
    """``head`` is None for a reader."""
    read = Head(first, [], [], [], [], [])
    never, rarity = Bit(), Near()
    expected = 44
    for c in range(classes):
        wanted = head.rarities[c] if head else None
        if side.bit(never, int(wanted is None)):
            read.rarities.append(None)
            continue
        r = rarity.code(side, wanted or 0, expected, 0, RARITIES)
        read.rarities.append(r)
        expected = min(r + 4, RARITIES)

    longer, expected = Near(), LEVELS
    for c in range(sum(r is not None for r in read.rarities)):
        level = longer.code(side, head.longer[c] if head else 0, expected, 0, LEVELS)
        read.longer.append(level)
        expected = min(level + 2, LEVELS)

    further, second, expected, before = Near(), Near(), EVEN, EVEN
    for u in range(min(side.plain(len(head.lengths) if head else 0, 9), classes + 30)):
        wanted_further, wanted_second = head.lengths[u] if head else (0, 0)
        level = further.code(side, wanted_further, expected, 0, LEVELS)
        expected = min(level + 2, LEVELS)
        before = second.code(side, wanted_second, before, 0, LEVELS - 1)
        read.lengths.append((level, before))

    against, shift = Near(), Near()
    before = EVEN
    for t in range(MAJORITIES):
        before = against.code(side, head.against[t] if head else 0, before, 0, LEVELS - 1)
        read.against.append(before)
    for i in range(len(shifted(runs))):
        read.shifts.append(shift.code(side, head.shifts[i] if head else 0, 0, -SHIFTS, SHIFTS))
    return read


def head_bytes(head: Head, runs: Runs) -> bytes:
    side = Writer()
    assert code_head(side, head, head.first, len(head.rarities), runs) == head
    return side.finish()


def read_head(data: bytes, runs: Runs) -> Head:
    parts = cut(data)
    head = code_head(Reader(parts.head), None, parts.first, parts.classes, runs)
    assert len(head_bytes(head, runs)) == len(parts.head)
    return head


@dataclass
class StateReader:
    states: list[int]
    words: bytes
    at: int = 0

    def bit(self, state: int, f: int, value: int = 0) -> int:
        if f in (0, SCALE):
            return f // SCALE
        x = self.states[state]
        slot = x % SCALE
        value = int(slot < f)
        x = f * (x // SCALE) + slot if value else (SCALE - f) * (x // SCALE) + slot - f
        if x < LOW:
            assert self.at + 2 <= len(self.words)
            x = x << 16 | int.from_bytes(self.words[self.at : self.at + 2], "little")
            self.at += 2
        self.states[state] = x
        return value


@dataclass
class StateWriter:
    """Notes the bits in the order in which they are read."""

    noted: list[tuple[int, int, int]] = field(default_factory=list)

    def bit(self, state: int, f: int, value: int) -> int:
        assert 0 < f < SCALE or value == f // SCALE, "a bit that its chance excludes"
        self.noted.append((state, *((f, 0) if value else (SCALE - f, f))))
        return value

    def finish(self, states: list[int]) -> bytes:
        """The words; ``states``, those at the end, become those at the start."""
        words = []
        for i, length, start in reversed(self.noted):
            if states[i] >= length << 20:
                words.append(states[i] & 0xFFFF)
                states[i] >>= 16
            states[i] = states[i] // length * SCALE + states[i] % length + start
        return b"".join(word.to_bytes(2, "little") for word in reversed(words))


class Chances:
    def __init__(
        self, head: Head, old: list[int], kind: Kind, runs: Runs, marked: Collection[int] = ()
    ) -> None:
        self.old, self.kind, self.head, self.size = old, kind, head, len(old)
        ascending = iter(head.longer)
        self.longer = [LEVELS if r is None else next(ascending) for r in head.rarities]
        self.least = min((r for r in head.rarities if r is not None), default=0)
        self.excess = np.float32(math.ldexp(Q[self.least % 4], -27 - self.least // 4))
        of_class = [0] * (kind.mask + 1)
        for c, r in enumerate(head.rarities, head.first):
            if r is not None:
                above = r - self.least
                of_class[c] = max(1, Q[above % 4] >> above // 4)
        self.weights = [of_class[(x >> kind.shift) & kind.mask] for x in old] + [0] * GROUP
        for p in marked:
            self.weights[p] = 0
        self.shift_of_batch = list(self._shifts(runs))

    def _shifts(self, runs: Runs) -> Iterator[int]:
        base = 0
        shift_of = dict(zip(shifted(runs), self.head.shifts, strict=True))
        for number, (elements, _, _) in enumerate(runs):
            for _ in range(base + -base % BATCH, base + elements, BATCH):
                yield shift_of[number]
            base += elements

    def cls(self, at: int) -> int:
        return (self.old[at] >> self.kind.shift) & self.kind.mask

    def hazard(self, w: int, shift: int) -> int:
        if not w:
            return 0
        e = w.bit_length() - 1
        return E[min(max(4 * e + ((4 * w >> e) & 3) + shift + 4 - self.least, 0), HAZARDS)]

    def group(self, start: int) -> int:
        return self.hazard(
            sum(self.weights[start : start + GROUP]), self.shift_of_batch[start // BATCH]
        )

    def element(self, start: int, k: int, any_before: bool) -> int:
        w, rest = self.weights[start + k], sum(self.weights[start + k : start + GROUP])
        if any_before:
            return self.hazard(w, 0)
        if w in (0, rest):
            return SCALE if w else 0
        more = min(np.float32(rest - w) * self.excess, np.float32(2))
        return min(max(int(SCALE * (np.float32(w) / np.float32(rest) * (1 + more))), 1), SCALE - 1)

    def size_above_one(self, at: int) -> int:
        return C[self.longer[self.cls(at) - self.head.first]]

    def length(self, at: int, n: int) -> tuple[int, int]:
        u = self.cls(at) + n - self.head.first - 1
        further, second = self.head.lengths[u] if u < len(self.head.lengths) else (LEVELS, EVEN)
        return C[further], C[second]


@dataclass
class Step:
    """Of a change; a reader learns the plain bits last."""

    size: int  # without the plain bits, of which there are `plain`
    plain: int
    down: bool


def code_changes(
    side: StateWriter | StateReader, chances: Chances, ends: list[int], wanted: dict[int, int]
) -> dict[int, Step]:
    """``wanted`` are the steps by position, empty for a reader."""
    found = dict[int, Step]()
    tally, row = 0, -1
    for tile in range(0, chances.size, TILE):
        groups = []
        for number, start in enumerate(range(tile, min(tile + TILE, chances.size), GROUP)):
            changes = int(any(p in wanted for p in range(start, start + GROUP)))
            if side.bit(number % STATES, chances.group(start), changes):
                groups.append(start)

        changed = set[int]()
        for batch in range(0, len(groups), STATES):
            for k in range(GROUP):
                for i, start in enumerate(groups[batch : batch + STATES]):
                    before = not changed.isdisjoint(range(start, start + k))
                    if side.bit(i, chances.element(start, k, before), int(start + k in wanted)):
                        changed.add(start + k)

        long = []
        for i, at in enumerate(sorted(changed)):
            found[at] = Step(1, 0, False)
            if side.bit(i % STATES, chances.size_above_one(at), int(abs(wanted.get(at, 1)) > 1)):
                long.append(at)
        for i, at in enumerate(long):
            size, n = abs(wanted.get(at, 2)), 1
            while n < 31 and side.bit(
                i % STATES, chances.length(at, n)[0], int(n < size.bit_length() - 1)
            ):
                n += 1
            second = side.bit(i % STATES, chances.length(at, n)[1], (size >> n - 1) & 1)
            found[at] = Step((2 | second) << n - 1, n - 1, False)
        for i, at in enumerate(sorted(changed)):
            tally = tally if ends[at] == row else 0
            row = ends[at]
            against = side.bit(
                i % STATES,
                C[chances.head.against[min(abs(tally), MAJORITIES - 1)]],
                int((wanted.get(at, 1) < 0) != (tally < 0)),
            )
            found[at].down = bool(against) != (tally < 0)
            tally += -1 if found[at].down else 1
    return found


class Front(Protocol):
    """What stands in front of the first tile, and the elements that it is about: these have no
    weight."""

    marked: Collection[int]

    def code(self, side: StateWriter | StateReader) -> None: ...
    def plain(self) -> list[tuple[int, int]]:
        """The plain bits that an encoder has in front of the others': numbers, and how many bits of
        each."""
        ...

    def take_plain(self, bits: int) -> int:
        """Takes its plain bits from the lowest ones of a decoder's; how many these are."""
        ...


def plain_bytes(
    sizes: dict[int, int], found: dict[int, Step], front: Sequence[tuple[int, int]] = ()
) -> bytes:
    """At least those that are in the states."""
    bits = used = 0
    for number, count in front:
        bits |= number << used
        used += count
    for at, step in found.items():
        assert sizes[at] >> step.plain == step.size >> step.plain
        bits |= (sizes[at] - step.size) << used
        used += step.plain
    return bits.to_bytes(max((used + 7) // 8, IN_STATES), "little")


def states_of(plain: bytes) -> list[int]:
    """The states at the end."""
    return [LOW | int.from_bytes(plain[2 * i : 2 * i + 2], "little") for i in range(STATES)]


def encode(
    old: list[int], new: list[int], kind: Kind, runs: Runs, head: Head, front: Front | None = None
) -> bytes:
    marked = front.marked if front else ()
    wanted = {}
    for at, (a, b) in enumerate(zip(old, new, strict=True)):
        if a != b and at not in marked:
            wanted[at] = kind.step(a, b)
    side = StateWriter()
    if front:
        front.code(side)
    found = code_changes(
        side, Chances(head, old, kind, runs, marked), list(row_ends(list(runs))), wanted
    )
    plain = plain_bytes(
        {at: abs(step) for at, step in wanted.items()}, found, front.plain() if front else ()
    )
    states = states_of(plain)
    words = side.finish(states)
    classes = len(head.rarities)
    return joined(
        Parts(
            len(wanted),
            head.first,
            classes,
            head_bytes(head, runs),
            plain[IN_STATES:],
            states,
            words,
        )
    )


def decode(
    data: bytes, old: list[int], kind: Kind, runs: Runs, front: Front | None = None
) -> list[int]:
    """The new elements, but for those that ``front`` is about."""
    parts, head = cut(data), read_head(data, runs)
    side = StateReader(list(parts.states), parts.words)
    if front:
        front.code(side)
    chances = Chances(head, old, kind, runs, front.marked if front else ())
    found = code_changes(side, chances, list(row_ends(list(runs))), {})
    assert len(found) == parts.changed
    assert found or front
    assert side.at == len(parts.words)
    assert all(x >> 16 == 1 for x in side.states)
    plain = b"".join((x - LOW).to_bytes(2, "little") for x in side.states) + parts.plain
    bits, new = int.from_bytes(plain, "little"), list(old)
    needed = front.take_plain(bits) if front else 0
    bits >>= needed
    needed += sum(step.plain for step in found.values())
    assert len(plain) == max((needed + 7) // 8, IN_STATES)
    for at, step in sorted(found.items()):
        size = step.size | bits % (1 << step.plain)
        bits >>= step.plain
        assert size < 1 << 8 * kind.width
        new[at] = kind.stepped(old[at], -size if step.down else size)
    assert bits == 0
    return new
