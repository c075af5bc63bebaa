"""The workers of one engine on one node: who leads, what they share, how they agree.

One worker, the leader, follows the stream. The others read what it staged from files in shared
memory, so that a node fetches, verifies and decodes each version once and holds one host state.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .._util.collective import Alone, GlooTransport, RankGroup
from ..errors import PulseError

T = TypeVar("T")
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "pulse-engine-"
_OWNER = "owner"
_ABANDONED_SECONDS = 60.0
_TIMEOUT_SECONDS = 1800.0  # a large model is loaded, packed and compared between two messages


class Node:
    """This worker among those of its node. ``leader``: whether it is the one that follows the
    stream.

    ``world``: the group of the engine's workers, with ``ranks`` and ``world_size`` as the engines'
    own have; None: this worker is the only one. All methods are collective: every worker of the
    engine calls them in the same order.
    """

    def __init__(self, world: Any) -> None:
        self.folder: Path | None = None
        self._owned: int | None = None
        self._engine = self._node = RankGroup(Alone())
        if world is not None and world.world_size > 1:
            self._engine = _group(world.ranks)
            places = self.gathered((socket.gethostname(), _boot()))
            here = [
                rank
                for rank, place in zip(world.ranks, places, strict=True)
                if place == places[self._engine.rank]
            ]
            if len(here) == self._engine.size:
                self._node = self._engine
            elif len(here) > 1:
                self._node = _group(here)
        self.rank, self.size = self._node.rank, self._node.size

    @property
    def leader(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether all workers of the engine are on this node."""
        return self.size == self._engine.size

    @property
    def last(self) -> bool:
        """Whether this is the engine's last worker."""
        return self._engine.rank == self._engine.size - 1

    def open_folder(self) -> None:
        """Makes ``folder``, in shared memory, where several workers share it."""
        if self.size > 1:
            made = ""
            if self.leader:
                parent = (
                    _SHARED_MEMORY
                    if os.access(_SHARED_MEMORY, os.W_OK)
                    else Path(tempfile.gettempdir())
                )
                _remove_abandoned(parent)
                made = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
                self._owned = _locked(Path(made))
            self.folder = Path(self.shared(made))

    def shared(self, value: T) -> T:
        """The leader's ``value``."""
        return _of_rank0(self._node, value)

    def common(self, value: T) -> T:
        """The ``value`` of the engine's first worker, across its nodes."""
        return _of_rank0(self._engine, value)

    def gathered(self, value: T) -> list[T]:
        """What each worker of the engine gives."""
        return _of_all(self._engine, value)

    def on_node(self, value: T) -> list[T]:
        """What each worker of the node gives."""
        return _of_all(self._node, value)

    def barrier(self) -> None:
        """Returns when all workers of the node have called it."""
        if self.size > 1:
            self._node.together(lambda: None)

    def window(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that the workers of the node share."""
        if self.folder is None:
            return np.empty(nbytes, np.uint8)
        file = self.folder / "window"
        failure = _reserve(file, nbytes) if self.leader else None
        failure = self.shared(failure)
        if failure is not None:
            raise PulseError(
                failure, hint="Give the container more shared memory (docker: --shm-size)."
            )
        view = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        self.barrier()
        if self.leader:
            file.unlink()
        return view

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on this worker; raises on all of the engine's if it raises on
        one."""

        def run() -> T:
            try:
                return work()
            except PulseError:
                raise
            # of torch, or of the model: a worker that ends in silence would be waited for
            except Exception as error:
                raise PulseError(
                    f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                ) from error

        return self._engine.together(run)

    def close_folder(self) -> None:
        """Removes what was shared. Not collective."""
        if self.leader and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._owned is not None:
            os.close(self._owned)
        self.folder = self._owned = None


def _group(ranks: Sequence[int]) -> RankGroup:
    return RankGroup(GlooTransport(ranks, _TIMEOUT_SECONDS, owner="node"))


def _of_rank0(group: RankGroup, value: T) -> T:
    found: T = group.from_first(lambda: value, pickle.dumps, pickle.loads)
    return found


def _of_all(group: RankGroup, value: T) -> list[T]:
    return group.each(lambda: value, pickle.dumps, pickle.loads)


def _reserve(file: Path, nbytes: int) -> str | None:
    """Makes a file of that size; why not, if there is no room: writing to what is not there would
    kill the process."""
    try:
        with file.open("wb") as handle:
            handle.truncate(nbytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle.fileno(), 0, nbytes)
    except OSError as error:
        file.unlink(missing_ok=True)
        return f"no room for {nbytes} bytes in {file.parent.parent}: {error.strerror}"
    return None


def _locked(folder: Path) -> int:
    """A lock on ``folder`` for as long as this process lives, or until it is closed."""
    lock = os.open(folder / _OWNER, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of workers that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _ABANDONED_SECONDS:
                continue  # perhaps it was just made
            lock = os.open(folder / _OWNER, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
