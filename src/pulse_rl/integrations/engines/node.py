"""The workers of one engine on one node: who leads, what they share, how they agree.

One worker, the leader, follows the stream. The others read what it staged from files in shared memory, so that a node
fetches, verifies and decodes each version once and holds one host state.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...errors import PulseError

T = TypeVar("T")
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "pulse-engine-"
_OWNER = "owner"
_ABANDONED_SECONDS = 60.0


class Node:
    """This worker among those of its node. ``leader``: whether it is the one that follows the stream.

    ``world``: the group of the engine's workers, with ``cpu_group``, ``ranks``, ``rank`` and ``world_size`` as the
    engines' own have; None: this worker is the only one. All methods are collective: every worker of the engine calls
    them in the same order.
    """

    def __init__(self, world: Any) -> None:
        self.rank, self.size, self._group = 0, 1, None
        self.folder: Path | None = None
        self._owned: int | None = None
        self._everyone: Any = None
        self._workers = 1
        if world is not None and world.world_size > 1:
            self._join(world)

    @property
    def leader(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether all workers of the engine are on this node."""
        return self.size == self._workers

    @property
    def last(self) -> bool:
        """Whether this is the engine's last worker."""
        return self._everyone is None or torch.distributed.get_rank(self._everyone) == self._workers - 1

    def _join(self, world: Any) -> None:
        self._everyone, self._workers = world.cpu_group, world.world_size
        places: list[Any] = [None] * world.world_size
        torch.distributed.all_gather_object(places, (socket.gethostname(), _boot()), group=self._everyone)
        for place in dict.fromkeys(places):
            ranks = [rank for rank, other in zip(world.ranks, places, strict=True) if other == place]
            group = torch.distributed.new_group(ranks, backend="gloo")
            if world.rank in ranks:
                self._group, self.rank, self.size = group, ranks.index(world.rank), len(ranks)
                self._first = ranks[0]

    def open_folder(self) -> None:
        """Makes ``folder``, in shared memory, where several workers share it."""
        if self.size > 1:
            made = ""
            if self.leader:
                parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
                _remove_abandoned(parent)
                made = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
                self._owned = _locked(Path(made))
            self.folder = Path(self.shared(made))

    def shared(self, value: T) -> T:
        """The leader's ``value``."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=self._first, group=self._group)
        return box[0]

    def common(self, value: T) -> T:
        """The ``value`` of the engine's first worker, across its nodes."""
        if self._everyone is None:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, group=self._everyone)
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """What each worker of the engine gives."""
        if self._everyone is None:
            return [value]
        found: list[Any] = [None] * torch.distributed.get_world_size(self._everyone)
        torch.distributed.all_gather_object(found, value, group=self._everyone)
        return found

    def on_node(self, value: T) -> list[T]:
        """What each worker of the node gives."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value, group=self._group)
        return found

    def barrier(self) -> None:
        """Returns when all workers of the node have called it."""
        if self.size > 1:
            torch.distributed.barrier(group=self._group)

    def window(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that the workers of the node share."""
        if self.folder is None:
            return np.empty(nbytes, np.uint8)
        file = self.folder / "window"
        failure = _reserve(file, nbytes) if self.leader else None
        failure = self.shared(failure)
        if failure is not None:
            raise PulseError(failure, hint="Give the container more shared memory (docker: --shm-size).")
        view = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        self.barrier()
        if self.leader:
            file.unlink()
        return view

    def first_failure(self, failure: PulseError | None) -> PulseError | None:
        """The failure of the engine's first worker that has one."""
        told = (type(failure), str(failure), failure.hint) if failure is not None else None
        for other in self.gathered(told):
            if other is not None:
                return failure or other[0](other[1], hint=other[2])
        return None

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on this worker; raises on all of them if it raises on one."""
        result, failure = None, None
        try:
            result = work()
        except PulseError as error:
            failure = error
        except Exception as error:  # of torch, or of the model: the other workers must hear of it
            failure = PulseError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        failure = self.first_failure(failure)
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]

    def close_folder(self) -> None:
        """Removes what was shared. Not collective."""
        if self.leader and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._owned is not None:
            os.close(self._owned)
        self.folder = self._owned = None


def _reserve(file: Path, nbytes: int) -> str | None:
    """Makes a file of that size; why not, if there is no room: writing to what is not there would kill the process."""
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
