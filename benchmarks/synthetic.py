"""Synthetic states with Hugging Face names and one Adam-like step between two of them, from 10 M to
1 B parameters.

The default shape is Qwen2.5-0.5B's (494 M parameters, tied head). Distributions are chosen, not
measured: normal weights with a scale per tensor (median |w| about 0.019) and per row, so that
magnitudes have the heavy lower tail that decides which BF16 roundings move; norms near 1. An update
is lr * u, where u is normal with a lognormal scale per row, and most embedding rows hardly move, as
for tokens that were never sampled. The middle scale 0.11 is set so that density is about the
published one (PULSE: 0.74% for this model at lr 3e-6; Adam's ratio would be 0.23 for Gaussian
noise, real gradients have heavier tails). With FP32 masters the rounding phase of a weight is
uniform; without, weights sit on the BF16 grid.

Everything is generated in chunks of rows, each from its own seed: the same bits with any number of
threads.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np

CHUNK = 1 << 21
STEP_SCALE = 0.11


@dataclass(frozen=True)
class Shape:
    """A Qwen2-style decoder with tied embeddings and biases on q, k and v."""

    vocabulary: int
    hidden: int
    layers: int
    intermediate: int
    key_value: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        h, kv, m = self.hidden, self.key_value, self.intermediate
        yield "model.embed_tokens.weight", (self.vocabulary, h)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            yield layer + "input_layernorm.weight", (h,)
            for name, rows in (("q", h), ("k", kv), ("v", kv)):
                yield layer + f"self_attn.{name}_proj.weight", (rows, h)
                yield layer + f"self_attn.{name}_proj.bias", (rows,)
            yield layer + "self_attn.o_proj.weight", (h, h)
            yield layer + "post_attention_layernorm.weight", (h,)
            yield layer + "mlp.gate_proj.weight", (m, h)
            yield layer + "mlp.up_proj.weight", (m, h)
            yield layer + "mlp.down_proj.weight", (h, m)
        yield "model.norm.weight", (h,)

    @property
    def elements(self) -> int:
        return sum(prod(shape) for _, shape in self.tensors())


SHAPES = {
    "10m": Shape(16384, 256, 6, 1024, 64),
    "30m": Shape(32768, 384, 10, 1280, 64),
    "100m": Shape(65536, 512, 12, 2816, 128),
    "300m": Shape(131072, 768, 20, 3584, 128),
    "0.5b": Shape(151936, 896, 24, 4864, 128),
    "1b": Shape(151936, 1280, 28, 6912, 256),
}


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Finite FP32 values to BF16 bits (uint16), round to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _chunk(
    name: str,
    shape: tuple[int, ...],
    rows: range,
    lr: float,
    masters: bool,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Old and new BF16 bits of some rows of a tensor, each [len(rows) * columns] uint16."""
    columns = shape[1] if len(shape) == 2 else 1
    size = (len(rows), columns)
    # The scale of a tensor depends on its name alone, so that all chunks agree.
    spread = 0.7 + 0.6 * (zlib.crc32(name.encode()) % 1024) / 1024
    row_scale = np.exp(0.3 * rng.standard_normal((len(rows), 1), np.float32))
    w = rng.standard_normal(size, np.float32)
    if "layernorm" in name or name.endswith("norm.weight"):
        w *= np.float32(0.2)
        w += np.float32(1)
    else:
        w *= np.float32(0.028 * spread) * row_scale
    step_scale = np.exp(0.5 * rng.standard_normal((len(rows), 1), np.float32)) * np.float32(
        STEP_SCALE * lr
    )
    if "embed" in name:
        step_scale *= np.where(rng.random((len(rows), 1)) < 0.1, 1, 0.05).astype(np.float32)
    u = rng.standard_normal(size, np.float32)
    u *= step_scale
    old = to_bf16(w)
    if not masters:
        w = from_bf16(old)
    w -= u
    return old.reshape(-1), to_bf16(w).reshape(-1)


def pair(
    shape: Shape,
    lr: float = 1e-6,
    *,
    masters: bool = True,
    seed: int = 0,
    workers: int | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two consecutive states, name -> uint16 BF16 bits in the tensor's shape; 4 bytes of memory per
    parameter."""
    old: dict[str, np.ndarray] = {}
    new: dict[str, np.ndarray] = {}
    tasks: list[tuple[str, tuple[int, ...], range, int]] = []
    for tensor, (name, dims) in enumerate(shape.tensors()):
        old[name], new[name] = np.empty(dims, np.uint16), np.empty(dims, np.uint16)
        step = max(1, CHUNK // (dims[1] if len(dims) == 2 else 1))
        tasks += [
            (name, dims, range(r, min(r + step, dims[0])), tensor) for r in range(0, dims[0], step)
        ]

    def fill(task: tuple[str, tuple[int, ...], range, int]) -> None:
        name, dims, rows, tensor = task
        rng = np.random.Generator(np.random.SFC64([seed, tensor, rows.start]))
        a, b = _chunk(name, dims, rows, lr, masters, rng)
        at = slice(rows.start, rows.stop)
        old[name][at], new[name][at] = a.reshape(-1, *dims[1:]), b.reshape(-1, *dims[1:])

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        list(pool.map(fill, tasks))
    return old, new
