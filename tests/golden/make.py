"""Writes this folder's files. Run it only for a new format: what a release has written must stay readable as it is.

python -m tests.golden.make FORMAT_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pulse_rl import Bits, LocalStore, Publisher, Signer, State, codec
from pulse_rl import patch as patches
from pulse_rl.state import checkpoint as checkpoints
from pulse_rl.state.digest import state_digest


def states() -> tuple[State, State]:
    """Two small states of several dtypes; every value comes from integer arithmetic, so that any machine makes them."""
    k = np.arange(6000, dtype=np.uint32)
    weights = (0x3C00 + (k * 2654435761 >> 20) % 1024).astype(np.uint16) | ((k % 2) << 15).astype(np.uint16)
    old = {
        "embed.weight": Bits(weights.reshape(60, 100), "BF16"),
        "empty": np.zeros((0, 4), np.float16),
        "fp8": Bits((k[:700] * 40503 >> 7).astype(np.uint8).reshape(7, 100), "F8_E4M3"),
        "norm": np.ones(64, np.float32),
        "scalar": np.int64(-7),
        "wide": (k[:500] * 7919).astype(np.int32),
    }
    moved = weights.copy()
    moved[::37] += np.where(k[::37] % 3 == 0, 65535, 1).astype(np.uint16)
    moved[4000:4020] = 0x7FC1
    new = dict(old)
    new["embed.weight"] = Bits(moved.reshape(60, 100), "BF16")
    new["norm"] = np.where(np.arange(64) % 5 == 0, np.float32(1.0000001), np.float32(1)).astype(np.float32)
    new["scalar"] = np.int64(-8)
    new["wide"] = old["wide"] + (k[:500] % 11 == 0) * 1000
    new["wide"] = new["wide"].astype(np.int32)
    return State.of(old), State.of(new)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    old, new = states()
    checkpoints.save(folder / "old.safetensors", old)
    checkpoints.save(folder / "new.safetensors", new)
    for name in codec.CODECS:
        built = patches.build_patch(old, new, state_digest(old), codec=name)
        (folder / f"{name}.patch").write_bytes(built.to_bytes())
    with Publisher(LocalStore(folder / "store"), stream="golden", signer=Signer(bytes(32)), folds=(2,)) as publisher:
        publisher.publish(old, metadata={"step": 0, "reward": 0.5, "note": "é"})
        publisher.publish(new)
        publisher.publish(old)
        publisher.publish(new)


if __name__ == "__main__":
    main()
