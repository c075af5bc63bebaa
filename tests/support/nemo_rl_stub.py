"""As much of NeMo-RL as the integration takes from it; NEMO_RL_CHECKOUT=FOLDER has the tests use that of a checkout."""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from functools import cache
from types import ModuleType
from typing import Any

INTEGRATION = "pulse_rl.integrations.nemo_rl"
BASE = "nemo_rl.utils.checkpoint_engines.base"


class CheckpointEngine(ABC):
    shard_expert_weights = False

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None:  # noqa: B027 - NeMo-RL's is one
        pass

    @abstractmethod
    async def send_weights(self, weights: Any) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> Any: ...


def create_checkpoint_engine(backend: str, *, bucket_size_bytes: int, engine_kwargs: dict[str, Any]) -> Any:
    module, name = backend.split(":", 1)
    return getattr(importlib.import_module(module), name)(bucket_size=bucket_size_bytes, **engine_kwargs)


@cache
def base() -> ModuleType:
    """NeMo-RL's module of the base class, or this one; the integration is imported over it."""
    if checkout := os.environ.get("NEMO_RL_CHECKOUT"):
        sys.path.append(checkout)
        return importlib.import_module(BASE)
    names = ("nemo_rl", "nemo_rl.utils", "nemo_rl.utils.checkpoint_engines", BASE)
    sys.modules |= dict.fromkeys(names, sys.modules[__name__])
    try:
        importlib.import_module(INTEGRATION)
    finally:
        for name in names:
            del sys.modules[name]
    return sys.modules[__name__]
