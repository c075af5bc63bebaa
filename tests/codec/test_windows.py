"""What windows keep of the changes of their versions: records, merged records, and what is known by them."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl._native import history_merged, history_records
from pulse_rl.codec import element_kind
from pulse_rl.state.tensors import DTYPES, DType, UIntArray
from tests.support import history_oracle as oracle
from tests.support.history_blocks import NAMES, all_steps, blocks, classes_of
from tests.support.history_oracle import Steps


def records_between(dtype: DType, before: UIntArray, after: UIntArray) -> bytes:
    positions = np.flatnonzero(before != after).astype(np.uint32)
    old, new = before[positions].view(np.uint8), after[positions].view(np.uint8)
    return history_records(positions, old, new, element_kind(dtype)).tobytes()


def parsed(records: bytes) -> tuple[Steps, dict[int, int]]:
    """Steps and classes."""
    steps, classes, at = {}, {}, 0
    for k in range(0, len(records), 4):
        gap, step, cls = int.from_bytes(records[k : k + 2], "little"), records[k + 2], records[k + 3]
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
    assert parsed(records_between(DTYPES["BF16"], weights, weights + 256)) == ({0: 0, 1: 0}, {0: 122, 1: 122})


GAPS = [0, 1, 65533, 65534, 65535, 65536, 65537, 131069, 131070, 131071, 300_000]


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("step", [1, 0])
def test_long_gaps_between_records(gap: int, step: int) -> None:
    old = np.zeros(gap + 3 + gap, np.uint16)
    new = old.copy()
    new[[gap, gap + 1, -1]] = 256 + step, 2, 512 + 3 * step
    steps = {gap: step, gap + 1: 2, len(old) - 1: 3 * step}
    kept = records_between(DTYPES["U16"], old, new)
    assert kept == oracle.records(steps)
    assert parsed(kept)[0] == steps
    parts = [(np.frombuffer(oracle.records(s), np.uint8), 1) for s in (steps, {p: d + 1 for p, d in steps.items()})]
    assert history_merged(parts, len(old)).tobytes() == oracle.records({p: 2 * d + 1 for p, d in steps.items()})


@pytest.mark.parametrize("name", NAMES)
def test_merged_windows_are_the_window_between_their_ends(name: str) -> None:
    """What changed and went back is among the merged ones as well, with its class and no step."""
    for block in blocks(name, 8):
        for first in range(len(block.windows)):
            for last in range(first + 1, min(first + 5, len(block.windows) + 1)):
                merged = history_merged(list(block.layout.past[first:last]), len(block.old)).tobytes()
                start, end = block.states[first], block.states[last]
                steps, classes = parsed(merged)
                expected, _ = parsed(records_between(block.layout.dtype, start, end))
                assert {p: d for p, d in steps.items() if d} == {p: d for p, d in expected.items() if d}
                assert expected.keys() <= steps.keys()
                of_end = classes_of(end, block.kind)
                assert all(of_end[p] == c for p, c in classes.items())


def test_steps_that_cancel_each_other_are_forgotten() -> None:
    parts = [(np.frombuffer(oracle.records(s), np.uint8), 1) for s in ({3: 5, 9: -128}, {3: -5, 9: -128, 11: 1})]
    assert history_merged(parts, 12).tobytes() == oracle.records({3: 0, 9: 0, 11: 1})
