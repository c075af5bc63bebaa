"""One state for several readers who go through it side by side: what is not in host memory is
copied there once."""

from __future__ import annotations

import time
from threading import Condition
from typing import NamedTuple

import numpy as np

from .._util.threads import LOOK_SECONDS, checkpoint, default_threads
from .tensors import State, UIntArray, stored_tensor

_PATIENCE_SECONDS = 60.0
_EACH = 32 << 20  # bytes: a thread works on a block, and on what lies between two of them


class ReadOnce:
    """``state`` for so many ``readers``, each in threads of its own. A tensor that is on a device,
    or is made when it is read, is copied to the host whole, when one of them first asks for it, and
    is held until all have read it to its end, or longer: in twice the bytes of the largest such
    tensor, and 32 MiB for each thread.

    Readers take tensors in about the order of their names. Where there is no room, the one that is
    ahead waits for the others, until they `leave`, or for a minute: then nobody waits any more.
    What is no longer held is copied again. Before `begin` they look at tensors in any order, and
    nobody waits.
    """

    def __init__(self, state: State, readers: int, threads: int | None = None) -> None:
        self._state = state
        made = [
            spec
            for spec in state.specs
            if not isinstance(stored_tensor(state, spec.name), np.ndarray)
        ]
        self._order = {spec.name: k for k, spec in enumerate(made)}
        largest = max((spec.nbytes for spec in made), default=0)
        self._most = 2 * largest + readers * (threads or default_threads()) * _EACH
        self._held: dict[str, UIntArray] = {}  # what was read last comes last
        self._coming: set[str] = set()
        self._bytes = 0
        self._at = dict.fromkeys(
            range(readers), -1
        )  # how far each has come, of those that have not left
        self._ended: list[set[str]] = [set() for _ in range(readers)]
        self._together = False
        self._change = Condition()

    def of(self, reader: int) -> State:
        """The state as the ``reader`` number so many reads it."""
        data = {spec.name: stored_tensor(self._state, spec.name) for spec in self._state.specs}
        data |= {name: _Tensor(self, reader, name) for name in self._order}
        return State(self._state.specs, data, self._state.aliases)

    def begin(self) -> None:
        """From now on all go through the state, side by side."""
        with self._change:
            self._at = dict.fromkeys(self._at, -1)
            self._ended = [set() for _ in self._ended]
            self._together = True

    def leave(self, reader: int) -> None:
        """The ``reader`` reads no more."""
        with self._change:
            self._at.pop(reader, None)
            self._change.notify_all()

    def _read(self, reader: int, name: str, start: int, stop: int) -> UIntArray:
        spec = self._state.spec(name)
        with self._change:
            self._at[reader] = max(self._at.get(reader, -1), self._order[name])
            self._change.notify_all()
            held = self._awaited(reader, name, spec.nbytes)
            if held is None:
                self._coming.add(name)
                self._bytes += spec.nbytes
        if held is None:
            held = self._copied(name, spec.nbytes)
        with self._change:
            if stop == spec.elements:
                self._ended[reader].add(name)
                self._change.notify_all()
        return held[start:stop]

    def _awaited(self, reader: int, name: str, nbytes: int) -> UIntArray | None:
        """What is held of a tensor, at the latest when another thread has copied it; None once it
        is to be copied here, and there is room."""
        limit = time.monotonic() + _PATIENCE_SECONDS
        while True:
            if (held := self._held.pop(name, None)) is not None:
                self._held[name] = held
                return held
            if name not in self._coming and self._has_room(reader, name, nbytes):
                return None
            self._change.wait(LOOK_SECONDS)
            checkpoint()
            if name not in self._coming and time.monotonic() > limit:
                self._together = False

    def _has_room(self, reader: int, name: str, nbytes: int) -> bool:
        for old in list(self._held):
            if self._bytes + nbytes <= self._most:
                break
            if not self._together or all(
                old in self._ended[k] and self._order[old] < at for k, at in self._at.items()
            ):
                self._bytes -= self._held.pop(old).nbytes
        # Who is behind all others waits for nobody, or all would wait.
        ahead = any(at < self._order[name] for other, at in self._at.items() if other != reader)
        return self._bytes + nbytes <= self._most or not (self._together and ahead)

    def _copied(self, name: str, nbytes: int) -> UIntArray:
        copied: UIntArray | None = None
        try:
            copied = self._state.read(name)
            return copied
        finally:
            with self._change:
                self._coming.discard(name)
                if copied is None:
                    self._bytes -= nbytes
                else:
                    self._held[name] = copied
                self._change.notify_all()


class _Tensor(NamedTuple):
    of: ReadOnce
    reader: int
    name: str

    def read(self, start: int, stop: int) -> UIntArray:
        return self.of._read(self.reader, self.name, start, stop)
