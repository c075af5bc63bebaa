"""The bytes of a round: against the plain Python oracle, against damage, and against what was written once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pulse_rl._native import Malformed, decode_entries, encode_entries
from pulse_rl.errors import CorruptMessage, InputError
from pulse_rl.loco.gate import ROUNDINGS, Floats, Positions, Rounding, open_entries
from pulse_rl.loco.wire import Message, Wire
from tests.support import entries_oracle as oracle

GOLDEN = Path(__file__).parents[1] / "golden" / "loco-1"
BF16 = ROUNDINGS[torch.bfloat16]
WIRES = [Wire(torch.float32), Wire(torch.bfloat16)]
Runs = list[tuple[int, int, int]]


class Block:
    """Random theta, momentum and pseudo-gradient in ragged runs, and the entries that pass the gate."""

    def __init__(self, rng: np.random.Generator, rounding: Rounding, elements: int = 400) -> None:
        rows = [int(rng.integers(1, 60)) for _ in range(rng.integers(1, 4))]
        self.runs: Runs = [(int(rng.integers(0, elements)), row, int(rng.integers(0, row))) for row in rows]
        self.rounding = rounding
        count = sum(run[0] for run in self.runs)
        self.theta, self.momentum = rng.normal(0, 0.02, (2, count)).astype(np.float32)
        if rng.random() < 0.3:
            anything = rng.integers(0, 1 << 32, (2, count), dtype=np.uint64).astype(np.uint32).view(np.float32)
            self.theta, self.momentum = np.where(np.isfinite(anything), anything, 0)
        self.momentum *= rng.choice([0, 1e-20, 1e-4], (count if rng.random() < 0.5 else 1))
        with np.errstate(over="ignore"):
            s = (self.theta * rng.normal(0, 10 ** -rng.uniform(0, 5), count)).astype(np.float32)
            if rng.random() < 0.7:
                s = self.theta - (self.theta - s)  # as the difference of two weights
        s[~(np.abs(s) < 2.0**64)] = 0
        zero, self.s = np.zeros_like(s), np.empty_like(s)
        found = open_entries(self.theta, s, zero, zero, self.s, rounding)
        assert found is not None
        self.positions = found
        if rng.random() < 0.3:  # as top-k would choose them
            self.positions = np.flatnonzero(rng.random(count) < rng.choice([0.01, 0.3, 1])).astype(np.uint32)

    def values(self, wire: Wire) -> Floats:
        return wire.round(self.s[self.positions])

    def encode(self, wire: Wire) -> bytes:
        entries = (self.positions, self.values(wire))
        return encode_entries(self.theta, self.momentum, self.rounding, self.runs, *entries, wire.bf16)

    def decode(self, wire: Wire, *payloads: bytes) -> list[tuple[Positions, Floats]]:
        views = [np.frombuffer(p, np.uint8) for p in payloads]
        return decode_entries(views, self.theta, self.momentum, self.rounding, self.runs, wire.bf16)


def patterns(x: Floats) -> list[int]:
    return x.view(np.uint32).tolist()


@pytest.mark.parametrize("wire", [pytest.param(WIRES[0], marks=pytest.mark.slow), WIRES[1]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", list(ROUNDINGS), ids=str)
def test_the_oracle_reads_and_writes_the_same_bytes(dtype: torch.dtype, wire: Wire) -> None:
    rng = np.random.default_rng(list(ROUNDINGS).index(dtype))
    rounding, empty = oracle.Rounding(*ROUNDINGS[dtype]), 0
    for _ in range(12):
        block = Block(rng, ROUNDINGS[dtype])
        payload = block.encode(wire)
        common = (patterns(block.theta), patterns(block.momentum), rounding, block.runs)
        entries = dict(zip(block.positions.tolist(), patterns(block.values(wire)), strict=True))
        assert oracle.decode(payload, *common, wire.bf16) == entries
        for positions, values in block.decode(wire, payload, payload):
            assert dict(zip(positions.tolist(), patterns(values), strict=True)) == entries
        if not entries:
            assert payload == b"\0"
            empty += 1
            continue
        count, head, *_ = oracle.head_of(payload)
        assert count == len(entries)
        assert oracle.encode(*common, entries, wire.bf16, head, oracle.levels_of(payload)) == payload
    assert empty < 8


def test_damage_is_refused_or_stays_in_range() -> None:
    """Flipped, cut, longer, random. (That a message is the one that was sent is the exchange's to check.)"""
    rng = np.random.default_rng(5)
    refused = tried = 0
    for _ in range(40):
        block, wire = Block(rng, BF16), WIRES[rng.integers(2)]
        payload = block.encode(wire)
        for kind in range(8):
            bad = bytearray(payload)
            if kind < 4:
                bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
            elif kind == 4:
                del bad[rng.integers(len(bad)) :]
            elif kind == 5:
                bad += rng.bytes(int(rng.integers(1, 20)))
            else:
                bad = bytearray(rng.bytes(int(rng.integers(0, 200))))
            tried += 1
            try:
                ((positions, values),) = block.decode(wire, bytes(bad))
            except Malformed:
                refused += 1
                continue
            assert len(positions) == len(values)
            assert (np.diff(positions.astype(np.int64)) > 0).all()
            assert (positions < len(block.theta)).all()
            assert np.isfinite(values).all()
    assert refused > tried / 2


@pytest.mark.parametrize("wire", WIRES, ids=["fp32", "bf16"])
def test_every_cut_and_every_extension_is_refused(wire: Wire) -> None:
    rng = np.random.default_rng(4)
    block, payload = next(
        (b, p) for b in (Block(rng, BF16) for _ in range(99)) if 100 < len(p := b.encode(wire)) < 1000
    )
    for length in range(len(payload)):
        with pytest.raises(Malformed):
            block.decode(wire, payload[:length])
    for tail in (b"\0", b"\xff", bytes(8), bytes(1000)):
        with pytest.raises(Malformed):
            block.decode(wire, payload + tail)


def test_one_bad_payload_refuses_them_all() -> None:
    block = Block(np.random.default_rng(8), BF16)
    payload = block.encode(WIRES[0])
    with pytest.raises(CorruptMessage):
        WIRES[0].decode(
            [memoryview(payload), memoryview(payload[:-1])], block.theta, block.momentum, BF16, tuple(block.runs)
        )


@pytest.mark.parametrize("positions", [[3, 3], [4, 3], [0, 10]])
def test_positions_must_ascend_within_the_block(positions: list[int]) -> None:
    theta = np.ones(10, np.float32)
    with pytest.raises(IndexError):
        encode_entries(theta, theta, BF16, [(10, 10, 0)], np.uint32(positions), np.ones(2, np.float32), False)


def test_a_value_of_any_size_comes_back() -> None:
    """From denormal to the largest, against theta and momentum of any size; zeros keep their sign."""
    values = np.float32([1e-45, -1e-45, 1e-38, 1.5, -1.8446743e19, 2.0**63, 0.0, -0.0])
    theta = np.repeat(np.float32([0.0, -0.0, 1e-45, 1e-30, -0.3, 7.0, 3e38]), len(values))
    values = np.tile(values, 7)
    for rounding in ROUNDINGS.values():
        for momentum in (np.zeros_like(theta), -values):
            everywhere = np.arange(len(theta), dtype=np.uint32)
            payload = encode_entries(theta, momentum, rounding, [(len(theta), 8, 0)], everywhere, values, False)
            view = np.frombuffer(payload, np.uint8)
            ((positions, back),) = decode_entries([view], theta, momentum, rounding, [(len(theta), 8, 0)], False)
            np.testing.assert_array_equal(positions, everywhere)
            np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))


def test_rounding_to_bf16_loses_nothing_that_the_residual_cannot_hold(rng: np.random.Generator) -> None:
    """s - bf16(s) is exact in FP32, as |s| is at most 2^64: denormals, ties, and a rounding into the next binade."""
    bits = rng.integers(0, 0x5F800000, 200_000, dtype=np.uint32) | rng.integers(0, 2, 200_000, dtype=np.uint32) << 31
    bits[:1000] &= 0x807FFFFF
    bits[1000:2000] |= 0xFFFF
    bits[2000:3000] = bits[2000:3000] & 0xFFFF0000 | 0x8000
    s = bits.view(np.float32)
    sent = WIRES[1].round(s)
    left = s - sent
    np.testing.assert_array_equal(sent.astype(np.float64) + left, s.astype(np.float64))
    np.testing.assert_array_equal((sent + left).view(np.uint32), np.where(s == 0, sent + left, s).view(np.uint32))
    assert (np.abs(left) <= np.abs(s) / 256 + 2.0**-134).all()


def test_a_value_that_is_too_large_is_refused() -> None:
    """As the gate would: a few of them make theta infinite."""
    theta, place = np.ones(3, np.float32), np.zeros(1, np.uint32)
    for value in (2.0**64, -(2.0**64), 3e38, np.inf, np.nan):
        payload = encode_entries(theta, theta, BF16, [(3, 3, 0)], place, np.float32([value]), False)
        with pytest.raises(Malformed):
            decode_entries([np.frombuffer(payload, np.uint8)], theta, theta, BF16, [(3, 3, 0)], False)


def test_other_wires_are_refused() -> None:
    with pytest.raises(InputError, match="wire_dtype"):
        Wire(torch.float16)


# -- messages


def test_a_message_is_read_back() -> None:
    payloads = [b"one", b"", b"\0" * 300]
    message = Message(1 << 40, WIRES[1].code, payloads).to_bytes()
    read = Message.parse(message, 3)
    assert (read.round, read.wire, [bytes(p) for p in read.payloads]) == (1 << 40, 1, payloads)
    assert message[:16].hex() == "504c534c01010000" + "0000000000010000"
    assert message[24:40].hex() == "03000000" + "03000000" + "00000000" + "2c010000"
    assert message != Message(1 << 40, WIRES[1].code, payloads).to_bytes(), (
        "the same entries of two trainers are two messages"
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m[:-1],
        lambda m: m + b"\0",
        lambda m: b"",
        lambda m: m[:27],
        lambda m: b"PLSX" + m[4:],
        lambda m: m[:4] + b"\2" + m[5:],
        lambda m: m[:6] + b"\1" + m[7:],
        lambda m: m[:24] + b"\1" + m[25:],
        lambda m: m[:28] + b"\xff\xff\xff\xff" + m[32:],
    ],
)
def test_a_damaged_message_is_refused(damage: object) -> None:
    message = Message(7, WIRES[0].code, [b"one", b"two"]).to_bytes()
    with pytest.raises(CorruptMessage):
        Message.parse(damage(message), 2)  # type: ignore[operator]


# -- what was written once


@pytest.mark.parametrize("wire", WIRES, ids=["fp32", "bf16"])
def test_golden_messages_decode(wire: Wire) -> None:
    """What a release has sent is decoded for ever. (How it chooses levels may change: encoding is not pinned.)"""
    name = "bf16" if wire.bf16 else "fp32"
    block = np.load(GOLDEN / "block.npz")
    message = Message.parse((GOLDEN / f"{name}.message").read_bytes(), 3)
    assert (message.round, message.wire) == (41, wire.code)
    theta, momentum = block["theta"], block["momentum"]
    for payload, (start, stop, row), key in zip(message.payloads, block["blocks"].tolist(), "abc", strict=True):
        runs = ((stop - start, row, 0),)
        ((positions, values),) = wire.decode([payload], theta[start:stop], momentum[start:stop], BF16, runs)
        np.testing.assert_array_equal(positions, block[f"{key}.positions"])
        np.testing.assert_array_equal(values.view(np.uint32), block[f"{key}.{name}"].view(np.uint32))
        entries = dict(zip(positions.tolist(), patterns(values), strict=True))
        common = (patterns(theta[start:stop]), patterns(momentum[start:stop]), oracle.Rounding(*BF16), list(runs))
        assert oracle.decode(bytes(payload), *common, wire.bf16) == entries
