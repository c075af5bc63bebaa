"""How a handle reaches an engine: the calls that all forms of an engine have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ... import errors
from ...errors import PulseError

Status = dict[str, Any]
"""What a worker says of itself; see `worker.Worker.answer`."""


@dataclass
class InitInfo:
    """What a handle tells an engine's workers. ``store``: its address; ``stream``: its name; ``base``: a checkpoint's
    path (None: the one that the engine was started from); ``trusted_keys``, ``stream_id``, ``allow_recreated`` and
    ``cache`` as those of `pulse_rl.Subscriber`; ``follow``: whether new versions are staged without being asked for;
    ``audit_every``: updates from one audit to the next; ``owner``: any string that stands for who drives the engine."""

    store: str
    stream: str
    base: str | None = None
    trusted_keys: list[str] | None = None
    stream_id: str | None = None
    allow_recreated: bool = False
    cache: str | None = None
    follow: bool = True
    audit_every: int = 100
    owner: str = ""


class Transport(Protocol):
    """An engine's calls. They raise EngineError, or whatever the engine raises."""

    def init(self, init_info: dict[str, Any]) -> None: ...

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[Status]:
        """The answers of all workers."""
        ...

    def recover(self) -> None:
        """Ends what a handle that died has left: an update that it began, a pause."""
        ...

    def pause(self, mode: str) -> None: ...

    def resume(self) -> None: ...

    def start(self) -> None: ...

    def update(self, version: int | None, owner: str) -> None: ...

    def finish(self, weight_version: str) -> None: ...

    def reset_prefix_cache(self, running: bool) -> bool:
        """Whether nothing of it is left. ``running``: requests in flight start over with the new weights."""
        ...


def raise_reported(field: str, statuses: list[Status]) -> None:
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
