"""Runs a study over a source, in as many passes as the memory limit requires."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from .._util.threads import ordered_map
from ..errors import InputError
from ..state.cast import CastState, cast_specs
from ..state.rounding import compute_dtype_named
from .record import BlockRecord, Pair
from .result import STEP_SECONDS, study_dict
from .sources import StateSequence
from .tally import Tally

DEFAULT_KS = (1, 2, 4, 8, 16, 32)
CODED_PAIRS = 3


def study(
    source: StateSequence,
    *,
    dtype: str = "BF16",
    ks: Sequence[int] = DEFAULT_KS,
    lr: float | None = None,
    step_seconds: float = STEP_SECONDS,
    threads: int | None = None,
    memory_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Compares the states of ``source`` that are k apart; returns the dict that `pulse_rl.study` describes.

    ``lr``, the learning rate, adds the predicted density; ``step_seconds`` is the compute time between syncs that the
    bandwidths assume; ``threads``: the maximum number (None: one per core). ``dtype`` names one of ``COMPUTE_DTYPES``,
    in any letter case: wider floats are cast to it. Values of ``ks`` with too few states are left out. For each k
    patches are built for at most ``CODED_PAIRS`` pairs.

    Memory: no checkpoint is ever held in full; they are mapped and read block by block (4 Mi elements). Of a stream one
    state is held. Of the blocks in work the newest elements are kept and, of the max(ks) states before, what changed:
    ``memory_bytes`` in all (default: 1 GiB, of a stream two states more). Where that does not hold a whole model the
    rest is measured in further passes over the source. A single block may take max(ks) + 1 copies of itself.

    ``progress`` is called with the bytes, after the cast, that were compared since its last call: less than 0 where a
    pass had to be cut short.

    Raises InputError, and whatever the source raises.
    """
    compute = compute_dtype_named(dtype)
    if not ks or min(ks) < 1:
        raise InputError("k is a number of states, 1 or more")
    for what, value in (("the learning rate", lr), ("the seconds of a step", step_seconds)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{what} cannot be {value}")
    last = len(source.state_names) - 1
    possible = sorted({k for k in ks if k <= last})
    if not possible:
        raise InputError(f"{last + 1} states are too few for k = {min(ks)}", hint="Give a smaller k, or more states.")
    coded = {Pair(k, new) for k in possible for new in evenly_spaced(k, last, CODED_PAIRS)}
    tally = Tally(cast_specs(source.specs, compute), possible)
    budget = source.spare_bytes if memory_bytes is None else memory_bytes
    done = 0
    while done < len(tally.blocks):
        records = [BlockRecord(block, possible, coded) for block in tally.blocks[done:]]
        for number, state in enumerate(source.walk()):
            fitting = _add(CastState(state, compute), records, threads, budget)
            if progress:
                dropped = sum(r.block.nbytes for r in records[fitting:])
                progress(sum(r.block.nbytes for r in records[:fitting]) - number * dropped)
            del records[fitting:]
        for record in records:
            tally.add(record)
        done += len(records)
    tally.finish_pairs()
    return study_dict(tally, source=source.name, states=source.state_names, lr=lr, step_seconds=step_seconds)


def evenly_spaced(first: int, last: int, count: int) -> set[int]:
    """At most ``count`` whole numbers from ``first`` to ``last``, both included, evenly spread."""
    if last - first < count:
        return set(range(first, last + 1))
    return {first + round(i * (last - first) / (count - 1)) for i in range(count)}


def _add(state: CastState, records: list[BlockRecord], threads: int | None, budget: int) -> int:
    """Gives each record its block of the next state; how many of the records fit into ``budget`` bytes, at least one.

    The records behind that number are half done and have to be given up.
    """

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
