"""The native sparse codec against its specification, with and without vectors: round trips, bytes,
refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import codec
from pulse_rl.codec import Layout, Run
from pulse_rl.errors import CorruptPatch
from pulse_rl.patch.history import records_of
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DTYPES
from tests.support import sparse_oracle as oracle
from tests.support.arrays import made_alike
from tests.support.block_codecs import GAPS, SPARSE, flat_layout
from tests.support.gaps_oracle import Bit, Writer, row_ends
from tests.support.sparse_blocks import (
    GROUPS,
    changed,
    check_decoded,
    check_round_trip,
    encoded,
    kind_of,
    refused,
    stepped,
    weights,
)
from tests.support.sparse_payload import Parts, cut, joined
from tests.support.states import present
from tests.support.table_oracle import SCALE, varint

NAMES = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "U16", "I32", "I8"]
STEPS = ["one", "small", "long", "any", "flip"]
TENSORS = (
    Run(3, 3, 0),
    Run(0, 5, 2),
    Run(1, 1, 0),
    Run(40_001, 777, 99),
    Run(509, 509, 0),
    Run(29_300, 512, 5),
    Run(6, 2, 1),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "density", "runs"),
    [
        ("BF16", "one", 0.0155, (Run(10, 3, 1), Run(262_100, 1000, 3), Run(20_003, 128, 7))),
        ("F32", "any", 0.061, (Run(68_201, 700, 0),)),
        ("F8_E4M3", "long", 0.061, TENSORS),
        ("I32", "long", 0.061, TENSORS),
        ("F16", "small", 0.061, (Run(68_200, 68_200, 0),)),
    ],
)
def test_the_oracle_reads_and_writes_the_same_bytes(
    name: str, steps: str, density: float, runs: tuple[Run, ...], rng: np.random.Generator
) -> None:
    old = weights(rng, name, sum(run.elements for run in runs))
    new = changed(rng, old, density, steps)
    layout = Layout(DTYPES[name], runs)
    payload = encoded(old, new, layout)
    check_decoded(payload, old, new, layout)
    assert oracle.decode(payload, old.tolist(), kind_of(name), runs) == new.tolist()
    head = oracle.read_head(payload, runs)
    assert oracle.encode(old.tolist(), new.tolist(), kind_of(name), runs, head) == payload


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("alike", [True, False])
def test_round_trips(name: str, steps: str, alike: bool, rng: np.random.Generator) -> None:
    for count, density in ((300_001, 0.016), (70_000, 0.0615)):
        old = weights(rng, name, count, alike)
        check_round_trip(
            old, changed(rng, old, density, steps), Layout(DTYPES[name], (Run(count, 512, 100),))
        )


@pytest.mark.parametrize("name", ["BF16", "F32", "F8_E4M3"])
@pytest.mark.parametrize("behind", [0, 1, 7, 8, 9, 500, 511, 512, 513])
def test_blocks_of_any_length_and_tensors_of_any_size(
    name: str, behind: int, rng: np.random.Generator
) -> None:
    tensors = (
        *TENSORS,
        Run(1 << 18, 4096, 4095),
        *(Run(1 + i % 40, 1 + i % 7, i % 2 and i % 7) for i in range(300)),
    )
    runs = (*tensors, Run(-sum(run.elements for run in tensors) % 512 + behind, 13, 3))
    old = weights(rng, name, sum(run.elements for run in runs))
    new = changed(rng, old, 0.02, "small")
    new[-1] = old[-1] ^ 1
    new[0] = old[0] ^ 1
    check_round_trip(old, new, Layout(DTYPES[name], runs))


@pytest.mark.parametrize("name", ["BF16", "F32"])
@pytest.mark.parametrize(
    ("first", "span"),
    [(100, 1), (90, 63), (90, 64), (90, 65), (3, 127), (128, 127), (60, 129), (0, 256)],
)
def test_exponents_of_any_span(name: str, first: int, span: int, rng: np.random.Generator) -> None:
    """Vectors look weights up in one, two or four tables. Elements that never change lie between,
    with any exponent."""
    dtype = DTYPES[name]
    shift, count = 8 * dtype.width - 9, 150_000
    exponents = rng.integers(first, first + span, count)
    exponents[:512] = first + np.arange(512) % span
    others = rng.random(count) < 0.1
    others[:512] = False
    exponents[others] = rng.integers(0, 256, int(others.sum()))
    mantissas = rng.integers(1, (1 << shift) - 1, count)
    old = (rng.integers(0, 2, count) << (shift + 8) | exponents << shift | mantissas).astype(
        dtype.uint
    )
    changes = (rng.random(count) < 0.03) & ~others
    changes[:512] = True
    check_round_trip(
        old, np.where(changes, old + 1, old).astype(dtype.uint), flat_layout(dtype, count)
    )


def test_changes_side_by_side(rng: np.random.Generator) -> None:
    """A whole part of the block changes: groups in which all elements do, tiles in which none
    do."""
    old = weights(rng, "BF16", 900_000)
    layout = flat_layout(DTYPES["BF16"], len(old))
    new = old.copy()
    new[:5000] = stepped(rng, old[:5000], "small")
    check_round_trip(old, new, layout)
    new[-5:] = stepped(rng, old[-5:], "any")
    check_round_trip(old, new, layout)


def test_tensors_that_differ_have_shifts(rng: np.random.Generator) -> None:
    """Four tensors, each of which changes twice as often as the one before: shifts pay."""
    old = weights(rng, "BF16", 1 << 18)
    new = np.concatenate(
        [changed(rng, part, 0.008 * 2**i, "one") for i, part in enumerate(np.split(old, 4))]
    )
    runs = (Run(1 << 16, 2048, 0),) * 4
    payload = encoded(old, new, Layout(DTYPES["BF16"], runs))
    check_decoded(payload, old, new, Layout(DTYPES["BF16"], runs))
    shifts = oracle.read_head(payload, runs).shifts
    assert len(shifts) == 4
    assert shifts == sorted(shifts)
    assert shifts[3] - shifts[0] > 8
    assert len(payload) < len(encoded(old, new, Layout(DTYPES["BF16"], (Run(1 << 18, 2048, 0),))))


def test_few_changes_many_and_rows_that_differ_are_left_to_gaps(rng: np.random.Generator) -> None:
    old = weights(rng, "BF16", 1 << 17)
    rows = np.repeat(rng.random(256) < 0.1, 512)
    new = {
        "none": old,
        "few": np.where(np.arange(len(old)) < 4095, old + 1, old),
        "many": changed(rng, old, 0.07, "one"),
        "in rows": np.where(rows, changed(rng, old, 0.5, "one"), old),
    }
    layout = Layout(DTYPES["BF16"], (Run(len(old), 512, 0),))
    for name, after in new.items():
        after = after.astype(old.dtype)
        made = codec.encode_block(old, after, layout)
        assert made.codec_id == (GAPS.id if made.changed else codec.SAME), name
        assert (made.payload, made.changed) == GAPS.encode(old, after, layout)
    enough = np.where(np.arange(len(old)) < 4096, old + 1, old)
    assert (
        codec.encode_block(old, enough, flat_layout(DTYPES["BF16"], len(old))).codec_id == SPARSE.id
    )


class AnyHead(Writer):
    """Writes bits by chance, whatever it is told."""

    def __init__(self, rng: np.random.Generator, ones: float) -> None:
        super().__init__()
        self.rng, self.ones = rng, ones

    def bit(self, model: Bit, value: int) -> int:
        return super().bit(model, int(self.rng.random() < self.ones))

    def plain(self, value: int, k: int) -> int:
        return super().plain(int(self.rng.integers(0, 1 << k)), k)


class AnyChanges(oracle.StateWriter):
    """Changes as the head says that they are, or by another chance for every bit that may be
    both."""

    def __init__(self, rng: np.random.Generator, ones: float | None) -> None:
        super().__init__()
        self.rng, self.ones = rng, ones

    def bit(self, state: int, f: int, value: int) -> int:
        chance = f / SCALE if self.ones is None or f in (0, SCALE) else self.ones
        return super().bit(state, f, int(self.rng.random() < chance))


@given(
    st.sampled_from(NAMES),
    st.integers(0, 1 << 32),
    st.integers(1, 2200),
    st.sampled_from([0.1, 0.3, 0.5, 0.7]),
    st.sampled_from([None, 0.05, 0.2, 0.4, 0.8]),
)
def test_any_head_and_any_changes_are_understood(
    name: str, seed: int, count: int, in_head: float, in_code: float | None
) -> None:
    rng, kind = np.random.default_rng(seed), kind_of(name)
    cuts = [0, *np.sort(rng.integers(0, count + 1, rng.integers(0, 6))).tolist(), count]
    runs = tuple(
        Run(b - a, row := int(rng.integers(1, 90)), int(rng.integers(0, row)))
        for a, b in pairwise(cuts)
    )
    old = weights(rng, name, count, alike=bool(rng.integers(2)))
    classes = (old >> kind.shift) & kind.mask
    first = int(classes.min())
    wide = AnyHead(rng, in_head)
    head = oracle.code_head(wide, None, first, int(classes.max()) - first + 1, runs)
    side, bits = AnyChanges(rng, in_code), 8 * kind.width
    found = oracle.code_changes(
        side, oracle.Chances(head, old.tolist(), kind, runs), list(row_ends(list(runs))), {}
    )
    sizes = {at: step.size | int(rng.integers(0, 1 << step.plain)) for at, step in found.items()}
    plain = oracle.plain_bytes(sizes, found)
    states = oracle.states_of(plain)
    words = side.finish(states)
    payload = joined(
        Parts(
            len(found),
            first,
            len(head.rarities),
            wide.finish(),
            plain[oracle.IN_STATES :],
            states,
            words,
        )
    )
    layout = Layout(DTYPES[name], runs)
    if not found:
        refused(payload, old, layout, "number of changes")
    elif max(sizes.values()) >= 1 << bits:
        refused(payload, old, layout, "a step is too large")
    else:
        new = old.tolist()
        for at, step in found.items():
            new[at] = kind.stepped(new[at], -sizes[at] if step.down else sizes[at])
        check_decoded(payload, old, np.array(new, old.dtype), layout)


@pytest.mark.parametrize("phase", range(0, 512, 37))
def test_all_states_in_step(phase: int) -> None:
    """Regular data: every state goes the same way, to the largest numbers too."""
    old = np.full(368 * 512 + phase, 0x3C00, np.uint16)
    for every in (2, 3, 5):
        new = old.copy()
        for at in range(0, 368, every):
            new[at * 512 : (at + 1) * 512 : 8] += 1
        check_round_trip(old, new, flat_layout(DTYPES["BF16"], len(old)))


@pytest.mark.parametrize("remembered", [False, True])
def test_elements_that_change_while_they_are_read(
    remembered: bool, rng: np.random.Generator
) -> None:
    """As a trainer's may: what is made of them need not be right, since a publisher proves it."""
    old = weights(rng, "BF16", 1 << 19)
    new = old.copy()
    done = threading.Event()

    def flip() -> None:
        while not done.is_set():
            new[::40] ^= 1

    writer = threading.Thread(target=flip)
    writer.start()
    try:
        layout = flat_layout(DTYPES["BF16"], len(old))
        if remembered:
            at = np.arange(0, len(old), 40, np.uint32)
            records = present(records_of(layout.dtype, at, old[at] ^ 1, old[at]))
            layout = layout._replace(past=(records,))
        names = set()
        for k in range(600):
            if k >= 60 and ("history" in names or not remembered):
                break
            with suppress(CorruptPatch):
                few = codec.encode_block(old, new, layout, prove=True)
                names.add(codec.codec_name(few.codec_id))
                codec.decode_block(few.codec_id, memoryview(few.payload), old, layout)
        assert ("history" in names) == remembered
    finally:
        done.set()
        writer.join()


# -- payloads that are damaged or made up: refused, or changes in order and in range


SMALL_RUNS = (Run(700, 50, 7), Run(900, 900, 0))
SMALL = Layout(DTYPES["BF16"], SMALL_RUNS)
OLD = weights(np.random.default_rng(5), "BF16", 1600)


def small(steps: str, density: float = 0.3, seed: int = 1) -> tuple[UIntArray, oracle.Head]:
    """New elements, and a head that allows any."""
    new = changed(np.random.default_rng(seed), OLD, density, steps)
    new[3] = OLD[3] ^ 1
    head = oracle.Head(
        0, [30] * 256, [20] * 256, [(22, 24)] * 286, [24, 26, 28, *[28] * 9], [2, -3]
    )
    return new, head


def small_payload(steps: str, seed: int = 1) -> bytes:
    new, head = small(steps, seed=seed)
    payload = oracle.encode(OLD.tolist(), new.tolist(), kind_of("BF16"), SMALL_RUNS, head)
    check_decoded(payload, OLD, new, SMALL)
    return payload


def test_whatever_is_cut_off_is_missed() -> None:
    for steps in ("one", "any"):
        payload = small_payload(steps)
        for size in [*range(0, len(payload) - 40, 3), *range(len(payload) - 40, len(payload))]:
            refused(payload[:size], OLD, SMALL)


def test_whatever_is_added_is_noticed() -> None:
    for steps in ("one", "any"):
        payload = small_payload(steps)
        parts = cut(payload)
        for more in (bytes(1), bytes(2), b"\xff\xff", bytes(64), bytes(1000)):
            refused(payload + more, OLD, SMALL, "longer or shorter")
            refused(joined(parts._replace(plain=parts.plain + more)), OLD, SMALL, "plain|behind")
            longer = parts._replace(head=parts.head + bytes(8) + more)
            refused(joined(longer), OLD, SMALL, "the head is longer or shorter")


def test_other_plain_bits() -> None:
    new, head = small("any")
    payload = oracle.encode(OLD.tolist(), new.tolist(), kind_of("BF16"), SMALL_RUNS, head)
    parts = cut(payload)
    assert len(parts.plain) > 10
    for less in (1, 2, len(parts.plain)):
        refused(
            joined(parts._replace(plain=parts.plain[:-less])),
            OLD,
            SMALL,
            "plain bits end too early",
        )


def with_end(change: Callable[[list[int]], None], steps: str, seed: int = 1) -> bytes:
    """A payload whose decoder comes to other states at its end."""
    new, head = small(steps, seed=seed)
    parts = cut(oracle.encode(OLD.tolist(), new.tolist(), kind_of("BF16"), SMALL_RUNS, head))
    side = oracle.StateWriter()
    ups = map(kind_of("BF16").step, OLD.tolist(), new.tolist())
    wanted = {at: up for at, up in enumerate(ups) if up}
    chances = oracle.Chances(head, OLD.tolist(), kind_of("BF16"), SMALL_RUNS)
    found = oracle.code_changes(side, chances, list(row_ends(list(SMALL_RUNS))), wanted)
    states = oracle.states_of(oracle.plain_bytes({at: abs(up) for at, up in wanted.items()}, found))
    change(states)
    words = side.finish(states)
    return joined(parts._replace(states=states, words=words))


def test_states_at_the_end() -> None:
    def none(states: list[int]) -> None:
        pass

    def large(states: list[int]) -> None:
        states[17] += 1 << 17

    def bit_behind(states: list[int]) -> None:
        states[63] |= 1 << 15

    assert with_end(none, "one") == small_payload("one")
    for steps in ("one", "small"):
        refused(with_end(large, steps), OLD, SMALL, "longer or shorter")
        refused(with_end(bit_behind, steps), OLD, SMALL, "bits behind the last size are not 0")


@pytest.mark.slow
def test_bits_behind_the_last_plain_one_and_behind_the_last_state() -> None:
    checked = [0, 0]
    for seed in range(5):
        payload = small_payload("any", seed)
        parts = cut(payload)
        if sum(x.bit_length() + 3 for x in parts.states) % 8:
            at = len(payload) - len(parts.words) - 1
            refused(
                payload[:at] + bytes([payload[at] | 128]) + payload[at + 1 :],
                OLD,
                SMALL,
                "bits behind the last state",
            )
            checked[0] += 1
        if plain_bits(parts) % 8:
            bad = joined(parts._replace(plain=parts.plain[:-1] + bytes([parts.plain[-1] | 128])))
            refused(bad, OLD, SMALL, "bits behind the last size")
            checked[1] += 1
    assert min(checked) > 1


def plain_bits(parts: Parts) -> int:
    """How many there are, those of the states included."""
    head, kind = oracle.read_head(joined(parts), SMALL_RUNS), kind_of("BF16")
    side = oracle.StateReader(list(parts.states), parts.words)
    chances = oracle.Chances(head, OLD.tolist(), kind, SMALL_RUNS)
    found = oracle.code_changes(side, chances, list(row_ends(list(SMALL_RUNS))), {})
    return sum(step.plain for step in found.values())


def test_wrong_numbers_of_changes() -> None:
    parts = cut(small_payload("one"))
    for count, match in (
        (0, "number of changes"),
        (1, "more changes"),
        (parts.changed - 1, "more changes"),
        (parts.changed + 1, "fewer changes"),
        (len(OLD), "fewer changes"),
        (len(OLD) + 1, "number of changes"),
        (1 << 32, "number"),
        (1 << 62, "number"),
    ):
        refused(joined(parts._replace(changed=count)), OLD, SMALL, match)
    refused(b"\x80" * 20, OLD, SMALL)


def test_heads_that_cannot_be() -> None:
    payload = small_payload("one")
    parts = cut(payload)
    refused(joined(parts._replace(first=1)), OLD, SMALL, "out of range")
    integers = Layout(DTYPES["U16"], SMALL_RUNS)
    refused(payload, OLD, integers, "out of range")
    for huge in (b"\xff\xff\x03", b"\xff" * 4 + b"\x7f"):
        refused(payload[:4] + huge + parts.head, OLD, SMALL, "inside its head")
        behind = payload[: 4 + len(varint(len(parts.head))) + len(parts.head)]
        refused(behind + huge + payload[len(behind) + 1 :], OLD, SMALL, "inside its plain bits")
    never = oracle.Head(0, [None] * 256, [], [], [24] * 12, [0, 0])
    refused(
        joined(parts._replace(head=oracle.head_bytes(never, SMALL_RUNS))),
        OLD,
        SMALL,
        "fewer changes",
    )


def test_more_lengths_than_there_can_be() -> None:
    """The number counts as the most; what is read of a head is never behind its tables."""

    class Boaster(Writer):
        def plain(self, value: int, k: int) -> int:
            return super().plain(511, k)

    new, head = small("any")
    side = Boaster()
    assert oracle.code_head(side, head, head.first, len(head.rarities), SMALL_RUNS) == head
    payload = oracle.encode(OLD.tolist(), new.tolist(), kind_of("BF16"), SMALL_RUNS, head)
    boasting = joined(cut(payload)._replace(head=side.finish()))
    assert boasting != payload
    check_decoded(boasting, OLD, new, SMALL)


def outcome(payload: bytes, old: UIntArray, layout: Layout) -> tuple[bytes, bytes] | None:
    try:
        found = GROUPS.decode(memoryview(payload), old, layout)
    except CorruptPatch:
        return None
    assert (np.diff(found.positions.astype(np.int64)) > 0).all()
    assert found.positions[-1] < len(old)
    assert (old[found.positions] != found.values).all()
    return found.positions.tobytes(), found.values.tobytes()


@pytest.mark.slow
def test_any_byte_may_be_another(rng: np.random.Generator) -> None:
    """Refused, or read as other changes of the same block; the same with and without vectors."""
    refusals = 0
    old = weights(rng, "BF16", 70_000)
    large = encoded(old, changed(rng, old, 0.061, "small"), flat_layout(DTYPES["BF16"], len(old)))
    for payload, before, layout in (
        (small_payload("any"), OLD, SMALL),
        (large, old, flat_layout(DTYPES["BF16"], len(old))),
    ):
        for at in range(min(len(payload), 450)):
            bad = bytearray(payload)
            bad[at] ^= int(rng.integers(1, 256))
            refusals += made_alike(partial(outcome, bytes(bad), before, layout)) is None
    assert refusals > 300
