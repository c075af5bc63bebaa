"""What the workers of a node share: no folder outlives them, and none is used without room."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pulse_rl.integrations.engines import node as nodes

_LEADER = """
import sys, time
from pathlib import Path
from pulse_rl.integrations.engines import node
folder = Path(sys.argv[1])
lock = node._locked(folder)
print("locked", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_the_folder_of_a_killed_leader_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / f"{nodes._PREFIX}one"
    folder.mkdir()
    (folder / "staged-1").write_bytes(b"bits")
    leader = subprocess.Popen([sys.executable, "-c", _LEADER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert leader.stdout is not None
        leader.stdout.readline()
        long_ago = time.time() - 2 * nodes._ABANDONED_SECONDS
        os.utime(folder, (long_ago, long_ago))
        nodes._remove_abandoned(tmp_path)
        assert folder.exists()
    finally:
        leader.kill()
        leader.communicate()
    os.utime(folder, (long_ago, long_ago))
    nodes._remove_abandoned(tmp_path)
    assert not folder.exists()


def test_memory_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert (
        nodes._reserve(tmp_path / "window", 1 << 20)
        == f"no room for 1048576 bytes in {tmp_path.parent}: No space left on device"
    )
    assert list(tmp_path.iterdir()) == []
