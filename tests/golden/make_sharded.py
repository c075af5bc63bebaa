"""Writes a stream of three ranks, of the states of format-1. Run it only for a new format of parts or slices.

python -m tests.golden.make_sharded FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pulse_rl import LocalStore
from tests.golden.make import states
from tests.support.parts import sharded_stream

IDENTITY = "37e9b03dc6af78ee4e1a0c15c3a021fc"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    old, new = states()
    sharded_stream(LocalStore(folder / "store"), "golden", [old, new, old], IDENTITY, np.random.default_rng(3), 3)


if __name__ == "__main__":
    main()
