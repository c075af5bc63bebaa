"""What one rank was told to publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from ...events import Metadata
from ...state.snapshot import await_devices
from ...stream.manifest import checked_metadata
from .local import LocalState


class Order(NamedTuple):
    """What a rank was told to publish. ``local`` is called for its part, and raises what is wrong with the order."""

    local: Callable[[], LocalState]
    metadata: Metadata
    anchor: bool

    @classmethod
    def of(cls, source: Mapping[str, Any], metadata: Metadata | None, dtype: str | None, anchor: bool) -> Self:
        """Looks at all of it in the caller's thread; an error is kept until all ranks can be told."""
        try:
            facts = checked_metadata({} if metadata is None else metadata)
            local = LocalState(source, dtype)
            await_devices(local.source)
        except Exception as error:  # whatever it is: the others wait to be told
            refused = error

            def refuse() -> LocalState:
                raise refused

            return cls(refuse, {}, anchor)
        return cls(lambda: local, facts, anchor)
