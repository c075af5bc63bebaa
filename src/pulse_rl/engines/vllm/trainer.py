"""The trainer's side of vLLM's weight transfer: a trainer that speaks vLLM's own API sends its
weights through a store.

Importing this module makes the backend ``pulse`` known to vLLM's factory for trainers
(docs/vllm.md).
"""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
)

from ..._util.settings import checked_number
from ...errors import InputError, StateMismatch
from ...events import Published
from ...frameworks.shards import RankSlice, chunk
from ...frameworks.weights import host_copy, torch_dtype
from ...sharding.layout import SliceSpec
from ...state.cast import DTypeLike
from ...stream.signing import keys_of
from ...sync.publisher import Publisher
from ..transport import InitInfo
from .plugin import BACKEND, register_trainer

__all__ = ["PulseTrainerEngine", "PulseTrainerInitInfo"]

register_trainer()
_log = logging.getLogger(__name__)


@dataclass
class PulseTrainerInitInfo(TrainerInitInfo):
    """What ``WeightTransferTrainerFactory.trainer_init`` takes for the backend ``pulse``, on every
    rank of the trainer.

    ``store``: the address of a store that trainer and engines reach; a folder by its path.
    ``stream``: its name. ``dtype``: the compute dtype of the engines ("BF16", "F16"); wider floats
    are cast to it, None leaves them as they are. ``publisher``: more arguments of
    `pulse_rl.Publisher`; ``engine``: more of what `connect` passes to the engine's workers
    (``trusted_keys``, by default those of the publisher; ``cache``, ``base``, ``audit_every``,
    ``stream_id``, ``allow_recreated``). ``timeout_seconds``: how long an engine waits for a version
    that was published. ``rank``: of this process; 0 publishes.

    ``sharded``: every rank publishes its own part of the weights, without a gather, with
    `pulse_rl.frameworks.fsdp.ShardedPublisher`; ``publisher`` has that class's arguments then. The
    parts are those of the source's ``iter_local`` (vLLM 0.33); where they cannot be used the log
    says why, and the ranks publish the whole tensors that they own.
    """

    backend: ClassVar[str] = BACKEND

    store: str
    stream: str
    dtype: DTypeLike | None = "BF16"
    publisher: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 240.0
    sharded: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.store, str) or self.store.startswith("memory:"):
            raise InputError(
                "the store must be an address that the engines reach, too",
                hint="s3://, or a folder.",
            )
        torch_dtype(self.dtype)
        checked_number("timeout_seconds", self.timeout_seconds)


# Without the base's arguments, of which vLLM 0.26 has two.
class PulseTrainerEngine(TrainerWeightTransferEngine):
    """Publishes the weights of a ``source`` as the next version, and has the engines behind a
    ``client`` go to it.

    Made by vLLM's factory. `send_weights` is called on all ranks, since to gather a weight is a
    collective; the first one publishes, or all do with ``sharded``, and the first one calls the
    engines. No connection between trainer and engine carries weights. ``published`` is the last
    version, None before and on ranks that publish nothing.
    """

    init_info_cls = PulseTrainerInitInfo

    def __init__(
        self, init_info: PulseTrainerInitInfo, *, client: Any, source: WeightSource, **config: Any
    ) -> None:
        super().__init__(**config, client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank  # the base of vLLM 0.33 takes it, older ones do not
        self.published: Published | None = None
        self._dtype = torch_dtype(init_info.dtype)
        self._seconds = init_info.timeout_seconds
        self._sharded = init_info.sharded
        self._weights = _reader(source, init_info)
        store = init_info.store
        if "://" not in store:
            store = str(Path(store).absolute())
        settings = dict(init_info.publisher)
        session = {
            "trusted_keys": keys_of(settings.get("signer"), settings.get("trusted_keys")),
            **init_info.engine,
            "owner": uuid.uuid4().hex,
        }
        try:
            self._session = InitInfo(store, init_info.stream, **session)
        except TypeError as error:
            raise InputError(f"engine: {error}") from None
        self._publisher: Publisher | None = None
        if init_info.sharded:
            from ...frameworks.fsdp import ShardedPublisher  # which takes seconds to import

            self._publisher = ShardedPublisher(store, stream=init_info.stream, **settings)
        elif self.is_sender:
            self._publisher = Publisher(store, stream=init_info.stream, **settings)

    @classmethod
    def trainer_init(
        cls,
        init_info: PulseTrainerInitInfo,
        *,
        client: Any,
        source: WeightSource | None = None,
        **config: Any,
    ) -> Self:
        """An engine that is connected. ``config``: what vLLM 0.26 hands over besides. Raises
        InputError without a ``source``, or for one that does not give the ranks what they publish;
        what the publisher raises; and what the client raises."""
        if source is None:
            raise InputError(
                "the backend pulse needs a source of all weights", hint="ModuleSource(model), say."
            )
        engine = cls(init_info, client=client, source=source, **config)
        if engine.is_sender:
            engine._connect()
        return engine

    def send_weights(self) -> None:
        """One update: a version is published, then the engines fetch, verify and write what
        changed.

        Raises what the publisher's ``publish`` raises, StateMismatch if the source gives something
        else than its metadata declares, and what the client raises where an engine refuses: it goes
        on with the weights that it has. Either way the next call sends all that is new.
        """
        if self._publisher is None:
            for _ in self._weights():
                pass
            return
        read = _WhenRead(self._copied) if self._sharded else self._copied()
        self.published = self._publisher.publish(read)
        if not self.is_sender:
            return
        try:
            self._move(self.published.version)
        except Exception:
            self._connect()  # an engine that was restarted knows nothing of the stream
            self._move(self.published.version)

    def shutdown(self) -> None:
        """Closes the publisher. The engines keep their weights. May be called twice."""
        if self._publisher is not None:
            self._publisher.close()

    def _copied(self) -> dict[str, torch.Tensor | RankSlice]:
        """What this rank publishes, in host memory: a source may use its tensors again."""
        found: dict[str, torch.Tensor | RankSlice] = {}
        failure: Exception | None = None
        for name, tensor, box in self._weights():
            if failure is None:
                try:
                    found[name] = self._copy(name, tensor, box)
                except Exception as error:  # other ranks are in the source's next collective
                    failure = error
        if failure is not None:
            raise failure
        declared = _declared(self.source)
        owned = [name for name, meta in declared.items() if _owns(meta, self.rank)]
        if declared and list(found) != owned:
            unlike = ", ".join(sorted({*found} ^ {*owned})[:3]) or "in another order"
            raise StateMismatch(
                f"the source does not give what its metadata declares for this rank: {unlike}"
            )
        return found

    def _copy(
        self, name: str, tensor: torch.Tensor | None, box: SliceSpec | None
    ) -> torch.Tensor | RankSlice:
        if tensor is None:  # vLLM 0.32 allows it for what a rank does not hold
            raise InputError(f"the source gives nothing for {name!r} to rank 0", hint=_OWNED)
        if box is not None and tuple(tensor.shape) != box.local_shape:
            raise StateMismatch(
                f"the source gives {list(tensor.shape)} of {name!r}, but its metadata declares "
                f"{list(box.local_shape)} for this rank"
            )
        copied = host_copy(tensor, self._dtype)
        if box is None or box == SliceSpec.whole(box.shape):
            return copied
        return RankSlice(copied, box)

    def _connect(self) -> None:
        self.client.init_weight_transfer_engine(asdict(self._session))

    def _move(self, version: int) -> None:
        update = {"version": version, "owner": self._session.owner, "wait_seconds": self._seconds}
        self.client.start_weight_update()
        try:
            self.client.update_weights(update)
        except BaseException:
            with suppress(Exception):  # on some workers vLLM's own session is still open
                self.client.finish_weight_update()
            raise
        finish: Any = self.client.finish_weight_update
        tags = inspect.signature(finish).parameters  # clients before vLLM 0.28 have no argument
        finish(**({"weight_version": str(version)} if tags else {}))


# -- what a rank has of the weights

_OWNED = "With vLLM 0.33 and sharded=True each rank publishes the tensors that it owns."
#: Name, tensor, and which elements of the whole it should have; None before vLLM 0.33.
_Part = tuple[str, torch.Tensor, SliceSpec | None]


class _WhenRead(Mapping[str, Any]):
    """What ``read`` returns, called once and by the publisher, which reports an error of it to the
    other ranks."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    @cached_property
    def _found(self) -> Mapping[str, Any]:
        return self._read()

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _declared(source: Any) -> dict[str, Any]:
    """vLLM 0.33's metadata of the whole model, the same on all ranks; {} before."""
    return {meta.name: meta for meta in source.metadata} if hasattr(source, "iter_full") else {}


def _owns(meta: Any, rank: int) -> bool:
    return meta.owners is None or rank in meta.owners


def _reader(source: Any, info: PulseTrainerInitInfo) -> Callable[[], Iterable[_Part]]:
    """How this rank reads what it publishes; all ranks choose alike. Raises InputError."""
    if not hasattr(source, "iter_full"):
        if info.sharded:
            _log.info("rank 0 publishes alone: sources before vLLM 0.33 have no iter_local()")
        # Of other ranks nothing counts, but to iterate is a collective.
        used = info.is_sender or not info.sharded
        return lambda: ((name, tensor, None) for name, tensor in source if used)
    declared = _declared(source)
    if info.sharded:
        reason = _no_slices(source)
        if not reason:
            return lambda: _parts(source.iter_local(), declared, info.rank, sliced=True)
        _log.info("the ranks publish whole tensors, which the source gathers: %s", reason)
    if not source.implements_iter_full():
        raise InputError(f"{type(source).__name__} does not implement iter_full()", hint=_OWNED)
    for meta in declared.values():
        if not info.sharded and not _owns(meta, 0):
            raise InputError(f"rank 0 does not own {meta.name!r}", hint=_OWNED)
    return lambda: _parts(source.iter_full(), declared, info.rank, sliced=False)


def _no_slices(source: Any) -> str:
    """Why the ranks cannot publish what ``iter_local`` gives them; "" if they can."""
    if not source.implements_iter_local():
        return f"{type(source).__name__} does not implement iter_local()"
    for meta in source.metadata:
        for placement in meta.placements or ():
            if type(placement) not in (base.Shard, base.Replicate):
                return f"{meta.name!r} is placed as {placement!r}, which is not known"
    return ""


def _parts(
    found: Iterable[tuple[str, torch.Tensor]], declared: dict[str, Any], rank: int, *, sliced: bool
) -> Iterator[_Part]:
    for name, tensor in found:
        meta = declared.get(name)
        if meta is None or not _owns(meta, rank):
            yield name, tensor, None  # `_copied` refuses it when all has been read
        else:
            yield name, tensor, _box(meta, rank if sliced and meta.placements else None)


def _box(meta: Any, rank: int | None) -> SliceSpec:
    """The elements of a tensor that an owner has; None: one who has it whole. The axes of the mesh
    cut it in their order."""
    box = SliceSpec.whole(meta.shape)
    if rank is None:
        return box
    of = list(box.of)
    place = np.unravel_index(meta.owners.index(rank), meta.mesh_shape)
    for size, index, placement in zip(meta.mesh_shape, place, meta.placements, strict=True):
        if isinstance(placement, base.Shard):
            of[placement.dim] = chunk(of[placement.dim], size, int(index))
    return SliceSpec(tuple(of), box.shape)
