"""Writes this folder's messages of trainers. Run it only for a new format: what a release has sent
must stay readable.

python -m tests.golden.make_loco FORMAT_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from pulse_rl._native import encode_entries
from pulse_rl.loco.gate import ROUNDINGS, open_entries
from pulse_rl.loco.messages import Compression, CompressionName, Message

COMPRESSIONS = [Compression(name) for name in get_args(CompressionName)]
BLOCKS = [(0, 600), (600, 640), (640, 1000)]


def block() -> dict[str, np.ndarray]:
    """Theta, momentum, pseudo-gradients (none in the second block) and the entries that pass the
    gate."""
    k = np.arange(1000, dtype=np.int64)
    uneven = (k * 2654435761 % (1 << 20)).astype(np.float32) / np.float32(1 << 20)
    theta = ((uneven - np.float32(0.5)) * np.float32(0.1)).astype(np.float32)
    theta[::97] = 0
    momentum = (theta * np.float32(1e-3) * (k % 3 - 1)).astype(np.float32)
    s = (theta * np.where(k % 5 == 0, np.float32(2**-8), np.float32(2**-11)) * (k % 4 - 1)).astype(
        np.float32
    )
    s[::7] = (theta - (theta - s))[::7]
    s[::50] = np.float32(1e-6)
    s[600:640] = 0
    out = np.empty_like(s)
    made = {"theta": theta, "momentum": momentum, "blocks": np.array(BLOCKS)}
    for name, (start, stop) in zip("abc", BLOCKS, strict=True):
        here = slice(start, stop)
        found = open_entries(
            theta[here], theta[here], s[here], out[here], ROUNDINGS[torch.bfloat16]
        )
        assert found is not None
        made[f"{name}.positions"] = found
        made |= {
            f"{name}.{compression.name}": compression.round(s[here][found])
            for compression in COMPRESSIONS
        }
    return made


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    made = block()
    np.savez_compressed(folder / "block.npz", **made)  # type: ignore[arg-type]
    for compression in COMPRESSIONS:
        payloads = []
        for key, (start, stop) in zip("abc", BLOCKS, strict=True):
            shared = (
                made["theta"][start:stop],
                made["momentum"][start:stop],
                ROUNDINGS[torch.bfloat16],
            )
            entries = (made[f"{key}.positions"], made[f"{key}.{compression.name}"])
            payloads.append(encode_entries(*shared, *entries, compression.mantissa))
        (folder / f"{compression.name}.message").write_bytes(
            Message(41, compression.mantissa, payloads).to_bytes()
        )


if __name__ == "__main__":
    main()
