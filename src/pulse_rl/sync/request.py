"""What one rank was told to publish: the caller's own memory, or a copy that was taken of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from ..errors import InputError
from ..events import Metadata
from ..state.cast import CastState, compute_dtype_named
from ..state.checkpoint import StateSource, as_state
from ..state.memory import recorded
from ..state.snapshot import (
    Snapshot,
    await_devices,
    copied_within_devices,
    cuda_tensors,
    merge,
    own_tensors,
    snapshot,
    split,
)
from ..state.tensors import DType, State, TensorSpec
from ..stream.manifest import checked_metadata
from .layout import Box, Held

BASELINE, COPY = "baseline", "copy"


class LocalState(NamedTuple):
    """This rank's elements of a state: ``source``, to be cast to ``dtype`` if there is one. ``boxes``: which elements
    of a tensor they are, where they are not all. ``owned``: nobody else writes to them."""

    source: State
    dtype: DType | None = None
    boxes: Mapping[str, Box] = {}
    owned: bool = False

    @classmethod
    def of(cls, source: StateSource, dtype: str | None) -> Self:
        """All of a state. Raises UnsupportedTensor and InputError."""
        compute = None if dtype is None else compute_dtype_named(dtype)
        return cls(as_state(source), compute)

    @property
    def state(self) -> State:
        """What the version is to hold of them."""
        return self.source if self.dtype is None else CastState(self.source, self.dtype)

    @property
    def held(self) -> list[Held]:
        """What they are, for the other ranks: the stored tensors first, then the other names of tied ones."""
        state, found = self.state, []
        storages = {spec.name: k for k, spec in enumerate(state.specs)}
        for name in [*storages, *state.aliases]:
            spec = state.spec(name)
            box = self.boxes.get(name) or Box.whole(spec.shape)
            storage = storages[state.aliases.get(name, name)] if spec.elements else None
            found.append(Held(TensorSpec(name, spec.dtype, box.shape), box, storage))
        return found


@dataclass(slots=True)
class HostCopy:
    """Memory into which a state is copied; ``resident`` are tensors that stay on their devices, and are there once
    ``written`` was waited for."""

    copied: Snapshot
    resident: State | None = None
    written: list[Any] = field(default_factory=list)

    def wait(self, local: LocalState) -> LocalState:
        """``local``, whose source is this copy, once all is there. Raises what the device reports."""
        self.copied.copies.wait()
        for event in self.written:
            event.synchronize()
        resident, self.resident = self.resident, None
        return local if resident is None else local._replace(source=merge(local.source, resident), owned=False)


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """What is to be published: the elements that ``local`` has, once its ``copy``, where there is one, was waited for;
    nothing where it was ``refused``. ``crowded``: whether a device had no memory for its copy."""

    local: LocalState | None
    metadata: Metadata
    dtype: str | None
    anchor: bool
    on_device: str | None = None
    crowded: bool = False
    copy: HostCopy | None = None
    refused: Exception | None = None

    @classmethod
    def of(
        cls,
        read: Callable[[], LocalState],
        *,
        metadata: Metadata | None,
        dtype: str | None,
        anchor: bool,
        on_device: str | None,
    ) -> Self:
        """The request of a call of `Publisher.publish`. Raises what that does for its arguments."""
        if on_device not in (None, COPY, BASELINE):
            raise InputError(f"on_device must be None, 'copy' or 'baseline', not {on_device!r}")
        facts = checked_metadata({} if metadata is None else metadata)
        return cls(read(), facts, dtype, anchor, on_device)

    @classmethod
    def refusing(cls, error: Exception) -> Self:
        """One whose error the other ranks wait to be told."""
        return cls(None, {}, None, anchor=False, refused=error)

    def awaited(self) -> Self:
        """The same, once the caller's devices have written what is to be published."""
        request = self._within_devices()
        if request.local:
            await_devices(request.local.source)
        return request

    def taken(self, spare: HostCopy | None, threads: int | None) -> Self:
        """The same of a copy in host memory, made into that of ``spare`` if that fits.

        What is on a CUDA device is copied as it is and cast later, so that the caller waits for neither; its own copies
        on its device stay there.
        """
        if spare:
            spare.resident = None  # before the same memory is asked for again
        request = self._within_devices()
        if request.local is None:
            return request
        resident, source = split(request.local.source, own_tensors(request.local.source))
        dtype = request.local.dtype
        if dtype and not cuda_tensors(source):
            source, dtype = CastState(source, dtype), None
        into = spare.copied if spare else None
        copied = snapshot(source, into, threads=threads, staged=self.on_device is not None)
        local = request.local._replace(source=copied.state, dtype=dtype, owned=dtype is None)
        written = recorded(cuda_tensors(resident).values())
        copy = HostCopy(copied, resident if len(resident) else None, written)
        return replace(request, local=local, copy=copy)

    def arrived(self) -> LocalState:
        """This rank's elements. Returns once all is copied; raises what is wrong with the request, and what the device
        reports."""
        if self.refused:
            raise self.refused
        assert self.local is not None
        return self.copy.wait(self.local) if self.copy else self.local

    def let_go(self) -> None:
        """Frees what it holds of devices' memory."""
        if self.copy:
            self.copy.resident = None

    def _within_devices(self) -> Self:
        """The same of a state whose CUDA tensors are copies on their devices, cast, where that is asked for and there
        is memory."""
        if self.local is None or self.on_device != BASELINE:
            return self
        source = copied_within_devices(self.local.source, self.local.dtype)
        if source is None:
            return replace(self, crowded=True)
        return replace(self, local=self.local._replace(source=source))
