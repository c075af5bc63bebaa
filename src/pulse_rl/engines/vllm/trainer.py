"""The trainer's side of vLLM's weight transfer: a trainer that speaks vLLM's own API sends its
weights through a store.

Importing this module makes the backend ``pulse`` known to vLLM's factory for trainers
(docs/vllm.md).
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
)

from ..._util.settings import checked_number
from ...errors import InputError
from ...events import Published
from ...frameworks.weights import host_copy, torch_dtype
from ...state.cast import DTypeLike
from ...stream.signing import keys_of
from ...sync.publisher import Publisher
from ..transport import InitInfo
from .plugin import BACKEND, register_trainer

__all__ = ["PulseTrainerEngine", "PulseTrainerInitInfo"]

register_trainer()


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
    """

    backend: ClassVar[str] = BACKEND

    store: str
    stream: str
    dtype: DTypeLike | None = "BF16"
    publisher: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 240.0

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
    collective; the first one publishes and calls the engines. No connection between trainer and
    engine carries weights. ``published`` is the last version, None before and on the other ranks.
    """

    init_info_cls = PulseTrainerInitInfo

    def __init__(
        self, init_info: PulseTrainerInitInfo, *, client: Any, source: WeightSource, **config: Any
    ) -> None:
        super().__init__(**config, client=client, source=source, is_sender=init_info.is_sender)
        self.published: Published | None = None
        self._dtype = torch_dtype(init_info.dtype)
        self._seconds = init_info.timeout_seconds
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
        if self.is_sender:
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
        InputError without a ``source``, what `pulse_rl.Publisher` raises, and what the client
        raises."""
        if source is None:
            raise InputError(
                "the backend pulse needs a source of all weights", hint="ModuleSource(model), say."
            )
        engine = cls(init_info, client=client, source=source, **config)
        if engine.is_sender:
            engine._connect()
        return engine

    def send_weights(self) -> None:
        """One update: on rank 0 a version is published, then the engines fetch, verify and write
        what changed.

        Raises what `pulse_rl.Publisher.publish` raises, and what the client raises where an engine
        refuses: it goes on with the weights that it has. Either way the next call sends all that is
        new.
        """
        if self._publisher is None:
            for _ in self.source:
                pass
            return
        state = {name: host_copy(tensor, self._dtype) for name, tensor in self.source}
        self.published = self._publisher.publish(state)
        try:
            self._move(self.published.version)
        except Exception:
            self._connect()  # an engine that was restarted knows nothing of the stream
            self._move(self.published.version)

    def shutdown(self) -> None:
        """Closes the publisher. The engines keep their weights. May be called twice."""
        if self._publisher is not None:
            self._publisher.close()

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
