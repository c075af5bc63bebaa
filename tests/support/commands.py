"""The command `pulse` in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from pulse_rl.cli import main

POLICY = ("--stream", "policy")


def at_waits(patch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> list[float]:
    """At each wait of a command that follows a step is taken, after the last one a Ctrl-C. The
    seconds of its waits, so far."""
    left, waits = iter(steps), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        step = next(left, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    patch.setattr("pulse_rl.cli.following.time.sleep", sleep)
    return waits


def without_time(line: str) -> str:
    """A line of a command that goes on, which begins with the time."""
    return re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", "", line)


class Pulse:
    """Runs commands in this process; ``out`` and ``err`` are what the last one printed."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self.out = self.err = ""

    def __call__(self, *args: object, status: int = 0) -> str:
        found = main([str(a) for a in args])
        self.out, self.err = self._capture.readouterr()
        assert found == status, self.out + self.err
        return self.out

    def json(self, *args: object, status: int = 0) -> Any:
        lines = self(*args, "--json", status=status).splitlines()
        assert len(lines) == 1
        return json.loads(lines[0])

    def refused(self, *args: object, kind: str, match: str) -> None:
        """One line on stderr with a hint, nothing else; the same as JSON on stdout."""
        self(*args, status=1)
        assert self.out == ""
        assert without_time(self.err).startswith("pulse: ")
        assert self.err.count("\n") == 1
        assert match in self.err
        assert self.err.rstrip().endswith(")")
        error = self.json(*args, status=1)
        assert error["error"] == kind
        assert match in error["message"]
        assert error["hint"] in self.err
        assert len(error["hint"]) > 10
