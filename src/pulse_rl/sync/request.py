"""What one rank is to publish: the caller's own memory, or a copy that was taken of it
(docs/protocol.md, section 3)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from ..errors import InputError, UnsupportedTensor
from ..events import Metadata
from ..state.cast import CastState, compute_dtype_named
from ..state.checkpoint import StateSource, as_state
from ..state.companions import Files, checked_files
from ..state.memory import recorded
from ..state.quantise import Quantise, QuantisedState, config_of
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
    """This rank's elements of a state: ``source``, to be cast to ``dtype`` if there is one.
    ``boxes``: which elements of a tensor they are, where they are not all. ``owned``: nobody else
    writes to them. ``quantise``: what is to be made of them first, once the ranks have agreed on
    scales (`quantised`). ``beside``: of other streams the same. ``config``: what the config.json of
    a quantised state says of it."""

    source: State
    dtype: DType | None = None
    boxes: Mapping[str, Box] = {}
    owned: bool = False
    quantise: Quantise | None = None
    config: Mapping[str, Any] | None = None
    beside: Mapping[str, Quantise | None] | None = None

    @classmethod
    def of(cls, source: StateSource, dtype: str | None, quantise: Quantise | None = None) -> Self:
        """All of a state. Raises UnsupportedTensor and InputError."""
        compute = None if dtype is None else compute_dtype_named(dtype)
        state = as_state(source)
        if isinstance(source, Mapping):
            require_weights((spec.name, spec.shape) for spec in state.specs)
        if quantise is not None:
            made = QuantisedState(state, quantise, compute)
            return cls(made, config=config_of(quantise, made.kept))
        return cls(state, compute)

    @property
    def state(self) -> State:
        """What the version is to hold of them."""
        return self.source if self.dtype is None else CastState(self.source, self.dtype)

    @property
    def early_dtype(self) -> DType | None:
        """To what a copy of them is cast: not if it is still to be quantised, which is done from
        the masters."""
        return None if self.quantise is not None or self.beside else self.dtype

    @property
    def held(self) -> list[Held]:
        """What they are, for the other ranks: the stored tensors first, then the other names of
        tied ones."""
        state, found = self.state, []
        storages = {spec.name: k for k, spec in enumerate(state.specs)}
        for name in [*storages, *state.aliases]:
            spec = state.spec(name)
            box = self.boxes.get(name) or Box.whole(spec.shape)
            storage = storages[state.aliases.get(name, name)] if spec.elements else None
            found.append(Held(TensorSpec(name, spec.dtype, box.shape), box, storage))
        return found


def require_weights(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raises UnsupportedTensor for what sharded training leaves in place of weights, by names and
    shapes."""
    zero = "deepspeed" in sys.modules
    for name, shape in shapes:
        if name.rpartition(".")[2] == "_flat_param" or (zero and shape == (0,)):
            raise UnsupportedTensor(
                f"{name!r} is what FSDP1 or DeepSpeed ZeRO-3 leaves in place of weights that it "
                "has cut over ranks",
                hint="Use PulseCallback, or ShardedPublisher on all ranks, which takes the model "
                "itself.",
            )


@dataclass(slots=True)
class HostCopy:
    """Memory into which a state is copied; ``resident`` are tensors that stay on their devices, and
    are there once ``written`` was waited for."""

    copied: Snapshot
    resident: State | None = None
    written: list[Any] = field(default_factory=list)

    def wait(self, local: LocalState) -> LocalState:
        """``local``, whose source is this copy, once all is there. Raises what the device
        reports."""
        self.copied.copies.wait()
        for event in self.written:
            event.synchronize()
        resident, self.resident = self.resident, None
        return (
            local
            if resident is None
            else local._replace(source=merge(local.source, resident), owned=False)
        )


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """What is to be published: the elements that ``local`` has, once its ``copy``, where there is
    one, was waited for; nothing where it was ``refused``; and the ``files`` beside the weights,
    None for those of the version before. ``after``: the version that the new one must follow, see
    `Publisher.publish`. ``out_of_memory``: whether a device had no memory for its copy."""

    local: LocalState | None
    metadata: Metadata
    dtype: str | None
    anchor: bool
    files: Mapping[str, bytes] | None = None
    on_device: str | None = None
    after: int | None = None
    out_of_memory: bool = False
    copy: HostCopy | None = None
    refused: Exception | None = None

    @property
    def quantise(self) -> Quantise | None:
        """What `LocalState` is to be quantised by."""
        return self.local.quantise if self.local else None

    @property
    def beside(self) -> Mapping[str, Quantise | None]:
        """The other streams that get the state, and what each is quantised by."""
        return (self.local and self.local.beside) or {}

    @classmethod
    def of(
        cls,
        read: Callable[[], LocalState],
        *,
        metadata: Metadata | None,
        dtype: str | None,
        anchor: bool,
        files: Files | None,
        on_device: str | None,
        after: int | None,
    ) -> Self:
        """The request of a call of `Publisher.publish`. Raises what that does for its arguments."""
        if on_device not in (None, COPY, BASELINE):
            raise InputError(f"on_device must be None, 'copy' or 'baseline', not {on_device!r}")
        facts = checked_metadata({} if metadata is None else metadata)
        taken = None if files is None else checked_files(files)
        if after is not None and (
            isinstance(after, bool) or not isinstance(after, int) or after < -1
        ):
            raise InputError(
                f"after must be the number of a version, or -1 for a new stream, not {after!r}"
            )
        return cls(read(), facts, dtype, anchor, taken, on_device, after)

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

        What is on a CUDA device is copied as it is and cast later, so that the caller waits for
        neither; its own copies on its device stay there.
        """
        if spare:
            spare.resident = None  # before the same memory is asked for again
        request = self._within_devices()
        if request.local is None:
            return request
        # Copies that devices have made for this call stay there; all else is copied to the host.
        resident, source = split(request.local.source, own_tensors(request.local.source))
        dtype = request.local.early_dtype
        # The host casts while it copies. A device's tensors are cast behind: the caller would wait
        # for the bus.
        if dtype and not cuda_tensors(source):
            source, dtype = CastState(source, dtype), None
        into = spare.copied if spare else None
        copied = snapshot(source, into, threads=threads, staged=self.on_device is not None)
        as_it_is = request.local.early_dtype is None
        local = request.local._replace(
            source=copied.state,
            dtype=request.local.dtype if as_it_is else dtype,
            owned=dtype is None,
        )
        written = recorded(cuda_tensors(resident).values())
        copy = HostCopy(copied, resident if len(resident) else None, written)
        return replace(request, local=local, copy=copy)

    def arrived(self) -> LocalState:
        """This rank's elements. Returns once all is copied; raises what is wrong with the request,
        and what the device reports."""
        if self.refused:
            raise self.refused
        assert self.local is not None
        return self.copy.wait(self.local) if self.copy else self.local

    def let_go(self) -> None:
        """Frees what it holds of devices' memory."""
        if self.copy:
            self.copy.resident = None

    def _within_devices(self) -> Self:
        """The same of a state whose CUDA tensors are copies on their devices, cast, where that is
        asked for and there is memory."""
        if self.local is None or self.on_device != BASELINE:
            return self
        source = copied_within_devices(self.local.source, self.local.early_dtype)
        if source is None:
            return replace(self, out_of_memory=True)
        return replace(self, local=self.local._replace(source=source))
