"""What several ranks of a publisher do together: agree on a call and on who publishes what, move
columns to rows, hash what they share, and find their baseline (docs/protocol.md, section 10)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from hashlib import sha256
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._util.collective import Bytes
from ..errors import InputError, RankLost
from ..patch.blocks import Block
from ..patch.tree import hashed_together
from ..quantize.formats import Shared
from ..state.tensors import Segment, State, TensorSpec
from ..stream.manifest import Manifest
from ..sync.host_state import HostState
from ..sync.pending import Baseline, PublishLayout, PublishState
from ..sync.rank import RankPublisher
from ..sync.request import LocalState, PublishRequest
from .baseline import restore_baseline
from .exchange import ColumnExchange, gather_tree, hash_shared
from .layout import (
    RankTensor,
    ShardedLayout,
    SharedLeaf,
    SlicedState,
    SliceSpec,
    held_from_bytes,
    held_to_bytes,
    layout_from_bytes,
    layout_to_bytes,
    make_layout,
)
from .quantized import Blocks, agree, quantized

if TYPE_CHECKING:
    from ..submit import Submission

_SHOWN = 200


class _Call(NamedTuple):
    """What a rank says of a call: its ``number``, whether it ``goes`` on with it, its
    ``arguments``, a ``digest`` and the length in bytes of the description of what it has, and which
    baseline is ``known`` to it. The rest stays on the rank: its part of the state, the description,
    and the scales to agree on."""

    number: int
    goes: bool
    arguments: Mapping[str, Any] = {}
    digest: str = ""
    nbytes: int = 0
    known: str = ""
    local: LocalState | None = None
    held: bytes = b""
    shared: Mapping[str, tuple[Shared, Blocks]] = {}

    def to_message(self) -> bytes:
        return json.dumps(self[:6]).encode()

    @classmethod
    def from_message(cls, message: bytes) -> _Call:
        return cls(*json.loads(message))


class ShardedRank(RankPublisher):
    """The publisher of one rank, which has some elements of the state."""

    _held_digests: list[bytes] | None = None
    _held: list[bytes] = []  # noqa: RUF012 - replaced, never changed; of all ranks, on rank 0 alone
    _layout: tuple[object, ShardedLayout] | None = None

    def forget(self) -> None:
        super().forget()
        self._held_digests, self._held, self._layout = None, [], None

    def _agree_arguments(
        self, request: PublishRequest, number: int, submission: Submission | None
    ) -> LocalState:
        """This rank's part of the state. The ranks tell each other what they were called with,
        which must be the same, and what they have, if that is not as it was."""

        def described() -> _Call:
            if submission and not submission.begin():
                return _Call(number, False)
            local = request.arrived()
            shared: dict[str, tuple[Shared, Blocks]] = {}
            if local.quantize is not None:
                local, shared = quantized(local)
            held, at = held_to_bytes(_held(local)), self._baseline
            arguments = {
                name: getattr(request, name)
                for name in ("metadata", "dtype", "anchor", "after", "quantize")
            }
            said = json.loads(json.dumps(arguments | {"stream": self._stream.name}))
            digest = sha256(held).hexdigest()
            known = f"{at.version} {at.root} {len(at.history.windows)}" if at else ""
            return _Call(number, True, said, digest, len(held), known, local, held, shared)

        # 1. One message each: the call's number, its arguments, and a digest of what the rank has.
        calls = self._ranks.each(described, _Call.to_message, _Call.from_message)
        for rank, call in enumerate(calls):
            if call.number != calls[0].number:
                raise RankLost(
                    f"ranks diverged: rank 0 is at call {calls[0].number}, rank {rank} at "
                    f"{call.number}",
                    hint="One was interrupted before a call that the others made. Start the ranks "
                    "again.",
                )
        if not all(call.goes for call in calls):
            raise self._ranks.mark_collective(CancelledError())
        if submission:
            submission.set_running_or_notify_cancel()
        self._compare(calls)
        if len({call.known for call in calls}) > 1:
            self._baseline = None  # one rank has lost its own
        # 2. In a steady state that is all. Rank 0 gets the descriptions where one has changed:
        # megabytes, once.
        mine = calls[self._ranks.rank]
        digests = [call.digest.encode() for call in calls]
        if self._held_digests != digests:
            lengths = {rank: call.nbytes for rank, call in enumerate(calls)} if self.first else {}
            came = self._ranks.exchange({0: np.frombuffer(mine.held, np.uint8)}, lengths)
            self._held = [came[rank].tobytes() for rank in range(len(came))]
            self._held_digests = digests
        assert mine.local is not None
        if request.quantize is None:
            return mine.local
        return agree(mine.local, dict(mine.shared), self._ranks)

    def _compare(self, calls: Sequence[_Call]) -> None:
        """Raises RankLost where a rank is at another step, and InputError, on all, where one was
        called with other arguments."""
        first = calls[0].arguments
        for (rank, call), what in product(enumerate(calls), ("stream", "metadata")):
            if call.arguments[what] != first[what]:
                raise RankLost(
                    f"ranks diverged: rank 0 publishes {json.dumps(first[what])[:_SHOWN]}, rank "
                    f"{rank} {json.dumps(call.arguments[what])[:_SHOWN]}",
                    hint="One has missed a step, or was given other metadata. Start the ranks "
                    "again.",
                )
        if found := unlike([call.arguments for call in calls]):
            raise self._ranks.mark_collective(
                InputError(found, hint="Call all ranks with the same arguments.")
            )

    def _layout_of(self, local: LocalState, known: frozenset[str]) -> ShardedLayout:
        """Who publishes what. Rank 0 makes it of the descriptions of all ranks, and sends each its
        part."""
        digests = self._held_digests
        assert digests is not None
        key = tuple(digests), known
        if self._layout is None or self._layout[0] != key:
            ranks = self._ranks

            def make() -> tuple[ShardedLayout | None, list[Bytes]]:
                if not self.first:
                    return None, []
                made = make_layout([held_from_bytes(message) for message in self._held], known)
                others = (layout_to_bytes(made.of_rank(rank)) for rank in range(1, ranks.size))
                return made, [np.frombuffer(view, np.uint8) for view in others]

            made, views = ranks.together(make)
            lengths = ranks.from_first(
                lambda: [0, *map(len, views)], lambda found: json.dumps(found).encode(), json.loads
            )
            mine = lengths[ranks.rank]
            came = ranks.exchange(dict(enumerate(views, 1)), {0: mine} if mine else {})
            if made is None:
                made = layout_from_bytes(came[0].tobytes())
            self._layout = key, made
        return self._layout[1]

    @contextmanager
    def _new_elements(
        self, layout: PublishLayout, local: State, blocks: Sequence[Block]
    ) -> Iterator[Iterator[tuple[range, State]]]:
        """Columns are moved to rows while rows are coded: a task waits for its window, and no rank
        holds a whole tensor."""
        segments = layout.segments(self._ranks.rank)
        assert isinstance(layout, ShardedLayout)
        columns = ColumnExchange(layout, self._ranks, local)
        try:
            here = tuple(s for s in segments if s.spec.name not in layout.moved)
            # A segment is read by its place in the whole tensor.
            whole = all(segment.is_whole for segment in here)
            source = local if whole else SlicedState(here, local)
            yield columns.tasks(hashed_together(blocks, self._threads), blocks, source)
        finally:
            columns.finish()  # other ranks wait for this rank's columns, whatever failed here

    def _allocate(self, segments: Sequence[Segment]) -> State:
        if all(segment.is_whole for segment in segments):
            return super()._allocate(segments)
        return SlicedState.allocate(segments)

    def _hash(self, state: PublishState) -> None:
        """Hashes the leaves that ranks share, if something in them changed. Each rank has hashed
        its own; rank 0 joins them."""
        ranks, layout = self._ranks, state.layout
        assert isinstance(layout, ShardedLayout)
        shared, own = layout.shared, np.zeros(layout.shares, bool)
        for k, fragments in shared.items():
            own[k] = any(f.rank == ranks.rank and _is_changed(state, f) for f in fragments)
        # A leaf is hashed again where any rank's piece of it changed: one bit each says so.
        said = ranks.each(
            lambda: (state.own_patch_bytes, np.packbits(own)),
            lambda mine: mine[0].to_bytes(8, "little") + mine[1].tobytes(),
            lambda data: (int.from_bytes(data[:8], "little"), np.frombuffer(data[8:], np.uint8)),
        )
        packed = np.bitwise_or.reduce([flags for _, flags in said])
        changed = np.unpackbits(packed, count=len(own))
        some = [fragments for k, fragments in shared.items() if changed[k]]
        state.patch_bytes = sum(nbytes for nbytes, _ in said)
        with ranks.isolated():
            state.leaves |= hash_shared(some, ranks, state.elements, self._threads)
            state.tree = gather_tree(layout, ranks, state.leaves)

    def _restored(
        self, layout: PublishLayout | None, head: Manifest, host: HostState
    ) -> tuple[Baseline | None, str]:
        assert isinstance(layout, ShardedLayout)
        found = restore_baseline(self._stream, self._ranks, layout, head, threads=self._threads)
        return (found, "") if isinstance(found, Baseline) else (None, found)


def _is_changed(state: PublishState, fragment: SharedLeaf) -> bool:
    """Whether an element of it is another than in the base; without one, yes."""
    return state.base is None or state.changes_in(fragment.segment) is not None


def _held(local: LocalState) -> list[RankTensor]:
    """What the elements of ``local`` are, for the other ranks: the stored tensors first, then the
    other names of tied ones."""
    state, found = local.state, []
    storages = {spec.name: k for k, spec in enumerate(state.specs)}
    for name in [*storages, *state.aliases]:
        spec = state.spec(name)
        box = local.boxes.get(name) or SliceSpec.whole(spec.shape)
        storage = storages[state.aliases.get(name, name)] if spec.elements else None
        found.append(RankTensor(TensorSpec(name, spec.dtype, box.shape), box, storage))
    return found


def unlike(given: Sequence[Mapping[str, Any]]) -> str:
    """What was not given to all ranks alike, in words; "" if nothing."""
    for name, first in given[0].items():
        for rank, other in enumerate(given):
            if other[name] != first:
                return f"{name} is {first!r} on rank 0, but {other[name]!r} on rank {rank}"
    return ""
