"""The SHA-256 tree: leaves of 1 MiB, a digest per tensor, one root per state (docs/format.md,
section 2).

``leaf = SHA-256(bytes)``, ``tensor = SHA-256("pulse.tensor.1\\0", name, dtype, shape, leaves)``,
``root = SHA-256("pulse.state.1\\0", tensor digests in name order)``. Name, dtype and shape are part
of the root.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._native import sha256_changed_leaves, sha256_leaves
from .._util.threads import ordered_map
from .bits import UIntArray
from .tensors import State, TensorSpec

LEAF_BYTES = 1 << 20
_TENSOR_TAG = b"pulse.tensor.1\0"
_STATE_TAG = b"pulse.state.1\0"

# Leaves are hashed side by side, at most 16. Small tensors share a task: a thread switch costs more
# than their hashes.
_TASK_BYTES = 16 * LEAF_BYTES


@dataclass(frozen=True, repr=False)
class StateDigest:
    """The SHA-256 tree of a state with ``specs``. ``leaves[name]`` holds a tensor's 32-byte leaf
    digests, in order; the dictionary must not change."""

    specs: tuple[TensorSpec, ...]
    leaves: dict[str, bytes]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.specs)} tensors: root {self.root}>"

    @cached_property
    def root(self) -> str:
        """The root as 64 hexadecimal digits."""
        return root_of(self.tensor_digests)

    @cached_property
    def tensor_digests(self) -> bytes:
        """The 32-byte digests of the tensors, one after another, in the order of the names."""
        return b"".join(map(self.tensor, self.specs))

    def tensor(self, spec: TensorSpec) -> bytes:
        """The 32-byte digest of the tensor ``spec``."""
        return tensor_digest(spec, self.leaves[spec.name])


@dataclass(frozen=True, slots=True, repr=False)
class PartDigest(StateDigest):
    """The tree of a state of which only ``specs`` are held, with their ``leaves``. ``whole`` are
    the specs of all its tensors in the order of the names, ``tensors`` their 32-byte digests, one
    after another."""

    whole: tuple[TensorSpec, ...]
    tensors: bytes

    @property
    def root(self) -> str:
        """The root of the whole state as 64 hexadecimal digits, of what is held and the digests of
        the rest."""
        own = {spec.name: self.tensor(spec) for spec in self.specs}
        digests = (
            own.get(s.name) or self.tensors[32 * k : 32 * k + 32] for k, s in enumerate(self.whole)
        )
        return root_of(b"".join(digests))

    def of(self, specs: tuple[TensorSpec, ...]) -> PartDigest:
        """The same tree, with the leaves of ``specs`` only."""
        return PartDigest(
            specs, {spec.name: self.leaves[spec.name] for spec in specs}, self.whole, self.tensors
        )


class Changed(NamedTuple):
    """A flat array, and new bits ``values`` at ``positions - base``, which ascend, of elements of
    it."""

    elements: UIntArray
    positions: npt.NDArray[np.uint32]
    base: int
    values: UIntArray


def leaf_digests(bits: UIntArray) -> bytes:
    """The leaf digests of a flat array, 32 bytes each, one after another; empty for an empty
    array."""
    return sha256_leaves([bits.view(np.uint8)], LEAF_BYTES)


def leaves_of(arrays: Sequence[UIntArray]) -> list[bytes]:
    """The leaf digests of each array, hashed side by side."""
    return _split(sha256_leaves([a.view(np.uint8) for a in arrays], LEAF_BYTES), arrays)


def changed_leaves_of(changed: Sequence[Changed]) -> list[bytes]:
    """The leaf digests that arrays of one dtype would have once changed. Writes nothing. Raises
    IndexError."""
    if not any(len(change.values) for change in changed):
        return leaves_of([change.elements for change in changed])
    raw = [
        (c.elements.view(np.uint8), c.positions, c.base, c.values.view(np.uint8)) for c in changed
    ]
    digests = sha256_changed_leaves(raw, LEAF_BYTES, changed[0].elements.dtype.itemsize)
    return _split(digests, [change.elements for change in changed])


def _split(digests: bytes, arrays: Sequence[UIntArray]) -> list[bytes]:
    ends = accumulate(32 * -(-a.nbytes // LEAF_BYTES) for a in arrays)
    starts = [0, *ends]
    return [digests[start:end] for start, end in pairwise(starts)]


def tensor_digest(spec: TensorSpec, leaves: bytes) -> bytes:
    """The 32-byte digest of one tensor from its leaf digests."""
    name, dtype = spec.name.encode(), spec.dtype.name.encode()
    head = struct.pack("<I", len(name)) + name + struct.pack("<I", len(dtype)) + dtype
    shape = struct.pack("<I", len(spec.shape)) + b"".join(struct.pack("<Q", d) for d in spec.shape)
    return sha256(_TENSOR_TAG + head + shape + leaves).digest()


def root_of(tensor_digests: bytes) -> str:
    """The root (64 hexadecimal digits) over tensors' 32-byte digests, in the order of the sorted
    names."""
    return sha256(_STATE_TAG + tensor_digests).hexdigest()


def state_digest(
    state: State,
    *,
    source: State | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> StateDigest:
    """Hashes a whole state in threads. ``progress`` is called with the number of bytes done since
    the last call.

    With a ``source`` of the same tensors, ``state`` is filled from it on the way, each piece hashed
    while it is in the cache: the digest is that of the copy, whatever becomes of the source.
    """
    tasks: list[list[tuple[str, int, int]]] = []
    room = 0
    for spec in state.specs:
        step = _TASK_BYTES // spec.dtype.width
        for start in range(0, spec.elements, step):
            stop = min(start + step, spec.elements)
            nbytes = (stop - start) * spec.dtype.width
            if nbytes > room:
                tasks.append([])
                room = _TASK_BYTES
            tasks[-1].append((spec.name, start, stop))
            room -= nbytes

    def run(task: list[tuple[str, int, int]]) -> list[bytes]:
        if source is not None:
            for piece in task:
                state.read(*piece)[:] = source.read(*piece)
        return leaves_of([state.read(*piece) for piece in task])

    leaves: dict[str, list[bytes]] = {spec.name: [] for spec in state.specs}
    for task, digests in zip(tasks, ordered_map(run, tasks, threads), strict=True):
        for (name, start, stop), digest in zip(task, digests, strict=True):
            leaves[name].append(digest)
            if progress:
                progress((stop - start) * state.spec(name).dtype.width)
    return StateDigest(state.specs, {name: b"".join(pieces) for name, pieces in leaves.items()})
