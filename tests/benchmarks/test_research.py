"""What the benchmark adds to a study: the bound, density by exponent, and what an element's last
change tells of its next one, against built streams, plain Python and a publisher."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.study.recurrence import CLASSES, Remembered, steps_to_code
from benchmarks.study.research import Research
from benchmarks.study.theory import ClassCounts, entropy_bound, exponent_of, exponent_rows, ulp_of
from pulse_rl import Bits, MemoryStore, State
from pulse_rl.history import START_SPAN
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.history import records_of
from pulse_rl.state.tensors import DTYPES
from pulse_rl.study.tally import Pair
from tests.support.publishers import tuned
from tests.support.states import Rng

OCTAVES = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, None)]
DTYPES_WITH_HISTORY = ["BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U16", "I32"]


def class_of(age: int) -> int:
    return next(i for i, (a, b) in enumerate(OCTAVES, 1) if a <= age <= (b or age))


def step_of(old: int, new: int, dtype: str) -> int:
    """docs/format.md, 3.6.2: `ordered(new) - ordered(old)` modulo 2^width, as a signed number."""
    kind = DTYPES[dtype]
    bits = 8 * kind.width

    def ordered(x: int) -> int:
        if kind.exponent is None:
            return x
        return ~x % (1 << bits) if x >> (bits - 1) else x | 1 << (bits - 1)

    step = (ordered(new) - ordered(old)) % (1 << bits)
    return step - (1 << bits) if step >> (bits - 1) else step


def entropy(symbols: Iterable[Any]) -> float:
    counts = Counter(symbols).values()
    return sum(n * math.log2(sum(counts) / n) for n in counts)


def by_class(pairs: Iterable[tuple[Any, Any]]) -> float:
    """Bits of the symbols, each given its class: (class, symbol)."""
    found: dict[Any, list[Any]] = {}
    for kind, symbol in pairs:
        found.setdefault(kind, []).append(symbol)
    return sum(entropy(symbols) for symbols in found.values())


def expected(states: Sequence[np.ndarray], dtype: str, first: int) -> dict[str, Any]:
    """Everything about the steps to the states from ``first`` on, one element at a time."""
    exponent, mask = DTYPES[dtype].exponent or (0, 0), 0
    mask = (1 << exponent[1]) - 1
    flags, steps = [], []
    for values in np.array(states).T.tolist():
        last, at = 0, 0
        for t in range(1, len(values)):
            old, new = values[t - 1], values[t]
            step = step_of(old, new, dtype)
            age = class_of(t - at) if last else 0
            field = old >> exponent[0] & mask
            if t >= first:
                flags.append((field, age, step != 0))
                if step:
                    steps.append((field, age, last, step))
            if step:
                last, at = step, t
    ages = Counter(age for _, age, _, _ in steps)
    return {
        "changed": len(steps),
        "ages": [ages[i] / len(steps) for i in range(CLASSES)],
        "position": (
            by_class((f, c) for f, _, c in flags),
            by_class(((f, a), c) for f, a, c in flags),
        ),
        "sign": (
            entropy(s > 0 for *_, s in steps),
            by_class(((a, (last > 0) - (last < 0)), s > 0) for _, a, last, s in steps),
        ),
        "size": (
            by_class((f, abs(s)) for f, _, _, s in steps),
            by_class(((f, min(abs(last), 2)), abs(s)) for f, _, last, s in steps),
        ),
    }


def walk(rng: Rng, dtype: str, count: int, elements: int = 120) -> list[np.ndarray]:
    """Bits that move by small steps now and then, some elements often and straight on."""
    kind = DTYPES[dtype].uint
    states = [rng.integers(0, np.iinfo(kind).max, elements, kind)]
    often, way = rng.random(elements) ** 3, rng.choice([-1, 1], elements)
    while len(states) < count:
        way = np.where(rng.random(elements) < 0.2, -way, way)
        moves = (rng.random(elements) < often) * way * rng.choice([1, 1, 1, 2, 5], elements)
        states.append(states[-1] + moves.astype(kind))
    return states


def researched(
    states: Sequence[State], coded: Sequence[Pair] = (), lr: float | None = None
) -> dict[str, Any]:
    research = Research(states[0], coded, len(states) - 1)
    for state in states:
        research.add(state)
    found: dict[str, Any] = {"rows": [{"k": k} for k in sorted({pair.k for pair in coded})]}
    research.add_to(found, lr)
    return found


def studied(states: Sequence[np.ndarray], dtype: str) -> dict[str, Any]:
    given = [State.of({"w": Bits(s.reshape(-1, 1), dtype)}) for s in states]
    return researched(given)["history"]  # type: ignore[no-any-return]


def shares(found: dict[str, Any]) -> list[float]:
    return [found["not_yet"], *(age["share"] for age in found["ages"])]


@pytest.mark.parametrize("periods", [(1, 2, 3, 5, 9), (17, 40)])
def test_a_stream_where_elements_alternate_has_the_ages_that_were_built(
    periods: tuple[int, ...],
) -> None:
    last = 4 * max(periods)
    states = [
        np.array([0x3F80 + (t // p) % 2 for p in periods], np.uint16) for t in range(last + 1)
    ]
    found = studied(states, "BF16")
    first = last // 2 + 1
    changes = {p: sum(t % p == 0 for t in range(first, last + 1)) for p in periods}
    total = sum(changes.values())
    assert (found["first"], found["steps"], found["changed"]) == (first, last - first + 1, total)
    for age in found["ages"]:
        built = sum(n for p, n in changes.items() if age["from"] <= p <= (age["to"] or p))
        assert age["share"] == built / total
    assert found["not_yet"] == 0
    assert found["within_8"] == pytest.approx(sum(n for p, n in changes.items() if p <= 8) / total)
    if 1 in periods:  # else nothing changes in the few steps that are coded
        assert found["sign_bits_with_history"] == 0  # each goes back where it came from
        assert found["position_bits_with_history"] < found["position_bits"]


@pytest.mark.parametrize("dtype", DTYPES_WITH_HISTORY)
def test_each_dtype_is_counted_as_element_by_element(rng: Rng, dtype: str) -> None:
    states = walk(rng, dtype, 17)
    found = studied(states, dtype)
    wanted = expected(states, dtype, 9)
    assert found["first"] == 9
    assert found["steps"] == 8
    assert found["coded_steps"] == 8
    assert found["changed"] == wanted["changed"]
    assert shares(found) == pytest.approx(wanted["ages"])
    for name in ("position", "sign", "size"):
        bits = found[f"{name}_bits"], found[f"{name}_bits_with_history"]
        assert bits == pytest.approx(tuple(b / wanted["changed"] for b in wanted[name])), name


@pytest.mark.parametrize("count", [3, 4, 30])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_shares_add_up_and_history_is_never_dearer(rng: Rng, dtype: str, count: int) -> None:
    found = studied(walk(rng, dtype, count), dtype)
    assert sum(shares(found)) == pytest.approx(1)
    assert found["within_8"] == pytest.approx(sum(shares(found)[1:5]))
    for name in ("position_bits", "sign_bits", "size_bits", "entropy_bound"):
        assert 0 <= found[f"{name}_with_history"] <= found[name] + 1e-12
    bits = sum(found[f"{name}_bits"] for name in ("position", "sign", "size"))
    assert found["entropy_bound"] == pytest.approx(bits / 8)


def test_elements_of_eight_bytes_are_left_out(rng: Rng) -> None:
    weights, counters = walk(rng, "BF16", 5), [np.full(9, t, np.int64) for t in range(5)]
    given = [
        State.of({"c": c, "w": Bits(w, "BF16")}) for c, w in zip(counters, weights, strict=True)
    ]
    both, alone = researched(given)["history"], studied(weights, "BF16")
    assert shares(both) == shares(alone)
    assert both["entropy_bound"] == alone["entropy_bound"]
    assert both["bytes_per_changed_history"] > 0


def drifting(rng: Rng, count: int, elements: int = 40_000) -> list[np.ndarray]:
    """BF16 bits of which a few percent move again and again in one direction, and others now and
    then."""
    states = [rng.integers(0x3C00, 0x3D00, elements, np.uint16)]
    restless = rng.random(elements) < 0.02
    while len(states) < count:
        moves = np.where(restless, rng.random(elements) < 0.6, rng.random(elements) < 0.001)
        states.append(states[-1] + moves.astype(np.uint16))
    return states


def test_the_bytes_are_those_of_a_publishers_patch_files(rng: Rng) -> None:
    states = drifting(rng, 24)
    found = studied(states, "BF16")
    for codec in ("history", "auto"):
        publisher = tuned(MemoryStore(), stream="run", history=codec == "history")
        done = [publisher.publish(State.of({"w": Bits(s.reshape(-1, 1), "BF16")})) for s in states]
        published = [done[version] for version in steps_to_code(23)]
        nbytes = sum(p.patch_bytes for p in published)
        changed = sum(p.changed or 0 for p in published)
        # Headers are compressed, with digests that differ.
        assert found[f"bytes_per_changed_{codec}"] * changed == pytest.approx(
            nbytes, abs=len(published)
        )
    assert found["bytes_per_changed_history"] < 0.8 * found["bytes_per_changed_auto"]


def remembered_after(versions: int, share: float = 0.002) -> Remembered:
    """Two blocks of a tensor, of which every version changes so much, always the same elements."""
    specs = State.of({"w": Bits(np.zeros((1 << 22) + 4096, np.uint16), "BF16")}).specs
    blocks = dict(enumerate(cut(specs)))
    remembered = Remembered(specs)
    records = {}
    for index, block in blocks.items():
        at = np.arange(round(share * block.elements), dtype=np.uint32)
        found = records_of(
            block.dtype, at, np.zeros(len(at), np.uint16), np.ones(len(at), np.uint16)
        )
        assert found is not None
        records[index] = found
    for version in range(1, versions + 1):
        remembered.take(records, version)
    return remembered


@pytest.mark.parametrize(
    ("versions", "before", "now"),
    [(1, 0, 1), (7, 6, 7), (START_SPAN, START_SPAN - 1, 0), (START_SPAN + 3, 2, 3)],
)
def test_it_is_remembered_what_publishers_remember(versions: int, before: int, now: int) -> None:
    remembered = remembered_after(versions, share=0.001)
    assert (len(remembered.before.windows), len(remembered.now.windows)) == (before, now)


def test_the_bound_and_density_by_exponent_of_coded_pairs(rng: Rng) -> None:
    """A tensor larger than a block counts as one; the density is that of the smallest k."""
    weights = rng.standard_normal((1 << 22) + 4000, np.float32) * np.float32(0.02)
    bits = []
    for _ in range(3):
        bits.append(torch.from_numpy(weights).bfloat16().view(torch.uint16).numpy())
        weights = weights + np.float32(1e-5)
    states = [State.of({"w": Bits(b, "BF16"), "n": b[:9].astype(np.int64)}) for b in bits]
    found = researched(states, [Pair(1, 1), Pair(1, 2), Pair(2, 2)], lr=1e-5)
    assert found["rows"][1]["entropy_bound"] == pytest.approx(
        entropy_bound(states[0], states[2]).bytes_per_changed
    )
    exponent = (np.concatenate(bits[:2]) >> 7 & 0xFF).astype(int) - 127
    changed = np.concatenate([old != new for old, new in pairwise(bits)])
    assert sum(row["elements"] for row in found["exponents"]) == len(exponent)
    for row in found["exponents"]:
        if row["exponent"] > -126:  # else subnormal numbers and zero
            here = exponent == row["exponent"]
            assert (row["elements"], row["changed"]) == (here.sum(), (here & changed).sum())
            assert row["density"] == row["changed"] / row["elements"]
            assert row["predicted_lr"] == min(1, 1e-5 / 2.0 ** (row["exponent"] - 7))
            assert row["predicted_10lr"] == min(1, 1e-4 / 2.0 ** (row["exponent"] - 7))


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)]
)
@pytest.mark.parametrize("exponent", [-13, -6, 0])
def test_updates_below_the_threshold_are_absorbed(
    dtype: str, torch_dtype: torch.dtype, exponent: int
) -> None:
    threshold = ulp_of(exponent, DTYPES[dtype]) / 2
    weight = torch.tensor(1.25 * 2.0**exponent, dtype=torch_dtype)
    assert (weight.double() + 0.99 * threshold).to(torch_dtype) == weight
    assert (weight.double() + 1.01 * threshold).to(torch_dtype) != weight
    if dtype == "BF16":
        assert threshold == 2.0**exponent / 256


def test_subnormals_share_the_lowest_exponent_and_integers_have_none() -> None:
    assert [exponent_of(f, DTYPES["F8_E4M3"]) for f in (0, 1, 2, 15)] == [-6, -6, -5, 8]
    counts = ClassCounts(DTYPES["BF16"])
    counts.add(np.array([0, 0x8000, 1, 0x80], np.uint16), np.array([1, 0x8000, 1, 0x80], np.uint16))
    (row,) = exponent_rows(counts, None)
    assert row["exponent"] == -126
    assert row["elements"] == 4
    assert row["changed"] == 1
    assert row["predicted_lr"] is None
    assert exponent_rows(ClassCounts(DTYPES["I32"]), 1.0) == []


def test_the_bound_is_the_entropy_of_flags_and_steps_given_tensor_and_exponent(rng: Rng) -> None:
    old = {n: rng.integers(0x3F00, 0x4100, 400, np.uint16) for n in "ab"}
    new = {
        n: v + rng.choice(np.array([0, 0, 0, 1, 0xFFFF], np.uint16), 400) for n, v in old.items()
    }
    bits = 0.0
    for name in "ab":
        for exponent in set((old[name] >> 7).tolist()):
            at = old[name] >> 7 == exponent
            steps = (new[name] - old[name])[at]
            bits += entropy((steps != 0).tolist()) + entropy(steps[steps != 0].tolist())
    found = entropy_bound(
        *(State.of({n: Bits(v, "BF16") for n, v in s.items()}) for s in (old, new))
    )
    assert found.position_bits + found.step_bits == pytest.approx(bits)
    assert found.changed == sum(int((old[n] != new[n]).sum()) for n in "ab")
    assert found.unconditional_bits > bits
