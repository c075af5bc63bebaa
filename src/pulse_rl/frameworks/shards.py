"""What a rank has of a parameter: a part of a DTensor (rows, columns, or what FSDP2 over tensor
parallelism leaves of both), or a range of a flattened parameter of FSDP1 and DeepSpeed ZeRO-3."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..errors import UnsupportedTensor
from ..sharding.layout import Runs, SliceSpec, union

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_PLACEMENTS = "Shard and Replicate placements are supported; finish a sum first."
_FSDP2 = "Use FSDP2: fsdp_version: 2 in accelerate's config."


class RankSlice(NamedTuple):
    """This rank's elements ``box`` of a checkpoint's tensor, in that order: ``local``."""

    local: torch.Tensor
    box: SliceSpec


@dataclass(frozen=True, eq=False)
class FlatShard:
    """What this rank has of a parameter of this ``shape``: ``local``, of one dimension. Rank k of
    ``group`` has the elements [``cuts[k]``, ``cuts[k + 1]``) of the flattened parameter."""

    local: torch.Tensor
    shape: tuple[int, ...]
    cuts: tuple[int, ...]
    group: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def start(self) -> int:
        """The number of this rank's first element."""
        return self.cuts[dist.get_rank(self.group)]

    @property
    def box(self) -> SliceSpec:
        """Which elements this rank has."""
        return SliceSpec.range(self.start, self.start + self.local.numel(), self.shape)

    def part(self, first: int, shape: tuple[int, ...]) -> FlatShard:
        """Of the tensor of this ``shape`` that begins at element ``first``: what this rank has of
        it."""
        elements = torch.Size(shape).numel()
        cuts = tuple(min(max(cut - first, 0), elements) for cut in self.cuts)
        rank = dist.get_rank(self.group)
        begin = first + cuts[rank] - self.start
        return FlatShard(
            self.local[begin : begin + cuts[rank + 1] - cuts[rank]], shape, cuts, self.group
        )

    def to(self, dtype: torch.dtype) -> FlatShard:
        """The same, cast."""
        return replace(self, local=self.local.to(dtype))

    def whole(self, *, keep: bool = True) -> torch.Tensor:
        """The parameter, empty where it is not to be ``kept``. A collective of ``group``, which
        needs memory for the parameter, or for the largest range of it."""
        elements, width = self.cuts[-1], self.local.element_size()
        longest = max(stop - start for start, stop in zip(self.cuts, self.cuts[1:], strict=False))
        # As bytes: backends know few dtypes. What is offloaded to the host passes through the
        # device, where NCCL is.
        device = self.local.device
        if device.type == "cpu" and "gloo" not in dist.get_backend(self.group):
            device = torch.accelerator.current_accelerator(check_available=True) or device
        bits = torch.empty(
            (elements if keep else longest) * width, dtype=torch.uint8, device=device
        )
        rank = dist.get_rank(self.group)
        for k, (start, stop) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)):
            if start == stop:
                continue
            piece = bits[start * width : stop * width] if keep else bits[: (stop - start) * width]
            if k == rank:
                piece.copy_(self.local.view(torch.uint8))
            dist.broadcast(piece, src=dist.get_global_rank(self.group, k), group=self.group)
        if not keep:
            return bits.new_empty(0, dtype=self.dtype)
        return bits.view(self.dtype).view(self.shape)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether FSDP1 wraps it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return bool(fsdp) and isinstance(module, fsdp.FullyShardedDataParallel)


def has_flat_shards(model: nn.Module) -> bool:
    """Whether FSDP1 or ZeRO-3 holds parameters of ``model``."""
    return any(map(is_fsdp1, model.modules())) or any(
        hasattr(p, "ds_id") for p in model.parameters()
    )


def named_tensors(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict`` of ``model``: its own tensors, and a `FlatShard` of each parameter that
    FSDP1 or ZeRO-3 cuts. Tied names have one object. No collective. Raises UnsupportedTensor."""
    if any(map(is_fsdp1, model.modules())):
        return _of_fsdp1(model)
    known: dict[int, FlatShard] = {}
    found: dict[str, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "ds_id"):
            known.setdefault(id(tensor), zero3_shard(name, tensor))
        found[name] = known.get(id(tensor), tensor)
    return found


def zero3_shard(name: str, parameter: Any) -> FlatShard:
    """What this rank has of a parameter of ZeRO-3. Raises UnsupportedTensor."""
    # DeepSpeed's GatheredParameters fails within another one, and frees what a forward pass has
    # gathered.
    held = getattr(parameter, "ds_tensor", None)
    if held is None or held.status.name != "AVAILABLE":
        raise UnsupportedTensor(
            f"this rank's part of {name!r}, a parameter of ZeRO-3, is not in memory",
            hint="Offload parameters to the CPU, not to NVMe.",
        )
    if hasattr(held, "ds_quant_scale"):
        raise UnsupportedTensor(
            f"{name!r} is quantized by ZeRO-3", hint="Leave zero_quantized_weights out."
        )
    group, elements = parameter.ds_process_group, int(parameter.ds_numel)
    cuts = tuple(
        min(k * int(held.ds_numel), elements) for k in range(dist.get_world_size(group) + 1)
    )
    rank = dist.get_rank(group)
    local = held.detach()[: cuts[rank + 1] - cuts[rank]]
    return FlatShard(local, tuple(parameter.ds_shape), cuts, group)


# -- FSDP1


def _of_fsdp1(model: nn.Module) -> dict[str, Any]:
    """Module by module: a ``state_dict`` of FSDP1 gathers all of the model."""
    units: list[tuple[str, Any]] = []
    hidden: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        handle = getattr(module, "_handle", None) if is_fsdp1(module) else None
        if handle is not None:
            units.append((f"{prefix}." if prefix else "", handle))
            flat: Any = handle.flat_param
            hidden |= {
                id(one) for one in [flat, *(flat._params or ()), *(flat._shared_params or ())]
            }
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Any] = {}
        module._save_to_state_dict(own, f"{prefix}." if prefix else "", keep_vars=True)
        found |= {name: tensor for name, tensor in own.items() if id(tensor) not in hidden}
    for prefix, handle in units:
        found |= {f"{prefix}_fsdp_wrapped_module.{name}": shard for name, shard in _of_unit(handle)}
    return found


def _of_unit(handle: Any) -> Iterator[tuple[str, Any]]:
    """The parameters of one flat parameter, by their names in its unit."""
    flat, group = handle.flat_param, handle.process_group
    if any(extension is not None for extension in flat._param_extensions):
        raise UnsupportedTensor("FSDP1 over tensor parallelism is not supported", hint=_FSDP2)
    if not all(flat._contiguities):
        raise UnsupportedTensor("FSDP1 holds a parameter that is not contiguous", hint=_FSDP2)
    ranks, rank, local = 1, 0, flat.detach()
    if handle.uses_sharded_strategy:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        local = flat._local_shard.detach()
    chunk, at, number = local.numel(), 0, 0
    of: dict[tuple[str, str], Any] = {}
    for elements, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            shape = tuple(flat._shapes[number])
            cuts = tuple(min(max(k * chunk - at, 0), elements) for k in range(ranks + 1))
            begin = at + cuts[rank] - rank * chunk
            piece = local[begin : begin + cuts[rank + 1] - cuts[rank]]
            # One rank of its own (NO_SHARD) has the parameter as it is.
            value = FlatShard(piece, shape, cuts, group) if ranks > 1 else piece.view(shape)
            info = flat._param_infos[number]
            of[info.module_name, info.param_name] = value
            yield flat._fqns[number], value
            number += 1
        at += elements
    for shared in flat._shared_param_infos:
        prefix = f"{shared.module_name}." if shared.module_name else ""
        yield prefix + shared.param_name, of[shared.prim_module_name, shared.prim_param_name]


# -- DTensors


def local_box(name: str, tensor: DTensor) -> SliceSpec:
    """The elements of a DTensor that this rank, which is in its mesh, has. Raises
    UnsupportedTensor."""
    from torch.distributed.tensor import Replicate, Shard  # which takes seconds to import

    local_shape = tuple(tensor.to_local().shape)
    placements = list(enumerate(tensor.placements))
    for _, placement in placements:
        is_split = getattr(placement, "split_factor", None) is not None
        if not is_split and not isinstance(placement, Replicate | Shard):
            raise UnsupportedTensor(f"tensor {name!r} is placed as {placement!r}", hint=_PLACEMENTS)
    # FSDP2 over tensor parallelism along one dimension cuts what the mesh's later dimensions have
    # cut. A DTensor says so by a split factor, whose rule is another where ranks are left without a
    # row.
    strided = [(k, placement) for k, placement in placements if _splits(tensor, k)]
    boxes = [_cut(tensor, placements, strided=True)]
    if strided:
        others = [each for each in placements if each not in strided]
        boxes.insert(0, _cut(tensor, others + strided[::-1], strided=False))
    for box in boxes:
        if box.local_shape == local_shape:
            return box
    raise UnsupportedTensor(
        f"the shard of tensor {name!r} is {list(local_shape)}, but {list(boxes[-1].local_shape)} "
        f"by its placements {tensor.placements}",
        hint=_PLACEMENTS,
    )


def _splits(tensor: DTensor, mesh_dim: int) -> bool:
    """Whether a placement has a split factor that stands for the later ones of its dimension."""
    placement = tensor.placements[mesh_dim]
    split, dim = getattr(placement, "split_factor", None), getattr(placement, "dim", None)
    if split is None:
        return False
    later = range(mesh_dim + 1, len(tensor.placements))
    alike = [k for k in later if getattr(tensor.placements[k], "dim", None) == dim]
    return bool(split == math.prod(tensor.device_mesh.size(k) for k in alike))


def _cut(
    tensor: DTensor, placements: Sequence[tuple[int, Placement]], *, strided: bool
) -> SliceSpec:
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
        pieces = [of[dim]] if split is None else [chunk(of[dim], split, k) for k in range(split)]
        of[dim] = union(run for piece in pieces for run in chunk(piece, size, index))
    return SliceSpec(tuple(of), tuple(tensor.shape))


def chunk(runs: Runs, chunks: int, index: int) -> Runs:
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
