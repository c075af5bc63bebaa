"""The native history codec against its specification: byte for byte what the plain Python oracle makes of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from pulse_rl import codec
from pulse_rl._native import history_merged, history_records
from pulse_rl.codec import Layout, Past, Run
from pulse_rl.codec.base import element_kind
from pulse_rl.errors import CorruptPatch
from pulse_rl.state.tensors import DTYPES, DType, UIntArray
from tests.support import history_oracle as oracle
from tests.support.context_oracle import Kind
from tests.support.history_oracle import Steps

HISTORY = codec.by_name("history")
NAMES = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U16", "I32", "BOOL"]
SPANS = [(1,), (1, 1, 1), (2,), (16, 4, 1, 1), (1, 3, 1), (64, 64, 1, 1, 1, 1, 1, 1, 1, 1, 1), (1,) * 12, (5, 1, 1, 7)]


class Block(NamedTuple):
    """``states`` at the starts of the stretches and at their end, and the elements that come then."""

    layout: Layout
    spans: tuple[int, ...]
    states: list[UIntArray]
    new: UIntArray
    stretches: list[Steps]

    @property
    def old(self) -> UIntArray:
        return self.states[-1]

    @property
    def kind(self) -> Kind:
        return Kind(*element_kind(self.layout.dtype))

    @property
    def past(self) -> list[tuple[Steps, int]]:
        return list(zip(self.stretches, self.spans, strict=True))


def moved(rng: np.random.Generator, now: UIntArray, mobile: np.ndarray, drift: np.ndarray, large: float) -> UIntArray:
    """Some of the ``mobile`` elements go on by a step, mostly where they ``drift``; of a small block, some become
    anything."""
    top = 1 << 8 * now.dtype.itemsize
    hit = rng.random(len(now)) < np.where(mobile, 0.5, 0.01)
    step = np.where(rng.random(len(now)) < 0.85, drift, -drift)
    size = np.where(rng.random(len(now)) < large, rng.integers(2, 200, len(now)), 1)
    new = now + np.where(hit, step * size % top, 0).astype(now.dtype)
    anywhere = rng.random(len(now)) < (0.002 if len(now) < 2000 else 0)
    new[anywhere] = rng.integers(0, top, anywhere.sum(), dtype=np.uint64).astype(now.dtype)
    return new


def random_block(
    rng: np.random.Generator, name: str, spans: tuple[int, ...], elements: int = 400, large: float | None = None
) -> Block:
    """A block of ragged rows whose changes come again, and its states at the starts of the stretches."""
    dtype = DTYPES[name]
    rows = [int(rng.integers(1, 60)) for _ in range(rng.integers(1, 4))]
    runs = tuple(Run(int(rng.integers(1, elements)), row, int(rng.integers(0, row))) for row in rows)
    count, top = sum(run.elements for run in runs), 1 << 8 * dtype.width
    now = rng.integers(0, top, count, dtype=np.uint64).astype(dtype.uint)
    if name in ("BF16", "F32", "F16"):
        values = rng.normal(0, 0.02, count)
        bits = values.astype(np.float16).view(np.uint16) if name == "F16" else values.astype(np.float32).view(np.uint32)
        now = (bits >> 16 if name == "BF16" else bits).astype(dtype.uint)
    mobile, drift = rng.random(count) < rng.choice([0.05, 0.3, 1]), rng.choice([-1, 1], count)
    large = float(rng.choice([0, 0.1, 0.9])) if large is None else large
    states, stretches = [now], []
    kind = Kind(*element_kind(dtype))
    for span in spans:
        for _ in range(min(span, 4)):
            now = moved(rng, now, mobile, drift, large)
        stretches.append(oracle.stretch(states[-1].tolist(), now.tolist(), kind))
        states.append(now)
    past = native_past(stretches, spans)
    return Block(Layout(dtype, runs, past), spans, states, moved(rng, now, mobile, drift, large), stretches)


def native_past(stretches: list[Steps], spans: tuple[int, ...]) -> Past:
    return tuple(
        (np.frombuffer(oracle.records(steps), np.uint8), span) for steps, span in zip(stretches, spans, strict=True)
    )


def encoded(block: Block) -> bytes | None:
    found = HISTORY.encode(block.old, block.new, block.layout)
    if found is None:
        return None
    assert found[1] == np.count_nonzero(block.old != block.new)
    return found[0]


def blocks(name: str, count: int = 12) -> list[Block]:
    rng = np.random.default_rng(NAMES.index(name))
    return [random_block(rng, name, SPANS[k % len(SPANS)]) for k in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_reads_and_writes_the_same_bytes(name: str) -> None:
    coded = 0
    for block in blocks(name):
        payload = encoded(block)
        if payload is None:
            continue
        coded += 1
        runs = list(block.layout.runs)
        new, chosen = oracle.decode(payload, block.old.tolist(), block.kind, runs, block.past)
        assert new == block.new.tolist()
        assert oracle.encode(block.old.tolist(), new, block.kind, runs, block.past, chosen) == payload
        decoded = HISTORY.decode(memoryview(payload), block.old, block.layout)
        np.testing.assert_array_equal(decoded.positions, np.flatnonzero(block.old != block.new))
        np.testing.assert_array_equal(decoded.values, block.new[decoded.positions])
        np.testing.assert_array_equal(decoded.before, block.old[decoded.positions])
    assert coded >= 3


def any_choices(rng: np.random.Generator, block: Block) -> oracle.Choices:
    """Choices that no good encoder makes, by which the block can be coded all the same."""
    shift, mask = block.kind.shift, block.kind.mask
    changed = np.flatnonzero(block.old != block.new)
    classes = (block.old[changed].astype(np.int64) >> shift) & mask
    first = int(rng.integers(max(classes.max() - 62, 0), classes.min() + 1))
    most = min(63, mask + 1 - first)
    count = int(rng.integers(classes.max() - first + 1, most + 1))
    chosen = oracle.Choices(int(rng.integers(0, len(block.spans) + 1)), int(rng.integers(0, 8)), first, count)
    for c in range(first, first + count):
        if c in classes or rng.random() < 0.5:
            chosen.levels[c] = int(rng.integers(0, 45))
    for place in range(count):
        chosen.odds[place] = int(rng.integers(-21, 22))
    known = oracle.what_is_known(block.past[len(block.past) - chosen.used :])
    moving = {known[p].group for p in changed.tolist() if p in known}
    for group in range(1, oracle.GROUPS):
        if group in moving or rng.random() < 0.5:
            chosen.groups[group] = int(rng.integers(-21, 22))
            chosen.cells.update({(group, place): int(rng.integers(0, 45)) for place in range(count)})
    return chosen


@pytest.mark.parametrize("name", NAMES)
def test_what_any_encoder_may_choose_is_read(name: str) -> None:
    rng, coded = np.random.default_rng(NAMES.index(name)), 0
    for block in blocks(name, 16):
        changed = np.flatnonzero(block.old != block.new)
        classes = (block.old[changed].astype(np.int64) >> block.kind.shift) & block.kind.mask
        if not len(changed) or classes.max() - classes.min() > 62:
            continue
        runs, chosen = list(block.layout.runs), any_choices(rng, block)
        payload = oracle.encode(block.old.tolist(), block.new.tolist(), block.kind, runs, block.past, chosen)
        decoded = HISTORY.decode(memoryview(payload), block.old, block.layout)
        np.testing.assert_array_equal(decoded.positions, changed)
        np.testing.assert_array_equal(decoded.values, block.new[changed])
        coded += 1
    assert coded >= 3


def records_between(dtype: DType, before: UIntArray, after: UIntArray) -> bytes:
    positions = np.flatnonzero(before != after).astype(np.uint32)
    width, _, _, floating = element_kind(dtype)
    old, new = before[positions].view(np.uint8), after[positions].view(np.uint8)
    return history_records(positions, old, new, width, floating).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_records_are_the_net_steps_modulo_256(name: str) -> None:
    for block in blocks(name, 8):
        for before, after, steps in zip(block.states, block.states[1:], block.stretches, strict=False):
            assert records_between(block.layout.dtype, before, after) == oracle.records(steps)


def test_a_net_step_of_a_multiple_of_256_is_not_remembered() -> None:
    old = np.uint16([0x3C00] * 5)
    new = old + np.uint16([256, 255, 512, 0, 257])
    assert records_between(DTYPES["U16"], old, new) == oracle.records({1: -1, 4: 1})


GAPS = [0, 1, 65534, 65535, 65536, 65537, 131070, 131071, 300_000]


@pytest.mark.parametrize("gap", GAPS)
def test_long_gaps_between_records(gap: int) -> None:
    old = np.zeros(gap + 3 + gap, np.uint8)
    new = old.copy()
    new[[gap, gap + 1, -1]] = 1, 2, 3
    steps = {gap: 1, gap + 1: 2, len(old) - 1: 3}
    kept = records_between(DTYPES["U8"], old, new)
    assert kept == oracle.records(steps)
    parts = [(np.frombuffer(oracle.records(s), np.uint8), 1) for s in (steps, {p: d + 1 for p, d in steps.items()})]
    assert history_merged(parts, len(old)).tobytes() == oracle.records({p: 2 * d + 1 for p, d in steps.items()})


@pytest.mark.parametrize("name", NAMES)
def test_merged_stretches_are_the_stretch_between_their_ends(name: str) -> None:
    for block in blocks(name, 8):
        for first in range(len(block.stretches)):
            for last in range(first + 1, min(first + 5, len(block.stretches) + 1)):
                found = history_merged(list(block.layout.past[first:last]), len(block.old)).tobytes()
                assert found == oracle.records(oracle.merged(block.stretches[first:last]))
                assert found == records_between(block.layout.dtype, block.states[first], block.states[last])


def test_steps_that_cancel_each_other_are_forgotten() -> None:
    parts = [(np.frombuffer(oracle.records(s), np.uint8), 1) for s in ({3: 5, 9: -128}, {3: -5, 9: -128, 11: 1})]
    assert history_merged(parts, 12).tobytes() == oracle.records({11: 1})


def test_nothing_is_coded_where_the_past_does_not_help() -> None:
    rng = np.random.default_rng(2)
    block = random_block(rng, "BF16", (1, 1), elements=20_000)
    assert encoded(block) is not None
    nothing = np.empty(0, np.uint8)
    elsewhere = np.setdiff1d(np.arange(len(block.old)), np.flatnonzero(block.old != block.new))
    others = np.frombuffer(oracle.records(dict.fromkeys(elsewhere[::9].tolist(), 1)), np.uint8)
    for past in ((), ((nothing, 1),), ((nothing, 3), (nothing, 1)), ((others, 1),)):
        assert HISTORY.encode(block.old, block.new, block.layout._replace(past=past)) is None
    assert HISTORY.encode(block.old, block.old, block.layout) is None


def test_classes_that_are_too_many_to_list_are_left_to_context() -> None:
    rng = np.random.default_rng(4)
    old = (np.arange(256, dtype=np.uint32) << 23).repeat(20)
    new = old + 1
    past = ((np.frombuffer(oracle.records(dict.fromkeys(range(len(old)), 1)), np.uint8), 1),)
    layout = Layout(DTYPES["F32"], (Run(len(old), 10, 0),), past)
    assert HISTORY.encode(old, new, layout) is None
    few = np.where(rng.random(len(old)) < 0.5, new, old)
    few[(old >> 23) >= 63] = old[(old >> 23) >= 63]
    assert HISTORY.encode(old, few, layout) is not None


def check_sane_or_refused(payload: bytes, block: Block, past: Past) -> bool:
    """True where it was refused; any exception but CorruptPatch fails the test."""
    kept = block.old.copy()
    try:
        found = HISTORY.decode(memoryview(payload), block.old, block.layout._replace(past=past))
    except CorruptPatch:
        return True
    finally:
        np.testing.assert_array_equal(block.old, kept)
    assert len(found.positions) == len(found.values) > 0
    assert (np.diff(found.positions.astype(np.int64)) > 0).all()
    assert found.positions[-1] < len(block.old)
    assert (found.values != block.old[found.positions]).all()
    return False


HOSTILE = ["BF16", "F32", "F8_E4M3", "I8"]


def coded_block(name: str, seed: int = 0) -> tuple[Block, bytes]:
    rng = np.random.default_rng(seed)
    while True:
        block = random_block(rng, name, (3, 1, 1))
        payload = encoded(block)
        if payload is not None:
            return block, payload


@pytest.mark.parametrize("name", HOSTILE)
def test_truncations_appended_bytes_and_flipped_bits(name: str) -> None:
    block, payload = coded_block(name)
    past = block.layout.past
    for tail in (bytes(9), b"\xff" * 8 + b"\0", payload):
        assert check_sane_or_refused(payload + tail, block, past)
    assert all(check_sane_or_refused(payload[:cut], block, past) for cut in range(max(len(payload) - 8, 5)))
    for cut in range(len(payload)):
        check_sane_or_refused(payload[:cut], block, past)
    for flip in range(0, 8 * len(payload), 1 if len(payload) < 300 else 7):
        broken = bytearray(payload)
        broken[flip // 8] ^= 1 << flip % 8
        check_sane_or_refused(bytes(broken), block, past)


@pytest.mark.parametrize("name", HOSTILE)
def test_random_payloads(name: str) -> None:
    block, payload = coded_block(name, 1)
    rng, refused = np.random.default_rng(1), 0
    for k in range(600):
        head = payload[:5] if k % 2 else b""
        refused += check_sane_or_refused(head + rng.bytes(int(rng.integers(0, 200))), block, block.layout.past)
    assert refused > 300


@pytest.mark.parametrize(
    "head", [(9, 0, 0, 0), (4, 0, 0, 0), (1, 8, 0, 0), (1, 0, 0, 63), (1, 0, 250, 6), (1, 0, 0, 255)]
)
def test_heads_that_cannot_be(head: tuple[int, ...]) -> None:
    """More stretches than there are; a boost, a number of classes or a class out of range."""
    block, payload = coded_block("BF16")
    at = next(k for k, byte in enumerate(payload) if byte < 128) + 1
    bad = payload[:at] + bytes(head) + payload[at + 4 :]
    with pytest.raises(CorruptPatch, match="head is out of range"):
        HISTORY.decode(memoryview(bad), block.old, block.layout)


def test_no_changes_and_too_many_are_refused() -> None:
    block, payload = coded_block("BF16")
    at = next(k for k, byte in enumerate(payload) if byte < 128) + 1
    for count in (0, len(block.old) + 1, 1 << 34):
        with pytest.raises(CorruptPatch, match="number of changes"):
            HISTORY.decode(memoryview(oracle.varint(count) + payload[at:]), block.old, block.layout)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_payload_with_another_past(name: str) -> None:
    """A reader is protected by the history's digest in the header; a codec alone must stay sane."""
    block, payload = coded_block(name, 2)
    other = random_block(np.random.default_rng(99), name, (3, 1, 1))
    wrong: list[Past] = [(), other.layout.past, block.layout.past[1:], tuple((r, 1) for r, _ in block.layout.past)]
    wrong += [(*block.layout.past[:-1], (np.empty(0, np.uint8), 1)), block.layout.past[::-1]]
    assert check_sane_or_refused(payload, block, ())
    for past in wrong:
        check_sane_or_refused(payload, block, past)


@pytest.mark.parametrize("name", HOSTILE)
def test_junk_as_records_is_a_past_like_any_other(name: str) -> None:
    """Positions past the block's end are not there; both sides see the same."""
    rng, coded = np.random.default_rng(7), 0
    block, payload = coded_block(name)
    for _ in range(60):
        junk = rng.integers(0, 256, 3 * int(rng.integers(0, 300)), np.uint8)
        junk[1::3] = np.where(rng.random(len(junk) // 3) < 0.98, 0, junk[1::3])
        if rng.random() < 0.5:
            junk[0::3] %= 3
        if rng.random() < 0.2:
            junk[2::3] = 0
        past = tuple((np.roll(junk, 3 * k), int(rng.choice([1, 1, 2, 64]))) for k in range(3))
        check_sane_or_refused(payload, block, past)
        merged = history_merged(list(past), len(block.old))
        assert len(merged) % 3 == 0
        layout = block.layout._replace(past=past)
        again = HISTORY.encode(block.old, block.new, layout)
        if again is None:
            continue
        coded += 1
        decoded = HISTORY.decode(memoryview(again[0]), block.old, layout)
        np.testing.assert_array_equal(decoded.positions, np.flatnonzero(block.old != block.new))
        np.testing.assert_array_equal(decoded.values, block.new[decoded.positions])
    assert coded > 5


def test_spans_as_long_as_the_binding_takes() -> None:
    """Sums of spans and of steps stay within their numbers."""
    block, _ = coded_block("BF16")
    past = tuple((records, 1 << 20) for records, _ in block.layout.past) * 85
    layout = block.layout._replace(past=past)
    found = HISTORY.encode(block.old, block.new, layout)
    assert found is not None
    decoded = HISTORY.decode(memoryview(found[0]), block.old, layout)
    np.testing.assert_array_equal(decoded.values, block.new[decoded.positions])


def test_a_history_saves_bytes_where_changes_come_again() -> None:
    block = random_block(np.random.default_rng(8), "BF16", (1, 1, 1), elements=30_000, large=0)
    payload = encoded(block)
    context, _ = codec.by_name("context").encode(block.old, block.new, block.layout)
    assert payload is not None
    assert len(payload) < 0.8 * len(context)
