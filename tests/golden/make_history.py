"""Writes a patch of the codec `history` with a block in each of its ways, and a stream: patches of format 3, manifests
of format 4. Run it only for a new format of the codec.

python -m tests.golden.make_history FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pulse_rl import LocalStore, Publisher, State
from pulse_rl.patch.build import build_patch
from pulse_rl.patch.history import History, Stretch
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import Bits
from tests.golden.make_groups import mixed

VERSIONS = 12
LARGE, SMALL = {"large": (320, 500), "wide": (1500,)}, {"small": (150, 200), "wide": (1500,)}


def states(shapes: dict[str, tuple[int, ...]], versions: int, one_in: int) -> Iterator[State]:
    """Few elements move, most of them again and again: ``one_in`` so many."""
    now = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        a = mixed(int(np.prod(shape)), 1000 + seed)
        octave = (a & 7) + (a >> 3 & 7) * (a >> 6 & 1)
        now[name] = (a >> 31) << 31 | (122 - octave) << 23 | a & 0x7FFFFF
    for version in range(versions):
        yield State.of(
            {
                name: Bits((bits if name == "wide" else (bits >> 16).astype(np.uint16)).reshape(shapes[name]), dtype)
                for (name, bits), dtype in zip(now.items(), ("BF16", "F32"), strict=True)
            }
        )
        for seed, (name, bits) in enumerate(now.items()):
            always, here = mixed(len(bits), 2000 + seed), mixed(len(bits), 3000 + 100 * version + seed)
            moves = (always % one_in == 0) & (here % 2 == 0) | (here % 1024 == 3)
            size = np.where(always % 5 == 0, 1 + (here >> 4) % 6, 1).astype(np.int64)
            step = np.where((always >> 8 & 1) ^ (here % 11 == 0), size, -size) << (0 if name == "wide" else 16)
            now[name] = np.where(moves, bits + step, bits).astype(np.uint32)


def last_patch() -> tuple[State, History, State]:
    """The state, the history, and the state to come: after a stretch of two versions and two of one."""
    chain = list(states(LARGE, 6, 9))
    history = History()
    for span, (first, last) in zip((2, 1, 1), ((0, 2), (2, 3), (3, 4)), strict=True):
        digest = state_digest(chain[first])
        built = build_patch(chain[first], chain[last], digest, most_records=1 << 40)
        history = history.then(Stretch(span, digest.root, built.records))
    return chain[4], history, chain[5]


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    old, history, new = last_patch()
    built = build_patch(old, new, state_digest(old), most_records=1 << 40, history=history)
    (folder / "history.patch").write_bytes(built.to_bytes())
    with Publisher(LocalStore(folder / "store"), stream="golden", history=True, folds=(8,)) as publisher:
        for state in states(SMALL, VERSIONS, 40):
            publisher.publish(state)


if __name__ == "__main__":
    main()
