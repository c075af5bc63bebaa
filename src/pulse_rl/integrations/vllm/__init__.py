"""vLLM: engines that follow a stream, and the handle that drives them (docs/vllm.md).

Installing pulse-rl next to vLLM makes the weight-transfer backend ``pulse`` known. Only what runs inside of vLLM's own
processes imports vLLM or torch: `connect` to a server needs neither.
"""

from __future__ import annotations

from ..engines.handle import EngineHandle, EngineSync
from .connection import connect

__all__ = ["EngineHandle", "EngineSync", "connect"]
