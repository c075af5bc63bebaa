"""How a handle reaches an engine: the calls that all forms of an engine have."""

from __future__ import annotations

from typing import Any, Protocol

Status = dict[str, Any]
"""What a worker says of itself; see `worker.Worker.answer`."""


class Transport(Protocol):
    """An engine's calls. They raise EngineError, or whatever the engine raises."""

    def init(self, init_info: dict[str, Any]) -> None: ...

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[Status]:
        """The answers of all workers."""
        ...

    def pause(self, mode: str) -> None: ...

    def resume(self) -> None: ...

    def start(self) -> None: ...

    def update(self, version: int | None) -> None: ...

    def finish(self, weight_version: str) -> None: ...

    def reset_prefix_cache(self, running: bool) -> bool:
        """Whether nothing of it is left. ``running``: requests in flight start over with the new weights."""
        ...
