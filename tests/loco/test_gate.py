"""The dense kernels: the gate against torch's casts, the outer step against torch.optim.SGD. Bits, not numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl._native import add_entries, decode_entries, encode_entries, gate, outer_step
from pulse_rl.errors import InputError
from pulse_rl.loco.gate import ROUNDINGS, Floats, open_entries, rounding_of
from tests.support.arrays import Array, misaligned
from tests.support.loco_reference import bits

DTYPES = list(ROUNDINGS)
LIMIT = 2.0**64


def floats(rng: np.random.Generator, count: int, below: float = np.inf) -> Floats:
    """Numbers of magnitudes under ``below``: weights, any size, beside boundaries, denormal, zero of either sign."""
    anything = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    beside = (anything & 0xFFFF0000) + rng.choice([0, 0x7FFF, 0x8000, 0x8001], count).astype(np.uint32)
    eighths = np.ldexp(rng.integers(-64, 64, count) / 8, rng.integers(-26, 18, count)).astype(np.float32)
    kinds = [
        rng.normal(0, 0.02, count).astype(np.float32),
        anything.view(np.float32),
        beside.view(np.float32),
        (anything & 0x807FFFFF).view(np.float32),
        (anything & 0x80000000).view(np.float32),
        eighths,  # ties of float16 and float8, too
    ]
    found = np.choose(rng.integers(0, len(kinds), count), kinds)
    found[~(np.abs(found) < below)] = 0
    return found


def opened(theta: Floats, s: Floats, dtype: torch.dtype) -> np.ndarray:
    """What torch's casts say."""
    with np.errstate(over="ignore"):
        before, after = (torch.from_numpy(x).to(dtype) for x in (theta, theta - s))
    return np.flatnonzero((bits(before) != bits(after)).numpy())


def gated(theta: Floats, s: Floats, dtype: torch.dtype) -> np.ndarray | None:
    zero, out = np.zeros_like(theta), np.empty_like(theta)
    found = open_entries(theta, s, zero, -zero, out, rounding_of(dtype))  # s - 0 + -0 is s, for -0 as well
    if found is not None:
        np.testing.assert_array_equal(out, s)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_is_torchs_cast(dtype: torch.dtype, rng: np.random.Generator) -> None:
    with np.errstate(over="ignore", under="ignore"):
        for _ in range(8):
            theta = floats(rng, 10_007)
            share = np.exp2(-rng.uniform(0, 26, len(theta))) * rng.choice([-1, 1], len(theta))
            for s in ((theta * share).astype(np.float32), floats(rng, len(theta))):
                s[~(np.abs(s) < LIMIT)] = 0
                if dtype == torch.float8_e4m3fn:
                    # Above its largest number torch gives that number or NaN, depending on torch's version.
                    outside = (np.abs(theta) > 448) | (np.abs(theta - s) > 448)
                    theta[outside] = s[outside] = 0
                np.testing.assert_array_equal(gated(theta, s, dtype), opened(theta, s, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_boundary_is_where_torch_has_it(dtype: torch.dtype) -> None:
    """Theta on both sides of every boundary of the narrow dtype, moved by the smallest step, and over zero."""
    width = torch.finfo(dtype).bits
    numbers = torch.arange(1 << width, dtype=torch.int32).to(torch.int16 if width == 16 else torch.uint8)
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
    theta, s = np.repeat(tiny, 4), np.tile(tiny, 4)
    np.testing.assert_array_equal(gated(theta, s, dtype), opened(theta, s, dtype))


def test_float8_e4m3fn_saturates() -> None:
    """It has no infinity: engines quantise to the largest number, so that nothing changes beyond it."""
    theta = np.float32([448, 448, -448, 460, 460, 416])
    target = np.float32([460, 1e9, -1e18, 470, 400, 1e9])
    found = gated(theta, theta - target, torch.float8_e4m3fn)
    assert found is not None
    assert found.tolist() == [4, 5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_open_and_all_closed(dtype: torch.dtype, rng: np.random.Generator) -> None:
    theta = rng.uniform(0.5, 2, 999).astype(np.float32)
    every, none = gated(theta, theta.copy(), dtype), gated(theta, np.zeros_like(theta), dtype)
    assert every is not None
    assert every.tolist() == list(range(999))
    assert none is not None
    assert none.tolist() == []


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_s_is_what_the_steps_left_and_the_residual(count: int, rng: np.random.Generator) -> None:
    """(start - now) + residual, in this order, and every entry of every chunk."""
    theta, start, now, residual = (floats(rng, count, LIMIT / 4) for _ in range(4))
    out = np.empty_like(theta)
    expected = (start - now) + residual
    found = gate(theta, start, now, residual, out, rounding_of(torch.bfloat16), 100)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
    assert found is not None
    np.testing.assert_array_equal(found - 100, opened(theta, expected, torch.bfloat16))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, LIMIT, -3e38])
@pytest.mark.parametrize("place", [0, 255, 256, 998])
def test_the_gate_finds_what_is_not_finite_or_far_too_large(value: float, place: int) -> None:
    s = np.zeros(999, np.float32)
    s[place] = value
    for dtype in DTYPES:
        assert gated(np.ones_like(s), s, dtype) is None


def test_a_sum_that_overflows_is_not_finite() -> None:
    large = np.full(3, 3e38, np.float32)
    out = np.empty_like(large)
    assert gate(large, large, -large, large, out, rounding_of(torch.bfloat16), 0) is None


def test_other_dtypes_are_refused() -> None:
    for dtype in (torch.float32, torch.float64, torch.int8):
        with pytest.raises(InputError, match="gate_dtype") as caught:
            rounding_of(dtype)
        assert "bfloat16" in caught.value.hint


@pytest.mark.parametrize("trainers", [1, 2, 3, 7])
@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.9), (1.0, 0.5), (0.3, 0.99)])
def test_the_outer_step_is_torchs_nesterov(trainers: int, lr: float, mu: float, rng: np.random.Generator) -> None:
    """Bit for bit where torch fuses multiplication and addition; to half a step in the last place where it does not."""
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
                np.testing.assert_array_equal(theta.view(np.uint32), p.detach().numpy().view(np.uint32))
                # torch's first step copies the gradient; ours adds it to 0: they differ in the sign of an underflow.
                np.testing.assert_array_equal(momentum, buffer)
            else:
                np.testing.assert_allclose(theta, p.detach().numpy(), rtol=1e-6, atol=1e-30)


def test_positions_are_checked_before_a_sum_changes() -> None:
    total = np.zeros(4, np.float32)
    with pytest.raises(IndexError):
        add_entries(total, np.uint32([1, 4]), np.float32([1, 1]))
    with pytest.raises(ValueError, match="length"):
        add_entries(total, np.uint32([1]), np.float32([1, 1]))
    assert not total.any()
    for arrays in ((theta[:-1] if i == k else theta for i in range(5)) for k in range(1, 5) for theta in [total]):
        with pytest.raises(ValueError, match="length"):
            gate(*arrays, rounding_of(torch.bfloat16), 0)
    with pytest.raises(ValueError, match="length"):
        outer_step(total, total[:2].copy(), total, 1, 0.7, 0.9)


def test_arrays_at_odd_addresses_are_refused() -> None:
    """Each array of each kernel in turn, the others where they belong."""
    good, at, rounding = np.zeros(4, np.float32), np.uint32([0, 1, 2, 3]), rounding_of(torch.bfloat16)
    runs = [(4, 4, 0)]
    payload = np.frombuffer(encode_entries(good, good, rounding, runs, at, good, False), np.uint8)
    calls: list[tuple[Callable[..., Any], list[Array]]] = [
        (lambda *a: gate(*a, rounding, 0), [good.copy() for _ in range(5)]),
        (lambda t, m, p, v: encode_entries(t, m, rounding, runs, p, v, False), [good, good, at, good]),
        (lambda t, m: decode_entries([payload], t, m, rounding, runs, False), [good, good]),
        (add_entries, [good.copy(), at, good]),
        (lambda *a: outer_step(*a, 2, 0.7, 0.9), [good.copy() for _ in range(3)]),
    ]
    for call, arrays in calls:
        call(*arrays)
        for k, array in enumerate(arrays):
            with pytest.raises(ValueError, match="not aligned to 4 bytes"):
                call(*arrays[:k], misaligned(array), *arrays[k + 1 :])
