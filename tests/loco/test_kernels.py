"""The gate against torch's casts, the outer step against torch.optim.SGD, the sparse one against
the dense one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pulse_rl._native import (
    decode_entries,
    encode_entries,
    gate,
    outer_step,
    sparse_outer_step,
    sum_entries,
)
from pulse_rl.errors import InputError
from pulse_rl.loco.gate import ROUNDINGS, open_entries, rounding_of
from pulse_rl.loco.messages import Entries
from pulse_rl.loco.parameters import Floats
from tests.support.arrays import Array, floats, misaligned
from tests.support.entries_oracle import Rounding, class_of
from tests.support.loco_reference import bits
from tests.support.states import present

DTYPES = list(ROUNDINGS)
LIMIT = 2.0**64


def opened(theta: Floats, s: Floats, dtype: torch.dtype) -> np.ndarray:
    """What torch's casts say."""
    with np.errstate(over="ignore"):
        before, after = (torch.from_numpy(x).to(dtype) for x in (theta, theta - s))
    return np.flatnonzero((bits(before) != bits(after)).numpy())


def gated(theta: Floats, s: Floats, dtype: torch.dtype) -> np.ndarray | None:
    """By a model that did not move, with all of ``s`` in the residual. No -0 is in ``s``: 0 + -0 is
    0."""
    out = np.empty_like(theta)
    found = open_entries(theta, theta, s, out, rounding_of(dtype))
    if found is not None:
        np.testing.assert_array_equal(out.view(np.uint32), s.view(np.uint32))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_is_torchs_cast(dtype: torch.dtype, rng: np.random.Generator) -> None:
    with np.errstate(over="ignore", under="ignore"):
        for _ in range(8):
            theta = floats(rng, 10_007)
            share = np.exp2(-rng.uniform(0, 26, len(theta))) * rng.choice([-1, 1], len(theta))
            for s in ((theta * share).astype(np.float32), floats(rng, len(theta))):
                s[~(np.abs(s) < LIMIT)] = 0
                s += 0.0
                if dtype == torch.float8_e4m3fn:
                    # Above its largest number torch gives that number or NaN, depending on torch's
                    # version.
                    outside = (np.abs(theta) > 448) | (np.abs(theta - s) > 448)
                    theta[outside] = s[outside] = 0
                np.testing.assert_array_equal(gated(theta, s, dtype), opened(theta, s, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_boundary_is_where_torch_has_it(dtype: torch.dtype) -> None:
    """Theta on both sides of every boundary of the narrow dtype, moved by the smallest step, and
    over zero."""
    width = torch.finfo(dtype).bits
    numbers = torch.arange(1 << width, dtype=torch.int32).to(
        torch.int16 if width == 16 else torch.uint8
    )
    exact = numbers.view(dtype).float().numpy()
    exact = np.sort(exact[np.isfinite(exact)])
    between = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
    for step in (np.float32(np.inf), np.float32(-np.inf)):
        moved = np.nextafter(between, step)
        for theta, target in ((between, moved), (moved, between)):
            s = np.where(np.abs(theta - target) < LIMIT, theta - target, np.float32(0))
            assert ((theta - s) == target)[s != 0].all()
            np.testing.assert_array_equal(gated(theta, s, dtype), opened(theta, s, dtype))
    tiny = np.float32([1e-45, -1e-45, 0.0, -0.0])
    theta, s = np.repeat(tiny, 4), np.tile(tiny, 4) + np.float32(0)
    np.testing.assert_array_equal(gated(theta, s, dtype), opened(theta, s, dtype))
    negative, out = np.float32([-0.0]), np.empty(1, np.float32)
    assert open_entries(negative, -negative, negative, out, rounding_of(dtype)) == [0], (
        "s is -0: theta becomes 0"
    )
    assert np.signbit(out)


def test_float8_e4m3fn_saturates() -> None:
    """It has no infinity: engines quantize to the largest number, so that nothing changes beyond
    it."""
    theta = np.float32([448, 448, -448, 460, 460, 416])
    target = np.float32([460, 1e9, -1e18, 470, 400, 1e9])
    found = present(gated(theta, theta - target, torch.float8_e4m3fn))
    assert found.tolist() == [4, 5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("lookahead", [0.0, 0.3, 7.0, 1024.0])
@pytest.mark.parametrize("bf16_start", [False, True])
def test_s_is_what_the_steps_left_and_the_residual(
    dtype: torch.dtype, count: int, lookahead: float, bf16_start: bool, rng: np.random.Generator
) -> None:
    """(start - now) + residual, in this order, of every entry of every chunk; start is theta -
    lookahead * residual, rounded twice, as the model holds it."""
    limit = LIMIT / 4096
    theta, now, residual = (floats(rng, count, limit) for _ in range(3))
    for _ in range(4):
        start = theta - np.float32(lookahead) * residual if lookahead else theta
        if bf16_start:
            start = torch.from_numpy(start).bfloat16().float().numpy()
        expected = (start - now) + residual
        out = np.empty_like(theta)
        rounding, ahead = rounding_of(dtype), float(np.float32(lookahead))
        found = gate(theta, now, residual, ahead, bf16_start, out, rounding, 100)
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
        assert found is not None
        if dtype != torch.float8_e4m3fn:  # which torch may not saturate
            np.testing.assert_array_equal(found - 100, opened(theta, expected, dtype))
        again = open_entries(
            theta, now, residual, out, rounding, lookahead=ahead, bf16_start=bf16_start
        )
        np.testing.assert_array_equal(found - 100, again)
        # As after some steps: close to the start, and a residual that is a fraction of theta.
        residual = (theta * rng.normal(0, 2**-11, count)).astype(np.float32)
        now = (start * rng.normal(1, 2**-10, count)).astype(np.float32)
        theta = np.where(np.abs(theta) < 1e9, theta, np.float32(1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, LIMIT, -3e38])
@pytest.mark.parametrize("place", [0, 255, 256, 998])
def test_the_gate_finds_what_is_not_finite_or_far_too_large(value: float, place: int) -> None:
    s = np.zeros(999, np.float32)
    s[place] = value
    for dtype in DTYPES:
        assert gated(np.ones_like(s), s, dtype) is None


def test_a_sum_that_overflows_is_not_finite() -> None:
    large, rounding = np.full(3, 3e38, np.float32), rounding_of(torch.bfloat16)
    out, none = np.empty_like(large), np.zeros(3, np.float32)
    assert gate(large, -large, large, 0.0, False, out, rounding, 0) is None
    assert gate(large, large, none, 0.0, False, out, rounding, 0) is not None
    assert gate(large, large, none, 0.0, True, out, rounding, 0) is None, (
        "BF16 rounds it away from where it was"
    )
    assert gate(none, none, large / 10, 1024.0, False, out, rounding, 0) is None, (
        "a start that overflows"
    )


def test_other_dtypes_are_refused() -> None:
    for dtype in (torch.float32, torch.float64, torch.int8):
        with pytest.raises(InputError, match="gate_dtype") as caught:
            rounding_of(dtype)
        assert "bfloat16" in caught.value.hint


# -- the outer step


BF16 = rounding_of(torch.bfloat16)
OCTAVES = 120, 104
CLASSIFIED = BF16, OCTAVES, np.empty(4, np.uint8)
COUNTS = [0, 1, 255, 257, 4095, 4096, 4097, 9000]


@pytest.mark.parametrize("trainers", [1, 2, 3, 7])
@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.9), (1.0, 0.5), (0.3, 0.99)])
def test_the_outer_step_is_torchs_nesterov(
    trainers: int, lr: float, mu: float, rng: np.random.Generator
) -> None:
    """Bit for bit where torch fuses multiplication and addition; to half a step in the last place
    where it does not."""
    fused = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    for count in (1, 7, 8, 9, 33, 100, 4099):
        theta, momentum = floats(rng, count), np.zeros(count, np.float32)
        theta[np.abs(theta) > 1e30] = 1
        p = torch.nn.Parameter(torch.from_numpy(theta.copy()))
        sgd = torch.optim.SGD([p], lr=lr, momentum=mu, nesterov=True)
        for _ in range(3):
            total = floats(rng, count)
            total[np.abs(total) > 1e30] = 0
            total += 0.0  # a sum that starts at 0 is never -0
            p.grad = torch.from_numpy(total) / trainers
            sgd.step()
            outer_step(theta, momentum, total, trainers, lr, mu)
            buffer = sgd.state[p]["momentum_buffer"].numpy()
            if fused:
                np.testing.assert_array_equal(
                    theta.view(np.uint32), p.detach().numpy().view(np.uint32)
                )
                # torch's first step copies the gradient; ours adds it to 0: they differ in the sign
                # of an underflow.
                np.testing.assert_array_equal(momentum, buffer)
            else:
                np.testing.assert_allclose(theta, p.detach().numpy(), rtol=1e-6, atol=1e-30)


class State(NamedTuple):
    theta: Floats
    momentum: Floats
    residual: Floats
    start: Floats
    counts: np.ndarray

    def copy(self) -> State:
        return State(*(array.copy() for array in self))  # type: ignore[arg-type]

    def same(self, other: State) -> None:
        for name in self._fields:
            mine, its = (getattr(state, name).view(np.uint8) for state in (self, other))
            np.testing.assert_array_equal(mine, its, err_msg=name)


def any_state(rng: np.random.Generator, count: int, granules: int) -> State:
    theta, momentum, residual, start = (floats(rng, count, 1e30) for _ in range(4))
    return State(theta, momentum, residual, start, rng.integers(0, 9, granules))


def any_summands(rng: np.random.Generator, elements: int, number: int) -> list[Entries]:
    """From none to all of the positions; some cancel in the sum, some are 0 themselves."""
    summands: list[Entries] = []
    for _ in range(number):
        positions = np.flatnonzero(rng.random(elements) < rng.choice([0, 1e-3, 0.1, 1])).astype(
            np.uint32
        )
        summands.append((positions, floats(rng, len(positions), 1e30)))
    if summands and rng.random() < 0.5:
        positions, values = summands[int(rng.integers(number))]
        few = rng.random(len(positions)) < 0.5
        summands.append((positions[few], -values[few]))
    return summands


def step_densely(
    state: State,
    lookahead: float,
    first: int,
    summands: list[Entries],
    how: tuple[float, float, float],
    offset: int,
) -> None:
    """As `sparse_outer_step` of parameters from ``first`` on, in granules of 256."""
    count = len(state.theta)
    total = np.zeros(first + count + 500, np.float32)
    for positions, values in summands:
        total[positions] += values
    total = total[first : first + count].copy()
    outer_step(state.theta, state.momentum, total, *how)
    ahead = state.theta - np.float32(lookahead) * state.residual if lookahead else state.theta
    state.start[:] = ahead
    np.add.at(state.counts, (offset + np.flatnonzero(total)) // 256, 1)


@pytest.mark.parametrize("number", [0, 1, 2, 7])
@pytest.mark.parametrize("lookahead", [0.0, 7.0, float(np.float32(0.3))])
@pytest.mark.parametrize("count", COUNTS)
def test_the_sparse_step_is_the_dense_one(
    count: int, lookahead: float, number: int, rng: np.random.Generator
) -> None:
    """Of a segment of a block: entries before and behind it change nothing; what is beside its
    granules neither."""
    for first, offset in ((0, 0), (1, 255), (700, 100), (5000, 256), (4096, 5)):
        summands = any_summands(rng, first + count + 500, number)
        dense = any_state(rng, count, (offset + count + 255) // 256 + 1)
        sparse = dense.copy()
        how = (float(max(len(summands), 1)), 0.7, 0.9)
        with np.errstate(over="ignore", invalid="ignore"):
            step_densely(dense, lookahead, first, summands, how, offset)
        classes = np.empty(count, np.uint8)
        where = offset, 256, sparse.counts, BF16, OCTAVES, classes
        sparse_outer_step(*sparse[:3], lookahead, sparse.start, first, summands, *how, *where)
        sparse.same(dense)
        few = slice(None, None, 1 + count // 500)
        bits = (array[few].view(np.uint32).tolist() for array in (dense.theta, dense.momentum))
        assert classes[few].tolist() == [
            class_of(x, m, Rounding(*BF16), *OCTAVES) for x, m in zip(*bits, strict=True)
        ]


@pytest.mark.parametrize("number", [0, 1, 2, 7])
@pytest.mark.parametrize("elements", COUNTS)
def test_sums_are_those_of_the_dense_way(
    elements: int, number: int, rng: np.random.Generator
) -> None:
    for _ in range(4):
        summands, total = any_summands(rng, elements, number), np.zeros(elements, np.float32)
        for positions, values in summands:
            total[positions] += values
        found, sums = sum_entries(summands, elements)
        np.testing.assert_array_equal(found, np.flatnonzero(total))
        np.testing.assert_array_equal(sums.view(np.uint32), total[found].view(np.uint32))
        assert (found.dtype, sums.dtype) == (np.uint32, np.float32)


def test_positions_are_checked_before_a_sum_changes() -> None:
    for positions in ([0, 4], [2, 2], [2, 1]):
        with pytest.raises(IndexError):
            sum_entries([(np.uint32(positions), np.float32([1, 1]))], 4)
    with pytest.raises(ValueError, match="length"):
        sum_entries([(np.uint32([1]), np.float32([1, 1]))], 4)
    with pytest.raises(ValueError, match="too long"):
        sum_entries([], 1 << 32)


def test_arrays_of_unequal_length_are_refused() -> None:
    four, two, counts = np.zeros(4, np.float32), np.zeros(2, np.float32), np.zeros(1, np.int64)

    def sparse(*arrays: Floats, summands: tuple[Entries, ...] = (), classes: int = 4) -> None:
        theta, momentum, residual, start = arrays
        where = 0, 256, counts, BF16, OCTAVES, np.empty(classes, np.uint8)
        sparse_outer_step(theta, momentum, residual, 1.0, start, 0, summands, 1, 0.7, 0.9, *where)

    with pytest.raises(ValueError, match="length"):
        sparse(four, four, four, four, classes=3)
    for k in range(4):
        arrays = [two.copy() if i == k else four.copy() for i in range(4)]
        with pytest.raises(ValueError, match="length"):
            gate(*arrays[:3], 0.0, False, arrays[3], BF16, 0)
        with pytest.raises(ValueError, match="length"):
            sparse(*arrays)
    with pytest.raises(ValueError, match="length"):
        outer_step(four, two, four, 1, 0.7, 0.9)
    with pytest.raises(ValueError, match="length"):
        sparse(four, four, four, four, summands=((np.uint32([0]), two),))


@pytest.mark.parametrize(
    ("offset", "granule", "counts"),
    [(0, 256, 0), (253, 256, 1), (0, 3, 1), (0, 0, 9), (1 << 40, 256, 9), (0, 2**64 - 1, 0)],
)
def test_counts_that_are_too_few_are_refused(offset: int, granule: int, counts: int) -> None:
    arrays = [np.ones(4, np.float32) for _ in range(4)]
    place = offset, granule, np.zeros(counts, np.int64)
    with pytest.raises(ValueError, match="too few"):
        sparse_outer_step(*arrays[:3], 0.0, arrays[3], 0, [], 1, 0.7, 0.9, *place, *CLASSIFIED)
    assert all((array == 1).all() for array in arrays)


def test_arrays_at_odd_addresses_are_refused() -> None:
    """Each array of each kernel in turn, the others where they belong."""
    good, at, counts = np.zeros(4, np.float32), np.uint32([0, 1, 2, 3]), np.zeros(1, np.int64)
    payload = np.frombuffer(encode_entries(good, good, BF16, at, good, 23), np.uint8)

    def sparse(*arrays: Array) -> None:
        theta, momentum, residual, start, *summand = arrays
        where = 0, 256, counts, *CLASSIFIED
        sparse_outer_step(
            theta, momentum, residual, 1.0, start, 0, [tuple(summand)], 1, 0.7, 0.9, *where
        )

    calls: list[tuple[Callable[..., Any], list[Array]]] = [
        (lambda t, n, r, s: gate(t, n, r, 1.0, False, s, BF16, 0), [good.copy() for _ in range(4)]),
        (lambda t, m, p, v: encode_entries(t, m, BF16, p, v, 23), [good, good, at, good]),
        (lambda t, m: decode_entries([payload], t, m, BF16, 23), [good, good]),
        (lambda p, v: sum_entries([(p, v)], 4), [at, good]),
        (lambda *a: outer_step(*a, 2, 0.7, 0.9), [good.copy() for _ in range(3)]),
        (sparse, [*(good.copy() for _ in range(4)), at, good]),
    ]
    for call, arrays in calls:
        call(*arrays)
        for k, array in enumerate(arrays):
            with pytest.raises(ValueError, match="not aligned to 4 bytes"):
                call(*arrays[:k], misaligned(array), *arrays[k + 1 :])
    four = [good.copy() for _ in range(4)]
    place = 0, 256, misaligned(counts, 4)
    with pytest.raises(ValueError, match="not aligned to 8 bytes"):
        sparse_outer_step(*four[:3], 0.0, four[3], 0, [], 1, 0.7, 0.9, *place, *CLASSIFIED)
