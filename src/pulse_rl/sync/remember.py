"""Which of the last changes a publisher remembers, and its readers with it (docs/protocol.md, section 12).

What is remembered at a version must be known to everybody who can get there: by single patches, by an aligned fold of
`STRETCH` versions, by one that ends at a multiple of `ANEW`, or by an anchor.
"""

from __future__ import annotations

from ..patch.history import History, Stretch
from ..state.tensors import State

STRETCH = 8
ANEW = 64
_SHARE = 16
"""What is remembered takes at most one part in this many of the state's bytes."""


def remembered(history: History, stretch: Stretch, version: int, state: State, *, threads: int | None) -> History:
    """The history at ``version``, to which the one patch of ``stretch`` leads from where ``history`` ends."""
    if version % ANEW == 0:
        return History()
    longer = history.then(stretch)
    single = [span for span in longer.spans if span == 1]
    whole = (STRETCH,) if len(single) == STRETCH else ()
    spans = longer.spans if version % STRETCH else whole
    found = longer.regrouped(spans, state.specs, threads=threads)
    while found.nbytes * _SHARE > state.nbytes:
        found = History(found.stretches[1:])
    return found


def keeps_history(base: int, version: int) -> bool:
    """Whether who takes this fold knows all that is remembered at ``version``."""
    return version % ANEW == 0 or (version - base == STRETCH and version % STRETCH == 0)
