"""Time and memory of this process: what the benchmarks measure with."""

from __future__ import annotations

import ctypes
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pulse_rl.patch.build import code_blocks
from pulse_rl.state.tensors import Bits, State
from pulse_rl.sync import pending

#: BF16 bit patterns, uint16, by name.
Mapping16 = dict[str, np.ndarray]


def state_of(tensors: Mapping16) -> State:
    return State.of({name: Bits(bits, "BF16") for name, bits in tensors.items()})


def best_of(
    times: int, run: Callable[[], Any], prepare: Callable[[], Any] = lambda: None
) -> tuple[float, Any]:
    """(shortest seconds, last result) of `run`, with `prepare` before each outside the clock."""
    best = float("inf")
    for _ in range(times):
        prepare()
        started = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - started)
    return best, result


@dataclass(frozen=True)
class Cost:
    """Seconds of the clock and of the processor, all threads; ``peak``: bytes of memory beyond what
    was held before."""

    wall: float
    cpu: float
    peak: int


def timed(run: Callable[[], Any]) -> tuple[Cost, Any]:
    """What one call costs, and its result."""
    before = memory("VmRSS")
    reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(wall, cpu, memory("VmHWM") - before), result


def reset_peak() -> None:
    """Start a new high-water mark at what is resident now, after giving freed heap back to the
    system."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # musl has no malloc_trim and keeps no freed heap
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):  # some sandboxes have no such file: peaks count from the start
            Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (peak since `reset_peak`, not on Linux: since the start) of this process
    in bytes."""
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def use_the_papers_layout() -> None:
    """Has this process publish patches in the layout of the PULSE paper, which is measured beside
    ours and is no setting."""
    pending.code_blocks = partial(code_blocks, codec="zstd")  # type: ignore[assignment]
