"""The native history codec against its specification, byte for byte; and the windows of changes
that it reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl._native import history_records
from pulse_rl.codec import Layout, Past, Run, element_kind
from pulse_rl.errors import CorruptPatch
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DTYPES, DType
from tests.codec.test_sparse import AnyChanges, AnyHead
from tests.support import history_oracle as oracle
from tests.support import sparse_oracle
from tests.support.arrays import both_ways
from tests.support.block_codecs import HISTORY, history_encode
from tests.support.gaps_oracle import Kind, row_ends, varint
from tests.support.history_blocks import (
    NAMES,
    WINDOWS,
    Block,
    all_steps,
    blocks,
    check_decoded,
    classes_of,
    encoded,
    large_block,
    native_past,
    random_block,
    refused,
)
from tests.support.history_oracle import Steps
from tests.support.sparse_payload import Parts, joined
from tests.support.states import present


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
        assert (
            oracle.encode(block.old.tolist(), new, block.kind, runs, block.past, chosen) == payload
        )
        check_decoded(payload, block)
    assert coded >= 3


def any_choices(rng: np.random.Generator, block: Block) -> oracle.Choices | None:
    """Choices that no good encoder makes, by which the block can be coded all the same; None where
    there are none."""
    changed = np.flatnonzero(block.old != block.new)
    classes = np.array(classes_of(block.old, block.kind))
    used = int(rng.integers(1, len(block.past) + 1))
    known = oracle.what_is_known(block.past[len(block.past) - used :])
    moving = [p for p in changed.tolist() if p in known]
    if not moving:
        return None
    of_moving = classes[moving]
    least, most = of_moving.min(), of_moving.max()
    if most - least > 62:
        return None
    first = int(rng.integers(max(most - 62, 0), least + 1))
    count = int(rng.integers(most - first + 1, min(63, 256 - first) + 1))
    chosen = oracle.Choices(used, first, count, boost=int(rng.integers(0, 8)))
    others = {
        c
        for p, c in zip(changed.tolist(), classes[changed].tolist(), strict=True)
        if p not in known
    }
    for c in range(block.kind.mask + 1):
        if c in others or rng.random() < 0.2:
            chosen.levels[c] = int(rng.integers(0, 45))
    for place in range(count):
        chosen.odds[place] = int(rng.integers(-21, 22))
    groups = {known[p].group for p in moving}
    for group in range(1, oracle.GROUPS):
        if group in groups or rng.random() < 0.5:
            odds = chosen.groups[group] = int(rng.integers(-21, 22))
            for place in range(count):  # within reach of what is expected, and not "never"
                usual = min(max(24 - odds - chosen.odds[place], 0), 48)
                chosen.cells[group, place] = int(
                    rng.integers(max(usual - 45, 0), min(usual + 45, 48) + 1)
                )
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_any_encoder_may_choose_is_read(name: str) -> None:
    rng, coded = np.random.default_rng(NAMES.index(name)), 0
    for block in blocks(name, 16):
        runs, chosen = list(block.layout.runs), any_choices(rng, block)
        if chosen is None:
            continue
        payload = oracle.encode(
            block.old.tolist(), block.new.tolist(), block.kind, runs, block.past, chosen
        )
        check_decoded(payload, block)
        coded += 1
    assert coded >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "large"), [("BF16", 0.0), ("BF16", 0.5), ("F32", 0.1), ("I8", 0.9), ("U16", 0.3)]
)
def test_the_oracle_reads_and_writes_the_same_bytes_by_groups(
    name: str, large: float, rng: np.random.Generator
) -> None:
    block = large_block(rng, name, large)
    runs = list(block.layout.runs)
    payloads = []
    for _ in both_ways():
        payloads.append(encoded(block))
        check_decoded(payloads[0], block)
    assert payloads[0] == payloads[1]
    payload = payloads[0]
    assert payload[0] & 128
    new, chosen = oracle.decode(payload, block.old.tolist(), block.kind, runs, block.past)
    assert new == block.new.tolist()
    assert oracle.encode(block.old.tolist(), new, block.kind, runs, block.past, chosen) == payload


@pytest.mark.slow
def test_blocks_without_other_changes(rng: np.random.Generator) -> None:
    """All that changes is remembered: by either codec for the others, which has nothing to say."""
    for elements in (3000, 160_000):
        now = rng.integers(0x3A00, 0x3C00, elements).astype(np.uint16)
        hit = rng.random(elements) < 0.055
        states = [now, now + hit]
        kind = Kind(*element_kind(DTYPES["BF16"]))
        steps = [oracle.window(states[0].tolist(), states[1].tolist(), kind)]
        layout = Layout(DTYPES["BF16"], (Run(elements, 100, 0),), native_past(states, kind))
        block = Block(layout, states, states[1] + hit, steps)
        payload = encoded(block)
        assert (payload[0] & 128 > 0) == (elements > 3000)
        check_decoded(payload, block)
        new, _ = oracle.decode(payload, block.old.tolist(), kind, list(layout.runs), block.past)
        assert new == block.new.tolist()


@given(
    st.sampled_from(NAMES),
    st.integers(0, 1 << 32),
    st.sampled_from([0.1, 0.3, 0.5, 0.7]),
    st.sampled_from([None, 0.05, 0.4]),
)
def test_any_head_and_any_changes_are_understood(
    name: str, seed: int, in_head: float, in_code: float | None
) -> None:
    """By groups; bits by chance, of the heads and of the code."""
    rng = np.random.default_rng(seed)
    block = random_block(
        rng, name, WINDOWS[int(rng.integers(len(WINDOWS)))], elements=int(rng.integers(2, 1500))
    )
    old, kind, runs = block.old.tolist(), block.kind, list(block.layout.runs)
    classes = classes_of(block.old, kind)
    first = int(rng.integers(max(max(classes) - 62, 0), max(classes) + 1))
    chosen = oracle.Choices(
        int(rng.integers(1, len(block.past) + 1)),
        first,
        int(rng.integers(1, min(63, 256 - first) + 1)),
    )
    recall = oracle.Recall(old, kind, block.past, chosen, {})
    mine, theirs = AnyHead(rng, in_head), AnyHead(rng, in_head)
    oracle.code_head(mine, chosen, recall.there, recall.large)
    head = sparse_oracle.code_head(
        theirs, None, min(classes), max(classes) - min(classes) + 1, runs
    )
    side = AnyChanges(rng, in_code)
    recall.code(side)
    found = sparse_oracle.code_changes(
        side, sparse_oracle.Chances(head, old, kind, runs, recall.marked), list(row_ends(runs)), {}
    )
    sizes = {at: step.size | int(rng.integers(0, 1 << step.plain)) for at, step in found.items()}
    front = [(int(rng.integers(0, 1 << said.plain)), said.plain) for said in recall.said.values()]
    plain = sparse_oracle.plain_bytes(sizes, found, front)
    try:
        recall.take_plain(int.from_bytes(plain, "little"))
        right = bool(recall.found)
    except AssertionError:
        right = False
    states = sparse_oracle.states_of(plain)
    words = side.finish(states)
    parts = Parts(
        len(found),
        min(classes),
        len(head.rarities),
        theirs.finish(),
        plain[sparse_oracle.IN_STATES :],
        states,
        words,
    )
    top = bytes([chosen.used | 128, chosen.first, chosen.count - 1])
    payload = top + varint(len(mine.finish())) + mine.finish() + joined(parts)
    if not right or any(size >= 1 << 8 * kind.width for size in sizes.values()):
        refused(payload, block)
        return
    new = list(old)
    for at, step in found.items():
        new[at] = kind.stepped(old[at], -sizes[at] if step.down else sizes[at])
    for at, step in recall.found.items():
        new[at] = kind.stepped(old[at], step)
    states_and_new = block._replace(new=np.array(new, block.old.dtype))
    for _ in both_ways():
        check_decoded(payload, states_and_new)


def test_nothing_is_coded_where_the_past_does_not_help() -> None:
    rng = np.random.default_rng(2)
    block = random_block(rng, "BF16", 2, elements=20_000)
    assert encoded(block) is not None
    nothing = np.empty(0, np.uint8)
    elsewhere = np.setdiff1d(np.arange(len(block.old)), np.flatnonzero(block.old != block.new))
    others = np.frombuffer(
        oracle.records(
            dict.fromkeys(elsewhere[::9].tolist(), 1),
            dict(enumerate(classes_of(block.old, block.kind))),
        ),
        np.uint8,
    )
    for past in ((), (nothing,), (nothing, nothing), (others,)):
        assert history_encode(block.old, block.new, block.layout._replace(past=past)) is None
    assert history_encode(block.old, block.old, block.layout) is None


@pytest.mark.slow
def test_remembered_elements_of_classes_that_are_not_listed_are_others(
    rng: np.random.Generator,
) -> None:
    """63 classes are listed, those of most changes; here by either codec for the others."""
    for each in (20, 700):
        old = rng.permutation((np.arange(256, dtype=np.uint32) << 23 | 5).repeat(each))
        before = np.where(rng.random(len(old)) < 0.05, old - 1, old).astype(np.uint32)
        new = np.where((before != old) | (rng.random(len(old)) < 0.005), old + 1, old).astype(
            np.uint32
        )
        kind = Kind(*element_kind(DTYPES["F32"]))
        layout = Layout(DTYPES["F32"], (Run(len(old), 10, 0),), native_past([before, old], kind))
        steps = [oracle.window(before.tolist(), old.tolist(), kind)]
        block = Block(layout, [before, old], new, steps)
        payload = present(encoded(block))
        assert (payload[0] & 128 > 0, payload[2] + 1) == (each == 700, 63)
        check_decoded(payload, block)
        again, chosen = oracle.decode(payload, old.tolist(), kind, list(layout.runs), block.past)
        assert again == new.tolist()
        assert (
            oracle.encode(old.tolist(), again, kind, list(layout.runs), block.past, chosen)
            == payload
        )


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
        block = random_block(rng, name, 3)
        payload = encoded(block)
        if payload is not None:
            return block, payload


@pytest.mark.parametrize("name", HOSTILE)
def test_truncations_appended_bytes_and_flipped_bits(name: str) -> None:
    block, payload = coded_block(name)
    past = block.layout.past
    for tail in (bytes(9), b"\xff" * 8 + b"\0", payload):
        assert check_sane_or_refused(payload + tail, block, past)
    assert all(
        check_sane_or_refused(payload[:cut], block, past) for cut in range(max(len(payload) - 8, 5))
    )
    for cut in range(len(payload)):
        check_sane_or_refused(payload[:cut], block, past)
    for flip in range(0, 8 * len(payload), 1 if len(payload) < 300 else 7):
        broken = bytearray(payload)
        broken[flip // 8] ^= 1 << flip % 8
        check_sane_or_refused(bytes(broken), block, past)


@pytest.mark.parametrize(
    "head", [(0, 0, 0), (4, 0, 0), (127, 0, 0), (128, 0, 0), (132, 0, 0), (1, 0, 63), (1, 250, 6)]
)
def test_heads_that_cannot_be(head: tuple[int, ...]) -> None:
    """No windows, or more than there are; a number of classes or a class out of range."""
    block, payload = coded_block("BF16")
    with pytest.raises(CorruptPatch, match="head is out of range"):
        HISTORY.decode(memoryview(bytes(head) + payload[3:]), block.old, block.layout)


def test_too_many_changes_are_refused() -> None:
    block, payload = coded_block("BF16")
    assert payload[0] < 128
    at = next(k for k, byte in enumerate(payload[3:], 3) if byte < 128) + 1
    for count in (len(block.old) + 1, 1 << 34):
        with pytest.raises(CorruptPatch, match="number of changes"):
            HISTORY.decode(
                memoryview(payload[:3] + varint(count) + payload[at:]), block.old, block.layout
            )


def test_a_payload_in_which_nothing_remembered_changes_is_refused() -> None:
    block, _ = coded_block("BF16")
    chosen = oracle.Choices(1, 100, 20, boost=0, levels=[20] * 256)
    known = oracle.what_is_known(block.past[-1:])
    new = [a if p in known else a ^ 1 for p, a in enumerate(block.old.tolist())]
    runs = list(block.layout.runs)
    payload = oracle.encode(block.old.tolist(), new, block.kind, runs, block.past, chosen)
    with pytest.raises(CorruptPatch, match="no element that is remembered"):
        HISTORY.decode(memoryview(payload), block.old, block.layout)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_payload_with_another_past(name: str) -> None:
    """A reader is protected by the history's digest in the header; a codec alone must stay sane."""
    block, payload = coded_block(name, 2)
    other = random_block(np.random.default_rng(99), name, 3)
    wrong: list[Past] = [
        (),
        other.layout.past,
        block.layout.past[1:],
        (*block.layout.past[:-1], np.empty(0, np.uint8)),
        block.layout.past[::-1],
    ]
    assert check_sane_or_refused(payload, block, ())
    for past in wrong:
        check_sane_or_refused(payload, block, past)


@pytest.mark.parametrize("name", HOSTILE)
def test_junk_as_records_is_a_past_like_any_other(name: str) -> None:
    """Positions past the block's end are not there; both sides see the same."""
    rng, coded = np.random.default_rng(7), 0
    block, payload = coded_block(name, 2)
    for _ in range(60):
        junk = rng.integers(0, 256, 4 * int(rng.integers(0, 300)), np.uint8)
        junk[1::4] = np.where(rng.random(len(junk) // 4) < 0.98, 0, junk[1::4])
        if rng.random() < 0.5:
            junk[0::4] %= 3
        if rng.random() < 0.2:
            junk[2::4] = 0
        if rng.random() < 0.8:
            junk[3::4] = rng.choice(classes_of(block.old, block.kind), len(junk) // 4)
        past = tuple(np.roll(junk, 4 * k) for k in range(3))
        check_sane_or_refused(payload, block, past)
        layout = block.layout._replace(past=past)
        again = history_encode(block.old, block.new, layout)
        if again is None:
            continue
        coded += 1
        decoded = HISTORY.decode(memoryview(again[0]), block.old, layout)
        np.testing.assert_array_equal(decoded.positions, np.flatnonzero(block.old != block.new))
        np.testing.assert_array_equal(decoded.values, block.new[decoded.positions])
    assert coded > 5


def test_as_many_windows_as_the_binding_takes() -> None:
    block, _ = coded_block("BF16")
    past = block.layout.past * 21
    layout = block.layout._replace(past=past)
    found = present(history_encode(block.old, block.new, layout))
    decoded = HISTORY.decode(memoryview(found[0]), block.old, layout)
    np.testing.assert_array_equal(decoded.values, block.new[decoded.positions])


@pytest.mark.parametrize("name", ["U16", "I32", "I8"])
@pytest.mark.parametrize("over", [1 << 32, 0])
def test_sizes_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, name: str, over: int) -> None:
    """Not even as a distance that would wrap to a small one."""
    dtype = DTYPES[name]
    kind, old = Kind(*element_kind(dtype)), np.full(40, 7, dtype.uint)
    records = dict.fromkeys(range(20), 2)
    layout = Layout(dtype, (Run(40, 40, 0),), (np.frombuffer(oracle.records(records), np.uint8),))
    size = (over or 1 << 8 * dtype.width) + 1
    monkeypatch.setattr(oracle, "steps_between", lambda *_: {3: size})
    monkeypatch.setattr(oracle.Recall, "finish", lambda *_: None)
    group, _ = next(iter({(k.group, 0) for k in oracle.what_is_known([records]).values()}))
    chosen = oracle.Choices(1, 0, 1, odds={0: 0}, groups={group: 0}, cells={(group, 0): 24})
    payload = oracle.encode(old.tolist(), old.tolist(), kind, list(layout.runs), [records], chosen)
    with pytest.raises(CorruptPatch, match="out of range"):
        HISTORY.decode(memoryview(payload), old, layout)


# -- what windows keep of the changes of their versions


def records_between(dtype: DType, before: UIntArray, after: UIntArray) -> bytes:
    positions = np.flatnonzero(before != after).astype(np.uint32)
    old, new = before[positions].view(np.uint8), after[positions].view(np.uint8)
    return history_records(positions, old, new, element_kind(dtype)).tobytes()


def parsed(records: bytes) -> tuple[Steps, dict[int, int]]:
    """Steps and classes."""
    steps, classes, at = {}, {}, 0
    for k in range(0, len(records), 4):
        gap = int.from_bytes(records[k : k + 2], "little")
        step = records[k + 2]
        cls = records[k + 3]
        at += gap
        if gap == 65535 and step == 0:
            assert cls == 0
            continue
        steps[at], classes[at] = oracle.signed(step, 8), cls
        at += 1
    return steps, classes


@pytest.mark.parametrize("name", NAMES)
def test_records_are_the_net_steps_modulo_256(name: str) -> None:
    for block in blocks(name, 8):
        for before, after in zip(block.states, block.states[1:], strict=False):
            classes = dict(enumerate(classes_of(after, block.kind)))
            expected = oracle.records(all_steps(block.kind, before, after), classes)
            assert records_between(block.layout.dtype, before, after) == expected


def test_of_a_net_step_of_a_multiple_of_256_only_the_class_is_known() -> None:
    old = np.uint16([0x3C00] * 5)
    new = old + np.uint16([256, 255, 512, 0, 257])
    assert parsed(records_between(DTYPES["U16"], old, new))[0] == {0: 0, 1: -1, 2: 0, 4: 1}
    weights = np.uint16([0x3C00, 0x3C01])
    assert parsed(records_between(DTYPES["BF16"], weights, weights + 256)) == (
        {0: 0, 1: 0},
        {0: 122, 1: 122},
    )


LONG_GAPS = [0, 1, 65533, 65534, 65535, 65536, 65537, 131069, 131070, 131071, 300_000]


@pytest.mark.parametrize("gap", LONG_GAPS)
@pytest.mark.parametrize("step", [1, 0])
def test_long_gaps_between_records(gap: int, step: int) -> None:
    old = np.zeros(gap + 3 + gap, np.uint16)
    new = old.copy()
    new[[gap, gap + 1, -1]] = 256 + step, 2, 512 + 3 * step
    steps = {gap: step, gap + 1: 2, len(old) - 1: 3 * step}
    kept = records_between(DTYPES["U16"], old, new)
    assert kept == oracle.records(steps)
    assert parsed(kept)[0] == steps
