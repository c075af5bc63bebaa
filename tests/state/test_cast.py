"""States after the cast into a compute dtype: which tensors are cast, from which dtypes, into which bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pulse_rl import Bits, State
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.state.cast import CastState, cast
from pulse_rl.state.rounding import COMPUTE_DTYPES
from pulse_rl.state.tensors import DTYPES, TensorSpec
from tests.state.test_tensors import TORCH_DTYPES
from tests.support.states import Rng

SPECIAL = np.array([np.nan, -0.0, 0.0, np.inf, -np.inf, 1e-45, -1e-40, 3e38, 448, -465, 6e4, 7e4], np.float32)


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
        every = rng.integers(1 << 32, size=1 << 17, dtype=np.uint32).view(np.float32)
        usual = rng.standard_normal(1 << 17, np.float32) * np.float32(30)
        halfway = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)).view(np.float32)
        values = torch.from_numpy(np.concatenate([every, usual, halfway, SPECIAL]))
        if source == "F64":
            values = values[~values.isnan()].double()  # float32 values: torch rounds doubles twice, as we do
        bits = values.numpy().view(DTYPES[source].uint)
    if dtype == "F8_E4M3":  # torch has changed its mind on what exceeds 448
        keep = ~(values.abs() > 448).numpy()
        bits, values = bits[keep], values[torch.from_numpy(keep)]
    result = cast(bits, DTYPES[source], COMPUTE_DTYPES[dtype])
    expected = values.to(TORCH_DTYPES[dtype])
    nan = values.isnan().numpy()
    raw = expected.view(torch.uint8 if expected.dtype.itemsize == 1 else torch.int16).numpy().view(result.dtype)
    assert np.array_equal(result[~nan], raw[~nan])
    back = torch.from_numpy(result.view(np.int16) if result.itemsize == 2 else result).view(TORCH_DTYPES[dtype])
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
