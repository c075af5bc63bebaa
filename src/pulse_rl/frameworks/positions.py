"""Where the elements of a rank's parameters lie in a checkpoint, read from codes that a framework's
own export has moved there.

Each element of each rank gets a number, and the number a code: a float64 that is an integer below
2^52, mixed so that neighbors are far apart. An export that only moves elements (gathers, splits,
joins, transposes) hands out codes. Sums, averages, scales and casts make values that almost never
are codes of numbers that were given out: of n elements in all, one wrong value passes with chance n
/ 2^52, and a tensor of wrong ones does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UnsupportedTensor
from ..sharding.layout import Box, Runs

__all__ = ["GATHER", "Learnt", "PositionCodes", "RankSlice"]

_BITS = 52
_MASK = (1 << _BITS) - 1
_ROUNDS = (0x2C1B3C6D9E377, 0x97F4A7C15F39D)  # odd
_INVERSES = tuple(pow(factor, -1, 1 << _BITS) for factor in _ROUNDS)
_CHUNK = 1 << 22  # elements of a tensor that are decoded at a time
_MAX_PIECES = 4096
GATHER = "Publish what is gathered: gathered() in place of slices()."

Places = npt.NDArray[np.int64]


class RankSlice(NamedTuple):
    """This rank's elements ``box`` of a checkpoint's tensor, in that order: ``local``."""

    local: torch.Tensor
    box: Box


class PositionCodes:
    """The codes of the elements of all ranks, of which each has as many as ``counts`` says, this
    one ``rank``."""

    def __init__(self, counts: Sequence[int], rank: int) -> None:
        self._total, self._first, self._count = sum(counts), sum(counts[:rank]), counts[rank]

    def of(self, first: int, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Those of this rank's elements from number ``first`` on, as a float64 tensor of
        ``shape``."""
        begin = self._first + first + 1  # zero, with which exports pad, is no code
        numbers = torch.arange(begin, begin + math.prod(shape), dtype=torch.int64, device=device)
        for factor in _ROUNDS:
            numbers = numbers * factor & _MASK
            numbers ^= numbers >> _BITS // 2
        return numbers.double().view(tuple(shape))

    def own(self, name: str, coded: torch.Tensor) -> tuple[torch.Tensor, Places]:
        """(which elements of an exported tensor are this rank's, their numbers there). Raises
        UnsupportedTensor unless all elements are codes."""
        if coded.dtype != torch.float64:
            raise UnsupportedTensor(f"the export casts {name!r} to {coded.dtype}", hint=GATHER)
        found = torch.empty(coded.numel(), dtype=torch.bool)
        numbers = []
        for start in range(0, coded.numel(), _CHUNK):
            chunk = coded.reshape(-1)[start : start + _CHUNK]
            number = chunk.to(torch.int64)
            exact = (number.double() == chunk) & (number > 0) & (number <= _MASK)
            for factor in reversed(_INVERSES):
                number ^= number >> _BITS // 2
                number = number * factor & _MASK
            if not bool((exact & (number > 0) & (number <= self._total)).all()):
                raise UnsupportedTensor(
                    f"the export computes {name!r} from the ranks' weights instead of moving them",
                    hint=GATHER,
                )
            number -= self._first + 1
            mine = (number >= 0) & (number < self._count)
            found[start : start + len(chunk)] = mine.cpu()
            numbers.append(number[mine].cpu())
        joined = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.int64)
        return found.view(coded.shape), joined.numpy()


class _Piece(NamedTuple):
    """``length`` indices of one dimension: the offsets that a walk of these ``sizes`` and
    ``strides`` has from ``start``."""

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def length(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Learnt:
    """Where this rank's elements ``box`` of a tensor come from: for each dimension the pieces of
    its indices, of which the first dimension's lie in the parameter with the number in
    ``parameters``."""

    box: Box
    parameters: tuple[int, ...]
    pieces: tuple[tuple[_Piece, ...], ...]

    @classmethod
    def of(cls, name: str, mine: torch.Tensor, numbers: Places, begins: Places) -> Learnt | None:
        """From what `PositionCodes.own` has found; None where this rank has no element. ``begins``:
        the number of the first element of each parameter. Raises UnsupportedTensor for what is no
        grid of slices."""
        if not len(numbers):
            return None
        dims = range(mine.dim())
        of = tuple(
            _runs_of(
                mine.any(dim=tuple(d for d in dims if d != dim)) if dim or len(dims) > 1 else mine
            )
            for dim in dims
        )
        box = Box(of, tuple(mine.shape))
        if box.elements != len(numbers):
            raise _scattered(name)
        grid = numbers.reshape(box.local_shape or (1,))
        zero = (0,) * grid.ndim
        offsets = []
        for dim in range(grid.ndim):
            line: Places = np.moveaxis(grid, dim, -1)[zero[1:]]
            offsets.append(line if dim == 0 else line - line[0])
        total = offsets[0].reshape(-1, *(1,) * (grid.ndim - 1))
        for dim in range(1, grid.ndim):
            total = total + offsets[dim].reshape(*(1 if d != dim else -1 for d in range(grid.ndim)))
        if not np.array_equal(total, grid):
            raise _scattered(name)
        # The first dimension alone may lead from one parameter to the next: experts that a
        # checkpoint stacks.
        reach = sum(int(line.max()) for line in offsets[1:])
        least = sum(int(line.min()) for line in offsets[1:])
        held = np.searchsorted(begins, offsets[0], side="right") - 1
        ends = np.append(begins[1:], np.iinfo(np.int64).max)
        if (offsets[0] + least < begins[held]).any() or (offsets[0] + reach >= ends[held]).any():
            raise _scattered(name)
        parameters: list[int] = []
        first: list[_Piece] = []
        for stretch in np.split(offsets[0], np.flatnonzero(np.diff(held)) + 1):
            number = int(np.searchsorted(begins, stretch[0], side="right")) - 1
            found = _pieces(stretch - begins[number])
            parameters += [number] * len(found)
            first += found
        pieces = (tuple(first), *(tuple(_pieces(line)) for line in offsets[1:]))
        if math.prod(map(len, pieces)) > _MAX_PIECES:
            raise _scattered(name)
        return cls(box, tuple(parameters), pieces)

    def take(self, flat: Sequence[torch.Tensor]) -> RankSlice:
        """The elements of the parameters, which are ``flat``: a view where their order allows it,
        else a copy."""
        shape, parts = self.box.local_shape or (1,), list(self._parts())
        if len(parts) == 1:
            return RankSlice(self._part(flat, parts[0][1]).reshape(self.box.local_shape), self.box)
        local = flat[self.parameters[0]].new_empty(shape)
        for place, combination in parts:
            target = local[place]
            target.copy_(self._part(flat, combination).reshape(target.shape))
        return RankSlice(local.reshape(self.box.local_shape), self.box)

    def _parts(self) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
        """Places in the local tensor, and the numbers of the pieces that lead there."""
        places = []
        for pieces in self.pieces:
            ends = np.cumsum([piece.length for piece in pieces]).tolist()
            places.append(
                [slice(end - piece.length, end) for end, piece in zip(ends, pieces, strict=True)]
            )
        for numbers in product(*(range(len(pieces)) for pieces in self.pieces)):
            yield tuple(of[k] for of, k in zip(places, numbers, strict=True)), numbers

    def _part(self, flat: Sequence[torch.Tensor], numbers: tuple[int, ...]) -> torch.Tensor:
        chosen = [pieces[k] for pieces, k in zip(self.pieces, numbers, strict=True)]
        parameter = flat[self.parameters[numbers[0]]]
        return parameter.as_strided(
            [size for piece in chosen for size in piece.sizes],
            [stride for piece in chosen for stride in piece.strides],
            parameter.storage_offset() + sum(piece.start for piece in chosen),
        )


def _scattered(name: str) -> UnsupportedTensor:
    return UnsupportedTensor(
        f"this rank's elements of {name!r} are no grid of slices of its parameters", hint=GATHER
    )


def _runs_of(used: torch.Tensor) -> Runs:
    """The indices at which a vector is true, as ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], used.numpy().astype(np.int8), [0]])))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))


def _pieces(offsets: Places) -> list[_Piece]:
    """Offsets as even steps, and as many of equal length one behind another as evenly follow each
    other."""
    steps = np.diff(offsets)
    turns = [
        *(np.flatnonzero(np.diff(steps)) + 1).tolist(),
        len(steps),
    ]  # numbers of the steps that differ
    walks: list[tuple[int, int, int]] = []
    at, turn = 0, 0
    while at < len(offsets):
        while turn < len(turns) and turns[turn] <= at:
            turn += 1
        last = (
            turns[turn] if turn < len(turns) and steps[at] >= 0 else at
        )  # torch has no strides below zero
        walks.append((int(offsets[at]), last - at + 1, int(steps[at]) if last > at else 1))
        at = last + 1
    found: list[_Piece] = []
    for start, size, step in walks:
        if found and found[-1].sizes[-1] == size and found[-1].strides[-1] == step:
            before = found[-1]
            if len(before.sizes) == 1:
                if start >= before.start:
                    found[-1] = _Piece(before.start, (2, size), (start - before.start, step))
                    continue
            elif start == before.start + before.sizes[0] * before.strides[0]:
                found[-1] = _Piece(before.start, (before.sizes[0] + 1, size), before.strides)
                continue
        found.append(_Piece(start, (size,), (step,)))
    return found
