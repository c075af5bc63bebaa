"""What it costs to catch up: bytes and fetches over single patches, over folds, and of a full sync.

Real       the recorded trace's 64 consecutive versions (benchmarks.trace: FP32 masters, lr 1e-6), recorded if missing.
Synthetic  513 small versions: each element changes with a chance of its own, as the weights of a trained model do, so
           that later changes often fall on elements that have changed before.

    python -m benchmarks.catch_up [--json FILE]

Nothing is computed from sizes alone: a subscriber at each distance really syncs, once from a store without the listed
folds, once with them, and once as a newcomer from an anchor at the head; its root is compared with the state's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import trace
from benchmarks.counted import CountedStore
from pulse_rl import Bits, MemoryStore, Publisher, Subscriber, state_root
from pulse_rl.store import ObjectInfo

FOLDS = (8, 64)
ELEMENTS, VERSIONS, DENSITY = 100_000, 513, 0.005

State = dict[str, Bits]


class HidesFolds(CountedStore):
    """A store in memory. Without ``folds`` it does not list them."""

    folds = True

    def __init__(self) -> None:
        super().__init__(MemoryStore())

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        hidden = not self.folds and folder.endswith("/links")
        return (info for info in super().list(folder, start_after) if not hidden or "-anchor-" in info.name)


@dataclass(frozen=True)
class Cost:
    """What one subscriber read to move over so many versions. ``way`` is "patches", "folds" or "full"."""

    data: str
    behind: int
    way: str
    fetches: int
    bytes: int


def real() -> Iterator[State]:
    """The states of the recorded chain."""
    run = trace.ensure(runs=[trace.CHAIN_RUN]) / trace.CHAIN_RUN
    shapes = json.loads((run / "trace.json").read_text())["tensors"]
    for _, flat in trace.read_chain(run):
        state, at = {}, 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            state[name] = Bits(flat[at : at + size].reshape(shape), "BF16")
            at += size
        yield state


def synthetic(seed: int = 0) -> Iterator[State]:
    """Small BF16 states: elements change with lognormal chances of their own, by one rounding step."""
    rng = np.random.default_rng(seed)
    bits = (rng.normal(0, 0.02, ELEMENTS).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    chance = np.minimum(rng.lognormal(0, 1.5, ELEMENTS), 60.0)
    chance *= DENSITY / chance.mean()
    for _ in range(VERSIONS):
        yield {"w": Bits(bits.copy().reshape(-1, 250), "BF16")}
        moved = np.flatnonzero(rng.random(ELEMENTS) < chance)
        bits[moved] = bits[moved] + np.where(rng.random(len(moved)) < 0.5, 1, -1).astype(np.uint16)


def measure(name: str, states: Iterator[State], distances: tuple[int, ...]) -> list[Cost]:
    """Publishes ``states`` with folds and catches up over each distance to the last of them."""
    store = HidesFolds()
    publisher = Publisher(store, stream="s", anchor_ratio=1e9, folds=FOLDS)
    last: State = {}
    versions = 0
    for last in states:
        publisher.publish(last)
        versions += 1
    publisher.wait()
    head, root = versions - 1, state_root(last)
    costs = []
    for behind in (d for d in distances if d <= head):
        for way in ("patches", "folds"):
            subscriber = Subscriber(store, stream="s")
            store.folds = True
            subscriber.sync(head - behind)
            store.folds = way == "folds"
            store.reset()
            subscriber.sync()
            if subscriber.root != root:
                raise AssertionError(f"{name}: {behind} behind by {way} ends at another root")
            costs.append(Cost(name, behind, way, len(store.payloads_read()), store.payload_bytes()))
    # A full sync is what a newcomer reads of a stream whose head has an anchor.
    fresh = HidesFolds()
    Publisher(fresh, stream="s").publish(last)
    newcomer = Subscriber(fresh, stream="s")
    newcomer.sync()
    return [*costs, Cost(name, 0, "full", len(fresh.payloads_read()), fresh.payload_bytes())]


def table(costs: list[Cost]) -> str:
    """One row a distance, with folds against patches and against a full sync."""
    found = {(c.data, c.behind, c.way): c for c in costs}
    head = f"{'data':<10} {'behind':>6} | {'patches':>20} | {'folds':>20} {'/patches':>8} |"
    head += f" {'full sync':>12} {'/folds':>7}"
    lines = [head, "-" * len(head)]
    for (data, behind, way), patches in found.items():
        if way != "patches":
            continue
        folds, full = found[data, behind, "folds"], found[data, 0, "full"]
        lines.append(
            f"{data:<10} {behind:>6} | {patches.bytes:>11,} in {patches.fetches:>5} |"
            f" {folds.bytes:>11,} in {folds.fetches:>5} {folds.bytes / patches.bytes:>8.3f} |"
            f" {full.bytes:>12,} {full.bytes / folds.bytes:>7.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes and fetches of catching up")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    costs = measure("real", real(), (1, 8, 64))
    costs += measure("synthetic", synthetic(), (1, 8, 64, 512))
    print("bytes, in payloads fetched\n" + table(costs))
    if args.json:
        args.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")


if __name__ == "__main__":
    main()
