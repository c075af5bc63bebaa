"""What a publisher was told to publish: the caller's own memory, or a copy that was taken of it."""

from __future__ import annotations

from typing import NamedTuple, Self

from ..events import Metadata
from ..state.cast import CastState
from ..state.checkpoint import StateSource, as_state
from ..state.device import DeviceCopies
from ..state.rounding import compute_dtype_named
from ..state.snapshot import Snapshot, on_cuda, snapshot
from ..state.tensors import DType, State
from ..stream.manifest import checked_metadata


class Order(NamedTuple):
    """``source``, cast to ``dtype`` if there is one. ``owned`` is a source that nobody else uses and nothing is cast
    of."""

    source: State
    dtype: DType | None
    metadata: Metadata
    anchor: bool
    owned: bool = False

    @classmethod
    def of(cls, source: StateSource, metadata: Metadata | None, dtype: str | None, anchor: bool) -> Self:
        """The order of a call of `Publisher.publish`. Raises what that does for its arguments."""
        facts = checked_metadata({} if metadata is None else metadata)
        compute = None if dtype is None else compute_dtype_named(dtype)
        return cls(as_state(source), compute, facts, anchor)

    @property
    def state(self) -> State:
        """What the version is to hold."""
        return self.source if self.dtype is None else CastState(self.source, self.dtype)

    def taken(self, spare: Taken | None, threads: int | None, *, staged: bool = False) -> Taken:
        """The same order of a copy, made into the memory of ``spare`` if that fits, and what of it is under way.

        What is on a CUDA device is copied as it is and cast later, so that the caller waits for neither; if ``staged``,
        within the device first.
        """
        source, dtype = (self.source, self.dtype) if on_cuda(self.source) else (self.state, None)
        into = Snapshot(spare.order.source, spare.copies) if spare else None
        copied, copies = snapshot(source, into, threads=threads, staged=staged)
        return Taken(self._replace(source=copied, dtype=dtype, owned=dtype is None), copies)


class Taken(NamedTuple):
    """An ``order`` whose source holds its values once ``copies`` were waited for."""

    order: Order
    copies: DeviceCopies
