"""The payloads of a round: against the plain Python oracle, against what was written once, and
damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch

from pulse_rl._native import (
    Malformed,
    decode_entries,
    encode_entries,
    shared_octaves,
    sparse_outer_step,
)
from pulse_rl._native._kernels import use_vectors
from pulse_rl.errors import InputError
from pulse_rl.loco.gate import ROUNDINGS
from pulse_rl.loco.messages import Compression, Entries, KnownClasses, Message
from pulse_rl.loco.parameters import Floats
from tests.support import entries_oracle as oracle
from tests.support.entry_blocks import BF16, COMPRESSIONS, Block, every_compression, patterns
from tests.support.loco_reference import rounded, same
from tests.support.table_oracle import varint

GOLDEN = Path(__file__).parents[1] / "golden" / "loco-1"
SIZES = [1, 63, 64, 65, 1000, 4095]
LARGE = [8192, 8193, 13000]


@pytest.fixture(autouse=True)
def vectors_as_they_were() -> Iterator[None]:
    yield
    use_vectors(True)


@pytest.mark.slow
@every_compression
@pytest.mark.parametrize("dtype", list(ROUNDINGS), ids=str)
@pytest.mark.parametrize("elements", SIZES)
def test_the_oracle_reads_and_writes_the_same_bytes(
    elements: int, dtype: torch.dtype, compression: Compression
) -> None:
    rng = np.random.default_rng([elements, list(ROUNDINGS).index(dtype)])
    for _ in range(2 if elements < 4095 else 1):
        block = Block(rng, ROUNDINGS[dtype], elements)
        check_against_the_oracle(rng, block, compression)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compression",
    [Compression("fp32"), Compression("e8m2")],
    ids=lambda compression: compression.name,
)
@pytest.mark.parametrize("elements", LARGE)
def test_blocks_around_a_tile_are_read_and_written_alike(
    elements: int, compression: Compression
) -> None:
    rng = np.random.default_rng(elements)
    for share in (None, 1) if elements == 13000 else (0.002, 0.2):
        check_against_the_oracle(rng, Block(rng, BF16, elements, share), compression)


def check_against_the_oracle(
    rng: np.random.Generator, block: Block, compression: Compression
) -> None:
    """Each reads what the other wrote; with the encoder's choices both write the same."""
    entries, payload = block.entries(compression), block.encode(compression)
    found, chosen = oracle.decode(payload, *block.known, compression.mantissa)
    assert found == entries
    assert block.decode(compression, payload, payload) == [entries, entries]
    if chosen is None:
        assert payload == b"\0"
        return
    assert oracle.encode(*block.known, entries, compression.mantissa, chosen) == payload
    other = oracle.encode(
        *block.known, entries, compression.mantissa, block.choices(rng, compression)
    )
    assert block.decode(compression, other) == [entries]
    # Others among them, and an empty one: each by its own classes.
    assert block.decode(compression, payload, b"\0", other, payload) == [
        entries,
        {},
        entries,
        entries,
    ]


@every_compression
def test_a_block_without_entries_and_one_without_parameters(compression: Compression) -> None:
    rng = np.random.default_rng(0)
    for elements in (0, 1, 64, 300):
        block = Block(rng, BF16, elements, 0)
        assert block.encode(compression) == b"\0"
        assert block.decode(compression, b"\0") == [{}]
    with pytest.raises(Malformed):
        Block(rng, BF16, 0).decode(compression, b"\1")


@every_compression
def test_unlikely_entries_are_written_by_any_level(compression: Compression) -> None:
    """All are entries where the levels expect one in 4096, and few where they expect all but 16: a
    word or so each."""
    rng = np.random.default_rng(3)
    for share, level in ((1.0, 1), (0.01, 31)):
        block = Block(rng, BF16, 1000, share)
        chosen = block.choices(rng, compression)
        chosen.classes = [level] * len(chosen.classes)
        payload = oracle.encode(
            *block.known, block.entries(compression), compression.mantissa, chosen
        )
        assert block.decode(compression, payload) == [block.entries(compression)]


@pytest.mark.parametrize("positions", [[3, 3], [4, 3], [0, 10]])
def test_positions_must_ascend_within_the_block(positions: list[int]) -> None:
    theta = np.ones(10, np.float32)
    with pytest.raises(IndexError):
        encode_entries(theta, theta, BF16, np.uint32(positions), np.ones(2, np.float32), 23)


def test_a_value_of_any_size_comes_back() -> None:
    """From denormal to the largest, against theta and momentum of any size; zeros keep their
    sign."""
    values = np.float32([1e-45, -1e-45, 1e-38, 1.5, -1.8446743e19, 2.0**63, 0.0, -0.0])
    theta = np.repeat(np.float32([0.0, -0.0, 1e-45, 1e-30, -0.3, 7.0, 3e38]), len(values))
    values = np.tile(values, 7)
    everywhere = np.arange(len(theta), dtype=np.uint32)
    for rounding in ROUNDINGS.values():
        for momentum in (np.zeros_like(theta), -values):
            payload = encode_entries(theta, momentum, rounding, everywhere, values, 23)
            ((positions, back),) = decode_entries(
                [np.frombuffer(payload, np.uint8)], theta, momentum, rounding, 23
            )
            np.testing.assert_array_equal(positions, everywhere)
            np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))


@every_compression
def test_rounding_loses_nothing_that_the_residual_cannot_hold(
    compression: Compression, rng: np.random.Generator
) -> None:
    """What is left is exact in FP32, as |s| is at most 2^64: denormals, ties, and a rounding into
    the next binade."""
    bits = (
        rng.integers(0, 0x5F800000, 200_000, dtype=np.uint32)
        | rng.integers(0, 2, 200_000, dtype=np.uint32) << 31
    )
    bits[:1000] &= 0x807FFFFF
    bits[1000:2000] |= 0xFFFF
    tie = 1 << 23 - compression.mantissa >> 1
    bits[2000:3000] = bits[2000:3000] & ~np.uint32(2 * tie - 1 if tie else 0) | tie
    s = bits.view(np.float32)
    sent = compression.round(s)
    assert same(torch.from_numpy(sent), rounded(torch.from_numpy(s), compression.name))
    left = s - sent
    np.testing.assert_array_equal(sent.astype(np.float64) + left, s.astype(np.float64))
    np.testing.assert_array_equal(
        (sent + left).view(np.uint32), np.where(s == 0, sent + left, s).view(np.uint32)
    )
    assert (
        np.abs(left)
        <= np.abs(s) * 2.0 ** -(compression.mantissa + 1) + 2.0 ** -(127 + compression.mantissa)
    ).all()


def test_a_value_that_is_too_large_is_refused() -> None:
    """As the gate would: a few of them make theta infinite."""
    theta, place = np.ones(3, np.float32), np.zeros(1, np.uint32)
    for compression in COMPRESSIONS:
        for value in (2.0**64, -(2.0**64), 2.0**127, np.inf, np.nan):
            sent = np.float32([value])
            payload = encode_entries(theta, theta, BF16, place, sent, compression.mantissa)
            with pytest.raises(Malformed):
                decode_entries(
                    [np.frombuffer(payload, np.uint8)], theta, theta, BF16, compression.mantissa
                )


def test_other_wires_are_refused() -> None:
    with pytest.raises(InputError, match="compression"):
        Compression("int8")  # type: ignore[arg-type]
    for mantissa in (-1, 24):
        with pytest.raises(ValueError, match="explicit bits"):
            encode_entries(
                *np.ones((2, 1), np.float32), BF16, np.uint32([0]), np.ones(1, np.float32), mantissa
            )


@every_compression
def test_golden_messages_decode(compression: Compression) -> None:
    """What a release has sent is decoded for ever. (How it chooses levels may change: encoding is
    not pinned.)"""
    block = np.load(GOLDEN / "block.npz")
    message = Message.parse((GOLDEN / f"{compression.name}.message").read_bytes(), 3)
    assert (message.round, message.mantissa) == (41, compression.mantissa)
    theta, momentum = block["theta"], block["momentum"]
    for payload, (start, stop), key in zip(
        message.payloads, block["blocks"].tolist(), "abc", strict=True
    ):
        ((positions, values),) = decode_entries(
            [np.frombuffer(payload, np.uint8)],
            theta[start:stop],
            momentum[start:stop],
            BF16,
            compression.mantissa,
        )
        np.testing.assert_array_equal(positions, block[f"{key}.positions"])
        np.testing.assert_array_equal(
            values.view(np.uint32), block[f"{key}.{compression.name}"].view(np.uint32)
        )
        entries = dict(zip(positions.tolist(), patterns(values), strict=True))
        known = (
            patterns(theta[start:stop]),
            patterns(momentum[start:stop]),
            oracle.Rounding(*BF16),
        )
        assert oracle.decode(bytes(payload), *known, compression.mantissa)[0] == entries


# -- classes that are known from the round before


def classified(theta: Floats, momentum: Floats, octaves: tuple[int, int]) -> KnownClasses:
    """By the outer step, which is the library's own way; of an outer rate of 0, so that nothing
    changes."""
    classes, scratch, counts = (np.empty(len(theta), t) for t in (np.uint8, np.float32, np.int64))
    now = theta.copy(), momentum.copy(), scratch, 0.0, scratch
    sparse_outer_step(*now, 0, [], 1.0, 0.0, 1.0, 0, 1, counts, BF16, octaves, classes)
    return classes, octaves


@every_compression
@pytest.mark.parametrize("size", [1, 64, 1000, 20_000])
def test_known_classes_change_no_byte(
    size: int, compression: Compression, rng: np.random.Generator
) -> None:
    """Of a payload whose octaves are theirs; one of other octaves is coded, and read, without
    them."""
    theta, momentum = (rng.normal(0, scale, size).astype(np.float32) for scale in (0.05, 2e-5))
    positions = np.union1d(np.flatnonzero(rng.random(size) < 0.2), [0]).astype(np.uint32)
    entries: Entries = (
        positions,
        compression.round(rng.normal(0, 1e-4, len(positions)).astype(np.float32)),
    )
    payload = encode_entries(theta, momentum, BF16, *entries, compression.mantissa)
    head = payload[next(i for i, byte in enumerate(payload) if byte < 128) + 1 :]
    own = head[0], head[1]
    known = classified(theta, momentum, own)
    assert encode_entries(theta, momentum, BF16, *entries, compression.mantissa, known) == payload
    for octaves in (own, shared_octaves(momentum), (own[0] + 4, own[1]), (0, 0)):
        known = classified(theta, momentum, octaves)
        coded = encode_entries(theta, momentum, BF16, *entries, compression.mantissa, known)
        for data in (payload, coded):
            for given in (None, known):
                ((found, values),) = decode_entries(
                    [np.frombuffer(data, np.uint8)],
                    theta,
                    momentum,
                    BF16,
                    compression.mantissa,
                    given,
                )
                assert np.array_equal(found, positions)
                assert np.array_equal(values.view(np.uint32), entries[1].view(np.uint32))


def test_octaves_without_momentum() -> None:
    assert shared_octaves(np.zeros(100, np.float32)) == (0, 0)


# -- payloads that no encoder wrote: refused, or read as the oracle reads them


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


def damaged_one(
    rng: np.random.Generator, elements: int, compression: Compression
) -> tuple[Block, Pieces]:
    """A block with entries, words and plain bits, to be damaged."""
    for _ in range(99):
        block = Block(rng, BF16, elements)
        if 20 < len(block.positions) < elements:
            payload = block.encode(compression)
            pieces = Pieces.of(payload)
            assert pieces.joined() == payload
            if pieces.words and (pieces.bits or not compression.mantissa):
                return block, pieces
    raise AssertionError("no such block")


@pytest.mark.slow
@every_compression
def test_damage_is_refused_as_the_oracle_does(compression: Compression) -> None:
    """Flipped, cut, longer, random. (That a message is the one that was sent is the exchange's to
    check.)"""
    rng = np.random.default_rng(5)
    refused = tried = 0
    for elements in (1, 64, 200, 333, 1000, 1000):
        for _ in range(3):
            block = Block(rng, BF16, elements)
            payload = block.encode(compression)
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
                refused += block.refuses(compression, bytes(bad))
    assert refused > tried / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "compression",
    [compression for compression in COMPRESSIONS if compression.mantissa],
    ids=lambda compression: compression.name,
)
def test_what_decodes_though_it_is_damaged_is_in_range(compression: Compression) -> None:
    """Plain bits may be anything: values that no encoder would write, but finite ones, as the
    oracle reads them."""
    rng = np.random.default_rng(6)
    accepted = tried = 0
    for rounding in ROUNDINGS.values():
        for _ in range(20):
            block = Block(rng, rounding, 200, 0.5)
            pieces = Pieces.of(block.encode(compression))
            bits = bytearray(pieces.bits)
            for at in rng.integers(0, len(bits) - 1, 3):
                bits[at] ^= rng.integers(256)
            tried += 1
            accepted += not block.refuses(compression, replace(pieces, bits=bytes(bits)).joined())
    assert accepted > tried / 2


@every_compression
def test_every_cut_and_every_extension_is_refused(compression: Compression) -> None:
    block, pieces = damaged_one(np.random.default_rng(4), 400, compression)
    payload = pieces.joined()
    for length in range(len(payload)):
        with pytest.raises(Malformed):
            block.decode(compression, payload[:length])
    for tail in (b"\0", b"\xff", bytes(8), bytes(1000)):
        with pytest.raises(Malformed):
            block.decode(compression, payload + tail)


@pytest.mark.slow
@every_compression
def test_every_byte_of_the_head_is_checked(compression: Compression) -> None:
    """What is out of range is refused; of the rest, the oracle is asked about a part."""
    block, pieces = damaged_one(np.random.default_rng(7), 300, compression)
    for k in range(8):
        for value in range(256):
            head = [*pieces.head[:k], value, *pieces.head[k + 1 :]]
            payload = replace(pieces, head=head).joined()
            _, _, first, classes, b, s, c, _ = head
            if first + classes > 255 or not 1 <= s <= 30 or b + s > 255 or c not in (1, 16, 128):
                with pytest.raises(Malformed):
                    block.decode(compression, payload)
            elif value % 8 == k or abs(value - pieces.head[k]) < 3:
                block.refuses(compression, payload)


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


@every_compression
@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE)
def test_hostile_payloads_are_refused(
    damage: Callable[[Pieces], Pieces], compression: Compression
) -> None:
    for seed in range(3):
        block, pieces = damaged_one(np.random.default_rng(seed), 300, compression)
        if damage is HOSTILE["one byte of plain bits less"] and not pieces.bits:
            continue
        assert block.refuses(compression, damage(pieces).joined())


def test_ones_in_the_last_byte_of_plain_bits_are_refused() -> None:
    rng, tried = np.random.default_rng(9), 0
    for _ in range(10):
        block = Block(rng, BF16, 100, 0.1)
        pieces = Pieces.of(block.encode(COMPRESSIONS[1]))
        if len(pieces.bits) * 8 > 7 * pieces.count:  # no value escapes: 7 bits each
            tried += 1
            bits = pieces.bits[:-1] + bytes([pieces.bits[-1] | 128])
            assert block.refuses(COMPRESSIONS[1], replace(pieces, bits=bits).joined())
    assert tried > 3


def test_a_padded_number_is_refused() -> None:
    block, pieces = damaged_one(np.random.default_rng(10), 300, COMPRESSIONS[0])
    payload = pieces.joined()
    with pytest.raises(Malformed):
        block.decode(COMPRESSIONS[0], bytes([payload[0] | 128, 0]) + payload[1:])
    with pytest.raises(Malformed):
        block.decode(COMPRESSIONS[0], b"\x80\0")


def test_one_bad_payload_refuses_them_all() -> None:
    block = Block(np.random.default_rng(8), BF16, 400, 0.3)
    payload = block.encode(COMPRESSIONS[0])
    payloads = [np.frombuffer(data, np.uint8) for data in (payload, payload[:-1])]
    with pytest.raises(Malformed):
        decode_entries(payloads, block.theta, block.momentum, BF16, COMPRESSIONS[0].mantissa)
