"""The bytes of a round: against the plain Python oracle, and against what was written once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pulse_rl._native import Malformed, decode_entries, encode_entries
from pulse_rl._native._testing import use_rans_vectors
from pulse_rl.errors import CorruptMessage, InputError
from pulse_rl.loco.gate import ROUNDINGS
from pulse_rl.loco.wire import Message, Wire
from tests.support import entries_oracle as oracle
from tests.support.entry_blocks import BF16, WIRES, Block, both_wires, patterns

GOLDEN = Path(__file__).parents[1] / "golden" / "loco-1"
SIZES = [1, 63, 64, 65, 1000, 4095]
LARGE = [8192, 8193, 13000]


@pytest.fixture(autouse=True)
def vectors_as_they_were() -> Iterator[None]:
    yield
    use_rans_vectors(True)


@pytest.mark.slow
@both_wires
@pytest.mark.parametrize("dtype", list(ROUNDINGS), ids=str)
@pytest.mark.parametrize("elements", SIZES)
def test_the_oracle_reads_and_writes_the_same_bytes(elements: int, dtype: torch.dtype, wire: Wire) -> None:
    rng = np.random.default_rng([elements, list(ROUNDINGS).index(dtype)])
    for _ in range(4):
        block = Block(rng, ROUNDINGS[dtype], elements)
        check_against_the_oracle(rng, block, wire)


@pytest.mark.slow
@both_wires
@pytest.mark.parametrize("elements", LARGE)
def test_blocks_around_a_tile_are_read_and_written_alike(elements: int, wire: Wire) -> None:
    rng = np.random.default_rng(elements)
    for share in (None, 0.002, 0.2, 1):
        check_against_the_oracle(rng, Block(rng, BF16, elements, share), wire)


def check_against_the_oracle(rng: np.random.Generator, block: Block, wire: Wire) -> None:
    """Each reads what the other wrote; with the encoder's choices both write the same."""
    entries, payload = block.entries(wire), block.encode(wire)
    found, chosen = oracle.decode(payload, *block.known, wire.bf16)
    assert found == entries
    assert block.decode(wire, payload, payload) == [entries, entries]
    if chosen is None:
        assert payload == b"\0"
        return
    assert oracle.encode(*block.known, entries, wire.bf16, chosen) == payload
    other = oracle.encode(*block.known, entries, wire.bf16, block.choices(rng, wire))
    assert block.decode(wire, other) == [entries]
    # Others among them, and an empty one: each by its own classes.
    assert block.decode(wire, payload, b"\0", other, payload) == [entries, {}, entries, entries]


@both_wires
def test_a_block_without_entries_and_one_without_parameters(wire: Wire) -> None:
    rng = np.random.default_rng(0)
    for elements in (0, 1, 64, 300):
        block = Block(rng, BF16, elements, 0)
        assert block.encode(wire) == b"\0"
        assert block.decode(wire, b"\0") == [{}]
    with pytest.raises(Malformed):
        Block(rng, BF16, 0).decode(wire, b"\1")


@both_wires
def test_unlikely_entries_are_written_by_any_level(wire: Wire) -> None:
    """All are entries where the levels expect one in 4096, and few where they expect all but 16: a word or so each."""
    rng = np.random.default_rng(3)
    for share, level in ((1.0, 1), (0.01, 31)):
        block = Block(rng, BF16, 1000, share)
        chosen = block.choices(rng, wire)
        chosen.classes = [level] * len(chosen.classes)
        payload = oracle.encode(*block.known, block.entries(wire), wire.bf16, chosen)
        assert block.decode(wire, payload) == [block.entries(wire)]


# -- values


@pytest.mark.parametrize("positions", [[3, 3], [4, 3], [0, 10]])
def test_positions_must_ascend_within_the_block(positions: list[int]) -> None:
    theta = np.ones(10, np.float32)
    with pytest.raises(IndexError):
        encode_entries(theta, theta, BF16, np.uint32(positions), np.ones(2, np.float32), False)


def test_a_value_of_any_size_comes_back() -> None:
    """From denormal to the largest, against theta and momentum of any size; zeros keep their sign."""
    values = np.float32([1e-45, -1e-45, 1e-38, 1.5, -1.8446743e19, 2.0**63, 0.0, -0.0])
    theta = np.repeat(np.float32([0.0, -0.0, 1e-45, 1e-30, -0.3, 7.0, 3e38]), len(values))
    values = np.tile(values, 7)
    everywhere = np.arange(len(theta), dtype=np.uint32)
    for rounding in ROUNDINGS.values():
        for momentum in (np.zeros_like(theta), -values):
            payload = encode_entries(theta, momentum, rounding, everywhere, values, False)
            ((positions, back),) = decode_entries([np.frombuffer(payload, np.uint8)], theta, momentum, rounding, False)
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
    for wire in WIRES:
        for value in (2.0**64, -(2.0**64), 3e38, np.inf, np.nan):
            sent = wire.round(np.float32([value]))
            payload = encode_entries(theta, theta, BF16, place, sent, wire.bf16)
            with pytest.raises(Malformed):
                decode_entries([np.frombuffer(payload, np.uint8)], theta, theta, BF16, wire.bf16)


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
        lambda m: m[:4] + b"\3" + m[5:],
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


@both_wires
def test_golden_messages_decode(wire: Wire) -> None:
    """What a release has sent is decoded for ever. (How it chooses levels may change: encoding is not pinned.)"""
    name = "bf16" if wire.bf16 else "fp32"
    block = np.load(GOLDEN / "block.npz")
    message = Message.parse((GOLDEN / f"{name}.message").read_bytes(), 3)
    assert (message.round, message.wire) == (41, wire.code)
    theta, momentum = block["theta"], block["momentum"]
    for payload, (start, stop), key in zip(message.payloads, block["blocks"].tolist(), "abc", strict=True):
        ((positions, values),) = wire.decode([payload], theta[start:stop], momentum[start:stop], BF16)
        np.testing.assert_array_equal(positions, block[f"{key}.positions"])
        np.testing.assert_array_equal(values.view(np.uint32), block[f"{key}.{name}"].view(np.uint32))
        entries = dict(zip(positions.tolist(), patterns(values), strict=True))
        known = (patterns(theta[start:stop]), patterns(momentum[start:stop]), oracle.Rounding(*BF16))
        assert oracle.decode(bytes(payload), *known, wire.bf16)[0] == entries
