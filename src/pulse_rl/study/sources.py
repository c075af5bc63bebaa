"""States in order: a folder of checkpoints, or the versions of a stream in a store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..errors import InputError, PulseError, StateMismatch
from ..state import checkpoint
from ..state.tensors import State, TensorSpec
from ..store import Store, open_store
from ..stream.stream import Stream
from ..sync.subscriber import Subscriber

_DIGITS = re.compile(r"([0-9]+)")
_FEWER = "A study compares at least two states of one model."
_HINT = "Give a folder whose entries are .safetensors files or folders of checkpoints, or a store and its stream."
_SPARE_BYTES = 1 << 30


class StateSequence(Protocol):
    """An ordered sequence of states that can be walked more than once.

    ``name`` is their source, ``state_names`` names each state, ``specs`` are their common tensors. Spending up to
    ``spare_bytes`` of memory is worth it to save a walk.
    """

    name: str
    state_names: list[str]
    specs: tuple[TensorSpec, ...]
    spare_bytes: int

    def walk(self) -> Iterator[State]:
        """The states in order, each valid until the next one is requested."""
        ...


class CheckpointFolder:
    """The checkpoints in ``folder``: files ``*.safetensors`` and folders with a checkpoint (sharded ones, too).

    They are ordered by the numbers in their names (step-9 before step-10). A checkpoint in the folder itself is ignored
    if at least two sub-folders hold checkpoints, since some trainers leave the last one there. Files are mapped, not
    read. Raises InputError for fewer than two, StateMismatch where names, dtypes or shapes differ.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.name = os.fspath(folder)
        self.spare_bytes = _SPARE_BYTES
        self._paths = _checkpoints(Path(folder))
        if len(self._paths) < 2:
            raise InputError(
                f"{self.name} holds {len(self._paths)} checkpoints, at least 2 are needed", hint=_hint(folder)
            )
        self.state_names = [path.name for path in self._paths]
        self.specs = self._load(self._paths[0]).specs
        for _ in self.walk():  # headers only: what does not fit is found before anything is measured
            pass

    def walk(self) -> Iterator[State]:
        """See `StateSequence`."""
        for path in self._paths:
            state = self._load(path)
            _require(state, self.specs, str(path), self.state_names[0])
            yield state

    @staticmethod
    def _load(path: Path) -> State:
        try:
            return checkpoint.load(path)[0]
        except PulseError as error:
            prefix = "" if str(path) in str(error) else f"{path}: "
            raise type(error)(f"{prefix}{error}", hint=error.hint) from None


class StoredStream:
    """The versions of ``stream`` in ``store``, replayed with a subscriber that uses ``threads`` threads and verifies
    each version; only one state is in memory.

    Raises InputError for fewer than two versions, StateMismatch if the tensors change.
    """

    def __init__(self, store: Store | str, stream: str, *, threads: int | None = None) -> None:
        self._store, self._stream, self._threads = open_store(store), stream, threads
        self.name = f"{store if isinstance(store, str) else type(store).__name__} stream {stream}"
        self._versions = Stream(self._store, stream).versions()
        if len(self._versions) < 2:
            raise InputError(
                f"stream {stream!r} holds {len(self._versions)} versions, at least 2 are needed", hint=_FEWER
            )
        self.state_names = [f"version {version}" for version in self._versions]
        first = next(self.walk())
        self.specs, self.spare_bytes = first.specs, _SPARE_BYTES + 2 * first.nbytes

    def walk(self) -> Iterator[State]:
        """See `StateSequence`."""
        subscriber = Subscriber(self._store, stream=self._stream, threads=self._threads)
        specs: tuple[TensorSpec, ...] | None = None
        for version, name in zip(self._versions, self.state_names, strict=True):
            if update := subscriber.sync(version):
                update.acknowledge()  # its state is used, not its changes
            state = subscriber.state
            specs = specs or state.specs
            _require(state, specs, name, self.state_names[0])
            yield state


def _require(state: State, specs: tuple[TensorSpec, ...], where: str, first: str) -> None:
    try:
        state.require_specs(specs, first)
    except StateMismatch as error:
        raise StateMismatch(f"{where}: {error}", hint=error.hint) from None


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A key that orders names by the numbers in them: a9 before a10."""
    parts = enumerate(_DIGITS.split(name))  # a number at each odd place
    return [(False, int(part), "") if i % 2 else (True, 0, part) for i, part in parts if part]


def _checkpoints(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir(), key=lambda path: (natural(path.name), path.name))
        folders = [p for p in entries if p.is_dir() and any(p.glob("*.safetensors"))]
        files = [p for p in entries if p.is_file() and p.suffix == ".safetensors"]
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}", hint=_HINT) from None
    own = (folder / checkpoint.INDEX_NAME).is_file() or (folder / checkpoint.FILE_NAME) in files
    if own and len(folders) >= 2:
        return folders
    if (folder / checkpoint.INDEX_NAME).is_file():
        return [folder]
    return [p for p in entries if p in folders or p in files]


def _hint(folder: str | os.PathLike[str]) -> str:
    if (Path(folder) / checkpoint.INDEX_NAME).is_file():
        return "This is one sharded checkpoint: give the folder above it."
    return _HINT
