"""What the workers of a node share: no folder outlives them, and none is used without room."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pulse_rl import PulseError
from pulse_rl.engines import node as nodes
from pulse_rl.errors import StateMismatch
from tests.support.trainers import Trainer, together

_LEADER = """
import sys, time
from pathlib import Path
from pulse_rl.engines import node
folder = Path(sys.argv[1])
lock = node._locked(folder)
print("locked", flush=True)
time.sleep(60)
"""


def worker(trainer: Trainer) -> list[object]:
    """What one of three workers sees: two are on a node, one on another."""
    rank = trainer.rank
    trainer.connect("meet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "ab"[rank // 2])
        node = nodes.Node(SimpleNamespace(ranks=[0, 1, 2], world_size=3))
    found = [node.size, node.alone, node.last, node.shared(rank), node.common(rank)]
    found += [node.gathered(rank), node.on_node(rank)]
    node.open_folder()
    window = node.window(2)
    window[node.rank] = 1
    node.barrier()

    def fail(error: Exception | None) -> int:
        if error and rank == 1:
            raise error
        return rank

    for error in (StateMismatch("no", hint="why"), ValueError("odd"), None):
        try:
            found.append(node.together(partial(fail, error)))
        except PulseError as known:
            found.append(f"{type(known).__name__}: {known} ({known.hint})")
    node.close_folder()
    return [*found, window.tolist()]


@pytest.mark.slow
def test_workers_of_two_nodes_agree_and_fail_together() -> None:
    found = together(worker, 3)
    everyone = [0, 1, 2]
    assert [row[:7] for row in found] == [
        [2, False, False, 0, 0, everyone, [0, 1]],
        [2, False, False, 0, 0, everyone, [0, 1]],
        [1, False, True, 2, 0, everyone, [2]],
    ]
    assert [row[7] for row in found] == [
        "StateMismatch: rank 1: no (why)",
        "StateMismatch: no (why)",
        "StateMismatch: rank 1: no (why)",
    ]
    assert all(row[8].startswith("PulseError: ") and "ValueError: odd" in row[8] for row in found)
    assert [row[9] for row in found] == everyone
    assert found[0][10] == found[1][10] == [1, 1]


@pytest.mark.slow
def test_the_folder_of_a_killed_leader_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
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
    message = f"no room for 1048576 bytes in {tmp_path.parent}: No space left on device"
    with pytest.raises(PulseError, match=message):
        nodes._reserve(tmp_path / "window", 1 << 20)
    assert list(tmp_path.iterdir()) == []
