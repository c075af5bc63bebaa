"""Which elements of a DTensor a rank has: rows, columns, or what FSDP2 over tensor parallelism
leaves of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..errors import UnsupportedTensor
from ..sharding.layout import Box, Runs

_HINT = "Shard and Replicate placements are supported; finish a sum first."


def local_box(name: str, tensor: DTensor) -> Box:
    """The elements of a DTensor that this rank, which is in its mesh, has. Raises
    UnsupportedTensor."""
    local_shape = tuple(tensor.to_local().shape)
    placements = list(enumerate(tensor.placements))
    for _, placement in placements:
        if (
            not isinstance(placement, Replicate | Shard)
            and getattr(placement, "split_factor", None) is None
        ):
            raise UnsupportedTensor(f"tensor {name!r} is placed as {placement!r}", hint=_HINT)
    # FSDP2 over tensor parallelism along one dimension cuts what the mesh's later dimensions have
    # cut. A DTensor says so by a split factor, whose rule is another where ranks are left without a
    # row.
    strided = [(k, placement) for k, placement in placements if _splits(tensor, k)]
    boxes = [_cut(tensor, placements, strided=True)]
    if strided:
        boxes.insert(
            0,
            _cut(
                tensor, [p for p in placements if p not in strided] + strided[::-1], strided=False
            ),
        )
    for box in boxes:
        if box.local_shape == local_shape:
            return box
    raise UnsupportedTensor(
        f"the shard of tensor {name!r} is {list(local_shape)}, but {list(boxes[-1].local_shape)} "
        "by its placements "
        f"{tensor.placements}",
        hint=_HINT,
    )


def _splits(tensor: DTensor, mesh_dim: int) -> bool:
    """Whether a placement has a split factor that stands for the later ones of its dimension."""
    placement = tensor.placements[mesh_dim]
    split, dim = getattr(placement, "split_factor", None), getattr(placement, "dim", None)
    later = [
        k
        for k, other in enumerate(tensor.placements)
        if k > mesh_dim and getattr(other, "dim", None) == dim
    ]
    return split is not None and split == math.prod(tensor.device_mesh.size(k) for k in later)


def _cut(tensor: DTensor, placements: Sequence[tuple[int, Placement]], *, strided: bool) -> Box:
    """The elements that are left on this rank by ``placements`` of the mesh's dimensions, one after
    another."""
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
