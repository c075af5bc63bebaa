"""As much of verl, NeMo-RL and Axolotl as `pulse_rl.frameworks` takes from them, where they are not
installed.

`make test-verl` has the real verl; NEMO_RL_CHECKOUT=FOLDER has the tests use that checkout of
NeMo-RL.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

#: Where each framework has its base class.
BASES = {
    "verl": "verl.checkpoint_engine.base",
    "nemo_rl": "nemo_rl.utils.checkpoint_engines.base",
    "axolotl": "axolotl.integrations.base",
}


class CheckpointEngineRegistry:
    """verl's."""

    registered: ClassVar[dict[str, type]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[type], type]:
        return lambda engine: cls.registered.setdefault(backend, engine)

    @classmethod
    def new(cls, backend: str, **kwargs: Any) -> Any:
        return cls.registered[backend](**kwargs)


class CheckpointEngine(ABC):  # noqa: B024 - verl's is one, and NeMo-RL's
    wire_format = ""


def create_checkpoint_engine(
    backend: str, *, bucket_size_bytes: int, engine_kwargs: dict[str, Any]
) -> Any:
    """NeMo-RL's."""
    module, name = backend.split(":", 1)
    return getattr(importlib.import_module(module), name)(
        bucket_size=bucket_size_bytes, **engine_kwargs
    )


class BasePlugin:
    """Axolotl's."""


@cache
def base(framework: str) -> ModuleType:
    """The module of its base class: the framework's own, or this one."""
    if framework == "nemo_rl" and (checkout := os.environ.get("NEMO_RL_CHECKOUT")):
        sys.path.append(checkout)
    return (
        importlib.import_module(BASES[framework]) if find_spec(framework) else sys.modules[__name__]
    )


@cache
def integration(framework: str = "verl") -> ModuleType:
    """`pulse_rl.frameworks.FRAMEWORK`, over the framework or over this module."""
    parts = [] if base(framework).__name__ != __name__ else BASES[framework].split(".")
    names = [".".join(parts[: k + 1]) for k in range(len(parts))]
    sys.modules |= dict.fromkeys(names, sys.modules[__name__])
    try:
        return importlib.import_module(f"pulse_rl.frameworks.{framework}")
    finally:
        for name in names:
            del sys.modules[name]
