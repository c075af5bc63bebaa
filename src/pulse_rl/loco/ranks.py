"""A trainer of several processes: a model that is sharded over them, by FSDP2 or tensor
parallelism, or in DDP (docs/loco.md, section 7.4)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._util.collective import GlooTransport, RankGroup
from .._util.serial import SerialThread
from ..errors import InputError, RankLost, StateMismatch, UnsupportedTensor
from ..state.tensors import State, is_sharded

Model = torch.nn.Module | Mapping[str, torch.Tensor]
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20
_ODD = 0x1E3779B97F4A7C15
_HINT = (
    "Every rank of a trainer must have its shard of every DTensor: data, tensor and expert "
    "parallelism, no stages."
)


def require_no_flat_parameters(model: object) -> None:
    """Raises UnsupportedTensor for FSDP1, whose parameters are pieces that do not say of what."""
    if _modules(model, "FullyShardedDataParallel"):
        raise UnsupportedTensor(
            "trainers cannot keep the flat parameters of FSDP1 equal",
            hint="Shard the model with fully_shard.",
        )


def reshard(model: object) -> None:
    """Has FSDP2 give up what it has gathered: after a forward pass alone it keeps the weights of
    the outer module, and would go on with these whatever is written to the shards."""
    for module in _modules(model, "FSDPModule"):
        module.reshard()


def _modules(model: object, kind: str) -> list[Any]:
    """The modules of a class of torch.distributed.fsdp, if the program has imported that."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, torch.nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, getattr(fsdp, kind))]


def ranks_of(model: object, named: Mapping[str, torch.Tensor]) -> list[int]:
    """The ranks that train one model together, if its tensors, or DDP, say that there are
    several."""
    sharded = [_ranks_of(tensor) for tensor in named.values() if is_sharded(tensor)]
    if sharded:
        return max(sharded, key=len)
    if isinstance(model, DistributedDataParallel):
        ranks = sorted(dist.get_process_group_ranks(model.process_group))
        return ranks if len(ranks) > 1 else []
    return []


def without_ddp(model: Model) -> Model:
    """The module that DDP, compiled or not, has wrapped. Raises InputError where DDP is not the
    outermost module."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel):
        module: torch.nn.Module = inner.module
        return module
    if isinstance(inner, torch.nn.Module) and any(
        isinstance(m, DistributedDataParallel) for m in inner.modules()
    ):
        raise InputError(
            "DDP has only a part of the model", hint="Wrap all of it: its ranks are one trainer."
        )
    return model


class Ranks:
    """The processes of one trainer. The first one *leads*: it has the outer state, all tensors
    whole in host memory, and speaks to the other trainers. The others have shards or replicas
    alone, and wait for what it says.

    ``members``: their ranks, of `ranks_of`; ``named``: the ``model``'s tensors; of the ``trained``
    ones, by id, the leader's values go to all. All ranks make it, and make the same calls in the
    same order; none waits for another one for longer than ``timeout_seconds``. Raises
    UnsupportedTensor for DTensors that are not made of plain slices, StateMismatch where another
    rank has other tensors, and RankLost, also from every call.
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
        self._trained = {name: tensor for name, tensor in named.items() if id(tensor) in trained}
        others = named.keys() - self._sharded.keys() - self._trained.keys()
        self._others = {name: named[name] for name in others}
        self._group = RankGroup(GlooTransport(members, timeout_seconds, owner="PulseLoCo"))
        # Messages of this trainer's ranks, which no interrupt parts: the others would take the next
        # one for this.
        self._serial = SerialThread("PulseLoCo's ranks")
        # For what is on a device, by the program's own backend; the world's group is there already.
        everyone = members == list(range(dist.get_world_size()))
        self._devices = (
            None if everyone else dist.new_group(members, use_local_synchronization=True)
        )
        self._leader = members[0]
        self.leads = self._group.rank == 0
        # The system gives memory to what is written: on the other ranks nothing is.
        self._whole = {
            id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for tensor in self._sharded.values()
        }
        self._parted: RankLost | None = None
        self._require_slices()
        # A tensor may be on some of the ranks, and again on the others; then it must be the same
        # one.
        apart = {name: t for name, t in self._sharded.items() if _ranks_of(t) != members}
        replicas = {name: t for name, t in self._trained.items() if not is_sharded(t)}
        self._require_same({**apart, **replicas})

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor on the rank that leads: the tensor itself, unless it is
        sharded."""
        return self._whole.get(id(tensor), tensor)

    def any(self, here: bool) -> bool:
        """Whether it is so on a rank."""
        return b"1" in self._all_say("any", b"1" if here else b"0")

    @torch.no_grad()
    def collect(self) -> None:
        """The whole tensors become what the ranks have now. Raises StateMismatch where what is
        neither trained nor sharded is not the same on all of them."""
        reshard(self._model)
        self._require_same({**self._others, **self._buffers()})
        with _rank_lost():
            for tensor in self._sharded.values():
                full = _full(tensor)
                if self.leads:
                    self.whole(tensor).copy_(full)

    def lead(
        self, work: Callable[[], Any], counters: Callable[[], Any], take: Callable[[Any], None]
    ) -> Any:
        """What ``work``, which is called on the rank that leads, returns there; it is sent as JSON.
        All ranks get what it has written, and ``take`` the ``counters`` of that rank. An error is
        raised on all, after that."""
        failure: BaseException | None = None
        message = b""
        if self.leads:
            before, made = self._versions(), None
            try:
                made = work()
            except BaseException as caught:
                failure = caught
            after = self._versions()
            written = [name for name in after if before.get(name) != after[name]]
            message = json.dumps([made, written, counters()]).encode()
        try:
            said, error = self._serial.run(
                lambda: self._exchange("lead", failure, message), whole=True
            )
        finally:
            failure = None  # or its traceback would hold itself
        made, written, found = json.loads(said[0])
        take(found)
        if written:
            reshard(self._model)
            with _rank_lost():
                self._distribute(written)
        if error is not None:
            raise error
        return made

    def is_common(self, error: BaseException) -> bool:
        """Whether the error was raised on all ranks alike, so that they are still together."""
        return isinstance(error, Exception) and error is self._group.common_error

    def _all_say(self, call: str, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order."""
        said, _ = self._serial.run(lambda: self._exchange(call, None, message), whole=True)
        return said

    def _exchange(
        self, call: str, failure: BaseException | None, message: bytes
    ) -> tuple[list[bytes], BaseException | None]:
        """The messages of all ranks, also after a ``failure``, which is returned on all alike."""
        if self._parted:
            raise self._parted
        head = call.encode() + b":"

        def fail() -> bytes:
            if failure is not None:
                raise failure
            return head + message

        error: BaseException | None = None
        try:
            try:
                said = self._group.each(fail, bytes, bytes)
            except RankLost:
                raise
            except BaseException as common:
                error = common
                said = self._group.each(lambda: head + message, bytes, bytes)
                self._group.mark_collective(error)
        except RankLost as lost:
            self._parted = lost
            if failure is not None:
                raise failure from None  # why the others are gone
            raise
        if not all(each.startswith(head) for each in said):
            self._parted = RankLost(
                "the ranks of this trainer have made different calls",
                hint="Each call of a loop is one of all its ranks, global_weights() among them.",
            )
            raise self._parted
        return [each.removeprefix(head) for each in said], error

    def _buffers(self) -> dict[str, torch.Tensor]:
        named = self._model.named_buffers() if isinstance(self._model, torch.nn.Module) else ()
        return {f"buffer {name}": buffer for name, buffer in named if not is_sharded(buffer)}

    def _versions(self) -> dict[str, tuple[int, int]]:
        """By trained tensor, what changes with each write to it."""
        tensors = {name: self.whole(tensor) for name, tensor in self._trained.items()}
        return {name: (id(tensor), tensor._version) for name, tensor in tensors.items()}

    @torch.no_grad()
    def _distribute(self, written: Sequence[str]) -> None:
        for tensor in [self._trained[name] for name in written]:
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
        """Raises UnsupportedTensor unless each rank's shards can be cut out of the whole."""
        wrong = ""
        with _rank_lost():
            for name, tensor in self._sharded.items():
                placements: Any = tensor.placements  # type: ignore[attr-defined]
                partial = any(placement.is_partial() for placement in placements)
                if partial or not _same_bits(_slice(_full(tensor), tensor), _local(tensor)):
                    wrong = wrong or f"{name!r} is placed as {placements}"
        said = self._all_say("slices", wrong.encode())
        if first := next(filter(None, said), b""):
            raise UnsupportedTensor(first.decode(), hint=_HINT)

    @torch.no_grad()
    def _require_same(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises StateMismatch unless these tensors are the same on all ranks."""
        own = {
            name: str(fingerprint(_full(t) if is_sharded(t) else t))
            for name, t in sorted(tensors.items())
        }
        everything = dict.fromkeys(self._sharded, "") | own
        for rank, said in enumerate(self._all_say("same", json.dumps(everything).encode())):
            theirs = json.loads(said)
            differ = sorted(
                n for n in everything.keys() | theirs if everything.get(n) != theirs.get(n)
            )
            if differ:
                raise StateMismatch(
                    f"{differ[0]!r} is another tensor on rank {rank} of this trainer", hint=_HINT
                )


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

    here = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return here.to_local()


# -- tensors as bits


def require_dense(tensor: torch.Tensor, what: str) -> None:
    """Raises UnsupportedTensor, with the words ``what``, for a tensor without dense memory that can
    be written: meta, sparse, sharded, quantized, uninitialized, wrapped, of a dtype without a plain
    bit view, or expanded."""
    try:
        State.of({what: tensor})
    except (UnsupportedTensor, ValueError) as error:  # a ValueError of torch: not initialized
        raise UnsupportedTensor(f"trainers cannot keep {what} equal: {error}") from None
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in sizes):
        raise UnsupportedTensor(
            f"trainers cannot keep {what} equal: its elements share memory",
            hint="Give the tensor memory of its own: clone() an expanded one.",
        )


def digest_of(tensor: torch.Tensor) -> bytes:
    """SHA-256 of the tensor's bytes."""
    return sha256(_bytes(tensor).cpu().numpy().data).digest()


def fingerprint(tensor: torch.Tensor) -> object:
    """What compares unequal in this process for other bits of the tensor, but for a chance of
    2^-60. It is computed on the tensor's device and takes one reading of its memory."""
    return digest_of(tensor) if tensor.device.type == "cpu" else fingerprint_on_device(tensor)


@torch.no_grad()
def fingerprint_on_device(tensor: torch.Tensor) -> int:
    """The elements as integers, multiplied by numbers at random and added up, modulo 2^64."""
    words = _bytes(tensor).view(_INTS[tensor.element_size()])
    weights = _weights(tensor.device)
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE]
        found = found * _ODD + (piece * weights[: len(piece)]).sum()
    return int(found)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes where they are, 1-D uint8; a copy if they do not lie in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """`_PIECE` odd numbers at random, INT64."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randint(-(1 << 62), 1 << 62, (_PIECE,), generator=generator, device="cpu")
    return (2 * drawn + 1).to(device)
