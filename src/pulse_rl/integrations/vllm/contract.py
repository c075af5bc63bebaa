"""Which of vLLM's weight-transfer contracts the engine fulfils."""

from __future__ import annotations

import inspect

from ...errors import EngineError

_ARGUMENTS = ("config", "vllm_config", "device", "model")
_METHODS = frozenset(
    {"init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"}
)


def require_known(base: type, version: str) -> None:
    """Raises EngineError unless vLLM's class ``base`` asks its subclasses for what this package implements."""
    found = tuple(inspect.signature(base).parameters)
    asked: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
    unknown = [*sorted(asked - _METHODS), *sorted(_METHODS - set(dir(base)))]
    if found != _ARGUMENTS:
        unknown.append(f"{base.__name__}({', '.join(found)})")
    if unknown:
        raise EngineError(
            f"the weight-transfer contract of vLLM {version} is not known: {', '.join(unknown)}",
            hint="Use a vLLM that this version of pulse-rl was tested with (docs/vllm.md).",
        )
