"""Full syncs and patches behind one face: a trainer publishes `Weights`, a worker's `Weights` follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np

from benchmarks.network.run import THREADS
from pulse_rl import Bits, Publisher, Store, Subscriber, state_root

STREAM, FULL = "policy", "full"


class Weights:
    """A state of BF16 bits in one flat array [elements] uint16; ``state`` names its pieces, in their shapes."""

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
    """``sync`` moves the weights to the newest version; ``root`` is their digest, as `Version` has it."""

    version: int

    def sync(self) -> None: ...

    def root(self) -> str: ...


def trainer(method: str, store: Store, weights: Weights) -> Trainer:
    return FullTrainer(store, weights) if method == "full" else PatchTrainer(store, weights, method)


def worker(method: str, store: Store, weights: Weights) -> Worker:
    """One whose weights are version 0, as a worker has them that starts from the trainer's checkpoint."""
    return FullWorker(store, weights) if method == "full" else PatchWorker(store, weights)


class FullTrainer:
    """A full sync at its best: one object a version, fetched in one request and hashed once on each side."""

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
        self._store, self._weights, self.version = store, weights, 0

    def sync(self) -> None:
        newest = [info.name for info in self._store.list(FULL)][-1]
        version, _, digest = newest.rpartition("/")[2].partition("-")
        if int(version) == self.version:
            return
        data = self._store.get(newest)
        if sha256(data).hexdigest() != digest:
            raise SystemExit(f"{newest} is damaged")
        self._weights.flat[:] = np.frombuffer(data, np.uint16)
        self.version = int(version)

    def root(self) -> str:
        return sha256(self._weights.flat.data).hexdigest()


class PatchTrainer:
    def __init__(self, store: Store, weights: Weights, codec: str) -> None:
        self._weights = weights
        layout = "zstd" if codec == "zstd" else "auto"
        self._publisher = Publisher(store, stream=STREAM, codec=layout, threads=THREADS)

    def publish(self) -> Version:
        done = self._publisher.publish(self._weights.state)
        density = None if done.changed is None else done.density
        return Version(done.version, done.root, done.patch_bytes or done.anchor_bytes, density)


class PatchWorker:
    def __init__(self, store: Store, weights: Weights) -> None:
        self._weights, self.version = weights, 0
        self._subscriber = Subscriber(store, stream=STREAM, base=weights.state, threads=THREADS)
        self._subscriber.sync(0)

    def sync(self) -> None:
        update = self._subscriber.sync()
        if update is None:
            return
        for name, indices, values in update:
            self._weights.state[name].array.reshape(-1)[slice(None) if indices is None else indices] = values
        self.version = update.version

    def root(self) -> str:
        return state_root(self._weights.state)
