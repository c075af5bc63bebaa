"""The request of a publish: the caller's own memory, or a copy of it (docs/protocol.md, section
3)."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from .._util.settings import checked_metadata
from ..errors import InputError, UnsupportedTensor
from ..events import Metadata
from ..state.cast import CastState, DTypeLike, compute_dtype_named
from ..state.tensors import DType, State, StateSource, await_devices

if TYPE_CHECKING:
    from ..quantize.states import Quantize
    from ..sharding.layout import SliceSpec
    from ..submit import Snapshot

#: A version's files as callers may pass them: a mapping of names to bytes or paths, or the folder
#: of a checkpoint.
Files = Mapping[str, bytes | str | os.PathLike[str]] | str | os.PathLike[str]


class LocalState(NamedTuple):
    """This rank's elements of a state.

    ``source`` has them; they are cast to ``dtype`` if it is set. ``boxes`` gives the parts of
    tensors that this rank has, for tensors that it does not have whole. ``owned``: nobody else
    writes to them. ``quantize`` says how they become codes and scales, once the ranks have agreed
    on scales (`quantized`). ``config`` is the quantization entry of config.json. The tensors
    ``uncast`` are not cast; those of ``mixed`` are, though most of the state is narrow already.
    """

    source: State
    dtype: DType | None = None
    boxes: Mapping[str, SliceSpec] = {}
    owned: bool = False
    quantize: Quantize | None = None
    config: Mapping[str, Any] | None = None
    uncast: Collection[str] = ()
    mixed: Sequence[str] = ()

    @classmethod
    def of(
        cls, source: StateSource, dtype: DTypeLike | None, quantize: Quantize | None = None
    ) -> Self:
        """A whole state. Raises UnsupportedTensor and InputError."""
        compute = None if dtype is None else compute_dtype_named(dtype)
        state = State.of(source)
        # A module is gathered by `State.of`; a mapping may hold placeholders of sharded weights.
        if isinstance(source, Mapping):
            require_weights((spec.name, spec.shape) for spec in state.specs)
        if quantize is not None:
            from ..quantize.states import QuantizedState, config_of

            made = QuantizedState(state, quantize, compute)
            return cls(made, config=config_of(quantize, made.kept))
        if compute is None:
            return cls(state)
        from ..quantize.states import exact_names, mixed_names

        uncast = state.uncast | exact_names(state.specs)
        return cls(state, compute, uncast=uncast, mixed=mixed_names(state.specs, compute, uncast))

    @property
    def state(self) -> State:
        """The elements as the version will have them."""
        return (
            self.source if self.dtype is None else CastState(self.source, self.dtype, self.uncast)
        )


def require_weights(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise UnsupportedTensor for the placeholders that sharded training leaves in place of
    weights.

    They are recognized by names and shapes.
    """
    # ZeRO-3 leaves tensors of shape (0,); elsewhere such a tensor is legitimate.
    zero = "deepspeed" in sys.modules
    for name, shape in shapes:
        if name.rpartition(".")[2] == "_flat_param" or (zero and shape == (0,)):
            raise UnsupportedTensor(
                f"{name!r} is what FSDP1 or DeepSpeed ZeRO-3 leaves in place of weights that it "
                "has cut over ranks",
                hint="Use PulseCallback, or ShardedPublisher on all ranks, which takes the model "
                "itself.",
            )


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """One publish: the elements ``local``, with the arguments of the call.

    ``copy``, if any, is a copy that must be waited for first. A ``refused`` request has an error
    and no elements. ``files`` are those next to the weights; None keeps those of the version
    before. ``after`` is the version that the new one must follow, see `Publisher.publish`.
    """

    local: LocalState | None
    metadata: Metadata
    dtype: str | None
    anchor: bool
    files: Mapping[str, bytes] | None = None
    after: int | None = None
    copy: Snapshot | None = None
    refused: Exception | None = None

    @property
    def quantize(self) -> Quantize | None:
        """How the elements are to be quantized; None: not at all."""
        return self.local.quantize if self.local else None

    @classmethod
    def of(
        cls,
        local: LocalState,
        *,
        metadata: Metadata | None,
        dtype: DTypeLike | None,
        anchor: bool,
        files: Files | None,
        after: int | None = None,
    ) -> Self:
        """The request of a call of `Publisher.publish`; raises what that raises for its
        arguments."""
        # All arguments are checked here, in the caller's thread, before any rank or device has
        # worked.
        facts = checked_metadata({} if metadata is None else metadata)
        taken = None
        if files is not None:
            from ..follow.aux_files import checked_files

            taken = checked_files(files)
        if after is not None and (
            isinstance(after, bool) or not isinstance(after, int) or after < -1
        ):
            raise InputError(
                f"after must be the number of a version, or -1 for a new stream, not {after!r}"
            )
        name = None if dtype is None else compute_dtype_named(dtype).name
        return cls(local, facts, name, anchor, taken, after)

    @classmethod
    def refusing(cls, error: Exception) -> Self:
        """A request that reports ``error`` to the other ranks."""
        return cls(None, {}, None, anchor=False, refused=error)

    def awaited(self) -> Self:
        """Wait until the caller's devices have written the state; return the request."""
        if self.local:
            await_devices(self.local.source)
        return self

    def arrived(self) -> LocalState:
        """Wait for the copy; return this rank's elements.

        Raises the error of a refused request, and what the device reports.
        """
        if self.refused:
            raise self.refused
        assert self.local is not None
        if self.copy:
            self.copy.copies.wait()
        return self.local
