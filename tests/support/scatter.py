"""A launch of `pulse_rl.frameworks.torch` against what numpy writes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from pulse_rl.frameworks.torch import PROGRAM_ELEMENTS, Launch, Scatter, Sent, write_group
from pulse_rl.patch.apply import TensorChanges

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cases(width: int, seed: int = 0) -> tuple[list[Scatter], list[np.ndarray[Any, Any]]]:
    """Changes of tensors of many sizes, and what these become."""
    rng = np.random.default_rng(seed)
    group, expected = [], []
    for size, density in (
        (1, 1),
        (3, 0.5),
        (PROGRAM_ELEMENTS, 1),
        (PROGRAM_ELEMENTS + 1, 1),
        (50_000, 0.1),
        (20_000, 0.001),
    ):
        bits = (
            rng.integers(0, 1 << 8 * width, size, dtype=np.dtype(f"u{width}"), endpoint=False)
            if width < 8
            else (rng.integers(0, 1 << 63, size, dtype=np.uint64))
        )
        flat = torch.from_numpy(bits.view(f"i{width}" if width > 1 else "u1").copy())
        indices = np.flatnonzero(rng.random(size) < density).astype(np.int64)
        if not len(indices):
            indices = np.array([size - 1])
        values = bits[indices] ^ np.array(5, bits.dtype)
        after = bits.copy()
        after[indices] = values
        group.append(Scatter(TensorChanges.at(indices, values), flat))
        expected.append(after)
    return group, expected


def check(width: int, launch: Launch) -> None:
    """Raises AssertionError unless ``launch`` writes exactly what it should."""
    group, expected = cases(width)
    write_group(group, launch)
    for changed, after in zip(group, expected, strict=True):
        assert changed.flat.numpy().view(after.dtype).tolist() == after.tolist()


def kernel_of_numpy(sent: Sent) -> None:
    """What the kernel does, program by program, at the addresses that it is given."""
    for address, first, last in sent.programs.tolist():
        assert 0 < last - first <= PROGRAM_ELEMENTS
        positions, values = sent.positions[first:last].numpy(), sent.values[first:last].numpy()
        length = int(positions.max()) + 1
        memory = (ctypes.c_uint8 * (length * values.itemsize)).from_address(address)
        np.frombuffer(memory, values.dtype)[positions] = values
