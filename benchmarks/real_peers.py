"""The library beside the peers' real code, on the same state in one run: bytes, speed, memory, and who hashes what.

    python -m benchmarks.real_peers [--shape 30m] [--lr 3e-6] [--times 2] [--peers NAME ...] [--json FILE]

PEER_GRAIL=CHECKOUT   a checkout of one-covenant/grail, the PULSE paper's code; needs its packages zstandard and xxhash
zipnn                 the package, with its own delta mode

A peer that is not to be had is named as absent. publish: from two states in memory to what would be sent; consume: from
that and the old state to the new one. Every peer is measured in a process of its own; every result is compared bit for
bit. GB are of model bytes; seconds are the best of some rounds; peaks are in states, beyond the old and new one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.measure import Mapping16, state_of, timed
from benchmarks.peers import peers as layouts
from benchmarks.synthetic import SHAPES, pair
from pulse_rl import MemoryStore, Publisher, Subscriber
from pulse_rl._util.threads import default_threads
from pulse_rl.state.digest import state_digest


class Absent(Exception):
    """Why a peer cannot be measured here."""


class RealPeer(ABC):
    """``hashes`` says what proves the result, and with what."""

    hashes: str

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        self.old, self.new = old, new

    def prepare(self) -> None:  # noqa: B027  # most peers need none
        """What each round begins with, outside the clock."""

    @abstractmethod
    def publish(self) -> int:
        """Makes what would be sent; how many bytes it has."""

    @abstractmethod
    def consume(self) -> None:
        """Turns the old state and what was sent into the new state."""

    @abstractmethod
    def check(self) -> None:
        """Raises AssertionError unless `consume` made the new state."""


class Pulse(RealPeer):
    hashes = "all leaves, payload, manifest: SHA-256; each block decoded again"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        super().__init__(old, new)
        self.states = state_of(old), state_of(new)
        self.root = ""

    def prepare(self) -> None:
        store = MemoryStore()
        self.publisher, self.subscriber = Publisher(store, stream="peers"), Subscriber(store, stream="peers")
        self.publisher.publish(self.states[0])
        if update := self.subscriber.sync():
            update.acknowledge()

    def publish(self) -> int:
        published = self.publisher.publish(self.states[1])
        self.root = published.root
        return published.patch_bytes

    def consume(self) -> None:
        self.subscriber.sync()

    def check(self) -> None:
        assert self.subscriber.root == self.root == state_digest(self.states[1]).root


class Grail(RealPeer):
    hashes = "all weights once on either side: xxh3-128; no proof, no commit"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        import torch

        super().__init__(old, new)
        if "PEER_GRAIL" not in os.environ:
            raise Absent("PEER_GRAIL is not set")
        folder = Path(os.environ["PEER_GRAIL"]) / "grail" / "infrastructure"
        self.codec, self.delta = _module(folder / "sparse_codec.py"), _module(folder / "delta_checkpoint.py")
        self.a, self.b = (
            {k: torch.from_numpy(v.view(np.int16)).view(torch.bfloat16) for k, v in state.items()}
            for state in (old, new)
        )
        self.base, self.data, self.digest, self.made = self.a, b"", "", self.a

    def prepare(self) -> None:
        self.base = {name: tensor.clone() for name, tensor in self.a.items()}  # it is patched in place

    def publish(self) -> int:
        sparse, shapes, _ = self.delta.compute_sparse_delta(self.b, self.base)
        self.data = self.codec.encode_sparse_delta_v3_1(sparse, shapes)
        self.digest = self.delta.compute_weights_hash(self.b)
        return len(self.data)

    def consume(self) -> None:
        sparse, shapes = self.codec.decode_sparse_delta_v3_1(self.data)
        self.made = self.delta.apply_sparse_delta(self.base, sparse, shapes)
        assert self.delta.verify_weights_hash(self.made, self.digest)

    def check(self) -> None:
        import torch

        assert all(torch.equal(self.made[k].view(torch.int16), v.view(torch.int16)) for k, v in self.b.items())


def _module(path: Path) -> ModuleType:
    """A file of a checkout on its own, without the packages that its package imports."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise Absent(f"there is no {path.name} in PEER_GRAIL")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise Absent(f"its package {error.name} is not installed") from error
    return module


class ZipNN(RealPeer):
    hashes = "nothing"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        super().__init__(old, new)
        found = [layout for layout in layouts() if layout.name == "zipnn"]
        if not found:
            raise Absent("the package is not installed")
        self.layout, self.data = found[0], b""
        self.a, self.b = [v.reshape(-1) for v in old.values()], [v.reshape(-1) for v in new.values()]
        self.made = [v.copy() for v in self.a]

    def publish(self) -> int:
        self.data = self.layout.encode(self.a, self.b, default_threads())
        return len(self.data)

    def prepare(self) -> None:
        for made, old in zip(self.made, self.a, strict=True):
            made[:] = old

    def consume(self) -> None:
        self.layout.decode(self.made, self.data, default_threads())

    def check(self) -> None:
        assert all(map(np.array_equal, self.made, self.b))


PEERS: dict[str, type[RealPeer]] = {
    "pulse": Pulse,
    "grail": Grail,
    "zipnn": ZipNN,
}


def measure(name: str, shape: str, lr: float, times: int) -> dict[str, Any]:
    old, new = pair(SHAPES[shape], lr)
    nbytes = sum(v.nbytes for v in old.values())
    changed = sum(int(np.count_nonzero(old[k] != new[k])) for k in old)
    try:
        peer = PEERS[name](old, new)
    except Absent as absent:
        return {"absent": str(absent)}
    found: dict[str, Any] = {"hashes": peer.hashes, "publish": 0.0, "consume": 0.0, "peak": 0.0}
    for _ in range(times):
        peer.prepare()
        published, size = timed(peer.publish)
        consumed, _ = timed(peer.consume)
        peer.check()
        found["publish"] = max(found["publish"], nbytes / published.wall / 1e9)
        found["consume"] = max(found["consume"], nbytes / consumed.wall / 1e9)
        found["peak"] = max(found["peak"], max(published.peak, consumed.peak) / nbytes)
        found |= {"bytes": size, "bytes_per_changed": size / changed, "density": 2 * changed / nbytes}
    return found


def report(shape: str, lr: float, times: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Measures and prints one row a peer."""
    print(f"\nreal code of others, {shape}, lr {lr:g}; GB/s of model bytes, peak in states")
    print(f"{'':18}{'bytes':>12}{'a change':>10}{'publish':>9}{'consume':>9}{'peak':>7}  who hashes what")
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        command = [sys.executable, "-m", "benchmarks.real_peers", "--shape", shape, "--lr", str(lr)]
        command += ["--times", str(times), "--measure", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        rows[name] = r = json.loads(done.stdout.splitlines()[-1])
        if "absent" in r:
            print(f"{name:18}absent: {r['absent']}", flush=True)
            continue
        cells = f"{r['bytes']:12,}{r['bytes_per_changed']:10.3f}{r['publish']:9.2f}{r['consume']:9.2f}{r['peak']:7.2f}"
        print(f"{name:18}{cells}  {r['hashes']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="the library beside the peers' real code")
    parser.add_argument("--shape", choices=list(SHAPES), default="30m")
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.shape, args.lr, args.times)))
        return
    rows = report(args.shape, args.lr, args.times, args.peers)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
