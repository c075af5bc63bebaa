"""Faults in what the ranks of a sharded trainer do together."""

from __future__ import annotations

from .mutant import one

RANKS = [
    one(
        "a rank forgets to store its part",
        "integrations.fsdp.upload",
        "        stream.put_payload(payload, PATCH, chunks)\n",
        "        if rank != 1:\n            stream.put_payload(payload, PATCH, chunks)\n",
    ),
    one(
        "the ranks' baselines stay behind a commit",
        "integrations.fsdp.draft",
        "                bits.put(self.state.read(*segment.place), piece.positions, piece.values, base)\n",
        "                pass\n",
    ),
    one(
        "pieces of a leaf are hashed by the ranks in any order",
        "integrations.fsdp.leaves",
        "    for step in range(max(map(len, leaves), default=0)):\n",
        "    leaves = [tuple(reversed(fragments)) for fragments in leaves]\n"
        "    for step in range(max(map(len, leaves), default=0)):\n",
    ),
    one(
        "the ranks' folds have no old bits",
        "integrations.fsdp.folds",
        "            kept.log.record(undo)\n",
        "            pass\n",
    ),
    one(
        "one rank's failure to store is not told to the others",
        "integrations.fsdp.ranks",
        '            failure, message = error, b"-" + _told(error)\n',
        '            failure, message = error, b"+"\n',
    ),
]
