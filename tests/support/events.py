"""One event of each kind."""

from __future__ import annotations

from pulse_rl.events import (
    BaselineRestored,
    CallFailed,
    Event,
    FallbackUsed,
    Folded,
    Hint,
    Progress,
    Published,
    Relayed,
    Served,
    Synced,
)

PUBLISHED = Published("policy", 1, "00", 1000, 10, 2000, 50, 0, 0.5, {"build": 0.4}, {"step": 1})
SYNCED = Synced("policy", 4, 1, "00", ("the patch",), 50, 0.5, 1.5, {"fetch": 0.4})
ONE_OF_EACH: list[Event] = [
    Progress("diff", 1, 2),
    PUBLISHED,
    BaselineRestored("policy", 1, "matched"),
    SYNCED,
    CallFailed("policy", "sync", "chain_gap", "no path"),
    FallbackUsed("policy", "the patch 0->1", "its bytes do not match", "corrupt_patch"),
    Hint("policy", 1, "wide_dtype", "nearly all elements changed", "publish the compute dtype"),
    Folded("policy", 0, 8, 100, 400),
    CallFailed("policy", "fold", "store", "the fold 0->8: gone"),
    Relayed("policy", 3, 1, ("the patch 1->3",), 60, 0.5, 2.5),
    Served("GET", "policy/versions/", 200, 70),
]
