"""How a handle reaches an engine: the calls that all forms of an engine have."""

from __future__ import annotations

from typing import Any, Protocol

from ... import errors
from ...errors import PulseError

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


def raise_told(field: str, statuses: list[Status]) -> None:
    """Raises what a worker reports, as the error that it was there."""
    for status in statuses:
        found = status.get(field)
        if found:
            raise _class_of(found["kind"])(found["message"], hint=found["hint"])


def _class_of(kind: str) -> type[PulseError]:
    for candidate in vars(errors).values():
        if isinstance(candidate, type) and issubclass(candidate, PulseError) and vars(candidate).get("kind") == kind:
            return candidate
    return PulseError
