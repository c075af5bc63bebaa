"""How ranks find their baseline in an existing stream: each reads its slices of the head (docs/protocol.md, 10)."""

from __future__ import annotations

from collections.abc import Callable

from ..._util.collective import RankGroup
from ...patch.blocks import cut
from ...state.slices import Segment
from ...state.tensors import UIntArray
from ...stream.stream import Stream
from ...sync.planner import BROKEN_LINK
from ...sync.slices import restore_slices
from .draft import Baseline, all_inner_leaves
from .head import Head, links_of_message
from .layout import Layout
from .leaves import gather_tree, hash_shared

_FINE = b"+"


def restore_baseline(
    stream: Stream, head: Head, ranks: RankGroup, layout: Layout, version: int, root: str, *, threads: int | None
) -> Baseline | str:
    """What this rank publishes of ``version``, read from the store, once all ranks have theirs and these have the
    ``root``; or why that fails. A collective: raises what `RankGroup.run_on_all` does, StoreUnavailable, say."""
    path = _said(ranks.on_rank0(lambda: _or_reason(lambda: head.path_to(version))))
    if isinstance(path, str):
        return path
    links, made = links_of_message(path), list[Baseline]()

    def restore() -> bytes:
        state = restore_slices(stream, links, layout.specs, layout.segments(ranks.rank), threads=threads)
        blocks = cut(layout.specs, state.segments)
        leaves = all_inner_leaves(blocks, state, threads)
        made.append(Baseline(version, root, layout, blocks, state, leaves))
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


def _or_reason(work: Callable[[], bytes]) -> bytes:
    """What ``work()`` returns behind a mark, or why the version cannot be restored. Raises what is worth a retry."""
    try:
        return _FINE + work()
    except BROKEN_LINK as error:
        return b"-" + str(error).encode()


def _said(message: bytes) -> bytes | str:
    return message[1:] if message[:1] == _FINE else message[1:].decode()
