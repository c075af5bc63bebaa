"""Time between processes: pauses that differ, so that workers which were started together do not ask together for ever,
and a socket whose peer cannot take for ever (`http.client` has a timeout for each packet only)."""

from __future__ import annotations

import io
import random
import socket
import time
from typing import Any

_SHARE = 0.25


def jittered(seconds: float) -> float:
    """``seconds``, a quarter more or less."""
    return seconds * random.uniform(1 - _SHARE, 1 + _SHARE)


class DeadlineSocket:
    """What `http.client` needs of ``sock``, with a deadline that `begin` sets. Raises TimeoutError past it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline = 0.0
        self._rate = 1
        self._expected = 0

    def begin(self, seconds: float, least_rate: int) -> None:
        """The next exchange ends within ``seconds``, and a second more for each ``least_rate`` bytes received of what
        `expect` announces."""
        self._deadline = time.monotonic() + seconds
        self._rate = least_rate
        self._expected = 0

    def expect(self, nbytes: int) -> None:
        """So many bytes to come move the deadline."""
        self._expected = nbytes

    def sendall(self, data: Any) -> None:
        self._limit()
        self._sock.sendall(data)

    def makefile(self, mode: str, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self, self._sock.makefile("rb", buffering=0)))

    def close(self) -> None:
        self._sock.close()

    def received(self, nbytes: int) -> None:
        counted = min(nbytes, self._expected)
        self._expected -= counted
        self._deadline += counted / self._rate

    def _limit(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)


class _Reader(io.RawIOBase):
    def __init__(self, owner: DeadlineSocket, raw: socket.SocketIO) -> None:
        self._owner = owner
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._owner._limit()
        count = self._raw.readinto(buffer)
        self._owner.received(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
