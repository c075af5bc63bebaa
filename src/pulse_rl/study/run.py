"""A study's states in order, a folder of checkpoints or the versions of a stream, and its run over
them, in as many passes as the memory limit requires."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from .._util.settings import checked_path
from .._util.threads import ordered_map
from ..errors import InputError, PulseError, StateMismatch
from ..follow import checkpoint
from ..quantize.states import Quantize, QuantizedState
from ..state.cast import CastState, DTypeLike, cast_specs, compute_dtype_named
from ..state.tensors import State, TensorSpec
from ..store import Store, open_store
from ..stream.stream import Stream
from ..sync.subscriber import Subscriber
from .record import BlockRecord, Pair
from .result import STEP_SECONDS, Tally, study_dict

_DIGITS = re.compile(r"([0-9]+)")
_FEWER = "A study compares at least two states of one model."
_HINT = (
    "Give a folder whose entries are .safetensors files or folders of checkpoints, or a "
    "store and its stream."
)
_SPARE_BYTES = 1 << 30


class StateSequence(Protocol):
    """An ordered sequence of states that can be walked more than once.

    ``name`` is their source, ``state_names`` names each state, ``specs`` are their common tensors.
    Spending up to ``spare_bytes`` of memory is worth it to save a walk.
    """

    name: str
    state_names: list[str]
    specs: tuple[TensorSpec, ...]
    spare_bytes: int

    def walk(self) -> Iterator[State]:
        """The states in order, each valid until the next one is requested."""
        ...


class CheckpointFolder:
    """The checkpoints in ``folder``: files ``*.safetensors`` and folders with a checkpoint (sharded
    ones, too).

    They are ordered by the numbers in their names (step-9 before step-10). A checkpoint in the
    folder itself is ignored if at least two sub-folders hold checkpoints, since some trainers leave
    the last one there. Files are mapped, not read. Raises InputError for fewer than two,
    StateMismatch where names, dtypes or shapes differ.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.name = os.fspath(folder)
        self.spare_bytes = _SPARE_BYTES
        self._paths = _checkpoints(checked_path(folder))
        if len(self._paths) < 2:
            raise InputError(
                f"{self.name} holds {len(self._paths)} checkpoints, at least 2 are needed",
                hint=_hint(folder),
            )
        self.state_names = [path.name for path in self._paths]
        self.specs = self._load(self._paths[0]).specs
        for (
            _
        ) in self.walk():  # headers only: what does not fit is found before anything is measured
            pass

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name}: {len(self.state_names)} states>"

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
    """The versions of ``stream`` in ``store``, replayed with a subscriber that uses ``threads``
    threads and verifies each version; only one state is in memory.

    Raises InputError for fewer than two versions, StateMismatch if the tensors change.
    """

    def __init__(self, store: Store | str, stream: str, *, threads: int | None = None) -> None:
        self._store, self._stream, self._threads = open_store(store), stream, threads
        self.name = f"{store if isinstance(store, str) else type(store).__name__} stream {stream}"
        where = Stream(self._store, stream)
        with where.limited():
            self._versions = where.versions()
        if len(self._versions) < 2:
            raise InputError(
                f"stream {stream!r} holds {len(self._versions)} versions, at least 2 are needed",
                hint=_FEWER,
            )
        self.state_names = [f"version {version}" for version in self._versions]
        first = next(self.walk())
        self.specs, self.spare_bytes = first.specs, _SPARE_BYTES + 2 * first.nbytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name}: {len(self.state_names)} states>"

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


DEFAULT_KS = (1, 2, 4, 8, 16, 32)
CODED_PAIRS = 3


def study(
    source: StateSequence,
    *,
    dtype: DTypeLike = "BF16",
    quantize: Quantize | None = None,
    ks: Sequence[int] = DEFAULT_KS,
    step_seconds: float = STEP_SECONDS,
    threads: int | None = None,
    memory_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Compares the states of ``source`` that are k apart; returns the dict that `pulse_rl.study`
    describes.

    ``step_seconds`` is the compute time between syncs that the bandwidths assume; ``threads``: the
    maximum number (None: one per core).
    ``dtype`` is a compute dtype as `Publisher.publish` takes it: wider floats are cast to it; with
    ``quantize``, as `Publisher.publish` takes it, those that are not quantized. Values of ``ks``
    with too few states are left out. For each k patches are built for at most ``CODED_PAIRS``
    pairs.

    Memory: no checkpoint is ever held in full; they are mapped and read block by block (4 Mi
    elements). Of a stream one state is held. Of the blocks in work the newest elements are kept
    and, of the max(ks) states before, what changed: ``memory_bytes`` in all (default: 1 GiB, of a
    stream two states more). Where that does not hold a whole model the rest is measured in further
    passes over the source. A single block may take max(ks) + 1 copies of itself.

    ``progress`` is called with the bytes, after the cast, that were compared since its last call:
    less than 0 where a pass had to be cut short.

    Raises InputError, and whatever the source raises.
    """
    compute = compute_dtype_named(dtype)
    if not ks or min(ks) < 1:
        raise InputError("k is a number of states, 1 or more")
    if not 0 < step_seconds < math.inf:
        raise InputError(f"the seconds of a step cannot be {step_seconds}")
    last = len(source.state_names) - 1
    possible = sorted({k for k in ks if k <= last})
    if not possible:
        raise InputError(
            f"{last + 1} states are too few for k = {min(ks)}",
            hint="Give a smaller k, or more states.",
        )
    coded = {Pair(k, new) for k in possible for new in evenly_spaced(k, last, CODED_PAIRS)}

    def seen(state: State) -> State:
        return (
            CastState(state, compute)
            if quantize is None
            else QuantizedState(state, quantize, compute)
        )

    specs = (
        cast_specs(source.specs, compute)
        if quantize is None
        else seen(next(iter(source.walk()))).specs
    )
    tally = Tally(specs, possible)
    budget = source.spare_bytes if memory_bytes is None else memory_bytes
    done = 0
    while done < len(tally.blocks):
        # One walk over the states, for as many of the blocks left as fit into memory.
        records = [BlockRecord(block, possible, coded) for block in tally.blocks[done:]]
        for number, state in enumerate(source.walk()):
            compared = _add(records, seen(state), number, budget, threads)
            if progress:
                progress(compared)
        for record in records:
            tally.add(record)
        done += len(records)
    tally.finish_pairs()
    return study_dict(
        tally, source=source.name, states=source.state_names, step_seconds=step_seconds
    )


def evenly_spaced(first: int, last: int, count: int) -> set[int]:
    """At most ``count`` whole numbers from ``first`` to ``last``, both included, evenly spread."""
    if last - first < count:
        return set(range(first, last + 1))
    return {first + round(i * (last - first) / (count - 1)) for i in range(count)}


def _add(
    records: list[BlockRecord], state: State, number: int, budget: int, threads: int | None
) -> int:
    """Give each record its block of the next state. Records that do not fit into ``budget`` bytes
    leave the list, half done, but for the first. Returns the bytes that were compared, less those
    of the records that left."""
    fitting = _fitting(records, state, budget, threads)
    dropped = sum(r.block.nbytes for r in records[fitting:])
    compared = sum(r.block.nbytes for r in records[:fitting]) - number * dropped
    del records[fitting:]
    return compared


def _fitting(records: list[BlockRecord], state: State, budget: int, threads: int | None) -> int:
    """How many of the records fit, at least one."""

    def add(record: BlockRecord) -> int:
        record.add(record.block.read(state))
        return record.nbytes

    held = 0
    with closing(ordered_map(add, records, threads)) as sizes:
        for index, nbytes in enumerate(sizes):
            held += nbytes
            if held > budget and index:
                return index
    return len(records)
