"""The library's codecs and its whole pipeline, timed. As a program: one size in a fresh process, JSON on stdout.

    python -m benchmarks.library --shape 0.5b --lr 3e-6 --workers 2 [--codec auto] [--bf16]

A process of its own makes peak memory honest: it is the high-water mark of resident memory since just before the
call (Linux; elsewhere since the start of the process, by resource.getrusage).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import SHAPES, pair
from pulse_rl import codec as codecs
from pulse_rl._util.threads import default_threads, ordered_map
from pulse_rl.patch import apply_patch, build_patch, parse_patch
from pulse_rl.patch.apply import scatter
from pulse_rl.patch.blocks import Block, cut
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import Bits, State
from pulse_rl.sync.publisher import Publisher
from pulse_rl.sync.subscriber import Subscriber

Mapping16 = dict[str, np.ndarray]


def state_of(tensors: Mapping16) -> State:
    return State.of({name: Bits(bits, "BF16") for name, bits in tensors.items()})


def codec_names() -> list[str]:
    """The library's codecs, but for the dense fallback."""
    return list(codecs.CODECS)


def best_of(times: int, run: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> tuple[float, Any]:
    """(shortest seconds, last result) of `run`, with `prepare` before each outside the clock."""
    best = float("inf")
    for _ in range(times):
        prepare()
        started = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - started)
    return best, result


class LibraryCodec:
    """Diff and encode, decode and apply, block by block as in a patch, without digests or header."""

    def __init__(self, name: str, old: State) -> None:
        self.codec = name
        self.blocks: list[Block] = cut(old.specs)

    def encode(self, old: State, new: State, workers: int) -> list[codecs.Encoded]:
        def one(block: Block) -> codecs.Encoded:
            return codecs.encode_block(block.read(old), block.read(new), block.layout, codec=self.codec)._replace(
                found=None
            )

        return list(ordered_map(one, self.blocks, workers))

    def decode(self, state: State, encoded: list[codecs.Encoded], workers: int) -> None:
        """Turns the old state into the new one in place."""

        def one(item: tuple[Block, codecs.Encoded]) -> None:
            block, part = item
            if part.codec_id == codecs.SAME:
                return
            elements = block.read(state)
            changes = codecs.decode_block(part.codec_id, memoryview(part.payload), elements, block.layout)
            scatter(block, state, changes)

        list(ordered_map(one, zip(self.blocks, encoded, strict=True), workers))


def _reset_peak() -> None:
    """Start a new high-water mark at what is resident now, after giving freed heap back to the system."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # musl has no malloc_trim and keeps no freed heap
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def _memory(field: str) -> int:
    """VmRSS (now) or VmHWM (peak since `_reset_peak`) of this process in bytes."""
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def kernels(old: Mapping16, new: Mapping16, codec: str, workers: int, times: int) -> dict[str, float]:
    """Seconds of the pure parts, best of `times`, and the patch's bytes; every result is checked."""
    a, b = state_of(old), state_of(new)
    coder = LibraryCodec(codec, a)
    seconds: dict[str, float] = {}
    seconds["digest"], base = best_of(times, lambda: state_digest(a, threads=workers))
    seconds["diff+encode"], encoded = best_of(times, lambda: coder.encode(a, b, workers))
    target = a.copy()

    def rewind() -> None:
        for spec in a.specs:
            target.read(spec.name)[:] = a.read(spec.name)

    seconds["decode+apply"], _ = best_of(times, lambda: coder.decode(target, encoded, workers), rewind)
    assert all(np.array_equal(target.read(s.name), b.read(s.name)) for s in b.specs), "decoded state differs"
    seconds["publish"], built = best_of(times, lambda: build_patch(a, b, base, codec=codec, threads=workers))
    patch = parse_patch([built.to_bytes()], base)
    seconds["consume"], applied = best_of(times, lambda: apply_patch(patch, target, base, threads=workers), rewind)
    assert applied.digest.root == state_digest(b, threads=workers).root
    return {**seconds, "patch_bytes": built.nbytes, "changed": built.header.changed}


def end_to_end(old: Mapping16, new: Mapping16, codec: str, workers: int, empty: int) -> dict[str, float]:
    """Seconds and peak memory of Publisher.publish and Subscriber.sync of one patch through a local folder.

    `old` is the caller's copy and becomes `new`, whose memory is given back first. Peaks are in states, without the
    interpreter's `empty` bytes and, for the publisher, without the caller's copy.
    """
    nbytes = sum(v.nbytes for v in old.values())
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(f"file://{folder}", stream="bench", codec=codec, threads=workers)
        publisher.publish(state_of(old))
        for name in list(new):
            old[name][...] = new.pop(name)
        _reset_peak()
        result["publish to folder"], _ = best_of(1, partial(Publisher.publish, publisher, state_of(old)))
        result["publish_peak_states"] = (_memory("VmHWM") - empty - nbytes) / nbytes
        del publisher
        old.clear()
        subscriber = Subscriber(f"file://{folder}", stream="bench", threads=workers)
        subscriber.sync(0)
        _reset_peak()
        result["sync from folder"], _ = best_of(1, partial(subscriber.sync, 1))
        result["sync_peak_states"] = (_memory("VmHWM") - empty) / nbytes
    return result


def measure(shape: str, lr: float, masters: bool, codec: str, workers: int, times: int) -> dict[str, Any]:
    empty = _memory("VmRSS")
    old, new = pair(SHAPES[shape], lr, masters=masters)
    elements = SHAPES[shape].elements
    parts = kernels(old, new, codec, workers, times)
    changed, patch_bytes = int(parts.pop("changed")), int(parts.pop("patch_bytes"))
    whole = end_to_end(old, new, codec, workers, empty)
    peaks = {k: round(whole.pop(k), 3) for k in ("publish_peak_states", "sync_peak_states")}
    seconds = parts | whole
    return {
        "shape": shape,
        "lr": lr,
        "masters": masters,
        "codec": codec,
        "workers": workers,
        "elements": elements,
        "density": changed / elements,
        "patch_bytes": patch_bytes,
        "bytes_per_changed": patch_bytes / max(1, changed),
        "seconds": {k: round(v, 4) for k, v in seconds.items()},
        "gb_s": {k: round(2e-9 * elements / v, 3) for k, v in seconds.items()},
        **peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="time the library on one synthetic state, JSON on stdout")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--bf16", action="store_true", help="pure BF16 weights, no FP32 masters")
    parser.add_argument("--codec", choices=codecs.CODECS, default=codecs.AUTO)
    parser.add_argument("--workers", type=int, default=default_threads())
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    json.dump(measure(args.shape, args.lr, not args.bf16, args.codec, args.workers, args.times), sys.stdout)


if __name__ == "__main__":
    main()
