"""Writes the files that every later release must read: python -m tests.golden.make

What it writes is a release's: from the tag v0.1.0 on it is run for a new format only, into a new
folder.

    format-1/old.safetensors, new.safetensors   two states
    format-1/*.patch                            patches between them, one for each codec that a user
                                                can name
    format-1/store/golden                       a signed stream: anchors, patches, a history, a
                                                fold, digests, a claim
    format-1/store/sharded                      a stream of three ranks: shards with slices, patches
                                                in parts, a history
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from pulse_rl import Bits, LocalStore, Signer, State, codec
from pulse_rl.follow import checkpoint as checkpoints
from pulse_rl.ops import diff
from pulse_rl.state.digest import state_digest
from tests.support.parts import sharded_stream
from tests.support.publishers import tuned

FOLDER = Path(__file__).parent / "format-1"
STREAM_ID = "37e9b03dc6af78ee4e1a0c15c3a021fc"
VERSIONS = 12


def states() -> list[State]:
    """Versions of a small state of several dtypes; every value comes from integer arithmetic, so
    that any machine makes them. The same weights move on from version to version, so that a history
    tells where."""
    k = np.arange(60_000, dtype=np.uint32)
    weights = (0x3C00 + (k * 2654435761 >> 20) % 1024).astype(np.uint16) | ((k % 2) << 15).astype(
        np.uint16
    )
    wide = (k[:500] * 7919).astype(np.int32)
    found = []
    for version in range(VERSIONS):
        moved = weights + np.where(k % 61 == 0, version, (k % 997 == version) * 3).astype(np.uint16)
        found.append(
            State.of(
                {
                    "embed.weight": Bits(moved.reshape(600, 100), "BF16"),
                    "empty": np.zeros((0, 4), np.float16),
                    "fp8": Bits((k[:700] * 40503 >> 7).astype(np.uint8).reshape(7, 100), "F8_E4M3"),
                    "norm": np.where(
                        k[:64] % 5 == version % 5, np.float32(1.0000001), np.float32(1)
                    ),
                    "packed": _moved(k[:3000], version),
                    "scalar": np.int64(version - 7),
                    "wide": wide + ((k[:500] % 11 == 0) * version).astype(np.int32),
                }
            )
        )
    return found


def _moved(k: np.ndarray[Any, Any], version: int) -> np.ndarray[Any, Any]:
    """Two codes of four bits a byte; with each version some of the upper ones become one larger."""
    upper = (k * 40503 >> 9) % 15 + (k % 120 < version)
    return ((k * 7) % 16 | upper << 4).astype(np.uint8).reshape(30, 100)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    old, *_, new = made = states()
    checkpoints.save(FOLDER / "old.safetensors", old)
    checkpoints.save(FOLDER / "new.safetensors", new)
    for name in codec.CODECS:
        built = diff.build_patch(old, new, state_digest(old), codec=name)
        (FOLDER / f"{name}.patch").write_bytes(built.to_bytes())
    store = LocalStore(FOLDER / "store")
    with tuned(
        store,
        stream="golden",
        signer=Signer(bytes(32)),
        stream_id=STREAM_ID,
        history=True,
        folds=(8,),
        anchor_ratio=9,
    ) as publisher:
        for version, state in enumerate(made):
            files = (
                {"config.json": b'{"model_type": "golden"}', "tokenizer/empty.txt": b""}
                if version == 0
                else None
            )
            publisher.publish(
                state, metadata={"step": version, "reward": 0.5, "note": "é"}, files=files
            )
    sharded_stream(store, "sharded", made[:3], STREAM_ID, np.random.default_rng(1), 3)


if __name__ == "__main__":
    main()
