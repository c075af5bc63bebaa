"""The native table codec against its specification, on every path of this processor; the choice of
it for a block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import codec
from pulse_rl.codec import Layout, Run, element_kind
from pulse_rl.errors import CorruptPatch
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DTYPES
from tests.support import table_oracle as oracle
from tests.support.arrays import both_ways, made_alike
from tests.support.block_codecs import TABLE, flat_layout
from tests.support.gaps_oracle import Kind
from tests.support.sparse_blocks import changed, weights

NAMES = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U16", "I32", "BOOL"]


def encoded(old: UIntArray, new: UIntArray, layout: Layout) -> bytes:
    """The payload, which must be the same without vectors."""
    payload, count = made_alike(lambda: TABLE.encode(old, new, layout))
    assert count == np.count_nonzero(old != new)
    return payload


def check_decoded(payload: bytes, old: UIntArray, new: UIntArray, layout: Layout) -> None:
    for _ in both_ways():
        found = TABLE.decode(memoryview(payload), old, layout)
        assert found.before is not None, "no look into memory that is in no cache"
        np.testing.assert_array_equal(found.before, old[found.positions])
        np.testing.assert_array_equal(found.positions, np.flatnonzero(old != new))
        np.testing.assert_array_equal(found.values, new[found.positions])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", ["one", "long", "any"])
def test_the_oracle_reads_and_writes_the_same_bytes(
    name: str, steps: str, rng: np.random.Generator
) -> None:
    kind = Kind(*element_kind(DTYPES[name]))
    for count in (1, 63, 64, 65, 128, 1000, 1555):
        old = weights(rng, name, count)
        new = changed(rng, old, float(rng.choice([0.02, 0.3, 1])), steps)
        new[-1] = old[-1] ^ 1
        layout = flat_layout(DTYPES[name], count)
        payload = encoded(old, new, layout)
        check_decoded(payload, old, new, layout)
        assert oracle.decode(payload, old.tolist(), kind) == new.tolist()
        head, _ = oracle.read_head(payload)
        assert oracle.encode(old.tolist(), new.tolist(), kind, head) == payload


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "I32", "F8_E5M2", "U16"])
@pytest.mark.parametrize("density", [0.01, 0.3, 1])
@pytest.mark.parametrize("steps", ["one", "long", "any"])
def test_long_blocks(name: str, density: float, steps: str, rng: np.random.Generator) -> None:
    """Long enough for the plain decoder's table of slots, and for a sample that does not see every
    element."""
    old = weights(rng, name, 300_001)
    new = changed(rng, old, density, steps)
    new[0] = old[0] ^ 1
    layout = flat_layout(DTYPES[name], len(old))
    check_decoded(encoded(old, new, layout), old, new, layout)


def test_steps_that_the_sample_has_not_seen_are_escaped() -> None:
    old = np.full(1 << 19, 0x3C00, np.uint16)
    new = old.copy()
    new[100::64] += 1  # the sample takes every fourth group of 64
    new[70] = 0x8000
    layout = flat_layout(DTYPES["BF16"], len(old))
    check_decoded(encoded(old, new, layout), old, new, layout)
    everything = (old + 1).astype(np.uint16)
    everything[70] = old[70]
    check_decoded(encoded(old, everything, layout), old, everything, layout)


BASE = (
    np.random.default_rng(4).normal(0, 0.02, 700).astype(np.float32).view(np.uint32) >> 16
).astype(np.uint16)
LAYOUT = flat_layout(DTYPES["BF16"], len(BASE))
KIND = Kind(*element_kind(DTYPES["BF16"]))


@st.composite
def heads(draw: st.DrawFn) -> oracle.Head:
    """Any tables that a writer may choose, good for the data or not: each has an escape and a
    frequency for 0."""
    alphabet = draw(st.integers(4, 18))
    first = [0, *sorted(draw(st.sets(st.integers(1, 255), max_size=15)))]
    frequencies = []
    for _ in first:
        table = draw(
            st.lists(st.integers(0, 4096 // alphabet), min_size=alphabet, max_size=alphabet)
        )
        table[-1] = max(table[-1], 1)
        table[0] = oracle.SCALE - sum(table[1:])
        frequencies.append(table)
    return oracle.Head(0, alphabet, first, frequencies)


@given(heads(), st.integers(0, 1 << 32), st.booleans())
def test_any_tables_are_understood(head: oracle.Head, seed: int, any_steps: bool) -> None:
    rng = np.random.default_rng(seed)
    new = changed(rng, BASE, 0.4, "any" if any_steps else "one")
    new[3] = BASE[3] ^ 1
    head = head._replace(changed=int(np.count_nonzero(new != BASE)))
    check_decoded(oracle.encode(BASE.tolist(), new.tolist(), KIND, head), BASE, new, LAYOUT)


def refused(payload: bytes, match: str) -> None:
    for _ in both_ways():
        with pytest.raises(CorruptPatch, match=match):
            TABLE.decode(memoryview(payload), BASE, LAYOUT)


FLAT = oracle.Head(1, 4, [0], [[4000, 40, 40, 16]])


def payload_of(head: oracle.Head, states: list[int] | None = None, words: bytes = b"") -> bytes:
    return (
        head.to_bytes()
        + b"".join(x.to_bytes(4, "little") for x in states or [1 << 16] * 64)
        + words
    )


@pytest.mark.parametrize(
    ("head", "match"),
    [
        (FLAT._replace(changed=0), "number of changes"),
        (FLAT._replace(changed=len(BASE) + 1), "number of changes"),
        (FLAT._replace(alphabet=3, frequencies=[[4000, 40, 56]]), "symbols or tables"),
        (FLAT._replace(alphabet=19, frequencies=[[4096] + [0] * 18]), "symbols or tables"),
        (FLAT._replace(first_classes=[], frequencies=[]), "symbols or tables"),
        (
            FLAT._replace(first_classes=list(range(17)), frequencies=FLAT.frequencies * 17),
            "symbols or tables",
        ),
        (FLAT._replace(first_classes=[0, 0], frequencies=FLAT.frequencies * 2), "not ascending"),
        (FLAT._replace(first_classes=[0, 9, 9], frequencies=FLAT.frequencies * 3), "not ascending"),
        (FLAT._replace(frequencies=[[0, 4000, 90, 7]]), "exceed their sum"),
    ],
)
def test_impossible_heads(head: oracle.Head, match: str) -> None:
    refused(payload_of(head), match)


def test_codes_that_do_not_end_where_they_should() -> None:
    new = changed(np.random.default_rng(1), BASE, 0.4, "one")
    good = encoded(BASE, new, LAYOUT)
    for cut in (1, 2, 10):
        refused(good[:-cut], "code")
    refused(good + bytes(2), "longer or shorter")
    refused(good + bytes(1), "longer or shorter")
    head, size = oracle.read_head(good)
    refused(good[: size + 255], "inside its states")
    refused(payload_of(head, [1] * 64), "state is out of range")
    more, fewer = head._replace(changed=head.changed + 1), head._replace(changed=head.changed - 1)
    refused(more.to_bytes() + good[size:], "fewer changes")
    refused(fewer.to_bytes() + good[size:], "more changes")
    # Sixty-three states are done, one is not.
    lazy = oracle.Head(1, 4, [0], [[4096, 0, 0, 0]])
    refused(payload_of(lazy, [1 << 16] * 64), "fewer changes")


def test_an_escape_is_a_change() -> None:
    """Symbol 3 is the escape; its bits are 0."""
    escapes = oracle.Head(len(BASE), 4, [0], [[0, 0, 0, 4096]])
    refused(payload_of(escapes, words=bytes(2 * len(BASE))), "a change by nothing")


def chosen(old: UIntArray, new: UIntArray, layout: Layout) -> str:
    return codec.codec_name(codec.encode_block(old, new, layout).codec_id)


def test_many_changes_are_coded_by_table_few_and_those_in_rows_by_gaps() -> None:
    rng = np.random.default_rng(2)
    old = weights(rng, "BF16", 1 << 19)
    layout = Layout(DTYPES["BF16"], (Run(len(old), 512, 0),))
    assert chosen(old, changed(rng, old, 0.01, "one"), layout) == "sparse"
    assert chosen(old, changed(rng, old, 0.05, "one"), layout) == "sparse"
    assert chosen(old, changed(rng, old, 0.1, "one"), layout) == "table"
    few = old[: len(old) // 2].copy()
    assert (
        chosen(few, changed(rng, few, 0.1, "one"), Layout(DTYPES["BF16"], (Run(len(few), 512, 0),)))
        == "gaps"
    )
    assert chosen(old, changed(rng, old, 1, "one"), layout) == "table"
    rows = np.repeat(rng.random(1024) < 0.1, 512)
    in_rows = np.where(rows, changed(rng, old, 0.6, "one"), old)
    assert chosen(old, in_rows, layout) == "gaps"


@pytest.mark.parametrize("name", ["F64", "C64", "U64"])
def test_wide_elements_are_left_to_zstd(name: str) -> None:
    old = np.arange(1000, dtype=np.uint64)
    assert chosen(old, old + 1, flat_layout(DTYPES[name], 1000)) in ("zstd", "raw")
