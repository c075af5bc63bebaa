"""Writes what the libraries of the formats make of some weights: python -m
tests.golden.make_quantized

It needs these, which no test does. compressed-tensors 0.20.0, ModelOpt 0.47.0 and, for GPT-OSS, the
reference in torch of triton_kernels (python/triton_kernels of Triton, of 2025-09-16), which
transformers calls, made the file that is here. FP8 in blocks of 128 x 128 is the scheme FP8_BLOCK
of compressed-tensors, under the names of DeepSeek's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILE = Path(__file__).parent / "quantized.npz"
SCHEMES = {"fp8_block": "FP8_BLOCK", "mxfp8": "MXFP8A16", "mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"}


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    yield "trained", 0.02 * normal(130, 160)
    yield (
        "ranges",
        normal(20, 96)
        * torch.exp2(torch.randint(-120, 100, (20, 96), generator=generator).float()),
    )
    yield "ties", ((torch.arange(2048) % 97) - 48).float().view(32, 64) / 8
    yield "zeros", torch.zeros(3, 32)
    some = 0.02 * normal(8, 64)
    some[3], some[:, 32:], some[5, 5] = 0, 0, -0.0
    yield "some-zeros", some
    yield "subnormal", 1e-39 * normal(8, 64)
    yield "tiny", 1e-43 * normal(8, 64)
    yield "huge", 1e37 * normal(8, 64)


#: The formats that only a configuration names.
CONFIGS: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
    "gpt_oss": {"quant_method": "mxfp4"},
}


def modelopt(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    codes, scales, whole = NVFP4QTensor.quantize(weight.clone(), 16)
    return {"weight": codes._quantized_data, "weight_scale": scales, "weight_scale_2": whole}


def gpt_oss(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of two experts, both with the transposed weight."""
    from triton_kernels.numerics_details.mxfp import downcast_to_mxfp_torch

    experts = torch.stack([weight.T, weight.T])
    codes, scales = (
        t.transpose(1, 2).contiguous() for t in downcast_to_mxfp_torch(experts, torch.uint8, axis=1)
    )
    return {
        "experts.up_proj_blocks": codes.unflatten(-1, (-1, 16)),
        "experts.up_proj_scales": scales,
    }


def quantized(weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    scheme: Any = preset_name_to_scheme(SCHEMES[name], ["Linear"])
    if name == "fp8_block":
        rows, columns = (-(-n // 128) for n in weight.shape)
        padded = torch.zeros(rows * 128, columns * 128)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        tiles = padded.view(rows, 128, columns, 128)
        scales, _ = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), scheme.weights)
        codes = quantize(weight, scales, None, scheme.weights, dtype=torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales}
    groups = weight.unflatten(-1, (-1, scheme.weights.group_size))
    whole = generate_gparam(weight.min(), weight.max()) if name == "nvfp4" else None
    scales, _ = calculate_qparams(
        groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=whole
    )
    given = {"weight": weight, "weight_scale": scales} | (
        {} if whole is None else {"weight_global_scale": whole}
    )
    formats = {
        "mxfp8": "mxfp8-quantized",
        "mxfp4": "mxfp4-pack-quantized",
        "nvfp4": "nvfp4-pack-quantized",
    }
    found: dict[str, torch.Tensor] = BaseCompressor.get_value_from_registry(formats[name]).compress(
        given, scheme
    )
    return found


def main() -> None:
    arrays: dict[str, Any] = {}
    for case, weight in weights():
        arrays[f"{case}/weight"] = weight.numpy()
        made = {"modelopt": modelopt(weight), "gpt_oss": gpt_oss(weight)}
        for name in SCHEMES:
            made[name] = quantized(weight, name)
        for name, parts in made.items():
            for part, tensor in parts.items():
                arrays[f"{case}/{name}/{part}"] = tensor.reshape(-1).view(torch.uint8).numpy()
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
