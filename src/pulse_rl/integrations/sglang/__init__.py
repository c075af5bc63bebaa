"""SGLang: servers that follow a stream, and a handle for whoever drives them (docs/sglang.md).

Installing pulse-rl next to SGLang makes its plugin ``pulse`` known; `load` is the custom weight loader. Only what runs
inside of SGLang's own processes imports SGLang or torch: `connect` needs neither.
"""

from __future__ import annotations

from ..engines.handle import EngineHandle, EngineSync
from .connection import connect
from .loader import load

__all__ = ["EngineHandle", "EngineSync", "connect", "load"]
