"""What one rank is to publish: the caller's own memory, or a copy that was taken of it
(docs/protocol.md, section 3)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..errors import InputError, UnsupportedTensor
from ..events import Metadata
from ..state.cast import CastState, DTypeLike, compute_dtype_named
from ..state.tensors import DType, State, StateSource, as_state, await_devices
from ..stream.manifest import checked_metadata

if TYPE_CHECKING:
    from ..quantize.states import Quantize
    from ..sharding.layout import Box
    from ..submit import Snapshot

Files = Mapping[str, bytes | str | os.PathLike[str]] | str | os.PathLike[str]
"""What is accepted as a version's files: a mapping of names to their bytes or their paths, or a
checkpoint's folder."""


class LocalState(NamedTuple):
    """This rank's elements of a state: ``source``, to be cast to ``dtype`` if there is one.
    ``boxes``: which elements of a tensor they are, where they are not all. ``owned``: nobody else
    writes to them. ``quantize``: what is to be made of them first, once the ranks have agreed on
    scales (`quantized`). ``config``: what the config.json of a quantized state says of it."""

    source: State
    dtype: DType | None = None
    boxes: Mapping[str, Box] = {}
    owned: bool = False
    quantize: Quantize | None = None
    config: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls, source: StateSource, dtype: DTypeLike | None, quantize: Quantize | None = None
    ) -> Self:
        """All of a state. Raises UnsupportedTensor and InputError."""
        compute = None if dtype is None else compute_dtype_named(dtype)
        state = as_state(source)
        if isinstance(source, Mapping):
            require_weights((spec.name, spec.shape) for spec in state.specs)
        if quantize is not None:
            from ..quantize.states import QuantizedState, config_of

            made = QuantizedState(state, quantize, compute)
            return cls(made, config=config_of(quantize, made.kept))
        return cls(state, compute)

    @property
    def state(self) -> State:
        """What the version is to hold of them."""
        return self.source if self.dtype is None else CastState(self.source, self.dtype)


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


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """What is to be published: the elements that ``local`` has, once its ``copy``, where there is
    one, was waited for; nothing where it was ``refused``; and the ``files`` beside the weights,
    None for those of the version before. ``after``: the version that the new one must follow, see
    `Publisher.publish`."""

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
        """What `LocalState` is to be quantized by."""
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
        """The request of a call of `Publisher.publish`. Raises what that does for its arguments."""
        facts = checked_metadata({} if metadata is None else metadata)
        taken = None
        if files is not None:
            from ..follow.companions import checked_files

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
        """One whose error the other ranks wait to be told."""
        return cls(None, {}, None, anchor=False, refused=error)

    def awaited(self) -> Self:
        """The same, once the caller's devices have written what is to be published."""
        if self.local:
            await_devices(self.local.source)
        return self

    def arrived(self) -> LocalState:
        """This rank's elements. Returns once all is copied; raises what is wrong with the request,
        and what the device reports."""
        if self.refused:
            raise self.refused
        assert self.local is not None
        if self.copy:
            self.copy.copies.wait()
        return self.local
