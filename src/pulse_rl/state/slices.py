"""Parts of a state: a segment of each of some tensors, in the places that it has in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .tensors import State, TensorSpec, UIntArray


class Segment(NamedTuple):
    """Elements [start, stop) of the flattened tensor ``spec``."""

    spec: TensorSpec
    start: int
    stop: int

    @property
    def place(self) -> tuple[str, int, int]:
        """The arguments of `State.read`."""
        return self.spec.name, self.start, self.stop

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.elements * self.spec.dtype.width

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.elements == self.spec.elements


class SlicedState(State):
    """One segment of each of some tensors. ``specs`` are those of the whole tensors; `read` takes places in these, and
    raises IndexError outside of the segment.

    ``source`` holds the segments' elements under the tensors' names; where it lacks one, nothing of it can be read.
    """

    def __init__(self, segments: Sequence[Segment], source: State) -> None:
        super().__init__(tuple(segment.spec for segment in segments), {})
        self.segments = tuple(sorted(segments, key=lambda s: s.spec.name.encode()))
        self._at = {segment.spec.name: segment for segment in segments}
        self._source = source

    @classmethod
    def allocate(cls, segments: Sequence[Segment]) -> SlicedState:
        """Segments in new host memory, with uninitialised values."""
        flat = tuple(TensorSpec(s.spec.name, s.spec.dtype, (s.elements,)) for s in segments)
        return cls(segments, State.empty(flat))

    @property
    def held_bytes(self) -> int:
        """Bytes of the segments."""
        return sum(segment.nbytes for segment in self.segments)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> UIntArray:
        """Elements [``start``, ``stop``) of the whole tensor, as `State.read`."""
        segment = self._at[name]
        stop = segment.spec.elements if stop is None else stop
        if not segment.start <= start <= stop <= segment.stop:
            raise IndexError(f"elements {start} to {stop} of tensor {name!r} are not held")
        return self._source.read(name, start - segment.start, stop - segment.start)
