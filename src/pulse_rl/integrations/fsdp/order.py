"""What one rank was told to publish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from ...events import Metadata
from ...state.snapshot import Snapshot, await_devices
from ...stream.manifest import checked_metadata
from .local import LocalState


class Order(NamedTuple):
    """What a rank was told to publish: ``mine``, unless it was ``refused``, once ``copied``, where there is one, holds
    its values."""

    mine: LocalState | None
    metadata: Metadata
    anchor: bool
    refused: Exception | None = None
    copied: Snapshot | None = None

    @classmethod
    def of(cls, source: Mapping[str, Any], metadata: Metadata | None, dtype: str | None, anchor: bool) -> Self:
        """Looks at all of it in the caller's thread; an error is kept until all ranks can be told."""
        try:
            return cls(LocalState(source, dtype), checked_metadata({} if metadata is None else metadata), anchor)
        except Exception as error:  # whatever it is: the others wait to be told
            return cls(None, {}, anchor, error)

    def taken(self, spare: Order | None, threads: int | None) -> Order:
        """The same order of a copy, made into the memory of ``spare`` if that fits."""
        if self.mine is None:
            return self
        try:
            mine, copied = self.mine.copied(spare.copied if spare else None, threads)
        except Exception as error:
            return self._replace(mine=None, refused=error)
        return self._replace(mine=mine, copied=copied)

    def awaited(self) -> Order:
        """The same, once the caller's devices have written it."""
        try:
            if self.mine:
                await_devices(self.mine.source)
        except Exception as error:
            return self._replace(mine=None, refused=error)
        return self

    def local(self) -> LocalState:
        """This rank's part. Raises what is wrong with the order."""
        if self.refused:
            raise self.refused
        if self.copied:
            self.copied.copies.wait()
        assert self.mine is not None
        return self.mine
