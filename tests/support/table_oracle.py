"""The table codec in plain, slow Python, written from docs/format.md, section 3.8: the oracle of
the native kernels.

`encode` chooses no tables by itself: it is given those of a payload, which `read_head` reads.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.support.gaps_oracle import Kind, varint, varint_at

STATES, LOW, SCALE = 64, 1 << 16, 4096


class Head(NamedTuple):
    changed: int
    alphabet: int
    first_classes: list[int]
    frequencies: list[list[int]]

    def table(self, cls: int) -> list[int]:
        return self.frequencies[sum(first <= cls for first in self.first_classes) - 1]

    def to_bytes(self) -> bytes:
        out = varint(self.changed) + bytes(
            [self.alphabet, len(self.frequencies), *self.first_classes[1:]]
        )
        return out + b"".join(varint(f) for table in self.frequencies for f in table[1:])


def read_head(data: bytes) -> tuple[Head, int]:
    """The head of a payload and its length."""
    changed, at = varint_at(data, 0)
    alphabet, tables = data[at], data[at + 1]
    first = [0, *data[at + 2 : at + 1 + tables]]
    at += 1 + tables
    frequencies = []
    for _ in range(tables):
        rest = []
        for _ in range(alphabet - 1):
            value, at = varint_at(data, at)
            rest.append(value)
        frequencies.append([SCALE - sum(rest), *rest])
    return Head(changed, alphabet, first, frequencies), at


def symbol_and_bits(step: int, alphabet: int, table: list[int], width: int) -> tuple[int, int, int]:
    """(symbol, plain bits, how many); the step is signed."""
    size = abs(step)
    symbol = {0: 0, 1: 1, -1: 2}.get(step, size.bit_length() + 1)
    if symbol >= alphabet - 1 or not table[symbol]:
        return alphabet - 1, step % (1 << 8 * width), 8 * width
    if symbol < 3:
        return symbol, 0, 0
    below = symbol - 2
    return symbol, size - (1 << below) | int(step < 0) << below, symbol - 1


def encode(old: list[int], new: list[int], kind: Kind, head: Head) -> bytes:
    states, words = [LOW] * STATES, list[int]()
    for start in reversed(range(0, len(old), STATES)):
        coded = []
        for a, b in zip(old[start : start + STATES], new[start : start + STATES], strict=True):
            step = kind.step(a, b)
            table = head.table((a >> kind.shift) & kind.mask)
            coded.append((table, *symbol_and_bits(step, head.alphabet, table, kind.width)))
        for piece in (1, 0):
            for i, (_, _, bits, count) in reversed(list(enumerate(coded))):
                k = min(max(count - 16 * piece, 0), 16)
                if states[i] >= 1 << (32 - k):
                    words.append(states[i] & 0xFFFF)
                    states[i] >>= 16
                states[i] = states[i] << k | (bits >> 16 * piece & (1 << k) - 1)
        for i, (table, symbol, _, _) in reversed(list(enumerate(coded))):
            f = table[symbol]
            if states[i] >= f << 20:
                words.append(states[i] & 0xFFFF)
                states[i] >>= 16
            states[i] = states[i] // f * SCALE + states[i] % f + sum(table[:symbol])
    tail = b"".join(x.to_bytes(4, "little") for x in states)
    return head.to_bytes() + tail + b"".join(word.to_bytes(2, "little") for word in reversed(words))


def decode(data: bytes, old: list[int], kind: Kind) -> list[int]:
    """The new elements."""
    head, at = read_head(data)
    states = [int.from_bytes(data[at + 4 * i : at + 4 * i + 4], "little") for i in range(STATES)]
    at += 4 * STATES
    new = list(old)

    def settle(i: int) -> None:
        nonlocal at
        if states[i] < LOW:
            states[i] = states[i] << 16 | int.from_bytes(data[at : at + 2], "little")
            at += 2

    for start in range(0, len(old), STATES):
        group = range(min(STATES, len(old) - start))
        symbols, bits = [], [0] * len(group)
        for i in group:
            table = head.table((old[start + i] >> kind.shift) & kind.mask)
            slot, below, symbol = states[i] % SCALE, 0, 0
            while below + table[symbol] <= slot:
                below += table[symbol]
                symbol += 1
            states[i] = table[symbol] * (states[i] // SCALE) + slot - below
            settle(i)
            symbols.append(symbol)
        escape = head.alphabet - 1
        counts = [8 * kind.width if s == escape else max(s - 1, 0) if s > 2 else 0 for s in symbols]
        for piece in (0, 1):
            for i in group:
                k = min(max(counts[i] - 16 * piece, 0), 16)
                bits[i] |= (states[i] & (1 << k) - 1) << 16 * piece
                states[i] >>= k
                settle(i)
        for i in group:
            step = {0: 0, 1: 1, 2: -1}.get(symbols[i], bits[i])
            if 2 < symbols[i] < escape:
                below = symbols[i] - 2
                size = 1 << below | bits[i] & (1 << below) - 1
                step = -size if bits[i] >> below else size
            new[start + i] = kind.stepped(old[start + i], step)
    assert at == len(data)
    assert set(states) == {LOW}
    assert sum(a != b for a, b in zip(old, new, strict=True)) == head.changed
    return new
