"""The fields of a payload of the sparse codec (docs/format.md, section 3.7.1)."""

from __future__ import annotations

from typing import NamedTuple

from tests.support.table_oracle import STATES, varint, varint_at


class Parts(NamedTuple):
    """A payload cut into its fields."""

    changed: int
    first: int
    classes: int
    head: bytes
    plain: bytes
    states: list[int]
    words: bytes


def cut(data: bytes) -> Parts:
    def field_of_bytes() -> bytes:
        nonlocal at
        size, at = varint_at(data, at)
        at += size
        assert at <= len(data)
        return data[at - size : at]

    changed, at = varint_at(data, 0)
    first, classes = data[at], data[at + 1] + 1
    at += 2
    head, plain = field_of_bytes(), field_of_bytes()
    bits, used, states = int.from_bytes(data[at : at + 4 * STATES + STATES // 2], "little"), 0, []
    for _ in range(STATES):
        more = 16 + (bits >> used) % 16
        states.append(1 << more | (bits >> used + 4) % (1 << more))
        used += 4 + more
    packed = (used + 7) // 8
    assert at + packed <= len(data)
    assert (bits % (1 << 8 * packed)) >> used == 0
    return Parts(changed, first, classes, head, plain, states, data[at + packed :])


def joined(parts: Parts) -> bytes:
    bits = used = 0
    for x in parts.states:
        more = x.bit_length() - 1
        bits |= (more - 16 | (x - (1 << more)) << 4) << used
        used += 4 + more
    packed = bits.to_bytes((used + 7) // 8, "little")
    out = (
        varint(parts.changed)
        + bytes([parts.first, parts.classes - 1])
        + varint(len(parts.head))
        + parts.head
    )
    return out + varint(len(parts.plain)) + parts.plain + packed + parts.words
