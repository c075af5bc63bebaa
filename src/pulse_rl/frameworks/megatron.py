"""Megatron-Core by Megatron-Bridge: a model's weights by the names of its Hugging Face checkpoint,
gathered tensor by tensor for one publisher, or each rank's own slices for a `ShardedPublisher`,
without a gather."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .._util import extra

with extra("torch"):
    import torch

import numpy as np

from .._util.collective import GlooTransport, RankGroup
from ..errors import PulseError, StateMismatch, UnsupportedTensor
from ..state.cast import DTypeLike
from .positions import GATHER, Learnt, PositionCodes, RankSlice
from .weights import host_copy, torch_dtype

__all__ = ["MegatronWeights"]

_SECONDS = 600.0


class MegatronWeights:
    """The weights of ``model`` as ``bridge`` exports them.

    ``bridge``: Megatron-Bridge's ``AutoBridge``. ``model``: its list of model chunks, one for each
    virtual pipeline stage, wrapped or not. All ranks of the default process group make one, and
    make the same calls.
    """

    def __init__(self, bridge: Any, model: Any) -> None:
        self._bridge = bridge
        self._model: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
        self._learnt: dict[str, Learnt] | None = None
        self._parameters: list[_Parameter] = []

    def __repr__(self) -> str:
        known = (
            "not learnt" if self._learnt is None else f"slices of {len(self._learnt)} tensors here"
        )
        return f"<MegatronWeights of {len(self._model)} model chunks, {known}>"

    def gathered(
        self, dtype: DTypeLike | None = None, *, keep: bool = True
    ) -> dict[str, torch.Tensor]:
        """All weights, for `Publisher.publish`: copies in host memory by the checkpoint's names,
        those of wider floats cast to the compute dtype ``dtype``. Adapters are merged by the
        bridge.

        A collective. The ranks that do not ``keep`` the result get none, and hold one tensor at a
        time. Raises InputError.
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
        """What this rank has of the weights, for a `ShardedPublisher`: the model's own memory, and
        copies of what the checkpoint has in another order, such as fused queries, keys and values.

        The first call is a collective: it learns from one export of float64 position codes, one
        parameter at a time, which element goes where. Later calls do not communicate. Raises
        UnsupportedTensor, on all ranks, for weights that the bridge computes (adapters, which it
        merges; quantized and DTensor parameters; sums and casts); StateMismatch where the model has
        changed since; RankLost.
        """
        if self._learnt is None:
            self._learn()
        assert self._learnt is not None
        flat = [parameter.flat(self._model) for parameter in self._parameters]
        found: dict[str, RankSlice] = {}
        used: set[Any] = set()
        for name, learnt in self._learnt.items():
            part = learnt.take(flat)
            # The export copies an embedding that it hands out twice: two tensors, which must not
            # look tied here.
            twin = (learnt.parameters, learnt.pieces)
            found[name] = RankSlice(part.local.clone(), part.box) if twin in used else part
            used.add(twin)
        return found

    def _learn(self) -> None:
        ranks = RankGroup(GlooTransport(None, _SECONDS, owner="MegatronWeights"))
        try:
            # 1. Each rank counts what it has: a failure of one is all ranks' before they export.
            def described() -> tuple[list[Any], list[_Parameter]]:
                tasks = list(self._bridge.get_conversion_tasks(self._model))
                return tasks, _parameters(self._model, tasks)

            tasks, self._parameters = ranks.together(described)
            elements = sum(parameter.elements for parameter in self._parameters)
            counts = ranks.each(lambda: elements, lambda n: b"%d" % n, int)
            codes = PositionCodes(counts, ranks.rank)
            begins = np.cumsum([0, *(parameter.elements for parameter in self._parameters)])[:-1]
            learnt: dict[str, Learnt] = {}
            # All ranks export to the end, whatever one of them finds: the others wait for it.
            error: PulseError | None = None
            coded = _Coded(tasks, self._parameters, codes, begins.tolist())
            with torch.no_grad():
                for name, tensor in self._bridge.export_hf_weights(
                    self._model, cpu=False, show_progress=False, conversion_tasks=coded
                ):
                    try:
                        found = Learnt.of(name, *codes.own(name, tensor), begins)
                    except UnsupportedTensor as refused:
                        error = error or refused
                        continue
                    if found:
                        learnt[name] = found

            def agreed() -> None:
                if error:
                    raise error

            ranks.together(agreed)
            self._learnt = learnt
        finally:
            ranks.close()


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """The parameter or buffer ``name`` of the model's chunk ``chunk``, as it was when the map was
    learnt; ``key`` is its id then."""

    chunk: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: int

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
                "learnt",
                hint="Make a new MegatronWeights, on all ranks.",
            )
        flat: torch.Tensor = live.detach().reshape(-1)
        return flat


def _parameters(model: Sequence[Any], tasks: Iterable[Any]) -> list[_Parameter]:
    """What of the ``model`` this rank's ``tasks`` export. Raises UnsupportedTensor."""
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
                f"{task.param_name!r} is no parameter of the model, but computed", hint=GATHER
            )
        chunk, name = names[id(weight)]
        if ".to_wrap." in name:
            raise UnsupportedTensor(
                f"the model's {name!r} has an adapter, which the bridge merges", hint=GATHER
            )
        if type(weight.data) is not torch.Tensor:
            raise UnsupportedTensor(
                f"the model's {name!r} is a {type(weight.data).__name__}", hint=GATHER
            )
        found[id(weight)] = _Parameter(chunk, name, tuple(weight.shape), weight.dtype, id(weight))
    return list(found.values())


class _Coded(Sequence[Any]):
    """The bridge's ``tasks`` with codes in place of the weights, made when they are asked for."""

    def __init__(
        self,
        tasks: Sequence[Any],
        parameters: Sequence[_Parameter],
        codes: PositionCodes,
        begins: Sequence[int],
    ) -> None:
        self._tasks, self._codes = tasks, codes
        self._begins = {
            parameter.key: begin for parameter, begin in zip(parameters, begins, strict=True)
        }

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

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))
