"""Publishing from a sharded trainer without a gather: FSDP2, HSDP, tensor, pipeline and expert parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from ..._util import extra

with extra("torch"):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..._util.collective import GlooTransport, RankGroup
from ..._util.settings import checked_number
from ...errors import InputError, UnsupportedTensor
from ...store import Store
from ...sync.layout import Box, Runs
from ...sync.publisher import Publisher, PublisherSettings
from ...sync.request import LocalState

__all__ = ["ShardedPublisher"]

_HINT = "Shard and Replicate placements are supported; finish a sum before it is published."

_DEFAULT_SECONDS = 600.0


class ShardedPublisher(Publisher):
    """Publishes the states of one policy that is sharded over several ranks, none of which gathers it.

    All ranks of ``process_group`` (None: all there are) make one, with the same arguments, and call `publish`, or
    `submit`, in the same order, each with what it has, a ``state_dict``: shards as DTensors (``fully_shard``, with
    replicas, tensor parallelism over rows or columns), and plain tensors, whole on one rank (pipeline stages, experts)
    or on several. Each rank compares, codes, hashes and uploads its own slices, and keeps a copy of these alone; then
    rank 0 commits the version, and all return what it cost. Of several ranks with the same slice the lowest publishes
    it. Readers follow the stream as any other, and a `Publisher` or another number of ranks can continue it.

    The other settings are those of `Publisher`, ``threads`` for each rank. No call waits for another rank for longer
    than ``timeout_seconds``.

    Host memory of a rank: its slices once (twice where a patch would be no smaller than they are), the changes of one
    version, a block (at most 2^22 elements) and its code for each thread, and on rank 0 the leaves' digests, 32 bytes
    for each MiB of the state; with ``folds`` about 6 bytes for every BF16 weight of its slices that changed within a
    span.

    Arguments of a call are the same on all ranks but for the source, and for ``files``, of which rank 0's count. An
    error of one rank is raised on all. A state of which the ranks publish other slices than of the version before is
    published with an anchor and no patch. Calls also raise StateMismatch, where the ranks do not have each element
    once, and RankLost, if a rank dies: then nothing was committed or all of it; start the ranks again. A version that
    one rank cancels, or gives up to ``replace`` it, is cancelled on all. An error that nobody has asked a `Submission`
    for is raised by `wait` and `close`, which releases the ranks' group. Making one is a collective. Raises InputError,
    InvalidName and RankLost.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = _DEFAULT_SECONDS,
        **settings: Unpack[PublisherSettings],
    ) -> None:
        def checked() -> dict[str, float]:
            checked_number("timeout_seconds", timeout_seconds)
            return {"timeout_seconds": timeout_seconds}

        # Whatever is wrong on one rank, it comes to where the others can be told.
        try:
            seconds = checked()["timeout_seconds"]
        except InputError:
            seconds = _DEFAULT_SECONDS
        ranks = RankGroup(GlooTransport(process_group, seconds, owner="ShardedPublisher"))
        self._open(ranks, store, stream=stream, also=checked, **settings)

    def _read(self, source: Any, dtype: str | None) -> LocalState:
        return local_state(source, dtype)


def local_state(source: Mapping[str, Any], dtype: str | None) -> LocalState:
    """The elements that this rank has of ``source``, a ``state_dict``, cast to the compute dtype ``dtype``: each shard
    under its tensor's name, with the shape that it has here. Raises InputError and UnsupportedTensor."""
    if not isinstance(source, Mapping):
        raise InputError(f"a {type(source).__name__} is not a mapping", hint="Pass model.state_dict().")
    shards: dict[str, Any] = {}
    boxes: dict[str, Box] = {}
    for name, value in source.items():
        if not isinstance(value, DTensor):
            shards[name] = value
        elif value.device_mesh.get_coordinate() is not None:
            shards[name] = value.to_local()
            if (box := local_box(name, value)) != Box.whole(box.shape):
                boxes[name] = box
    return LocalState.of(shards, dtype)._replace(boxes=boxes)


def local_box(name: str, tensor: DTensor) -> Box:
    """The elements of a DTensor that this rank, which is in its mesh, has. Raises UnsupportedTensor."""
    local_shape = tuple(tensor.to_local().shape)
    placements = list(enumerate(tensor.placements))
    for _, placement in placements:
        if not isinstance(placement, Replicate | Shard) and getattr(placement, "split_factor", None) is None:
            raise UnsupportedTensor(f"tensor {name!r} is placed as {placement!r}", hint=_HINT)
    # FSDP2 over tensor parallelism along one dimension cuts what the mesh's later dimensions have cut. A DTensor says
    # so by a split factor, whose rule is another where ranks are left without a row.
    strided = [(k, placement) for k, placement in placements if _splits(tensor, k)]
    boxes = [_cut(tensor, placements, strided=True)]
    if strided:
        boxes.insert(0, _cut(tensor, [p for p in placements if p not in strided] + strided[::-1], strided=False))
    for box in boxes:
        if box.local_shape == local_shape:
            return box
    raise UnsupportedTensor(
        f"the shard of tensor {name!r} is {list(local_shape)}, but {list(boxes[-1].local_shape)} by its placements "
        f"{tensor.placements}",
        hint=_HINT,
    )


def _splits(tensor: DTensor, mesh_dim: int) -> bool:
    """Whether a placement has a split factor that stands for the later ones of its dimension."""
    placement = tensor.placements[mesh_dim]
    split, dim = getattr(placement, "split_factor", None), getattr(placement, "dim", None)
    later = [k for k, other in enumerate(tensor.placements) if k > mesh_dim and getattr(other, "dim", None) == dim]
    return split is not None and split == math.prod(tensor.device_mesh.size(k) for k in later)


def _cut(tensor: DTensor, placements: Sequence[tuple[int, Placement]], *, strided: bool) -> Box:
    """The elements that are left on this rank by ``placements`` of the mesh's dimensions, one after another."""
    of: list[Runs] = [((0, n),) if n else () for n in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for mesh_dim, placement in placements:
        dim: int | None = getattr(placement, "dim", None)
        if dim is None:
            continue
        index, size = coordinate[mesh_dim], tensor.device_mesh.size(mesh_dim)
        split: int | None = getattr(placement, "split_factor", None) if strided else None
        pieces = [of[dim]] if split is None else [_chunk(of[dim], split, k) for k in range(split)]
        of[dim] = _merged([run for piece in pieces for run in _chunk(piece, size, index)])
    return Box(tuple(of), tuple(tensor.shape))


def _chunk(runs: Runs, chunks: int, index: int) -> Runs:
    """The indices in the chunk of this number, as torch.chunk cuts them."""
    total = sum(stop - start for start, stop in runs)
    step = -(-total // chunks)
    low, high, at, found = min(index * step, total), min((index + 1) * step, total), 0, []
    for start, stop in runs:
        first, last = max(low, at), min(high, at + stop - start)
        if first < last:
            found.append((start + first - at, start + last - at))
        at += stop - start
    return tuple(found)


def _merged(runs: Sequence[tuple[int, int]]) -> Runs:
    """The same indices; ranges that touch are one."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
