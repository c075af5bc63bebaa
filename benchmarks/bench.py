"""All codecs and peers on the same data in one run: sizes, speeds, distance to the entropy bound.

    python -m benchmarks.bench [--quick] [--data NAME ...] [--json FILE]

Every decoded state is compared bit for bit before its row is printed. GB/s are of model bytes (2
per parameter), best of a few repetitions. What publish and sync cost as a whole:
`benchmarks.speed`. A trace that has not been recorded yet is recorded first (some five minutes on
one core).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import real_peers, synthetic
from benchmarks.measure import Mapping16, best_of, state_of
from benchmarks.peers import Peer, peers
from benchmarks.study.theory import EntropyBound, entropy_bound
from pulse_rl._util.threads import default_threads, ordered_map
from pulse_rl.codec import CODECS, SAME, Encoded, decode_block, encode_block
from pulse_rl.ops.diff import build_patch
from pulse_rl.patch.apply import scatter
from pulse_rl.patch.blocks import Block, cut
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import State

Pair = tuple[Mapping16, Mapping16]
TRACE = Path(__file__).parent / ".cache" / "trace"
EARLY_STEPS, WARMUP_STEPS, STEADY_STEPS = (5, 7, 10), (10, 20), (40, 80, 120)


@dataclass(frozen=True)
class Data:
    """A data set: what it is, and its pairs of consecutive states, loaded when asked for."""

    name: str
    load: Callable[[], Iterator[Pair]]


@dataclass(frozen=True)
class Row:
    """One codec on one data set; bytes and seconds are sums over the pairs.

    `file_per_changed` counts the library's whole patch file: names, shapes, roots and a SHA-256 per
    block as well.
    """

    codec: str
    bytes: int
    bytes_per_changed: float
    file_per_changed: float | None
    times_bound: float
    ratio: float
    encode_gb_s: float
    decode_gb_s: float
    encode_all_gb_s: float | None
    decode_all_gb_s: float | None


def trace_data(run: str, label: str, steps: tuple[int, ...]) -> Data:
    def load() -> Iterator[Pair]:
        from benchmarks.trace import read_state

        for step in steps:
            path = TRACE / run / f"step{step:05d}"
            yield (
                read_state(Path(f"{path}.old.safetensors")),
                read_state(Path(f"{path}.new.safetensors")),
            )

    return Data(f"real trace {run}, {label} (steps {', '.join(map(str, steps))})", load)


def synthetic_data(shape: str, lr: float, masters: bool) -> Data:
    kind = "FP32 masters" if masters else "pure BF16"
    return Data(
        f"synthetic {shape}, lr {lr:g}, {kind}",
        lambda: iter([synthetic.pair(synthetic.SHAPES[shape], lr, masters=masters)]),
    )


def data_sets(quick: bool) -> list[Data]:
    first = -1 if quick else 0
    sets = [
        trace_data(run, label, steps[first:])
        for run in ("lr1e-6", "lr3e-6")
        for label, steps in (("warm-up", WARMUP_STEPS), ("steady", STEADY_STEPS))
    ]
    sets.insert(0, trace_data("lr1e-6-early", "no warm-up", EARLY_STEPS[first:]))
    sets.append(trace_data("lr1e-6-bf16", "pure BF16, steady", STEADY_STEPS[first:]))
    shape = "100m" if quick else "0.5b"
    return [*sets, synthetic_data(shape, 3e-6, True), synthetic_data(shape, 3e-6, False)]


def record_missing_trace() -> None:
    """In a process of its own, so that torch's memory and threads stay out of the measurements."""
    subprocess.run([sys.executable, "-m", "benchmarks.trace", "--out", str(TRACE)], check=True)


class Measure:
    """Sums of bytes and seconds over the pairs of one data set for one codec."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self.file_bytes = 0
        self.seconds = {"encode": 0.0, "decode": 0.0, "encode_all": 0.0, "decode_all": 0.0}

    def row(self, model_bytes: int, total: EntropyBound) -> Row:
        gb_s = {k: 1e-9 * model_bytes / s if s else None for k, s in self.seconds.items()}
        per_changed = self.bytes / max(1, total.changed)
        return Row(
            self.name,
            self.bytes,
            per_changed,
            self.file_bytes / max(1, total.changed) or None,
            per_changed / total.bytes_per_changed,
            model_bytes / self.bytes,
            gb_s["encode"] or 0,
            gb_s["decode"] or 0,
            gb_s["encode_all"],
            gb_s["decode_all"],
        )


def core_counts() -> dict[str, int]:
    """Workers per kind of column: one, and all cores where that is more."""
    return {"": 1} | ({"_all": default_threads()} if default_threads() > 1 else {})


def measure(
    peer: Peer, old: list[np.ndarray], new: list[np.ndarray], times: int, into: Measure
) -> None:
    for key, workers in core_counts().items():
        seconds, data = best_of(times, partial(peer.encode, old, new, workers))
        into.seconds["encode" + key] += seconds
        target = [a.copy() for a in old]

        def rewind() -> None:
            for t, a in zip(target, old, strict=True):  # noqa: B023
                np.copyto(t, a)

        seconds, _ = best_of(times, partial(peer.decode, target, data, workers), rewind)
        into.seconds["decode" + key] += seconds
        if not all(map(np.array_equal, target, new)):
            raise AssertionError(f"{peer.name} is not lossless")
    into.bytes += peer.size(data)


def library_codec(name: str, old: Mapping16) -> Peer:
    """Diff and encode, decode and apply, block by block as in a patch, without digests or
    header."""
    specs = state_of(old).specs
    blocks: list[Block] = cut(specs)

    def states(arrays: Sequence[np.ndarray]) -> State:
        return state_of(dict(zip(old, arrays, strict=True)))

    def encode(a: Sequence[np.ndarray], b: Sequence[np.ndarray], workers: int) -> list[Encoded]:
        before, after = states(a), states(b)

        def one(block: Block) -> Encoded:
            found = encode_block(block.read(before), block.read(after), block.layout, codec=name)
            return found._replace(found=None)

        return list(ordered_map(one, blocks, workers))

    def decode(arrays: Sequence[np.ndarray], encoded: list[Encoded], workers: int) -> None:
        state = states(arrays)

        def one(item: tuple[Block, Encoded]) -> None:
            block, part = item
            if part.codec_id != SAME:
                changes = decode_block(
                    part.codec_id, memoryview(part.payload), block.read(state), block.layout
                )
                scatter(block, state, changes)

        list(ordered_map(one, zip(blocks, encoded, strict=True), workers))

    return Peer(name, encode, decode, lambda encoded: sum(len(part.payload) for part in encoded))


def run_data(data: Data, times: int) -> dict[str, Any]:
    """All rows of one data set, its density and its bound (summed over pairs)."""
    found = peers()
    measures = {name: Measure(name) for name in [*(p.name for p in found), *CODECS]}
    bounds: list[EntropyBound] = []
    for old, new in data.load():
        bounds.append(entropy_bound(state_of(old), state_of(new)))
        # One repetition is enough for what takes seconds: sizes are the point there.
        repeats = times if sum(v.size for v in old.values()) < 1 << 27 else 1
        arrays = list(old.values()), [new[name] for name in old]
        for peer in found:
            measure(
                peer,
                *([v.reshape(-1) for v in state] for state in arrays),
                repeats,
                measures[peer.name],
            )
        for name in CODECS:
            measure(library_codec(name, old), *arrays, repeats, measures[name])
            a, b = state_of(old), state_of(new)
            measures[name].file_bytes += build_patch(a, b, state_digest(a), codec=name).nbytes
    total = EntropyBound(
        *(sum(getattr(b, f) for b in bounds) for f in EntropyBound.__dataclass_fields__)
    )
    rows = [m.row(2 * total.elements, total) for m in measures.values()]
    return {
        "data": data.name,
        "elements": total.elements,
        "changed": total.changed,
        "density": total.changed / total.elements,
        "bound_bytes_per_changed": total.bytes_per_changed,
        "unconditional_bound_bytes_per_changed": total.unconditional_bytes_per_changed,
        "rows": [asdict(r) for r in rows],
    }


def print_data(result: dict[str, Any], workers: int) -> None:
    print(
        f"\n{result['data']}: {result['elements'] / 1e6:.1f} M elements, density "
        f"{result['density']:.4%}"
    )
    print(
        f"order-0 entropy: {result['bound_bytes_per_changed']:.4f} bytes per changed weight "
        "given tensor and "
        f"exponent, {result['unconditional_bound_bytes_per_changed']:.4f} without"
    )
    print(f"{'':14} bytes per   whole   times  ratio to   1 core, GB/s     {workers} cores, GB/s")
    print(f"{'':14}   changed    file   bound full sync   encode  decode   encode  decode")
    for r in sorted(result["rows"], key=lambda r: -r["bytes"]):
        cells = [
            (r["bytes_per_changed"], 10, 4),
            (r["file_per_changed"], 8, 4),
            (r["times_bound"], 8, 2),
        ]
        cells += [(r["ratio"], 10, 1), (r["encode_gb_s"], 9, 2), (r["decode_gb_s"], 8, 2)]
        cells += [(r["encode_all_gb_s"], 9, 2), (r["decode_all_gb_s"], 8, 2)]
        print(f"{r['codec']:14}" + "".join(_cell(*c) for c in cells), flush=True)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            x.split(":", 1)[1].strip()
            for x in info.read_text().splitlines()
            if x.startswith("model name")
        ]
        model = models[0] if models else model
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model,
        "cores": default_threads(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="compare codecs and peers on the same data")
    parser.add_argument(
        "--quick", action="store_true", help="one pair per data set, a 93 M state instead of 494 M"
    )
    parser.add_argument(
        "--data", nargs="+", default=[""], help="only data sets whose name contains one of these"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    about = machine()
    report: dict[str, Any] = {"machine": about, "data": []}
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    if not any(peer.name == "zipnn" for peer in peers()):
        print("zipnn is not installed: its row is missing (pip install --no-deps zipnn)")
    record_missing_trace()
    for data in data_sets(args.quick):
        if any(word in data.name for word in args.data):
            report["data"].append(run_data(data, times=3))
            print_data(report["data"][-1], about["cores"])
    report["peers"] = real_peers.report(
        "30m" if args.quick else "100m", 3e-6, 2, list(real_peers.PEERS)
    )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
