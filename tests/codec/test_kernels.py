"""The native kernels at their binding: whole, aligned elements and positions inside the array, or a
ValueError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulse_rl._native import (
    decode_block,
    encode_block,
    gate,
    gather,
    history_records,
    outer_step,
    round_values,
    scan,
    scatter,
    sparse_outer_step,
)
from pulse_rl.codec import GAPS, HISTORY
from tests.support.arrays import Array, misaligned

POSITIONS = np.uint32([0, 2])
Past = list[Array]


def encode(past: Past, old: Array, new: Array, width: int, *kind: Any) -> Any:
    *ordered, runs = kind
    return encode_block(past, old, new, (width, *ordered), runs)


def decode(past: Past, payload: Array, old: Array, width: int, *kind: Any) -> Any:
    *ordered, runs = kind
    codec = HISTORY if past else GAPS
    return decode_block(codec, past, payload, old, (width, *ordered), runs)


def elements(width: int) -> Array:
    return np.arange(8 * width, dtype=np.uint8)


def payload_of(old: Array) -> Array:
    """A payload of eight elements; the width of an element is no part of it."""
    new = old[:8] ^ np.uint8(1)
    return np.frombuffer(encode([], old[:8].copy(), new, 1, *KIND)[1], np.uint8)


def history_payload_of(old: Array) -> Array:
    new = old[:8].copy()
    new[0] += 1
    return np.frombuffer(encode(PAST, old[:8].copy(), new, 1, *KIND)[1], np.uint8)


KIND = (0, 0, False, [(8, 8, 0)])
PAST = [np.uint8([0, 0, 1, 0])]
CALLS: dict[str, Callable[[Array, Array, int], Any]] = {
    "encode, old": lambda x, good, w: encode([], x, good, w, *KIND),
    "encode, new": lambda x, good, w: encode([], good, x, w, *KIND),
    "decode, old": lambda x, good, w: decode([], payload_of(good), x, w, *KIND),
    "encode with a history, old": lambda x, good, w: encode(PAST, x, good, w, *KIND),
    "encode with a history, new": lambda x, good, w: encode(PAST, good, x, w, *KIND),
    "decode with a history, old": lambda x, good, w: decode(
        PAST, history_payload_of(good), x, w, *KIND
    ),
    "history_records, old": lambda x, good, w: history_records(
        POSITIONS, x[: 2 * w], good[: 2 * w], (w, 0, 0, False)
    ),
    "history_records, new": lambda x, good, w: history_records(
        POSITIONS, good[: 2 * w], x[: 2 * w], (w, 0, 0, False)
    ),
    "scan, old": lambda x, good, w: scan(x, good, w),
    "scan, new": lambda x, good, w: scan(good, x, w),
    "gather, elements": lambda x, good, w: gather(x, w, POSITIONS, 0),
    "scatter, elements": lambda x, good, w: scatter(x, w, POSITIONS, 0, good[: 2 * w]),
    "scatter, values": lambda x, good, w: scatter(good.copy(), w, POSITIONS, 0, x[: 2 * w]),
}


@pytest.mark.parametrize(
    ("call", "width"),
    [
        (c, w)
        for c in CALLS
        for w in (2, 4, 8)
        if w < 8 or not c.startswith(("encode", "decode", "history"))
    ],
)
def test_elements_at_odd_addresses_are_refused(call: str, width: int) -> None:
    good = elements(width)
    CALLS[call](good.copy(), good, width)
    name = call.partition(", ")[2]
    for offset in (1, width // 2):
        bad = misaligned(good, offset)
        with pytest.raises(ValueError, match=f"{name} is not aligned to {width} bytes"):
            CALLS[call](bad, good, width)
        np.testing.assert_array_equal(bad, good)


def test_bytes_may_lie_anywhere() -> None:
    good = elements(1)
    for call in CALLS.values():
        call(misaligned(good), good, 1)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_an_empty_array_has_no_address(width: int) -> None:
    empty, none = np.zeros(8, np.uint8)[1:1], np.empty(0, np.uint32)
    assert scan(empty, empty, width).tolist() == []
    assert gather(empty, width, none, 0).tolist() == []
    scatter(empty, width, none, 0, empty)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_part_of_an_element_is_refused(width: int) -> None:
    """It would be silently left out of the comparison otherwise."""
    for short in range(1, width):
        old, new = np.zeros(2 * width - short, np.uint8), np.full(2 * width - short, 1, np.uint8)
        with pytest.raises(
            ValueError, match=f"old is no whole number of elements of {width} bytes"
        ):
            scan(old, new, width)
        with pytest.raises(ValueError, match="elements is no whole number"):
            gather(old, width, np.uint32([0]), 0)
        with pytest.raises(ValueError, match="elements is no whole number"):
            scatter(old, width, np.uint32([0]), 0, np.zeros(width, np.uint8))
        with pytest.raises(ValueError, match="values is no whole number"):
            scatter(np.zeros(width, np.uint8), width, np.uint32([0]), 0, old)
        assert not old.any()
    with pytest.raises(ValueError, match="old is no whole number"):
        encode([], np.zeros(3, np.uint8), np.zeros(3, np.uint8), 2, 0, 0, False, [(1, 1, 0)])
    with pytest.raises(ValueError, match="old is no whole number"):
        encode(PAST, np.zeros(3, np.uint8), np.zeros(3, np.uint8), 2, 0, 0, False, [(1, 1, 0)])


@pytest.mark.parametrize(
    ("past", "words"),
    [
        ([np.zeros(2, np.uint8)], "four bytes"),
        ([PAST[0], np.zeros(7, np.uint8)], "four bytes"),
        (PAST * 65, "too many windows"),
    ],
)
def test_windows_out_of_range_are_refused(past: Past, words: str) -> None:
    eight = elements(1)
    for call in (
        lambda: encode(past, eight, eight, 1, *KIND),
        lambda: decode(past, history_payload_of(eight), eight, 1, *KIND),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_records_and_runs_out_of_range_are_refused() -> None:
    two = np.zeros(2, np.uint8)
    for positions in ([2, 2], [2, 0]):
        with pytest.raises(ValueError, match="do not ascend"):
            history_records(np.uint32(positions), two, two, (1, 0, 0, False))
    with pytest.raises(ValueError, match="positions is not aligned"):
        history_records(misaligned(POSITIONS), two, two, (1, 0, 0, False))
    payload = history_payload_of(elements(1))
    for call in (
        lambda *kind: encode(PAST, elements(1), elements(1), *kind),
        lambda *kind: decode(PAST, payload, elements(1), *kind),
    ):
        for kind in ((1, 32, 0), (1, -1, 0), (1, 0, 256)):
            with pytest.raises(ValueError, match="out of range"):
                call(*kind, False, [(8, 8, 0)])
        for runs in ([], [(7, 7, 0)], [(9, 9, 0)]):
            with pytest.raises(ValueError, match="do not cover"):
                call(1, 0, 0, False, runs)
        for run in ((8, 0, 0), (8, 8, 8), (8, (1 << 48) + 1, 0)):
            with pytest.raises(ValueError, match="run is out of range"):
                call(1, 0, 0, False, [run])


def test_positions_are_aligned_and_inside() -> None:
    array, at = np.zeros(8, np.uint16), misaligned(POSITIONS)
    raw, values = array.view(np.uint8), np.uint16([1, 2]).view(np.uint8)
    for call in (lambda p: gather(raw, 2, p, 0), lambda p: scatter(raw, 2, p, 0, values)):
        with pytest.raises(ValueError, match="positions is not aligned to 4 bytes"):
            call(at)
        with pytest.raises(IndexError, match="outside"):
            call(np.uint32([0, 8]))
    assert not array.any()


@pytest.mark.parametrize("width", [-1, 0, 3, 16])
def test_other_widths_are_refused(width: int) -> None:
    raw = np.zeros(48, np.uint8)
    for call in CALLS.values():
        with pytest.raises(ValueError, match="out of range"):
            call(raw, raw, width)


def test_arrays_of_unequal_length_are_refused() -> None:
    two, three = np.zeros(4, np.uint8), np.zeros(6, np.uint8)
    for call in (
        lambda: scan(two, three, 2),
        lambda: encode([], two, three, 2, 0, 0, False, [(2, 2, 0)]),
        lambda: encode(PAST, two, three, 2, 0, 0, False, [(2, 2, 0)]),
        lambda: history_records(POSITIONS, two, three, (2, 0, 0, False)),
        lambda: history_records(POSITIONS, three, three, (2, 0, 0, False)),
        lambda: scatter(three, 2, POSITIONS, 0, three),
    ):
        with pytest.raises(ValueError, match="differ"):
            call()


def test_an_array_is_never_converted() -> None:
    """A strided array, or one of another dtype, would be copied, and what is written into the copy
    lost."""
    raw, one, value = np.zeros(16, np.uint8), np.uint32([0]), np.uint8([9])
    floats, four, counts = np.zeros(8, np.float32), np.zeros(4, np.float32), np.zeros(4, np.int64)
    rounding, known = (7, 1, 0x7F7F0000, 0x7F800000), ((120, 104), np.zeros(4, np.uint8))
    rest = (0, [(one, np.float32([1]))], 2, 0.7, 0.9, 0, 256)
    calls: list[Callable[[], Any]] = [
        lambda: scatter(raw[::2], 1, one, 0, value),
        lambda: scatter(raw.view(np.uint16), 2, one, 0, raw[:2]),
        lambda: round_values(
            np.zeros(8, np.uint32), (3, 121, 0x43E00000, 0x43E00000), 0x7F, 1, raw[::2]
        ),
        lambda: outer_step(floats[::2], four, four, 2, 0.7, 0.9),
        lambda: gate(four, four, four, 0.0, False, floats[::2], rounding, 0),
        lambda: gate(four, four, four, 0.0, False, np.zeros(4), rounding, 0),
        lambda: sparse_outer_step(
            floats[::2], four, four, 1.0, four, *rest, counts[:1], rounding, *known
        ),
        lambda: sparse_outer_step(
            four, floats[::2], four, 1.0, four, *rest, counts[:1], rounding, *known
        ),
        lambda: sparse_outer_step(
            four, four, four, 1.0, floats[::2], *rest, counts[:1], rounding, *known
        ),
        lambda: sparse_outer_step(
            four, four, four, 1.0, four, *rest, counts[::2], rounding, *known
        ),
        lambda: sparse_outer_step(
            four, four, four, 1.0, four, *rest, counts.astype(np.int32), rounding, *known
        ),
        lambda: sparse_outer_step(
            four, four, four, 1.0, four, *rest, counts[:1], rounding, (1, 1), raw[:8:2]
        ),
        lambda: gather(raw, 1, np.int64([0]), 0),
        lambda: scan(raw[::2], raw[::2], 1),
        lambda: history_records(one, raw[::2], raw[::2], (1, 0, 0, False)),
        lambda: encode(PAST, raw[::2], raw[::2], 1, *KIND),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="incompatible"):
            call()
    assert not any(array.any() for array in (raw, floats, four, counts))


def test_a_read_only_array_is_not_written() -> None:
    raw = np.zeros(4, np.uint8)
    raw.flags.writeable = False
    with pytest.raises(TypeError, match="incompatible"):
        scatter(raw, 1, np.uint32([0]), 0, np.uint8([9]))
    assert gather(raw, 1, np.uint32([0]), 0).tolist() == [0]
