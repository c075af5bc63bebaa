"""Payloads that no encoder wrote: each is refused, or read as the oracle reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pytest

from pulse_rl._native import Malformed
from pulse_rl._native._testing import use_rans_vectors
from pulse_rl.errors import CorruptMessage
from pulse_rl.loco.gate import ROUNDINGS
from pulse_rl.loco.wire import Wire
from tests.support import entries_oracle as oracle
from tests.support.entry_blocks import BF16, WIRES, Block, both_wires
from tests.support.table_oracle import varint


@pytest.fixture(autouse=True)
def vectors_as_they_were() -> Iterator[None]:
    yield
    use_rans_vectors(True)


@dataclass(frozen=True)
class Pieces:
    """A payload that has entries, apart."""

    count: int
    head: list[int]
    levels: bytes
    states: list[int]
    words: bytes
    bits: bytes
    announced: int | None = None

    @classmethod
    def of(cls, payload: bytes) -> Self:
        side = oracle.Bytes(payload)
        count, head, levels = side.varint(), list(side.take(8)), side.take(side.varint())
        states = [side.varint() for _ in range(64)]
        words = side.take(2 * side.varint())
        return cls(count, head, levels, states, words, payload[side.at :])

    def joined(self) -> bytes:
        words = len(self.words) // 2 if self.announced is None else self.announced
        numbers = b"".join(varint(x) for x in [*self.states, words])
        levels = varint(len(self.levels)) + self.levels
        return varint(self.count) + bytes(self.head) + levels + numbers + self.words + self.bits


def damaged_one(rng: np.random.Generator, elements: int, wire: Wire) -> tuple[Block, Pieces]:
    """A block with entries, words and plain bits, to be damaged."""
    for _ in range(99):
        block = Block(rng, BF16, elements)
        if 20 < len(block.positions) < elements:
            payload = block.encode(wire)
            pieces = Pieces.of(payload)
            assert pieces.joined() == payload
            if pieces.words and pieces.bits:
                return block, pieces
    raise AssertionError("no such block")


@pytest.mark.slow
@both_wires
def test_damage_is_refused_as_the_oracle_does(wire: Wire) -> None:
    """Flipped, cut, longer, random. (That a message is the one that was sent is the exchange's to check.)"""
    rng = np.random.default_rng(5)
    refused = tried = 0
    for elements in (1, 64, 200, 333, 1000, 1000):
        for _ in range(5):
            block = Block(rng, BF16, elements)
            payload = block.encode(wire)
            for kind in range(8):
                bad = bytearray(payload)
                if kind < 4:
                    bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
                elif kind == 4:
                    del bad[rng.integers(len(bad)) :]
                elif kind == 5:
                    bad += rng.bytes(int(rng.integers(1, 20)))
                elif kind == 6:
                    bad[rng.integers(min(len(bad), 80))] = rng.integers(256)
                else:
                    bad = bytearray(rng.bytes(int(rng.integers(0, 200))))
                tried += 1
                refused += block.refuses(wire, bytes(bad))
    assert refused > tried / 2


@both_wires
def test_what_decodes_though_it_is_damaged_is_in_range(wire: Wire) -> None:
    """Plain bits may be anything: values that no encoder would write, but finite ones, as the oracle reads them."""
    rng = np.random.default_rng(6)
    accepted = tried = 0
    for rounding in ROUNDINGS.values():
        for _ in range(20):
            block = Block(rng, rounding, 200, 0.5)
            pieces = Pieces.of(block.encode(wire))
            bits = bytearray(pieces.bits)
            for at in rng.integers(0, len(bits) - 1, 3):
                bits[at] ^= rng.integers(256)
            tried += 1
            accepted += not block.refuses(wire, replace(pieces, bits=bytes(bits)).joined())
    assert accepted > tried / 2


@both_wires
def test_every_cut_and_every_extension_is_refused(wire: Wire) -> None:
    block, pieces = damaged_one(np.random.default_rng(4), 400, wire)
    payload = pieces.joined()
    for length in range(len(payload)):
        with pytest.raises(Malformed):
            block.decode(wire, payload[:length])
    for tail in (b"\0", b"\xff", bytes(8), bytes(1000)):
        with pytest.raises(Malformed):
            block.decode(wire, payload + tail)


@pytest.mark.slow
@both_wires
def test_every_byte_of_the_head_is_checked(wire: Wire) -> None:
    """What is out of range is refused; of the rest, the oracle is asked about a part."""
    block, pieces = damaged_one(np.random.default_rng(7), 300, wire)
    for k in range(8):
        for value in range(256):
            head = [*pieces.head[:k], value, *pieces.head[k + 1 :]]
            payload = replace(pieces, head=head).joined()
            _, _, first, classes, b, s, c, _ = head
            if first + classes > 255 or not 1 <= s <= 30 or b + s > 255 or c not in (1, 16, 128):
                with pytest.raises(Malformed):
                    block.decode(wire, payload)
            elif value % 8 == k or abs(value - pieces.head[k]) < 3:
                block.refuses(wire, payload)


HOSTILE: dict[str, Callable[[Pieces], Pieces]] = {
    "a count of more than there are": lambda p: replace(p, count=p.count + 1),
    "a count of fewer": lambda p: replace(p, count=p.count - 1),
    "a count above the parameters": lambda p: replace(p, count=1 << 20),
    "a huge count": lambda p: replace(p, count=(1 << 35) - 1),
    "a count past 64 bits": lambda p: replace(p, count=(1 << 70) - 1),
    "no levels": lambda p: replace(p, levels=b""),
    "levels that lack a byte": lambda p: replace(p, levels=p.levels[: len(p.levels) // 2]),
    "levels with more behind them": lambda p: replace(p, levels=p.levels + bytes(8)),
    "a state above 32 bits": lambda p: replace(p, states=[(1 << 32) - (1 << 16), *p.states[1:]]),
    "a state far above 32 bits": lambda p: replace(p, states=[*p.states[:-1], 1 << 62]),
    "another state": lambda p: replace(p, states=[p.states[0] ^ 1, *p.states[1:]]),
    "states of another order": lambda p: replace(p, states=p.states[::-1]),
    "one word more": lambda p: replace(p, words=p.words + b"\0\0"),
    "one word less": lambda p: replace(p, words=p.words[:-2]),
    "more words announced than there are": lambda p: replace(p, announced=len(p.words) // 2 + 1000),
    "a huge number of words": lambda p: replace(p, announced=(1 << 34)),
    "words that overflow": lambda p: replace(p, announced=1 << 63),
    "no words": lambda p: replace(p, words=b""),
    "one byte of plain bits more": lambda p: replace(p, bits=p.bits + b"\0"),
    "one byte of plain bits less": lambda p: replace(p, bits=p.bits[:-1]),
}


@both_wires
@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE)
def test_hostile_payloads_are_refused(damage: Callable[[Pieces], Pieces], wire: Wire) -> None:
    for seed in range(3):
        block, pieces = damaged_one(np.random.default_rng(seed), 300, wire)
        assert block.refuses(wire, damage(pieces).joined())


def test_ones_in_the_last_byte_of_plain_bits_are_refused() -> None:
    rng, tried = np.random.default_rng(9), 0
    for _ in range(10):
        block = Block(rng, BF16, 100, 0.1)
        pieces = Pieces.of(block.encode(WIRES[1]))
        if len(pieces.bits) * 8 > 7 * pieces.count:  # no value escapes: 7 bits each
            tried += 1
            bits = pieces.bits[:-1] + bytes([pieces.bits[-1] | 128])
            assert block.refuses(WIRES[1], replace(pieces, bits=bits).joined())
    assert tried > 3


def test_a_padded_number_is_refused() -> None:
    block, pieces = damaged_one(np.random.default_rng(10), 300, WIRES[0])
    payload = pieces.joined()
    with pytest.raises(Malformed):
        block.decode(WIRES[0], bytes([payload[0] | 128, 0]) + payload[1:])
    with pytest.raises(Malformed):
        block.decode(WIRES[0], b"\x80\0")


def test_one_bad_payload_refuses_them_all() -> None:
    block = Block(np.random.default_rng(8), BF16, 400, 0.3)
    payload = block.encode(WIRES[0])
    with pytest.raises(CorruptMessage):
        WIRES[0].decode([memoryview(payload), memoryview(payload[:-1])], block.theta, block.momentum, BF16)
