"""Where the elements of checkpoint tensors lie in live parameters: strided boxes, no index per element.

A model's loader copies rectangles: a tensor-parallel slice, one part of a fused parameter, a transpose. Each is one
`Box`, however many elements it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Axis:
    """``size`` elements that lie ``source`` elements apart in the checkpoint tensor, ``target`` in the parameter."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``source + sum(c * axis.source)`` of a flattened checkpoint tensor go to the elements
    ``target + sum(c * axis.target)`` of the memory of ``parameter``, for all ``0 <= c < axis.size``.

    ``axes`` go from the widest step in the source to the narrowest. No two elements share a place. Made by `make`.
    """

    parameter: str
    source: int
    target: int
    axes: tuple[Axis, ...]

    @classmethod
    def make(
        cls,
        parameter: str,
        sizes: Sequence[int],
        source: tuple[int, Sequence[int]],
        target: tuple[int, Sequence[int]],
    ) -> Box:
        """The box of a copy between two views of ``sizes``, of which ``source`` and ``target`` are (offset, strides).

        Raises ValueError where elements of a view share a place.
        """
        axes = [Axis(n, s, t) for n, s, t in zip(sizes, source[1], target[1], strict=True) if n != 1]
        axes.sort(key=lambda axis: -axis.source)
        joined: list[Axis] = []
        for axis in axes:
            if joined and joined[-1].source == axis.size * axis.source and joined[-1].target == axis.size * axis.target:
                joined[-1] = Axis(joined[-1].size * axis.size, axis.source, axis.target)
            else:
                joined.append(axis)
        for steps in ([(a.source, a.size) for a in joined], [(a.target, a.size) for a in joined]):
            reach = 0
            for step, size in sorted(steps):
                if step <= reach:
                    raise ValueError(f"elements of a view of {list(sizes)} share a place")
                reach += step * (size - 1)
        return cls(parameter, source[0], target[0], tuple(joined))

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def source_strides(self) -> tuple[int, ...]:
        return tuple(axis.source for axis in self.axes)

    @property
    def target_strides(self) -> tuple[int, ...]:
        return tuple(axis.target for axis in self.axes)

    def locate(self, indices: Indices) -> tuple[npt.NDArray[np.bool_] | slice, Indices]:
        """Which of ``indices``, ascending flat positions in the checkpoint tensor, lie in the box, and the positions in
        the parameter's memory to which those go."""
        first, last = np.searchsorted(indices, [self.source, self.source + _reach(self.axes) + 1])
        within = slice(int(first), int(last))
        rest = indices[within] - self.source
        if len(self.axes) == 1 and self.axes[0].source == 1:
            return within, rest * self.axes[0].target + self.target
        targets = np.full(len(rest), self.target, np.int64)
        inside = np.ones(len(rest), bool)
        for axis in self.axes:
            count = rest // axis.source
            rest = rest - count * axis.source
            inside &= count < axis.size
            targets += count * axis.target
        inside &= rest == 0
        chosen = np.zeros(len(indices), bool)
        chosen[within] = inside
        return chosen, targets[inside]

    def within(self, start: int, stop: int) -> Iterator[Box]:
        """The parts of the box whose source lies in [``start``, ``stop``)."""
        if start <= self.source and self.source + _reach(self.axes) < stop:
            yield self
            return
        if not self.axes or start > self.source + _reach(self.axes) or self.source >= stop:
            return
        first = self.axes[0]
        inner = _reach(self.axes[1:])
        most = first.size
        low = max(0, -((self.source - start) // first.source))
        high = min(most, (stop - 1 - inner - self.source) // first.source + 1)
        if low < high:
            yield self._part(low, high)
        touched = range(
            max(0, -((self.source + inner - start) // first.source)),
            min(most, (stop - 1 - self.source) // first.source + 1),
        )
        for group in touched:
            if not low <= group < high:
                yield from self._part(group, group + 1).within(start, stop)

    def _part(self, low: int, high: int) -> Box:
        first, *inner = self.axes
        axes = tuple(inner) if high - low == 1 else (Axis(high - low, first.source, first.target), *inner)
        return Box(self.parameter, self.source + low * first.source, self.target + low * first.target, axes)


def _reach(axes: Sequence[Axis]) -> int:
    return sum(axis.source * (axis.size - 1) for axis in axes)
