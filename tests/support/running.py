"""Commands that go on, as processes, and what they show at their ports."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

T = TypeVar("T")


def until(find: Callable[[], T], seconds: float = 60) -> T:
    """The first result of ``find`` that is true."""
    ends = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.05)
    return found


def got(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Running:
    """``pulse *args`` in a process of its own; its output is in the file ``log``."""

    def __init__(self, log: Path, *args: object) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [Path(sys.executable).parent / "pulse", *map(str, args)],
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def says(self, pattern: str) -> str:
        """The first group of the first match in its output, once it is there."""
        return until(lambda: re.search(pattern, self.log.read_text()))[1]  # type: ignore[index]

    @property
    def address(self) -> str:
        """Of its metrics, without a path."""
        return self.says(r"metrics at (\S+)/metrics")

    def metric(self, name: str, *labels: str) -> float | None:
        """The value of the sample of that name with all of these labels."""
        for line in got(f"{self.address}/metrics")[1].splitlines():
            if line.startswith(f"pulse_{name}{{") and all(label in line for label in labels):
                return float(line.rpartition(" ")[2])
        return None

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
