"""What torchao makes of weights, beside the quantized formats here: the same bits where its rule is
the same (docs/quantized.md, "Whose rule"). Where it is not installed nothing is looked at; `make
test-trainers` installs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchao")
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization.granularity import PerBlock
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

from pulse_rl import MemoryStore, Publisher, Subscriber
from tests.golden.make_quantized import CONFIGS, weights

CASES = {name: weight for name, weight in weights() if name not in ("zeros", "subnormal", "tiny")}
RANDOM = np.random.default_rng(1).integers(0, 1 << 32, (256, 512), np.uint32).view(np.float32)
CASES["bits"] = torch.from_numpy(np.where(np.isfinite(RANDOM), RANDOM, 0))
CASES["trained in FP32"] = 0.02 * torch.randn(
    (256, 512), generator=torch.Generator().manual_seed(5)
)


def made(weight: torch.Tensor, name: str) -> list[Any]:
    """Codes and scales, as bytes."""
    store = MemoryStore()
    with Publisher(store, stream="a") as publisher, Subscriber(store, stream="a") as subscriber:
        publisher.publish({"m.weight": weight}, quantize=CONFIGS.get(name, name))
        subscriber.sync()
        state = subscriber.state
        return [state.read(spec.name).view(np.uint8).copy() for spec in state.specs][:2]


def octets(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def unsigned_zeros(packed: Any) -> Any:
    """The codes of four bits, without the sign that torchao leaves on some zeros."""
    codes = np.stack([packed & 15, packed >> 4], 1)
    return np.where(codes == 8, 0, codes)


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_fp8_are_the_same(case: str) -> None:
    """It takes whole blocks only."""
    rows, columns = CASES[case].shape
    weight = torch.nn.functional.pad(CASES[case], (0, -columns % 128, 0, -rows % 128))
    theirs = Float8Tensor.from_hp(weight.clone(), torch.float8_e4m3fn, PerBlock([128, 128]))
    codes, scales = made(weight, "fp8_block")
    np.testing.assert_array_equal(octets(theirs.scale), scales)
    np.testing.assert_array_equal(octets(theirs.qdata), codes)


@pytest.mark.parametrize("case", CASES)
def test_mx_formats_are_those_of_one_of_its_modes(case: str) -> None:
    """MXFP4 is EVEN. MXFP8 is RCEIL, the default, but where a largest magnitude is 1.75 times a
    power of two."""
    weight = CASES[case]
    codes, scales = made(weight, "mxfp4")
    their_scales, their_codes = to_mx(
        weight.clone(), torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.EVEN
    )
    np.testing.assert_array_equal(octets(their_scales), scales)
    np.testing.assert_array_equal(unsigned_zeros(octets(their_codes)), unsigned_zeros(codes))
    codes, scales = made(weight, "mxfp8")
    their_scales, their_codes = to_mx(
        weight.clone(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL
    )
    at_most = np.abs(weight.numpy().reshape(-1, 32)).max(1)
    border = np.frexp(at_most)[0] == 0.875
    np.testing.assert_array_equal(octets(their_scales) + border, scales)
    same = ~border
    np.testing.assert_array_equal(
        octets(their_codes).reshape(-1, 32)[same], codes.reshape(-1, 32)[same]
    )


def test_nvfp4_has_the_scales_of_modelopt_and_codes_a_step_away_at_ties() -> None:
    """Where a scale is at least 2^-6, its least one, and not of zeros; it multiplies by a
    reciprocal."""
    for name, weight in CASES.items():
        codes, scales = made(weight, "modelopt")
        theirs = nvfp4_quantize(weight.clone(), 16, per_tensor_amax_to_scale(weight.abs().max()))
        some = weight.numpy().reshape(-1, 16).any(1)
        np.testing.assert_array_equal(np.maximum(scales, 8)[some], octets(theirs[0])[some], name)
        ours, other = (unsigned_zeros(packed).astype(int) for packed in (codes, octets(theirs[1])))
        steps = np.abs(ours - other).reshape(-1, 16)[scales >= 8]
        assert steps.max(initial=0) <= 1
        assert np.count_nonzero(steps) <= (0.03 if name == "ties" else 0) * steps.size
