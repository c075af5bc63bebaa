"""How ranks find their baseline in an existing stream: each reads its slices of the head (docs/protocol.md, 10)."""

from __future__ import annotations

import json
from collections.abc import Callable

from .._util.collective import RankGroup
from ..errors import ChainGap
from ..events import Listener
from ..patch.blocks import cut
from ..state.tensors import Segment, UIntArray
from ..stream.manifest import Link, Payload
from ..stream.stream import Stream
from ..stream.unreadable import UNREADABLE
from .catch_up import catch_up
from .host_state import HostState
from .layout import Layout, whole_layout
from .leaves import Leaves, gather_tree, hash_shared, inner_leaves
from .pending import Baseline
from .planner import BROKEN_LINK, Planner
from .slices import restore_slices

_FINE = b"+"


def restore_whole(
    stream: Stream, version: int, root: str, *, threads: int | None, listener: Listener | None
) -> Baseline | str:
    """The whole of ``version`` with its ``root``, read from the store as a subscriber does it; or why that fails.
    Raises StoreUnavailable."""
    host = HostState(threads=threads, listener=listener)
    try:
        catch_up(host, stream, version)
    except (ChainGap, *UNREADABLE) as error:
        return str(error)
    layout = whole_layout(host.state.specs, host.state.aliases)
    leaves: Leaves = {
        (name, k): of[32 * k : 32 * k + 32] for name, of in host.digest.leaves.items() for k in range(len(of) // 32)
    }
    blocks = cut(layout.specs)
    return Baseline(version, root, layout, layout.segments(0), blocks, host.state, leaves, host.history)


def restore_baseline(
    stream: Stream, ranks: RankGroup, layout: Layout, version: int, root: str, *, threads: int | None
) -> Baseline | str:
    """What this rank publishes of ``version``, read from the store, once all ranks have theirs and these have the
    ``root``; or why that fails. A collective: raises what `RankGroup.run_on_all` does, StoreUnavailable, say."""
    path = _said(ranks.on_rank0(lambda: _or_reason(lambda: _path_to(stream, version))))
    if isinstance(path, str):
        return path
    links, made = _links_of(path), list[Baseline]()

    def restore() -> bytes:
        segments = layout.segments(ranks.rank)
        state = restore_slices(stream, links, layout.specs, segments, threads=threads)
        blocks = cut(layout.specs, segments)
        leaves = inner_leaves(blocks, lambda segment: state.read(*segment.place))
        made.append(Baseline(version, root, layout, segments, blocks, state, leaves))
        return b""

    for message in ranks.run_on_all(lambda: _or_reason(restore)):
        if isinstance(reason := _said(message), str):
            return reason
    (baseline,) = made

    def elements(segment: Segment) -> UIntArray:
        return baseline.state.read(*segment.place)

    with ranks.isolated():
        leaves = baseline.leaves | hash_shared(list(layout.shared.values()), ranks, elements, threads)
        tree = gather_tree(layout, ranks, leaves)
    if ranks.on_rank0(lambda: tree.root.encode() if tree else b"").decode() != root:
        return "what was restored has another root"
    return baseline._replace(leaves=leaves)


def _path_to(stream: Stream, version: int) -> bytes:
    """The links from an anchor to ``version``, as `_links_of` reads them. Raises ChainGap, and what reading manifests
    raises."""
    path = [stream.resolved(planned) for planned in Planner(stream, version).plan(None)]
    return json.dumps(
        [[link.base, link.version, [[p.sha256, p.bytes] for p in link.payloads or ()]] for link in path]
    ).encode()


def _links_of(message: bytes) -> list[Link]:
    found = []
    for base, version, said in json.loads(message):
        payloads = tuple(Payload(*payload) for payload in said)
        found.append(Link(base, version, sum(payload.bytes for payload in payloads), payloads))
    return found


def _or_reason(work: Callable[[], bytes]) -> bytes:
    """What ``work()`` returns behind a mark, or why the version cannot be restored. Raises what is worth a retry."""
    try:
        return _FINE + work()
    except BROKEN_LINK as error:
        return b"-" + str(error).encode()


def _said(message: bytes) -> bytes | str:
    return message[1:] if message[:1] == _FINE else message[1:].decode()
