"""Speed and memory of the four ways of a state: first publish, publish, first sync, sync; old
beside new.

    python -m benchmarks.speed [--shape 300m] [--times 2] [--beside CHECKOUT] [--json FILE]

Through a `MemoryStore`, so that no disk is measured. About 0.9% of the elements change by an
update; 10% and 50% by one step, at random. Every run is a process of its own, of some rounds; with
``--beside`` each is followed by one of another checkout, with the library of its own ``.venv``, on
the same data. GB are of model bytes; seconds are the best of all runs: wall clock, and CPU of all
threads, which other work on the machine disturbs less. Peaks are in states, beyond the caller's own
copy and the store's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Mapping16, state_of, timed
from benchmarks.synthetic import SHAPES, pair
from pulse_rl import MemoryStore, Publisher, State, Subscriber, audit

ROOT = Path(__file__).parents[1]
ROUNDS = 3
DENSITIES = {"0.9%": None, "10%": 0.1, "50%": 0.5}

Figures = dict[str, dict[str, float]]


def states(shape: str, density: float | None) -> tuple[Mapping16, Mapping16]:
    """A state and the next one; with a `density`, so many of its elements changed by one step up or
    down."""
    old, new = pair(SHAPES[shape], 3e-6)
    if density is not None:
        rng = np.random.Generator(np.random.SFC64(0))
        for name, bits in old.items():
            chance = rng.integers(0, 1 << 16, bits.shape, np.uint16)
            step = np.where(chance & 1, np.uint16(1), np.uint16(0xFFFF))
            new[name] = bits + np.where(chance < density * (1 << 16), step, np.uint16(0))
    return old, new


def measure(shape: str, density: str) -> Figures:
    """All ways in this process, the best of some rounds: in the first one the system pays for new
    memory."""
    old, new = states(shape, DENSITIES[density])
    a, b = state_of(old), state_of(new)
    rounds = [one_round(a, b) for _ in range(ROUNDS)]
    changed = sum(int(np.count_nonzero(old[name] != new[name])) for name in old)
    figures = best(rounds)
    nbytes = figures.pop("data")["bytes"]
    for way in figures:  # later rounds find memory that the first one has left
        figures[way]["peak"] = rounds[0][way]["peak"]
    figures["data"] = {"density": changed / a.elements, "bytes_per_changed": nbytes / changed}
    return figures


def one_round(a: State, b: State) -> Figures:
    """Wall and CPU seconds per GB of each way, and its peak in states beyond what the store came to
    hold."""
    store, figures = MemoryStore(), Figures()

    def held() -> int:
        return sum(info.nbytes for info in store.list("bench"))

    def measured(way: str, run: Callable[[], Any]) -> Any:
        stored = held()
        cost, result = timed(run)
        peak = cost.peak - (held() - stored)
        figures[way] = {"wall": cost.wall, "cpu": cost.cpu, "peak": peak * 1e-9}
        figures[way] = {key: value / a.nbytes * 1e9 for key, value in figures[way].items()}
        return result

    with Publisher(store, stream="bench") as publisher, Subscriber(store, stream="bench") as worker:

        def sync() -> None:  # the update is not kept: while one is alive, the state moves in a copy
            update = worker.sync()
            assert update is not None
            update.acknowledge()

        measured("first publish", lambda: publisher.publish(a))
        measured("first sync", sync)
        published = measured("publish", lambda: publisher.publish(b))
        measured("sync", sync)
        report = measured("audit", lambda: audit(b, worker.digest))
        assert report.ok, report
        figures["data"] = {"bytes": published.patch_bytes}
    return figures


def child(python: Path, shape: str, density: str) -> Figures:
    command = [str(python), "-m", "benchmarks.speed", "--shape", shape, "--measure", density]
    return dict(
        json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    )


def best(runs: list[Figures]) -> Figures:
    return {
        way: {key: min(run[way][key] for run in runs) for key in runs[0][way]} for way in runs[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="time publish and sync through memory")
    parser.add_argument("--shape", choices=list(SHAPES), default="300m")
    parser.add_argument("--density", nargs="+", choices=list(DENSITIES), default=list(DENSITIES))
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument(
        "--beside", type=Path, help="another checkout, whose library is measured as well"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        json.dump(measure(args.shape, args.measure), sys.stdout)
        return
    pythons = {"this": Path(sys.executable)}
    if args.beside:
        pythons["beside"] = args.beside.absolute() / ".venv/bin/python"
    report: dict[str, dict[str, Figures]] = {}
    print(
        f"{args.shape}; GB/s by the wall clock, CPU seconds per GB, peak in states; best of "
        f"{args.times} times {ROUNDS}"
    )
    for density in args.density:
        runs: dict[str, list[Figures]] = {name: [] for name in pythons}
        for _ in range(args.times):
            for name, python in pythons.items():
                runs[name].append(child(python, args.shape, density))
        report[density] = {name: best(found) for name, found in runs.items()}
        for name, figures in report[density].items():
            data = figures.pop("data")
            print(
                f"{name:>7}: density {data['density']:.2%}, {data['bytes_per_changed']:.4f} "
                "bytes per changed weight"
            )
            for way, f in figures.items():
                print(
                    f"{way:>22} {1 / f['wall']:7.2f} GB/s {f['cpu']:7.3f} s/GB {f['peak']:7.2f}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
