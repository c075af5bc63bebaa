"""SGLang: servers that follow a stream, and the handle that drives them (docs/sglang.md).

Installing pulse-rl next to SGLang makes its plugin ``pulse`` known; `load` is the custom weight loader. Only what runs
inside of SGLang's own processes imports SGLang or torch: `connect` needs neither.
"""

from __future__ import annotations

from typing import Any

from ..engines.handle import EngineHandle, EngineSync
from .connection import connect

__all__ = ["EngineHandle", "EngineSync", "connect", "load"]


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Moves the live parameters of ``model`` to the version that is staged. Called by SGLang, in every worker, for
    ``/update_weights_from_tensor`` with this function's name as ``load_format``; ``named_tensors`` is empty.

    Never raises: an error in a worker ends SGLang's server. The plugin lets the request answer with it instead.
    """
    from .plugin import update

    update(model, named_tensors)
