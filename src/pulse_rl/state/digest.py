"""The SHA-256 tree of a state (docs/format.md, section 2).

A tree has leaves of 1 MiB, one digest per tensor, and one root per state::

    leaf   = SHA-256(bytes)
    tensor = SHA-256("pulse.tensor.1\\0", name, dtype, shape, leaves)
    root   = SHA-256("pulse.state.1\\0", tensor digests in name order)

So the root covers names, dtypes and shapes too.
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

# The kernel hashes up to 16 leaves at once on one core: 2.9 to 3.7 GB/s, against 1.7 for one leaf
# at a time. Small tensors share a task, because a thread switch costs more than their hashes.
_TASK_BYTES = 16 * LEAF_BYTES


@dataclass(frozen=True, repr=False)
class StateDigest:
    """The SHA-256 tree of a state with ``specs``.

    ``leaves[name]`` holds the leaf digests of a tensor in order, 32 bytes each. The dictionary must
    not change.
    """

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
        """The digests of all tensors in name order, 32 bytes each."""
        return b"".join(map(self.tensor, self.specs))

    def tensor(self, spec: TensorSpec) -> bytes:
        """The 32-byte digest of the tensor ``spec``."""
        name, dtype = spec.name.encode(), spec.dtype.name.encode()
        head = struct.pack("<I", len(name)) + name + struct.pack("<I", len(dtype)) + dtype
        sizes = b"".join(struct.pack("<Q", d) for d in spec.shape)
        shape = struct.pack("<I", len(spec.shape)) + sizes
        return sha256(_TENSOR_TAG + head + shape + self.leaves[spec.name]).digest()


@dataclass(frozen=True, slots=True, repr=False)
class PartDigest(StateDigest):
    """The tree of a state of which a worker holds only the tensors ``specs``, with their
    ``leaves``.

    ``whole`` lists the specs of all its tensors in name order, ``tensors`` their digests, 32 bytes
    each.
    """

    whole: tuple[TensorSpec, ...]
    tensors: bytes

    @property
    def root(self) -> str:
        """The root of the whole state, 64 hexadecimal digits.

        It is computed from the leaves of the held tensors and the stored digests of the others.
        """
        own = {spec.name: self.tensor(spec) for spec in self.specs}
        digests = (
            own.get(s.name) or self.tensors[32 * k : 32 * k + 32] for k, s in enumerate(self.whole)
        )
        return root_of(b"".join(digests))

    def of(self, specs: tuple[TensorSpec, ...]) -> PartDigest:
        """The same tree with the leaves of ``specs`` only."""
        return PartDigest(
            specs, {spec.name: self.leaves[spec.name] for spec in specs}, self.whole, self.tensors
        )


class Changed(NamedTuple):
    """A flat array ``elements``, and new bits ``values`` at the ascending ``positions - base`` in
    it."""

    elements: UIntArray
    positions: npt.NDArray[np.uint32]
    base: int
    values: UIntArray


def leaf_digests(bits: UIntArray) -> bytes:
    """The leaf digests of a flat array, 32 bytes each; empty for an empty array."""
    return sha256_leaves([bits.view(np.uint8)], LEAF_BYTES)


def leaves_of(arrays: Sequence[UIntArray]) -> list[bytes]:
    """The leaf digests of each array, 32 bytes each, all hashed in one call."""
    return _split(sha256_leaves([a.view(np.uint8) for a in arrays], LEAF_BYTES), arrays)


def changed_leaves_of(changed: Sequence[Changed]) -> list[bytes]:
    """The leaf digests that arrays of one dtype would have after their changes; writes nothing.

    Raises IndexError.
    """
    if not any(len(change.values) for change in changed):
        return leaves_of([change.elements for change in changed])
    raw = [
        (c.elements.view(np.uint8), c.positions, c.base, c.values.view(np.uint8)) for c in changed
    ]
    digests = sha256_changed_leaves(raw, LEAF_BYTES, changed[0].elements.dtype.itemsize)
    return _split(digests, [change.elements for change in changed])


def _split(digests: bytes, arrays: Sequence[UIntArray]) -> list[bytes]:
    # An array of n bytes has ceil(n / 1 MiB) leaves of 32 bytes.
    ends = accumulate(32 * -(-a.nbytes // LEAF_BYTES) for a in arrays)
    starts = [0, *ends]
    return [digests[start:end] for start, end in pairwise(starts)]


def root_of(tensor_digests: bytes) -> str:
    """The root, 64 hexadecimal digits, of tensor digests of 32 bytes each in name order."""
    return sha256(_STATE_TAG + tensor_digests).hexdigest()


def state_digest(
    state: State,
    *,
    source: State | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> StateDigest:
    """Hash a whole state in threads.

    With a ``source`` of the same tensors, ``state`` is filled from it meanwhile, and each piece is
    hashed while it is in the cache. The digest is that of the copy, even if the source changes
    during the call. ``progress`` gets the number of bytes since its last call.
    """
    # 1. Tasks of at most 16 MiB: pieces of large tensors, or several small tensors.
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

    # 2. Results arrive in the order of the tasks, so the leaves of a tensor stay in order.
    leaves: dict[str, list[bytes]] = {spec.name: [] for spec in state.specs}
    for task, digests in zip(tasks, ordered_map(run, tasks, threads), strict=True):
        for (name, start, stop), digest in zip(task, digests, strict=True):
            leaves[name].append(digest)
            if progress:
                progress((stop - start) * state.spec(name).dtype.width)
    return StateDigest(state.specs, {name: b"".join(pieces) for name, pieces in leaves.items()})
