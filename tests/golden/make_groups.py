"""Writes a patch of the codec `groups` between two states that are made of integers. Run it only for a new format of
the codec.

python -m tests.golden.make_groups FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pulse_rl import State
from pulse_rl import patch as patches
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import Bits

Words = npt.NDArray[np.uint32]


def mixed(count: int, seed: int) -> Words:
    """Numbers without a pattern, the same everywhere."""
    x = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0x27D4EB2F)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(15))


def before_and_after(count: int, seed: int) -> tuple[Words, Words]:
    """The bits of FP32 numbers of a few octaves; the smaller ones change more often, and by more steps of a BF16."""
    a, b, c = (mixed(count, seed + k) for k in range(3))
    octave = (a & 7) + (a >> 3 & 7) * (a >> 6 & 1)
    before = (b >> 31) << 31 | (122 - octave) << 23 | b & 0x7FFFFF
    chance = np.uint32(2) << octave >> 3
    size = np.uint32(1) + (c >> 16 & 7) * (octave > 8) + (c >> 20) * (octave > 13)
    step = np.where(c & 1, size, -size.astype(np.int64)).astype(np.int64) << 16
    after = np.where(c >> 3 & 4095 < chance, before + step, before)
    return before, after.astype(np.uint32)


def states() -> tuple[State, State]:
    shapes = {"a": (200, 384), "b": (600,), "c": (350, 512), "wide": (500, 500)}
    old, new = {}, {}
    for seed, (name, shape) in enumerate(shapes.items()):
        before, after = before_and_after(int(np.prod(shape)), 100 * seed)
        if name != "wide":
            before, after = before >> 16, after >> 16
        dtype, width = ("F32", np.uint32) if name == "wide" else ("BF16", np.uint16)
        old[name] = Bits(before.astype(width).reshape(shape), dtype)
        new[name] = Bits(after.astype(width).reshape(shape), dtype)
    return State.of(old), State.of(new)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    old, new = states()
    built = patches.build_patch(old, new, state_digest(old))
    (folder / "groups.patch").write_bytes(built.to_bytes())


if __name__ == "__main__":
    main()
