"""How a publisher finds its baseline in an existing stream (docs/protocol.md, 3, "Resume")."""

from __future__ import annotations

from ..errors import ChainGap, FormatError, NotFound, Untrusted
from ..events import Resumed
from ..state.digest import state_digest
from ..state.tensors import State
from ..stream.stream import Stream
from .catch_up import catch_up
from .host_state import HostState


def resume(baseline: HostState, stream: Stream, head: int, state: State, *, anchor_ratio: float) -> tuple[Resumed, int]:
    """Makes version ``head`` the baseline: from ``state``, the caller's, if it is that version, else from the store.

    Returns what happened, and the bytes of the patches since the last anchor. If the head cannot be restored, the
    baseline becomes unusable, and the event says why: so it is with a head that no trusted key has signed. Raises
    StoreUnavailable.
    """
    try:
        since_anchor = _bytes_since_anchor(stream, head, anchor_ratio)
        manifest = stream.manifest(head)
        state = state.stored_as(set(manifest.aliases.values()))
        digest = state_digest(state, threads=baseline.threads)
        if digest.root == manifest.root:
            baseline.adopt(head, state.copy(), digest)
            return Resumed(stream.name, head, "matched"), since_anchor
        catch_up(baseline, stream, head)
        baseline.acknowledge()
    except (ChainGap, NotFound, FormatError, Untrusted) as error:
        return Resumed(stream.name, head, "anchored", str(error)), 0
    return Resumed(stream.name, head, "restored"), since_anchor


def _bytes_since_anchor(stream: Stream, version: int, anchor_ratio: float) -> int:
    """Bytes of the patches that a new worker replays to ``version`` after its last anchor.

    Counted no further than past ``anchor_ratio`` times the state's bytes, which makes the next anchor due.
    """
    total = 0
    while True:
        manifest = stream.manifest(version)
        if manifest.anchor or not manifest.patch or total > anchor_ratio * manifest.dense_bytes:
            return total
        total += sum(p.bytes for p in manifest.patch.parts)
        version = manifest.patch.base
