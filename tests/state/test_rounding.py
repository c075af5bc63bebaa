"""The cast into each compute dtype, against torch and against the nearest of all its numbers."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pulse_rl import Bits, State
from pulse_rl._native import round_values
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.state.cast import (
    COMPUTE_DTYPES,
    ROUNDINGS,
    CastState,
    cast,
    compute_dtype_named,
    round_bits,
)
from pulse_rl.state.tensors import DTYPES, DType, TensorSpec
from tests.state.test_tensors import TORCH_DTYPES
from tests.support.arrays import Array, misaligned
from tests.support.states import WIDTHS, Rng

INFINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F8_E5M2": 0x7C}
SATURATED = {"F8_E4M3": 0x7E}
FP32Bits = npt.NDArray[np.uint32]


@cache
def magnitudes(name: str) -> npt.NDArray[np.float64]:
    """What each code from 0 to that of the largest finite number means, and what the next one
    would, were it finite."""
    assert DTYPES[name].exponent is not None
    mantissa, exponent_bits = DTYPES[name].exponent
    code = np.arange((INFINITE | {n: c + 1 for n, c in SATURATED.items()})[name] + 1)
    field, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / 2.0**mantissa
    bias = 2 ** (exponent_bits - 1) - 1
    return np.where(field, np.ldexp(1 + fraction, field - bias), np.ldexp(fraction, 1 - bias))


def nearest(bits: FP32Bits, name: str) -> Array:
    """The code of the nearest number, of two that are equally near the even one; NaN is not looked
    at."""
    numbers, sign = magnitudes(name), bits >> np.uint32(31)
    with np.errstate(invalid="ignore"):
        wanted = np.nan_to_num(
            np.abs(bits.view(np.float32)).astype(np.float64), nan=0.0, posinf=1e300
        )
    above = np.clip(np.searchsorted(numbers, wanted), 1, len(numbers) - 1)
    up, down = numbers[above] - wanted, wanted - numbers[above - 1]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    code = np.minimum(code, (INFINITE | SATURATED)[name])
    return (code | sign << np.uint32(8 * COMPUTE_DTYPES[name].width - 1)).astype(
        COMPUTE_DTYPES[name].uint
    )


def patterns(name: str, rng: np.random.Generator) -> FP32Bits:
    """All upper halves with lower halves around ties; all numbers of the dtype and the points
    halfway between two, each with its neighbors; a sample of all 2^32."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    exact = magnitudes(name)
    with np.errstate(over="ignore"):
        corners = (
            np.concatenate([exact, (exact[1:] + exact[:-1]) / 2]).astype(np.float32).view(np.uint32)
        )
    beside = (corners[:, None] + np.uint32([0xFFFFFFFF, 0, 1])).reshape(-1)
    sample = rng.integers(1 << 32, size=1 << 20, dtype=np.uint32)
    stride = np.arange(0, 1 << 32, 8191, dtype=np.uint64).astype(np.uint32)
    return np.concatenate(
        [(upper[:, None] | lower).reshape(-1), beside, beside | np.uint32(1 << 31), sample, stride]
    )


def is_nan(bits: FP32Bits) -> npt.NDArray[np.bool_]:
    return (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDINGS)
def test_every_number_becomes_the_nearest_one(name: str, rng: np.random.Generator) -> None:
    bits = patterns(name, rng)
    numbers = ~is_nan(bits)
    np.testing.assert_array_equal(
        round_bits(bits, DTYPES[name])[numbers], nearest(bits, name)[numbers]
    )


@pytest.mark.parametrize("count", [0, 1, 7, 31, 32, 33, 1000])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_any_number_of_values(name: str, count: int, rng: np.random.Generator) -> None:
    bits = rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(round_bits(bits, DTYPES[name]), nearest(bits, name))


NANS = np.uint32(
    [0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FBFFFFF, 0xFF812345, 0xFFFFFFFF, 0x7FABCDEF]
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BF16", [0x7FC0, 0xFFC0, 0x7FC0, 0x7FFF, 0xFFC1, 0xFFFF, 0x7FEB]),
        ("F16", [0x7E00, 0xFE00, 0x7E00, 0x7FFF, 0xFE09, 0xFFFF, 0x7F5E]),
        ("F8_E4M3", [0x7F, 0xFF, 0x7F, 0x7F, 0xFF, 0xFF, 0x7F]),
        ("F8_E5M2", [0x7F, 0xFF, 0x7F, 0x7F, 0xFF, 0xFF, 0x7F]),
    ],
)
def test_nan_stays_a_quiet_nan_with_its_sign_and_upper_payload(
    name: str, expected: list[int]
) -> None:
    """torch's own NaN bits differ between processors, so they are no oracle."""
    assert [hex(b) for b in round_bits(NANS, DTYPES[name])] == [hex(b) for b in expected]


def test_denormals_are_rounded_where_the_processor_flushes_them() -> None:
    """`torch.set_flush_denormal` changes the arithmetic of its thread; a cast that needs none does
    not care."""
    bits = np.uint32([0x00018000, 0x00018001, 0x80028000, 0x33000001, 0x33800000, 0x3A800001])
    expected = {name: nearest(bits, name).tolist() for name in ROUNDINGS}
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert np.float32(2**-126) * np.float32(0.5) == 0
        found = {name: round_bits(bits, DTYPES[name]).tolist() for name in ROUNDINGS}
    finally:
        torch.set_flush_denormal(False)
    assert found == expected


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("BF16", torch.bfloat16),
        ("F16", torch.float16),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
    ],
)
def test_compute_dtypes_have_the_names_of_safetensors_and_torch(
    stored: str, dtype: torch.dtype
) -> None:
    plain = str(dtype).removeprefix("torch.")
    for name in (stored, stored.lower(), stored.capitalize(), dtype, str(dtype), plain):
        assert compute_dtype_named(name) == DTYPES[stored]
    assert compute_dtype_named(plain.upper()) == DTYPES[stored]


def test_the_kernel_refuses_what_it_cannot_write() -> None:
    bits, bf16, e5m2 = np.zeros(4, np.uint32), ROUNDINGS["BF16"], ROUNDINGS["F8_E5M2"]
    out = np.full(8, 7, np.uint8)
    for width in (0, 3, 4):
        with pytest.raises(ValueError, match="width"):
            round_values(bits, bf16, 0x7FC0, width, out)
    for rounding, nan, width in ((bf16, 0x7FC0, 1), (e5m2, 0xFF, 1), (bf16, 0xFFC0, 2)):
        with pytest.raises(ValueError, match="do not fit"):
            round_values(bits, rounding, nan, width, out[: 4 * width])
    for length in (6, 7, 4):
        with pytest.raises(ValueError, match=r"length|whole number"):
            round_values(bits, bf16, 0x7FC0, 2, out[:length])
    with pytest.raises(ValueError, match="bits is not aligned"):
        round_values(misaligned(bits), bf16, 0x7FC0, 2, out)
    with pytest.raises(ValueError, match="out is not aligned"):
        round_values(bits, bf16, 0x7FC0, 2, misaligned(out))
    for mantissa, least in ((0, 1), (23, 1), (7, 0), (7, 255)):
        with pytest.raises(ValueError, match="rounding"):
            round_values(bits, (mantissa, least, 0x7F7F0000, 0x7F800000), 0x7FC0, 2, out)
    assert (out == 7).all()


# -- states after the cast


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("source", ["F32", "BF16", "F16", "F64"])
def test_casts_are_those_of_torch(rng: Rng, source: str, dtype: str) -> None:
    if DTYPES[source].width <= COMPUTE_DTYPES[dtype].width:
        state = State.of({"w": Bits(np.arange(9, dtype=DTYPES[source].uint), source)})
        assert CastState(state, COMPUTE_DTYPES[dtype]).spec("w").dtype.name == source
        return
    if source in ("BF16", "F16"):
        bits = np.arange(1 << 16, dtype=np.uint16)
        values = torch.from_numpy(bits.view(np.int16)).view(TORCH_DTYPES[source]).float()
    else:
        values = torch.from_numpy(patterns(dtype, rng).view(np.float32))
        if source == "F64":
            values = values[
                ~values.isnan()
            ].double()  # float32 values: torch rounds doubles twice, as we do
        bits = values.numpy().view(DTYPES[source].uint)
    if dtype == "F8_E4M3":  # torch has changed its mind on what exceeds 448
        keep = ~(values.abs() > 448).numpy()
        bits, values = bits[keep], values[torch.from_numpy(keep)]
    result = cast(bits, DTYPES[source], COMPUTE_DTYPES[dtype])
    expected = values.to(TORCH_DTYPES[dtype])
    nan = values.isnan().numpy()
    raw = (
        expected.view(torch.uint8 if expected.dtype.itemsize == 1 else torch.int16)
        .numpy()
        .view(result.dtype)
    )
    assert np.array_equal(result[~nan], raw[~nan])
    back = torch.from_numpy(result.view(np.int16) if result.itemsize == 2 else result).view(
        TORCH_DTYPES[dtype]
    )
    assert back.float().isnan().numpy().tolist() == nan.tolist()


def test_beyond_its_range_e4m3_saturates_and_e5m2_is_infinite() -> None:
    large = np.array([449, 480, 1e9, np.inf, -np.inf], np.float32).view(np.uint32)
    assert cast(large, DTYPES["F32"], DTYPES["F8_E4M3"]).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]
    large = np.array([57344, 61440, 1e9, np.inf, -np.inf], np.float32).view(np.uint32)
    assert cast(large, DTYPES["F32"], DTYPES["F8_E5M2"]).tolist() == [0x7B, 0x7C, 0x7C, 0x7C, 0xFC]


def test_integers_have_no_cast() -> None:
    with pytest.raises(UnsupportedTensor, match="no cast from I32"):
        cast(np.zeros(3, np.uint32), DTYPES["I32"], DTYPES["BF16"])


def test_specs_after_the_cast() -> None:
    state = State.of({"w": np.zeros((2, 3), np.float32), "n": np.zeros(4, np.int32)})
    assert CastState(state, DTYPES["F16"]).specs == (
        TensorSpec("n", DTYPES["I32"], (4,)),
        TensorSpec("w", DTYPES["F16"], (2, 3)),
    )


# -- dtypes


def test_the_dtypes_are_those_tested_here() -> None:
    assert {name: d.width for name, d in DTYPES.items()} == WIDTHS
    assert [DTYPES[name].id for name in WIDTHS] == list(range(1, 20))


def test_dtype_records_the_layout_of_its_bits() -> None:
    assert DTYPES["BF16"] == DType(12, "BF16", 2, (7, 8), "bfloat16")
    for name, (low, count) in {n: d.exponent for n, d in DTYPES.items() if d.exponent}.items():
        one = (
            torch.ones(1)
            .to(TORCH_DTYPES[name])
            .view(torch.uint8)
            .numpy()
            .view(DTYPES[name].uint)[0]
        )
        two = (
            torch.full((1,), 2.0)
            .to(TORCH_DTYPES[name])
            .view(torch.uint8)
            .numpy()
            .view(DTYPES[name].uint)[0]
        )
        assert int(two) - int(one) == 1 << low, name
        assert low + count == 8 * DTYPES[name].width - 1, name
