"""States for tests: random bits of every dtype, changes of a given density, and comparisons bit for
bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from pulse_rl import Bits, Published, Publisher, State, Subscriber, Update, state_root

T = TypeVar("T")
Tensors = dict[str, Bits]
Rng = np.random.Generator

#: The bytes of an element of every dtype, in the order of the dtypes' numbers in docs/format.md.
WIDTHS = {
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 1
    ),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
UINTS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

#: ±0, subnormals, ±Inf and NaNs with several payloads.
SPECIAL_BITS: dict[str, list[int]] = {
    "BF16": [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7F7F, 0x3F80],
    "F16": [0x0000, 0x8000, 0x0001, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x7BFF],
    "F32": [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF],
    "F64": [
        0,
        1 << 63,
        1,
        0x7FF0 << 48,
        0xFFF0 << 48,
        0x7FF8 << 48,
        (0x7FF0 << 48) + 1,
        (1 << 64) - 1,
    ],
    "F8_E4M3": [0x00, 0x80, 0x01, 0x7F, 0xFF, 0x7E],
    "F8_E5M2": [0x00, 0x80, 0x01, 0x7C, 0xFC, 0x7D, 0xFF],
}


def bits(rng: Rng, dtype: str, *shape: int) -> Bits:
    """A tensor of random bits, whatever they mean in its dtype."""
    uint = UINTS[WIDTHS[dtype]]
    return Bits(np.asarray(rng.integers(0, np.iinfo(uint).max, shape, uint, endpoint=True)), dtype)


_TRAINED = np.uint16(
    (np.random.default_rng(0).standard_normal(1 << 16, np.float32) * 0.02).view(np.uint32) >> 16
)


def weights(rng: Rng, *shape: int) -> Bits:
    """BF16 weights with the spread of a trained layer: drawn from some, which takes a fifth of the
    time of normal numbers."""
    drawn = rng.integers(0, len(_TRAINED) - 1, shape, np.uint16, endpoint=True)
    return Bits(_TRAINED[drawn], "BF16")


def all_dtypes(rng: Rng, elements: int = 60) -> Tensors:
    """One tensor of each dtype, special values first, and one empty tensor and one scalar of
    each."""
    tensors: Tensors = {}
    for name, width in WIDTHS.items():
        tensors[f"{name}.empty"] = bits(rng, name, 3, 0)
        tensors[f"{name}.scalar"] = bits(rng, name)
        plain = bits(rng, name, elements).array
        special = np.array(SPECIAL_BITS.get(name, []), UINTS[width])[:elements]
        plain[: len(special)] = special
        tensors[f"{name}.values"] = Bits(plain.reshape(-1, 2), name)
    return tensors


def policy(rng: Rng, elements: int = 3000) -> Tensors:
    """A small state in the shape of a model: BF16 weights, an FP32 norm, an integer buffer."""
    return {
        "embed.weight": weights(rng, elements // 10, 10),
        "layers.0.mlp.weight": weights(rng, elements),
        "layers.0.norm.weight": bits(rng, "F32", 16),
        "layers.1.mlp.weight": weights(rng, elements // 2, 2),
        "steps": bits(rng, "I64"),
    }


def mutated(rng: Rng, tensors: Tensors, density: float = 0.01) -> Tensors:
    """A copy in which ``density`` of each tensor's elements (at least one, unless it is 0) have
    other bits."""
    result = {}
    for name, old in tensors.items():
        array = old.array.copy()
        flat = array.reshape(-1)
        count = min(flat.size, max(round(density * flat.size), 1 if density else 0))
        at = rng.choice(flat.size, count, replace=False) if count else np.empty(0, np.int64)
        flat[at] ^= rng.integers(1, np.iinfo(flat.dtype).max, count, flat.dtype, endpoint=True)
        result[name] = Bits(array, old.dtype)
    return result


def history(rng: Rng, versions: int, density: float = 0.01, elements: int = 3000) -> list[Tensors]:
    """Consecutive states of one policy."""
    states = [policy(rng, elements)]
    while len(states) < versions:
        states.append(mutated(rng, states[-1], density))
    return states


class TinyTrainer:
    """A state of two BF16 tensors with 60,000 elements each; a step flips the lowest bit of a
    few."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        bits = (
            self.rng.normal(0, 0.02, (2, 60_000)).astype(np.float32).view(np.uint32) >> 16
        ).astype(np.uint16)
        self.state = {"a": Bits(bits[0].reshape(200, 300), "BF16"), "b": Bits(bits[1], "BF16")}

    def step(self, density: float = 0.003) -> None:
        for tensor in self.state.values():
            tensor.array[self.rng.random(tensor.array.shape) < density] ^= 1

    def publish(self, publisher: Publisher, versions: int = 1, **arguments: Any) -> Published:
        """A step before each of these versions; the report of the last."""
        for _ in range(versions):
            self.step()
            published = publisher.publish(self.state, **arguments)
        return published


def snapshot(state: State | Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything that two equal states share: (dtype, shape, bytes) under every name, copied."""
    state = state if isinstance(state, State) else State.of(state)
    return {
        n: (state.spec(n).dtype.name, state.spec(n).shape, state.read(n).tobytes()) for n in state
    }


def roots(states: list[Tensors]) -> list[str]:
    return [state_root(state) for state in states]


class Live:
    """A worker's own copy in plain numpy, changed by nothing but the updates that it is given."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def apply(self, update: Update | None) -> None:
        if update is None:
            return
        if update.full:
            self.tensors = {}
        for tensor in update.tensors:
            if tensor.indices is None:
                array = tensor.values.copy().reshape(tensor.spec.shape)
                self.tensors[tensor.spec.name] = Bits(array, tensor.spec.dtype.name)
            else:
                self.tensors[tensor.spec.name].array.reshape(-1)[tensor.indices] = tensor.values
        update.acknowledge()

    @property
    def root(self) -> str:
        return state_root(self.tensors)


def taken(worker: Subscriber, target: int | None = None) -> Update | None:
    """What a sync returns, acknowledged as by a live model that has it at once."""
    if update := worker.sync(target):
        update.acknowledge()
    return update


def reach(worker: Subscriber, root: str, version: int | None = None) -> None:
    """The newest version is the one with this root, and of this number."""
    worker.sync()
    assert worker.root == root
    assert version in (None, worker.version)


def publish_each(publisher: Publisher, states: Iterable[Tensors]) -> None:
    for state in states:
        publisher.publish(state)


def present(value: T | None) -> T:
    assert value is not None
    return value


def run_python(code: str, *args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter; its output is captured.

    One arena: for programs that limit their address space, of which glibc reserves 64 MiB for each
    new thread's.
    """
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env=environment
    )


#: For programs of `run_python`: from the call on, allocating more than so many bytes is a
#: MemoryError.
LIMIT_MEMORY = """
import re, resource
def limit_memory(spare_bytes):
    held = int(re.search(r"VmSize:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + spare_bytes, held + spare_bytes))
"""
