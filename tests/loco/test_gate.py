"""The gate against torch's casts, done densely. Bits, not numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pulse_rl._native import gate
from pulse_rl.errors import InputError
from pulse_rl.loco.gate import ROUNDINGS, open_entries, rounding_of
from pulse_rl.loco.parameters import Floats
from tests.support.arrays import floats
from tests.support.loco_reference import bits

DTYPES = list(ROUNDINGS)
LIMIT = 2.0**64


def opened(theta: Floats, s: Floats, dtype: torch.dtype) -> np.ndarray:
    """What torch's casts say."""
    with np.errstate(over="ignore"):
        before, after = (torch.from_numpy(x).to(dtype) for x in (theta, theta - s))
    return np.flatnonzero((bits(before) != bits(after)).numpy())


def gated(theta: Floats, s: Floats, dtype: torch.dtype) -> np.ndarray | None:
    """By a model that did not move, with all of ``s`` in the residual. No -0 is in ``s``: 0 + -0 is 0."""
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
    theta, s = np.repeat(tiny, 4), np.tile(tiny, 4) + np.float32(0)
    np.testing.assert_array_equal(gated(theta, s, dtype), opened(theta, s, dtype))
    negative, out = np.float32([-0.0]), np.empty(1, np.float32)
    assert open_entries(negative, -negative, negative, out, rounding_of(dtype)) == [0], "s is -0: theta becomes 0"
    assert np.signbit(out)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("lookahead", [0.0, 0.3, 7.0, 1024.0])
@pytest.mark.parametrize("bf16_start", [False, True])
def test_s_is_what_the_steps_left_and_the_residual(
    dtype: torch.dtype, count: int, lookahead: float, bf16_start: bool, rng: np.random.Generator
) -> None:
    """(start - now) + residual, in this order, of every entry of every chunk; start is theta - lookahead * residual,
    rounded twice, as the model holds it."""
    limit = LIMIT / 4096
    theta, now, residual = (floats(rng, count, limit) for _ in range(3))
    for _ in range(4):
        start = theta - np.float32(lookahead) * residual if lookahead else theta
        if bf16_start:
            start = torch.from_numpy(start).bfloat16().float().numpy()
        expected = (start - now) + residual
        out = np.empty_like(theta)
        found = gate(theta, now, residual, float(np.float32(lookahead)), bf16_start, out, rounding_of(dtype), 100)
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
        assert found is not None
        if dtype != torch.float8_e4m3fn:  # which torch may not saturate
            np.testing.assert_array_equal(found - 100, opened(theta, expected, dtype))
        kept = {"lookahead": float(np.float32(lookahead)), "bf16_start": bf16_start}
        again = open_entries(theta, now, residual, out, rounding_of(dtype), **kept)  # type: ignore[arg-type]
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
    assert gate(large, large, none, 0.0, True, out, rounding, 0) is None, "BF16 rounds it away from where it was"
    assert gate(none, none, large / 10, 1024.0, False, out, rounding, 0) is None, "a start that overflows"


def test_other_dtypes_are_refused() -> None:
    for dtype in (torch.float32, torch.float64, torch.int8):
        with pytest.raises(InputError, match="gate_dtype") as caught:
            rounding_of(dtype)
        assert "bfloat16" in caught.value.hint
