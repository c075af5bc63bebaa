"""Writes a patch of the codec `rans` between the states of format-1. Run it only for a new format of the codec.

python -m tests.golden.make_rans FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from pulse_rl import patch as patches
from pulse_rl.state.digest import state_digest
from tests.golden.make import states


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    old, new = states()
    built = patches.build_patch(old, new, state_digest(old))
    (folder / "rans.patch").write_bytes(built.to_bytes())


if __name__ == "__main__":
    main()
