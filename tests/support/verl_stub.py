"""As much of verl as the integration takes from it, where verl is not installed; `make test-verl` has the real one."""

from __future__ import annotations

import importlib
import sys
from abc import ABC
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

INTEGRATION = "pulse_rl.integrations.verl"


class CheckpointEngineRegistry:
    registered: ClassVar[dict[str, type]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[type], type]:
        return lambda engine: cls.registered.setdefault(backend, engine)

    @classmethod
    def new(cls, backend: str, **kwargs: Any) -> Any:
        return cls.registered[backend](**kwargs)


class CheckpointEngine(ABC):  # noqa: B024 - verl's is one
    wire_format = ""


@cache
def integration() -> ModuleType:
    """`pulse_rl.integrations.verl`, over verl or over this module."""
    if find_spec("verl"):
        return importlib.import_module(INTEGRATION)
    names = ("verl", "verl.checkpoint_engine", "verl.checkpoint_engine.base")
    sys.modules |= dict.fromkeys(names, sys.modules[__name__])
    try:
        return importlib.import_module(INTEGRATION)
    finally:
        for name in names:
            del sys.modules[name]
