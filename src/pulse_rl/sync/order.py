"""What a publisher was told to publish: the caller's own memory, or a copy that was taken of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from ..events import Metadata
from ..state.cast import CastState
from ..state.checkpoint import StateSource, as_state
from ..state.device import recorded
from ..state.rounding import compute_dtype_named
from ..state.snapshot import Snapshot, copied_within_devices, cuda_tensors, merge, own_tensors, snapshot, split
from ..state.tensors import DType, State
from ..stream.manifest import checked_metadata


class Order(NamedTuple):
    """``source``, cast to ``dtype`` if there is one. ``owned`` is a source that nobody else uses and nothing is cast
    of. ``crowded``: whether a device had no memory for its copy."""

    source: State
    dtype: DType | None
    metadata: Metadata
    anchor: bool
    owned: bool = False
    crowded: bool = False

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

    def within_devices(self) -> Self:
        """The same order of a state whose CUDA tensors are copies on their devices, cast, where there is memory."""
        source = copied_within_devices(self.source, self.dtype)
        return self._replace(crowded=True) if source is None else self._replace(source=source)

    def taken(self, spare: Taken | None, threads: int | None, on_device: str | None) -> Taken:
        """The same order of a copy, made into the memory of ``spare`` if that fits, and what of it is under way.

        What is on a CUDA device is copied as it is and cast later, so that the caller waits for neither. ``on_device``:
        see `Publisher`.
        """
        if spare:
            spare.resident = None  # before the same is asked for again
        order = self.within_devices() if on_device == "baseline" else self
        resident, source = split(order.source, own_tensors(order.source))
        dtype = order.dtype
        if dtype and not cuda_tensors(source):
            source, dtype = CastState(source, dtype), None
        copied = snapshot(source, spare.copied if spare else None, threads=threads, staged=on_device is not None)
        order = order._replace(source=copied.state, dtype=dtype, owned=dtype is None)
        written = recorded(cuda_tensors(resident).values())
        return Taken(order, copied, resident if len(resident) else None, written)


@dataclass(slots=True)
class Taken:
    """An order whose source holds its values once the copies of ``copied`` were waited for; without the tensors that
    are ``resident`` on devices, and are there once ``written`` was waited for."""

    order: Order
    copied: Snapshot
    resident: State | None
    written: list[Any]

    def arrived(self) -> Order:
        """The whole order. Returns once all is copied, and raises what the device reports."""
        self.copied.copies.wait()
        for event in self.written:
            event.synchronize()
        if self.resident is None:
            return self.order
        return self.order._replace(source=merge(self.order.source, self.resident), owned=False)
