"""A command that is killed at one change of a folder after another, by what it does and not by a
clock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Self

_PROGRAM = """
import os, signal, sys
from pulse_rl.cli import main
out, numbers, *command = sys.argv[1:]
EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"}
left = 0
def hook(event, args):
    global left
    if event in EVENTS and left and any(out in str(a) for a in args):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
for number in map(int, numbers.split()):
    pid = os.fork()
    if not pid:
        sys.addaudithook(hook)
        left = number
        os._exit(main(command))
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.stdin.readline()
"""


def follow(store: Path, out: Path, *options: str) -> list[str]:
    """The command that brings the folder ``out`` to the newest version of the stream "policy"."""
    return ["follow", str(store), "--stream", "policy", "--out", str(out), "--once", *options]


class Killed:
    """Runs a command of `pulse` again and again, in processes of their own, killed at the changes
    of ``out`` of these ``numbers``: the first, the second … A context manager."""

    def __init__(
        self, out: Path, command: list[str], numbers: Iterable[int] = range(1, 500)
    ) -> None:
        program = [sys.executable, "-c", _PROGRAM, str(out), " ".join(map(str, numbers)), *command]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def next(self) -> int:
        """Waits until it has ended, and returns how: -9 where it was killed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ended "):
                return int(line.split()[1])
        raise AssertionError("the program ended")

    def go_on(self) -> None:
        """Lets it run once more."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
