"""A trainer of several processes: a model that is sharded over them, by FSDP2 or tensor parallelism, or in DDP
(docs/loco.md, section 7.4)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._util.collective import GlooTransport, RankGroup
from .._util.serial import shield
from ..errors import RankLost, UnsupportedTensor
from .buffers import digest_of

R = TypeVar("R")
_HINT = "Every rank of a trainer must have its shard of every DTensor: data, tensor and expert parallelism, no stages."


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Its module takes half a second to import, and is there where one is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def require_no_flat_parameters(model: object) -> None:
    """Raises UnsupportedTensor for FSDP1, whose parameters are pieces that do not say of what."""
    if _modules(model, "FullyShardedDataParallel"):
        raise UnsupportedTensor(
            "trainers cannot keep the flat parameters of FSDP1 equal", hint="Shard the model with fully_shard."
        )


def reshard(model: object) -> None:
    """Has FSDP2 give up what it has gathered: after a forward pass alone it keeps the weights of the outer module, and
    would go on with these whatever is written to the shards."""
    for module in _modules(model, "FSDPModule"):
        module.reshard()


def _modules(model: object, kind: str) -> list[Any]:
    """The modules of a class of torch.distributed.fsdp, if the program has imported that."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, torch.nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, getattr(fsdp, kind))]


def ranks_of(model: object, named: Mapping[str, torch.Tensor]) -> list[int]:
    """The ranks that train one model together, if its tensors, or DDP, say that there are several."""
    sharded = [_ranks_of(tensor) for tensor in named.values() if is_sharded(tensor)]
    if sharded:
        return max(sharded, key=len)
    if isinstance(model, DistributedDataParallel):
        ranks = sorted(dist.get_process_group_ranks(model.process_group))
        return ranks if len(ranks) > 1 else []
    return []


class Ranks:
    """The processes of one trainer. The first one *leads*: it has the outer state, all tensors whole in host memory,
    and speaks to the other trainers. The others have shards or replicas alone, and wait for what it says.

    ``members``: their ranks, of `ranks_of`; ``named``: the ``model``'s tensors; of the ``trained`` ones, by id, the
    leader's values go to all. All ranks make it, and make the same calls in the same order; none waits for another one
    for longer than ``timeout_seconds``. Raises UnsupportedTensor for DTensors that are not made of plain slices, or
    others on another rank, and RankLost, also from every call.
    """

    def __init__(
        self,
        members: list[int],
        model: object,
        named: Mapping[str, torch.Tensor],
        trained: set[int],
        timeout_seconds: float,
    ) -> None:
        self._model = model
        self._sharded = {name: tensor for name, tensor in named.items() if is_sharded(tensor)}
        self._trained = [tensor for tensor in named.values() if id(tensor) in trained]
        self._group = RankGroup(GlooTransport(members, timeout_seconds, owner="PulseLoCo"))
        # For what is on a device, by the program's own backend; the world's group is there already.
        everyone = members == list(range(dist.get_world_size()))
        self._devices = None if everyone else dist.new_group(members, use_local_synchronization=True)
        self._leader = members[0]
        self.leads = self._group.rank == 0
        # The system gives memory to what is written: on the other ranks nothing is.
        self._whole = {
            id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in self._sharded.values()
        }
        self._writes = 0
        self._parted: RankLost | None = None
        # A tensor may be on some of the ranks, and again on the others; then it must be the same one.
        apart = {name: t for name, t in named.items() if not is_sharded(t) or _ranks_of(t) != members}
        self._require_slices()
        self._require_same({name: t for name, t in apart.items() if id(t) in trained or is_sharded(t)})

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor on the rank that leads: the tensor itself, unless it is sharded."""
        return self._whole.get(id(tensor), tensor)

    def any(self, here: bool) -> bool:
        """Whether it is so on a rank."""
        return b"1" in self._all_say("any", lambda: b"1" if here else b"0")

    @torch.no_grad()
    def collect(self) -> None:
        """The whole tensors become what the ranks have now."""
        reshard(self._model)
        with _rank_lost():
            for tensor in self._sharded.values():
                full = _full(tensor)
                if self.leads:
                    self.whole(tensor).copy_(full)
        self._writes = self._count_writes()

    def lead(self, work: Callable[[], Any]) -> Any:
        """What ``work``, which is called on the rank that leads, returns there; it is sent as JSON. All ranks get their
        shards of what it has written. An error is raised on all."""
        try:
            said = self._all_say("lead", lambda: json.dumps(work()).encode() if self.leads else b"")
        except RankLost:
            raise
        except BaseException:
            self._distribute_new()  # what was written before an error stays
            raise
        self._distribute_new()
        return json.loads(said[0])

    def _distribute_new(self) -> None:
        writes = self._count_writes()
        new, *_ = self._all_say("new", lambda: b"1" if writes != self._writes else b"0")
        self._writes = writes
        if new == b"1":
            reshard(self._model)
            with _rank_lost():
                self._distribute()

    def _all_say(self, call: str, work: Callable[[], bytes]) -> list[bytes]:
        """What ``work`` returns on each rank, in their order. Only the leader's may be interrupted."""
        if self._parted:
            raise self._parted
        head = call.encode() + b":"
        with nullcontext() if self.leads else shield():
            said = self._group.run_on_all(lambda: head + work())
        if not all(message.startswith(head) for message in said):
            self._parted = RankLost(
                "the ranks of this trainer have made different calls",
                hint="Each call of a loop is one of all its ranks, global_weights() among them.",
            )
            raise self._parted
        return [message.removeprefix(head) for message in said]

    def _count_writes(self) -> int:
        return sum(self.whole(tensor)._version for tensor in self._trained)

    @torch.no_grad()
    def _distribute(self) -> None:
        for tensor in self._trained:
            if not is_sharded(tensor):
                dist.broadcast(tensor.detach(), self._leader, self._devices)
                continue
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if self.leads:
                full.copy_(self.whole(tensor))
            dist.broadcast(full, self._leader, self._devices)
            _local(tensor).copy_(_slice(full, tensor))

    @torch.no_grad()
    def _require_slices(self) -> None:
        """Raises UnsupportedTensor unless this rank's shard can be cut out of the whole."""
        wrong = ""
        for name, tensor in self._sharded.items():
            placements: Any = tensor.placements  # type: ignore[attr-defined]
            partial = any(placement.is_partial() for placement in placements)
            if partial or not _same_bits(_slice(_full(tensor), tensor), _local(tensor)):
                wrong = wrong or f"{name!r} is placed as {placements}"

        def say() -> bytes:
            if wrong:
                raise UnsupportedTensor(wrong, hint=_HINT)
            return b""

        self._group.run_on_all(say)

    @torch.no_grad()
    def _require_same(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises UnsupportedTensor unless these tensors are the same on all ranks."""
        own = {name: digest_of(_full(t) if is_sharded(t) else t).hex() for name, t in sorted(tensors.items())}
        names = [*self._sharded]
        found = [json.loads(said) for said in self._group.run_on_all(lambda: json.dumps([names, own]).encode())]
        for rank, (sharded, digests) in enumerate(found):
            differ = sorted(set(sharded) ^ set(names)) or [
                n for n in own.keys() | digests if own.get(n) != digests.get(n)
            ]
            if differ:
                raise UnsupportedTensor(f"{differ[0]!r} is another tensor on rank {rank} of this trainer", hint=_HINT)


@contextmanager
def _rank_lost() -> Iterator[None]:
    """A collective of tensors fails by a RuntimeError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankLost(f"a rank of this trainer died or stalled: {error}") from error


def _ranks_of(tensor: Any) -> list[int]:
    ranks: list[int] = sorted(tensor.device_mesh.mesh.flatten().tolist())
    return ranks


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and digest_of(one) == digest_of(other)


def _full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.detach().full_tensor()
    return full


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.detach().to_local()
    return local


def _slice(full: torch.Tensor, tensor: Any) -> torch.Tensor:
    """What this rank has of a tensor that is ``full`` where all have it."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
