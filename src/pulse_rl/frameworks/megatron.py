"""Megatron-Core by Megatron-Bridge: a model's weights by the names of its Hugging Face checkpoint,
gathered tensor by tensor for one publisher, or each rank's own slices for a `ShardedPublisher`,
without a gather.

Where the elements of a rank's parameters lie in the checkpoint is read from codes that the bridge's
own export has moved there. Each element of each rank gets a number, and the number a code: a
float64 that is an integer below 2^52, mixed so that neighbors are far apart. An export that only
moves elements (gathers, splits, joins, transposes) hands out codes. Sums, averages, scales and
casts make values that almost never are codes of numbers that were given out: of n elements in all,
one wrong value passes with chance n / 2^52, and a tensor of wrong ones does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

from .._util import extra

with extra("torch"):
    import torch

import numpy as np
import numpy.typing as npt

from .._util.collective import GlooTransport, RankGroup
from ..errors import PulseError, StateMismatch, UnsupportedTensor
from ..sharding.layout import Runs, SliceSpec
from ..state.cast import DTypeLike
from .shards import RankSlice
from .weights import host_copy, torch_dtype

__all__ = ["MegatronWeights"]

_SECONDS = 600.0
_BITS = 52
_MASK = (1 << _BITS) - 1
_ROUNDS = (0x2C1B3C6D9E377, 0x97F4A7C15F39D)  # odd
_INVERSES = tuple(pow(factor, -1, 1 << _BITS) for factor in _ROUNDS)
_CHUNK = 1 << 22  # elements of a tensor that are decoded at a time
_MAX_PIECES = 4096
_GATHER = "Publish what is gathered: gathered() in place of slices()."

Places = npt.NDArray[np.int64]


class MegatronWeights:
    """The weights of a model as Megatron-Bridge exports them.

    All ranks of the default process group make one, and make the same calls.

    Args:
        bridge: Megatron-Bridge's ``AutoBridge``.
        model: Its list of model chunks, one for each virtual pipeline stage, wrapped or not.
    """

    def __init__(self, bridge: Any, model: Any) -> None:
        self._bridge = bridge
        self._model: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
        self._sources: dict[str, _Source] | None = None
        self._parameters: list[_Parameter] = []

    def __repr__(self) -> str:
        sources = self._sources
        known = "not learned" if sources is None else f"slices of {len(sources)} tensors here"
        return f"<MegatronWeights of {len(self._model)} model chunks, {known}>"

    def gathered(
        self, dtype: DTypeLike | None = None, *, keep: bool = True
    ) -> dict[str, torch.Tensor]:
        """Gather all weights, for `Publisher.publish`.

        A collective. The bridge merges adapters.

        Args:
            dtype: Compute dtype to which wider floats are cast. None: as they are.
            keep: Whether this rank gets the result. One that does not holds one tensor at a time.

        Returns:
            Copies in host memory, by the checkpoint's names; nothing without ``keep``.

        Raises:
            InputError: ``dtype`` is no compute dtype.
        """
        target = torch_dtype(dtype)
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in self._bridge.export_hf_weights(
                self._model, cpu=False, show_progress=False
            ):
                if keep:
                    found[name] = host_copy(tensor, target)
        return found

    def slices(self) -> dict[str, RankSlice]:
        """Find what this rank has of the weights, for a `ShardedPublisher`.

        The first call is a collective: it learns from one export of float64 position codes, one
        parameter at a time, which element goes where. Later calls do not communicate.

        Returns:
            The model's own memory, by the checkpoint's names, and copies of what the checkpoint has
            in another order, such as fused queries, keys and values.

        Raises:
            UnsupportedTensor: On all ranks, for weights that the bridge computes: adapters, which
                it merges, quantized and DTensor parameters, sums and casts.
            StateMismatch: The model has changed since the first call.
            RankLost: A rank has died.
        """
        if self._sources is None:
            self._learn()
        assert self._sources is not None
        flat = [parameter.flat(self._model) for parameter in self._parameters]
        found: dict[str, RankSlice] = {}
        used: set[Any] = set()
        for name, source in self._sources.items():
            part = source.take(flat)
            # The export copies an embedding that it hands out twice: two tensors, which must not
            # look tied here.
            twin = (source.parameters, source.pieces)
            found[name] = RankSlice(part.local.clone(), part.box) if twin in used else part
            used.add(twin)
        return found

    def _learn(self) -> None:
        ranks = RankGroup(GlooTransport(None, _SECONDS, owner="MegatronWeights"))
        try:
            # 1. Each rank counts what it has: a failure of one fails all ranks before they export.
            def described() -> tuple[list[Any], dict[int, _Parameter]]:
                tasks = list(self._bridge.get_conversion_tasks(self._model))
                return tasks, _parameters(self._model, tasks)

            tasks, parameters = ranks.together(described)
            sizes = [parameter.elements for parameter in parameters.values()]
            counts = ranks.each(lambda: sum(sizes), lambda n: b"%d" % n, int)
            # 2. The bridge exports codes in place of weights: which of them arrive where says where
            # this rank's elements lie.
            codes = _Codes(counts, ranks.rank)
            begins = np.cumsum([0, *sizes])[:-1]
            coded = _Coded(tasks, dict(zip(parameters, begins.tolist(), strict=True)), codes)
            sources: dict[str, _Source] = {}
            # All ranks export to the end, whatever one of them finds: the others wait for it.
            error: PulseError | None = None
            with torch.no_grad():
                for name, tensor in self._bridge.export_hf_weights(
                    self._model, cpu=False, show_progress=False, conversion_tasks=coded
                ):
                    try:
                        found = _Source.of(name, *codes.own(name, tensor), begins)
                    except UnsupportedTensor as refused:
                        error = error or refused
                        continue
                    if found:
                        sources[name] = found

            def agreed() -> None:
                if error:
                    raise error

            ranks.together(agreed)
            self._parameters, self._sources = list(parameters.values()), sources
        finally:
            ranks.close()


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """The parameter or buffer ``name`` of the model's chunk ``chunk``, as it was when the map was
    learned."""

    chunk: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    def flat(self, model: Sequence[Any]) -> torch.Tensor:
        """Its elements now. Raises StateMismatch."""
        module, _, last = self.name.rpartition(".")
        try:
            live = getattr(model[self.chunk].get_submodule(module), last)
        except AttributeError:
            live = None
        if live is None or tuple(live.shape) != self.shape or live.dtype != self.dtype:
            raise StateMismatch(
                f"the model's {self.name!r} is not what it was when the map of its weights was "
                "learned",
                hint="Make a new MegatronWeights, on all ranks.",
            )
        flat: torch.Tensor = live.detach().reshape(-1)
        return flat


def _parameters(model: Sequence[Any], tasks: Iterable[Any]) -> dict[int, _Parameter]:
    """What of the ``model`` this rank's ``tasks`` export, by its id. Raises UnsupportedTensor."""
    names: dict[int, tuple[int, str]] = {}
    for chunk, part in enumerate(model):
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            names.setdefault(id(tensor), (chunk, name))
    found: dict[int, _Parameter] = {}
    for task in tasks:
        weight = None if task is None else task.param_weight
        if weight is None or id(weight) in found:
            continue
        if id(weight) not in names:
            raise UnsupportedTensor(
                f"{task.param_name!r} is no parameter of the model, but computed", hint=_GATHER
            )
        chunk, name = names[id(weight)]
        if ".to_wrap." in name:
            raise UnsupportedTensor(
                f"the model's {name!r} has an adapter, which the bridge merges", hint=_GATHER
            )
        if type(weight.data) is not torch.Tensor:
            raise UnsupportedTensor(
                f"the model's {name!r} is a {type(weight.data).__name__}", hint=_GATHER
            )
        found[id(weight)] = _Parameter(chunk, name, tuple(weight.shape), weight.dtype)
    return found


class _Coded(Sequence[Any]):
    """The bridge's ``tasks`` with codes in place of the weights, made when they are asked for.
    ``begins``: the number of the first element of each parameter, by its id."""

    def __init__(self, tasks: Sequence[Any], begins: Mapping[int, int], codes: _Codes) -> None:
        self._tasks, self._begins, self._codes = tasks, begins, codes

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, number: Any) -> Any:
        task = self._tasks[number]
        weight = None if task is None else task.param_weight
        if weight is None:
            return task
        coded = self._codes.of(self._begins[id(weight)], weight.shape, weight.device)
        coded.__dict__.update(vars(weight))  # how Megatron has cut it
        return dataclasses.replace(task, param_weight=coded)


# -- codes of positions, and what is read from them


class _Codes:
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

    def own(self, name: str, coded: torch.Tensor) -> tuple[npt.NDArray[np.bool_], Places]:
        """(which elements of an exported tensor are this rank's, their numbers there). Raises
        UnsupportedTensor unless all elements are codes."""
        if coded.dtype != torch.float64:
            raise UnsupportedTensor(f"the export casts {name!r} to {coded.dtype}", hint=_GATHER)
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
                    hint=_GATHER,
                )
            number -= self._first + 1
            mine = (number >= 0) & (number < self._count)
            found[start : start + len(chunk)] = mine.cpu()
            numbers.append(number[mine].cpu())
        joined = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.int64)
        return found.view(coded.shape).numpy(), joined.numpy()


class _Piece(NamedTuple):
    """``length`` indices of one dimension: the offsets that a walk of these ``sizes`` and
    ``strides`` has from ``start``."""

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def length(self) -> int:
        return math.prod(self.sizes)


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where this rank's elements ``box`` of a tensor come from: for each dimension the pieces of
    its indices, of which the first dimension's lie in the parameter with the number in
    ``parameters``."""

    box: SliceSpec
    parameters: tuple[int, ...]
    pieces: tuple[tuple[_Piece, ...], ...]

    @classmethod
    def of(
        cls, name: str, mine: npt.NDArray[np.bool_], numbers: Places, begins: Places
    ) -> _Source | None:
        """From what `_Codes.own` has found; None where this rank has no element. ``begins``:
        the number of the first element of each parameter. Raises UnsupportedTensor for what is no
        grid of slices."""
        if not len(numbers):
            return None
        dims = range(mine.ndim)
        others = [tuple(d for d in dims if d != dim) for dim in dims]
        of = tuple(_runs_of(np.asarray(mine.any(axis=axes))) for axes in others)
        box = SliceSpec(of, tuple(mine.shape))
        if box.elements != len(numbers):
            raise _scattered(name)
        grid = numbers.reshape(box.local_shape or (1,))
        offsets = []
        for dim in range(grid.ndim):
            line: Places = np.moveaxis(grid, dim, -1)[(0,) * (grid.ndim - 1)]
            offsets.append(line - line[0] if dim else line)
        if not np.array_equal(reduce(np.add.outer, offsets), grid):
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
        f"this rank's elements of {name!r} are no grid of slices of its parameters", hint=_GATHER
    )


def _runs_of(used: npt.NDArray[np.bool_]) -> Runs:
    """The indices at which a vector is true, as ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], used.astype(np.int8), [0]])))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))


def _pieces(offsets: Places) -> list[_Piece]:
    """Offsets as even steps, and as many of equal length one behind another as evenly follow each
    other."""
    steps = np.diff(offsets)
    # The numbers of the steps that differ from the one before.
    turns = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    walks: list[tuple[int, int, int]] = []
    at, turn = 0, 0
    while at < len(offsets):
        while turn < len(turns) and turns[turn] <= at:
            turn += 1
        # torch has no strides below zero.
        last = turns[turn] if turn < len(turns) and steps[at] >= 0 else at
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
