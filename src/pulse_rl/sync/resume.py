"""How a publisher finds its baseline in an existing stream (docs/protocol.md, 3, "Resume")."""

from __future__ import annotations

from ..errors import ChainGap
from ..events import BaselineRestored
from ..state.digest import state_digest
from ..state.tensors import State
from ..stream.manifest import Manifest
from ..stream.stream import Stream
from ..stream.unreadable import UNREADABLE
from .catch_up import catch_up
from .host_state import HostState


def resume(
    baseline: HostState, stream: Stream, head: Manifest, state: State, *, anchor_ratio: float
) -> tuple[BaselineRestored, int]:
    """Makes the version ``head`` the baseline: from ``state``, the caller's, if it is that version, else from the
    store.

    Returns what happened, and the bytes of the patches since the last anchor. If the head cannot be restored, the
    baseline becomes unusable, and the event says why. Raises StoreUnavailable.
    """
    version = head.version
    try:
        since_anchor = bytes_since_anchor(stream, version, anchor_ratio)
        state = state.stored_as(set(head.aliases.values()))
        own = State.empty(state.specs, state.aliases)
        digest = state_digest(own, source=state, threads=baseline.threads)
        if digest.root == head.root:
            baseline.adopt(version, own, digest)
            return BaselineRestored(stream.name, version, "matched"), since_anchor
        del own  # before another state is restored
        catch_up(baseline, stream, version)
        baseline.acknowledge()
    except (ChainGap, *UNREADABLE) as error:
        return BaselineRestored(stream.name, version, "anchored", str(error)), 0
    return BaselineRestored(stream.name, version, "restored"), since_anchor


def bytes_since_anchor(stream: Stream, version: int, anchor_ratio: float) -> int:
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
