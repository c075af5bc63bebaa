"""The SHA-256 tree of a sharded state: each rank hashes what it publishes (docs/format.md, section
2).

A leaf that several ranks publish is hashed by one after another: each passes on the state of the
hash, never weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .._native import sha256_absorb, sha256_begin, sha256_digests
from .._util.collective import RankGroup
from .._util.threads import ordered_map
from ..patch.tree import Leaves, tree_of
from ..state.bits import UIntArray
from ..state.digest import StateDigest
from ..state.tensors import Segment
from .layout import Fragment, ShardedLayout, whole_leaves

MIDSTATE_BYTES = 104
_TOGETHER = 64


def hash_shared(
    leaves: Sequence[tuple[Fragment, ...]],
    ranks: RankGroup,
    elements: Callable[[Segment], UIntArray],
    threads: int | None,
) -> Leaves:
    """Hashes ``leaves``, each given by its ranks' fragments in order, rank by rank; returns those
    that end on this one.

    ``elements`` gives this rank's. All ranks call this with the same leaves. Raises RankLost.
    """
    me, found = ranks.rank, dict[tuple[str, int], bytes]()
    held: dict[int, bytes] = {}
    # Step by step, all leaves at once: of each the rank whose turn it is absorbs its bytes, and
    # passes the state on.
    for step in range(max(map(len, leaves), default=0)):
        now = [k for k, fragments in enumerate(leaves) if step < len(fragments)]
        mine = [k for k in now if leaves[k][step].rank == me]
        if step == 0:
            held = {k: sha256_begin(1) for k in mine}
        absorbed = _absorb(
            [held.pop(k) for k in mine], [leaves[k][step].segment for k in mine], elements, threads
        )
        sent: dict[int, bytearray] = {}
        for k, midstate in zip(mine, absorbed, strict=True):
            if step + 1 == len(leaves[k]):  # the last fragment: the leaf is this rank's
                last = leaves[k][step]
                found[last.segment.spec.name, last.leaf] = sha256_digests(
                    np.frombuffer(midstate, np.uint8)
                )
            else:
                sent.setdefault(leaves[k][step + 1].rank, bytearray()).extend(midstate)
        coming = [k for k in now if step + 1 < len(leaves[k]) and leaves[k][step + 1].rank == me]
        senders: dict[int, list[int]] = {}
        for k in coming:
            senders.setdefault(leaves[k][step].rank, []).append(k)
        received = ranks.exchange(
            {rank: np.frombuffer(data, np.uint8) for rank, data in sent.items()},
            {rank: MIDSTATE_BYTES * len(of) for rank, of in senders.items()},
        )
        for rank, of in senders.items():
            data = received[rank].tobytes()
            held |= {k: data[MIDSTATE_BYTES * i :][:MIDSTATE_BYTES] for i, k in enumerate(of)}
    return found


def _absorb(
    midstates: list[bytes],
    segments: list[Segment],
    elements: Callable[[Segment], UIntArray],
    threads: int | None,
) -> list[bytes]:
    """The midstates once each has absorbed the elements of the segment in its place."""

    def run(first: int) -> list[bytes]:
        some = midstates[first : first + _TOGETHER]
        arrays = [
            elements(segment).view(np.uint8) for segment in segments[first : first + _TOGETHER]
        ]
        data = sha256_absorb(np.frombuffer(b"".join(some), np.uint8), arrays)
        return [data[MIDSTATE_BYTES * k :][:MIDSTATE_BYTES] for k in range(len(some))]

    starts = range(0, len(midstates), _TOGETHER)
    return [midstate for some in ordered_map(run, starts, threads) for midstate in some]


def gather_tree(layout: ShardedLayout, ranks: RankGroup, own: Leaves) -> StateDigest | None:
    """The tree of the whole state, on rank 0; ``own`` are the leaves that end on this rank. Raises
    RankLost."""
    data = np.frombuffer(b"".join(own[leaf] for leaf in whole_leaves(layout, ranks.rank)), np.uint8)
    # In the order of the layout, which all know: digests alone travel, 32 bytes for each MiB.
    if ranks.rank:
        ranks.exchange({0: data}, {})
        return None
    ended = {rank: list(whole_leaves(layout, rank)) for rank in range(ranks.size)}
    received = ranks.exchange({0: data}, {rank: 32 * len(of) for rank, of in ended.items()})
    found: Leaves = {}
    for rank, of in ended.items():
        digests = received[rank].tobytes()
        found |= {leaf: digests[32 * k : 32 * k + 32] for k, leaf in enumerate(of)}
    return tree_of(layout.specs, found)
