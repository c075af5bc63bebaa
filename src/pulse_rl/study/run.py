"""A study's states in order, a folder of checkpoints or the versions of a stream, and its run over
them, in as many passes as the memory limit requires."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from .._util.settings import checked_path, counted
from .._util.threads import ordered_map
from ..errors import InputError, PulseError, StateMismatch
from ..events import Listener, progress_to
from ..follow import checkpoint
from ..quantize.states import Quantize, QuantizedState
from ..state.cast import CastState, DTypeLike, compute_dtype_named
from ..state.tensors import State, TensorSpec
from ..store import Store, open_store
from ..stream.stream import Stream
from ..sync.subscriber import Subscriber
from .tally import STEP_SECONDS, BlockRecord, Pair, Tally, study_dict

_DIGITS = re.compile(r"([0-9]+)")
_HINT = (
    "Give a folder whose entries are .safetensors files or folders of checkpoints, or a "
    "store and its stream."
)
# Of memory: worth it to save a pass over the states.
_SPARE_BYTES = 1 << 30
DEFAULT_KS = (1, 2, 4, 8, 16, 32)
CODED_PAIRS = 3


def study(
    source: Store | str | os.PathLike[str],
    *,
    stream: str | None = None,
    dtype: DTypeLike = "BF16",
    quantize: Quantize | None = None,
    ks: Sequence[int] = DEFAULT_KS,
    step_seconds: float = STEP_SECONDS,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> dict[str, Any]:
    """Compare states of one model that are k apart: the checkpoints of a folder, or the versions
    of a stream.

    The checkpoints of a folder are files ``*.safetensors`` and folders with a checkpoint (sharded
    ones, too), ordered by the numbers in their names (step-9 before step-10). A checkpoint in the
    folder itself is ignored if at least two sub-folders hold checkpoints, since some trainers leave
    the last one there. The versions of a stream are verified.

    Memory: no checkpoint is ever held in full; they are mapped and read block by block (4 Mi
    elements). Of a stream one state is held. Of the blocks in work the newest elements are kept
    and, of the max(ks) states before, what changed: 1 GiB in all, of a stream two states more.
    Where that does not hold a whole model the rest is measured in further passes over the source.
    A single block may take max(ks) + 1 copies of itself.

    Args:
        source: The folder; with ``stream`` a store or its address.
        stream: The stream's name.
        dtype: Compute dtype as `Publisher.publish` takes it. Wider floats are cast to it; with
            ``quantize``, those that are not quantized.
        quantize: Format of quantized weights as `Publisher.publish` takes it.
        ks: States apart. Values with too few states are left out. For each k patches are built for
            at most 3 pairs.
        step_seconds: Seconds of compute between syncs that the bandwidths assume.
        threads: Maximum number of threads. Default: one per core.
        on_event: Gets `Progress` in bytes after the cast. It goes back where a pass was cut short.

    Returns:
        The dict that `pulse_rl.study` describes.

    Raises:
        InputError: There are fewer than two states, or too few for ``ks``.
        StateMismatch: Names, dtypes or shapes of the states differ.
    """
    # 1. What is compared.
    compute = compute_dtype_named(dtype)
    if not ks or min(ks) < 1:
        raise InputError("k is a number of states, 1 or more")
    if not 0 < step_seconds < math.inf:
        raise InputError(f"the seconds of a step cannot be {step_seconds}")
    given = _of_folder(source) if stream is None else _of_stream(source, stream, threads)
    last = len(given.names) - 1
    possible = sorted({k for k in ks if k <= last})
    if not possible:
        raise InputError(
            f"{last + 1} states are too few for k = {min(ks)}",
            hint="Give a smaller k, or more states.",
        )
    coded = {Pair(k, new) for k in possible for new in evenly_spaced(k, last, CODED_PAIRS)}

    def seen(state: State) -> State:
        if quantize is None:
            return CastState(state, compute)
        return QuantizedState(state, quantize, compute)

    first = next(given.walk())
    tally = Tally(seen(first).specs, possible)
    budget = _SPARE_BYTES + given.held_states * first.nbytes
    nbytes = sum(block.nbytes for block in tally.blocks)
    progress = progress_to(on_event, "study", len(given.names) * nbytes)
    # 2. Passes over the states, each for as many of the blocks left as fit into memory.
    done = 0
    while done < len(tally.blocks):
        records = [BlockRecord(block, possible, coded) for block in tally.blocks[done:]]
        for number, state in enumerate(given.walk()):
            fitting = _fitting(records, seen(state), budget, threads)
            if progress:  # what was half done is done again
                dropped = sum(r.block.nbytes for r in records[fitting:])
                compared = sum(r.block.nbytes for r in records[:fitting])
                progress(compared - number * dropped)
            del records[fitting:]
        for record in records:
            tally.add(record)
        done += len(records)
    tally.finish_pairs()
    return study_dict(tally, source=given.source, states=given.names, step_seconds=step_seconds)


def _fitting(records: list[BlockRecord], state: State, budget: int, threads: int | None) -> int:
    """Give each record its block of the next state. Returns how many of them fit into ``budget``
    bytes, at least one."""

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


def evenly_spaced(first: int, last: int, count: int) -> set[int]:
    """At most ``count`` whole numbers from ``first`` to ``last``, both included, evenly spread."""
    if last - first < count:
        return set(range(first, last + 1))
    return {first + round(i * (last - first) / (count - 1)) for i in range(count)}


class _States(NamedTuple):
    """States of one model in order. ``walk`` yields them, each valid until the next one is asked
    for, and holds ``held_states`` of them in memory."""

    source: str
    names: list[str]
    walk: Callable[[], Iterator[State]]
    held_states: int


def _of_folder(folder: Any) -> _States:
    paths = _checkpoints(checked_path(folder))
    if len(paths) < 2:
        sharded = (Path(folder) / checkpoint.INDEX_NAME).is_file()
        raise InputError(
            f"{folder} holds {len(paths)} checkpoints, at least 2 are needed",
            hint="This is one sharded checkpoint: give the folder above it." if sharded else _HINT,
        )

    def walk() -> Iterator[State]:
        specs: tuple[TensorSpec, ...] | None = None
        for path in paths:
            try:
                state = checkpoint.load(path)[0]
            except PulseError as error:
                prefix = "" if str(path) in str(error) else f"{path}: "
                raise type(error)(f"{prefix}{error}", hint=error.hint) from None
            specs = specs or state.specs
            _require(state, specs, str(path), paths[0].name)
            yield state

    for _ in walk():  # headers only: what does not fit is found before anything is measured
        pass
    return _States(os.fspath(folder), [path.name for path in paths], walk, held_states=0)


def _of_stream(store: Any, stream: str, threads: int | None) -> _States:
    opened = open_store(store)
    where = Stream(opened, stream)
    with where.limited():
        versions = where.versions()
    if len(versions) < 2:
        raise InputError(
            f"stream {stream!r} holds {counted(len(versions), 'version')}, at least 2 are needed",
            hint="A study compares at least two states of one model.",
        )

    def walk() -> Iterator[State]:
        subscriber = Subscriber(opened, stream=stream, threads=threads)
        specs: tuple[TensorSpec, ...] | None = None
        for version in versions:
            if update := subscriber.sync(version):
                update.acknowledge()  # its state is used, not its changes
            state = subscriber.state
            specs = specs or state.specs
            _require(state, specs, f"version {version}", f"version {versions[0]}")
            yield state

    name = f"{type(store).__name__ if isinstance(store, Store) else store} stream {stream}"
    return _States(name, [f"version {version}" for version in versions], walk, held_states=2)


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
