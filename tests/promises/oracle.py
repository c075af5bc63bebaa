"""What the promises are checked against: states, their roots by hashlib alone, and a worker's own
copy in numpy.

Nothing here imports more of the library than `pulse_rl` shows, so that these tests outlive any
rewrite of its inside.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np

from pulse_rl import Bits, Subscriber, Update

STREAM = "policy"
LEAF = 1 << 20
Tensors = dict[str, Bits]


def root_of(tensors: Mapping[str, Bits]) -> str:
    """The root of a state: docs/format.md, section 2, and nothing else."""
    digests = b""
    for name in sorted(tensors, key=str.encode):
        array, dtype = tensors[name].array, tensors[name].dtype
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        leaves = b"".join(sha256(data[at : at + LEAF]).digest() for at in range(0, len(data), LEAF))
        head = b"".join(
            struct.pack("<I", len(text)) + text for text in (name.encode(), dtype.encode())
        )
        shape = struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape)
        digests += sha256(b"pulse.tensor.1\0" + head + shape + leaves).digest()
    return sha256(b"pulse.state.1\0" + digests).hexdigest()


def bf16(values: np.ndarray[Any, Any]) -> Bits:
    return Bits((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), "BF16")


class Trainer:
    """Weights of mixed dtypes, and steps that change some of their bits. ``root`` is the
    oracle's."""

    def __init__(self, seed: int = 0, elements: int = 6000) -> None:
        self._rng = np.random.default_rng(seed)
        normal = self._rng.standard_normal
        self.state: Tensors = {
            "embed.weight": bf16(normal((elements // 20, 20)) * 0.02),
            "layers.0.weight": bf16(normal(elements) * 0.02),
            "layers.1.weight": bf16(normal((elements // 30, 10)) * 0.02),
            "norm.weight": Bits(normal(32).astype(np.float32).view(np.uint32), "F32"),
            "steps": Bits(np.zeros((), np.uint64), "I64"),
        }

    def step(self, density: float = 0.01) -> Tensors:
        """The next state, in memory of its own."""
        self.state = {
            name: Bits(bits.array.copy(), bits.dtype) for name, bits in self.state.items()
        }
        for bits in self.state.values():
            flat = bits.array.reshape(-1)
            at = self._rng.choice(flat.size, max(1, round(density * flat.size)), replace=False)
            flat[at] ^= self._rng.integers(1, 4, at.size).astype(flat.dtype)
        return self.state

    @property
    def root(self) -> str:
        return root_of(self.state)


def publish(publisher: Any, trainer: Trainer, count: int = 1, **settings: Any) -> list[str]:
    """The roots of the next ``count`` versions, as the oracle has them and the publisher reports
    them."""
    roots = []
    for _ in range(count):
        published = publisher.publish(trainer.step(), **settings)
        assert published.root == trainer.root
        roots.append(trainer.root)
    return roots


def held(subscriber: Subscriber) -> Tensors:
    """What a subscriber holds, copied out of it."""
    state = subscriber.state
    specs = {spec.name: spec for spec in state.specs}
    return {
        name: Bits(np.array(state.read(name)).reshape(spec.shape), spec.dtype.name)
        for name, spec in specs.items()
    }


class Worker:
    """A subscriber and the model that it serves, which is changed by nothing but its updates."""

    def __init__(self, store: Any, **settings: Any) -> None:
        self.subscriber = Subscriber(store, stream=STREAM, threads=1, **settings)
        self.tensors: Tensors = {}

    def sync(self, target: int | None = None) -> Update | None:
        """Follows, and proves that both copies have the root that the version promises."""
        update = self.subscriber.sync(target)
        if update is not None:
            self.apply(update)
        if self.subscriber.status == "ready":
            assert root_of(held(self.subscriber)) == self.subscriber.root == root_of(self.tensors)
        return update

    def reach(self, trainer: Trainer) -> None:
        """Follows to what the trainer published last."""
        self.sync()
        assert self.root == trainer.root

    def apply(self, update: Update) -> None:
        if update.full:
            self.tensors = {}
        specs = {tensor.spec.name: tensor.spec for tensor in update.tensors}
        for name, indices, values in update:
            if indices is None:
                self.tensors[name] = Bits(
                    np.array(values).reshape(specs[name].shape), specs[name].dtype.name
                )
            else:
                self.tensors[name].array.reshape(-1)[indices] = values

    @property
    def root(self) -> str:
        return root_of(self.tensors)


def objects(store: Any) -> dict[str, bytes]:
    """Everything that the stream's folder of a store holds."""
    return {info.name: bytes(store.get(info.name)) for info in store.list(STREAM)}


def copied(store: Any, into: Any) -> Any:
    """``into``, with the objects of another store."""
    for name, data in objects(store).items():
        into.put(name, data)
    return into
