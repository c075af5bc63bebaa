"""Full syncs and patches behind one face: a trainer publishes `Weights`, a worker's `Weights`
follow."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.measure import use_the_papers_layout
from benchmarks.network.run import THREADS
from pulse_rl import Bits, Publisher, Store, Subscriber, state_root
from pulse_rl.events import FallbackUsed, Synced

MODEL = "model.safetensors"
STREAM, FULL = "policy", "full"
#: Of a full sync.
CONNECTIONS = 8


class Weights:
    """A state of BF16 bits in one flat array [elements] uint16; ``state`` names its pieces, in
    their shapes."""

    def __init__(self, flat: np.ndarray, shapes: Mapping[str, Sequence[int]]) -> None:
        self.flat = flat
        self.state: dict[str, Bits] = {}
        at = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            self.state[name] = Bits(flat[at : at + size].reshape(shape), "BF16")
            at += size


@dataclass(frozen=True)
class Version:
    """What was published. ``density`` is None where nothing was compared."""

    version: int
    root: str
    bytes: int
    density: float | None


class Trainer(Protocol):
    """``publish`` stores the weights as the next version; the first is version 0."""

    def publish(self) -> Version: ...


class Worker(Protocol):
    """``sync`` moves the weights to the newest version; ``root`` is their digest, as `Version` has
    it. ``fallbacks`` counts the ways that failed before another one led there."""

    version: int
    fallbacks: int

    def sync(self) -> None: ...

    def root(self) -> str: ...


def trainer(method: str, store: Store | Path, weights: Weights) -> Trainer:
    if isinstance(store, Path):
        return RsyncTrainer(store, weights)
    return FullTrainer(store, weights) if method == "full" else PatchTrainer(store, weights, method)


def worker(method: str, store: Store, weights: Weights) -> Worker:
    """One whose weights are version 0, as a worker has them that starts from the trainer's
    checkpoint."""
    return FullWorker(store, weights) if method == "full" else PatchWorker(store, weights)


class FullTrainer:
    """A full sync at its best: one object a version, fetched over some connections and hashed once
    on each side."""

    def __init__(self, store: Store, weights: Weights) -> None:
        self._store, self._weights, self._next = store, weights, 0

    def publish(self) -> Version:
        data = self._weights.flat.tobytes()
        done = Version(self._next, sha256(data).hexdigest(), len(data), None)
        self._store.put(f"{FULL}/{done.version:012d}-{done.root}", data)
        self._next += 1
        return done


class FullWorker:
    def __init__(self, store: Store, weights: Weights) -> None:
        self._store, self._weights, self.version, self.fallbacks = store, weights, 0, 0
        self._pool = ThreadPoolExecutor(CONNECTIONS)

    def sync(self) -> None:
        newest = [info.name for info in self._store.list(FULL)][-1]
        version, _, digest = newest.rpartition("/")[2].partition("-")
        if int(version) == self.version:
            return
        cuts = [self._weights.flat.nbytes * part // CONNECTIONS for part in range(CONNECTIONS + 1)]
        data = b"".join(
            self._pool.map(lambda start, stop: self._store.get(newest, start, stop), cuts, cuts[1:])
        )
        if sha256(data).hexdigest() != digest:
            raise SystemExit(f"{newest} is damaged")
        self._weights.flat[:] = np.frombuffer(data, np.uint16)
        self.version = int(version)

    def root(self) -> str:
        return sha256(self._weights.flat.data).hexdigest()


class PatchTrainer:
    def __init__(self, store: Store, weights: Weights, codec: str) -> None:
        self._weights = weights
        if codec == "zstd":
            use_the_papers_layout()
        self._publisher = Publisher(store, stream=STREAM, threads=THREADS)

    def publish(self) -> Version:
        done = self._publisher.publish(self._weights.state)
        density = None if done.changed is None else done.density
        return Version(done.version, done.root, done.patch_bytes or done.anchor_bytes, density)


class PatchWorker:
    def __init__(self, store: Store, weights: Weights) -> None:
        self._weights, self.version, self.fallbacks = weights, 0, 0
        heard = self._heard
        self._subscriber = Subscriber(
            store, stream=STREAM, base=weights.state, threads=THREADS, on_event=heard
        )
        self._subscriber.sync(0)

    def sync(self) -> None:
        update = self._subscriber.sync()
        if update is None:
            return
        for name, indices, values in update:
            self._weights.state[name].array.reshape(-1)[
                slice(None) if indices is None else indices
            ] = values
        self.version = update.version

    def root(self) -> str:
        return state_root(self._weights.state)

    def _heard(self, event: object) -> None:
        self.fallbacks += isinstance(event, FallbackUsed)
        if isinstance(event, Synced):
            self.phases = event.phases


class RsyncTrainer:
    """A safetensors file of the bits in a folder that an rsync daemon shows. Its header holds the
    version."""

    def __init__(self, folder: Path, weights: Weights) -> None:
        self._file, self._weights, self._next = folder / MODEL, weights, 0

    def publish(self) -> Version:
        unfinished = self._file.with_suffix(".new")
        write_file(unfinished, self._weights, self._next)
        done = Version(
            self._next, sha256(self._weights.flat.data).hexdigest(), unfinished.stat().st_size, None
        )
        unfinished.replace(self._file)
        self._next += 1
        return done


class RsyncWorker:
    """``daemon`` is its host and port; ``folder`` holds the worker's own file."""

    def __init__(self, daemon: str, folder: Path, weights: Weights) -> None:
        folder.mkdir()
        self._source, self._file, self._weights = (
            f"rsync://{daemon}/run/{MODEL}",
            folder / MODEL,
            weights,
        )
        self.version, self.fallbacks = 0, 0
        write_file(self._file, weights, 0)
        os.utime(self._file, (0, 0))

    def sync(self) -> None:
        subprocess.run(
            ["rsync", "--times", "--no-whole-file", self._source, str(self._file)], check=True
        )
        with safe_open(self._file, "numpy") as file:
            if (version := int(file.metadata()["version"])) != self.version:
                for name, bits in self._weights.state.items():
                    bits.array[:] = file.get_tensor(name)
                self.version = version

    def root(self) -> str:
        return sha256(self._weights.flat.data).hexdigest()


def write_file(path: Path, weights: Weights, version: int) -> None:
    bits = {name: each.array for name, each in weights.state.items()}
    save_file(bits, path, metadata={"version": str(version)})
