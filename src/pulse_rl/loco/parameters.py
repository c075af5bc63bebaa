"""The tensors of a model. What the inner optimizers train: which call ends an inner step, and the
parameters as one flat FP32 array in blocks. What no optimizer trains and the forward pass reads:
frozen parameters and buffers, which must not change (docs/loco.md, section 4.1)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .._util.threads import ordered_map
from ..errors import InputError, NonFinite, StateMismatch, UnsupportedTensor
from ..patch.blocks import cut
from ..state.tensors import DTYPES, Segment, State, TensorSpec, is_sharded
from .group import TrainerGroup
from .ranks import (
    Model,
    Ranks,
    digest_of,
    fingerprint,
    ranks_of,
    require_dense,
    require_no_flat_parameters,
    reshard,
    without_ddp,
)

BLOCK_ELEMENTS = 1 << 22
Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.uint32]
_MAX_PROBLEM_BYTES = 2000
_UNCHANGED = (
    "Pass all optimizers that train the model, in a list; keep modules with running statistics "
    "in eval()."
)
_NEW = "Create a new PulseLoCo for them, on all trainers."
_PROBES = 8
_NOT_IN_THE_MODEL = (
    "If it holds FP32 masters, pass a mapping of names to the masters instead of the model."
)

#: Parameters, their gradients of some moment, and how often those had been written by then.
Gradients = list[tuple[torch.Tensor, "weakref.ref[torch.Tensor]", int]]


class Optimizers:
    """One optimizer or several, in the order in which the training loop steps them.

    An inner step ends with the ``step()`` of the last one. Another one may skip a step there or
    take more than one. Raises InputError for an empty list, something else than optimizers, and one
    that is given twice.
    """

    def __init__(self, given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
        self._all = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
        if not self._all:
            raise InputError("no optimizer is given", hint="Give one, or a list of them.")
        for number, optimizer in enumerate(self._all):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InputError(
                    f"optimizer {number} is a {type(optimizer).__name__}, not a "
                    "torch.optim.Optimizer"
                )
            if any(optimizer is other for other in self._all[:number]):
                raise InputError(f"optimizer {number} ({type(optimizer).__name__}) is given twice")

    @property
    def ids(self) -> set[int]:
        """The ids of the tensors that are trained now."""
        return {id(p) for optimizer in self._all for _, p in _parameters(optimizer)}

    def label(self, number: int) -> str:
        """Words for messages."""
        if len(self._all) == 1:
            return "the optimizer"
        return f"optimizer {number} ({type(self._all[number]).__name__})"

    def require(self, named: dict[str, torch.Tensor]) -> None:
        """Raises InputError unless each tensor that is trained is in ``named`` and belongs to one
        optimizer."""
        names = {id(p): name for name, p in reversed(named.items())}
        owner: dict[int, int] = {}
        for number, optimizer in enumerate(self._all):
            for place, p in _parameters(optimizer):
                if id(p) not in names:
                    raise InputError(
                        f"{self.label(number)} trains tensors that are not parameters of the "
                        f"model: {place}, {str(p.dtype).removeprefix('torch.')} {list(p.shape)}",
                        hint=_NOT_IN_THE_MODEL,
                    )
                if owner.setdefault(id(p), number) != number:
                    both = f"{self.label(owner[id(p)])} and by {self.label(number)}"
                    raise InputError(
                        f"parameter {names[id(p)]!r} is trained by {both}",
                        hint="Give each parameter one optimizer.",
                    )

    def hook(self, after_step: Callable[[], None]) -> list[Any]:
        """Has ``after_step`` called at the end of each inner step. Returns handles with
        ``remove()``."""
        seen: dict[int, Gradients] = {}

        def end(*_: object) -> None:
            # What the others hold now must have been computed anew when they step again.
            for number, optimizer in enumerate(self._all[:-1]):
                seen[number] = _gradients(optimizer)
            after_step()

        def check(number: int, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A closure makes its gradients in the step itself. The first argument may be the
            # optimizer.
            closure = kwargs.get("closure") or any(callable(a) for a in args)
            if not closure and _unchanged(seen.pop(number, [])):
                raise InputError(
                    f"{self.label(number)} steps after {self.label(len(self._all) - 1)}, the "
                    "last one of the list",
                    hint="List the optimizers in the order of their step() calls: the last "
                    "one ends an inner step.",
                )

        handles: list[Any] = [
            optimizer.register_step_pre_hook(partial(check, number))
            for number, optimizer in enumerate(self._all[:-1])
        ]
        return [*handles, self._all[-1].register_step_post_hook(end)]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """All tensors of an optimizer, and words for where in it they are."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [])
        for i, p in enumerate(group["params"]):
            yield (repr(names[i]) if i < len(names) else f"number {i} of group {number}"), p


def _gradients(optimizer: torch.optim.Optimizer) -> Gradients:
    """Some of an optimizer's gradients as they are now. They are not kept alive."""
    found: Gradients = []
    for _, p in _parameters(optimizer):
        if p.grad is not None:
            found.append((p, weakref.ref(p.grad), p.grad._version))
        if len(found) == _PROBES:
            break
    return found


def _unchanged(gradients: Gradients) -> bool:
    """Whether nothing was computed since: there are gradients, the same ones, and none was
    written."""
    return bool(gradients) and all(
        p.grad is not None and p.grad is gradient() and p.grad._version == version
        for p, gradient, version in gradients
    )


def is_finite(values: Floats) -> npt.NDArray[np.bool_]:
    """Which values count as finite: not NaN and below 2^64 in magnitude (a few larger ones make
    the global weights infinite)."""
    return np.abs(values) < 2.0**64


class FlatBlock(NamedTuple):
    """Parameters [start, stop) of the flat array: rows of one tensor, or several whole tensors."""

    number: int
    start: int
    stop: int
    segments: tuple[Segment, ...]

    def of(self, flat: Floats) -> Floats:
        return flat[self.start : self.stop]


def parts(block: FlatBlock) -> Iterator[tuple[slice, Segment]]:
    """Where in the block each of its segments is."""
    at = 0
    for segment in block.segments:
        stop = at + segment.stop - segment.start
        yield slice(at, stop), segment
        at = stop


class Parameters:
    """The parameters that optimizers train, in name order; a tied one once, under its first name.

    ``model`` is a module, or a mapping of names to the tensors that the optimizers hold (FP32
    masters of a BF16 model, say). Raises InputError if they train a tensor that the model lacks,
    none at all, or one of a dtype other than FP32 and BF16, and UnsupportedTensor for one without
    dense memory.

    ``rank_seconds``: where a model is of DTensors, or in DDP, its ranks are one trainer, and wait
    for each other so long. Then ``tensors``, and all that are ``named``, are whole where
    ``ranks.leads``, as when `Ranks.collect` was called.
    """

    def __init__(
        self,
        model: Model,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        rank_seconds: float | None = None,
    ) -> None:
        require_no_flat_parameters(model)
        reshard(model)
        self.optimizers = Optimizers(optimizers)
        ranks: list[int] = []
        if rank_seconds is not None:
            ranks = ranks_of(getattr(model, "_orig_mod", model), _named(model))
            model = without_ddp(model)
        self._model, self._named = model, _named(model)
        self.optimizers.require(self._named)
        self._trained = self.optimizers.ids
        self.ranks: Ranks | None = None
        self.named = self._named
        if ranks and rank_seconds is not None:
            self.ranks = Ranks(ranks, model, self._named, self._trained, rank_seconds)
            self.named = {name: self.ranks.whole(p) for name, p in self._named.items()}
        tensors: dict[str, torch.Tensor] = {}
        found: set[int] = set()
        # In the model's order, so that of tied names the first stands for all.
        for name, p in self.named.items():
            trained = id(self._named[name])
            if trained in self._trained and trained not in found:
                found.add(trained)
                if is_sharded(p):
                    raise UnsupportedTensor(
                        f"parameter {name!r} is sharded over ranks that would each be a trainer "
                        "of a process group",
                        hint="Give a store as exchange=: over a store all ranks of such a "
                        "model are one trainer.",
                    )
                require_dense(p, f"parameter {name!r}")
                if p.dtype not in (torch.float32, torch.bfloat16):
                    raise InputError(
                        f"parameter {name!r} is {p.dtype}", hint="Train in FP32 or BF16."
                    )
                tensors[name] = p
        if not any(p.numel() for p in tensors.values()):
            raise InputError("the optimizer trains no parameters")
        specs = [TensorSpec(name, DTYPES["F32"], tuple(p.shape)) for name, p in tensors.items()]
        self.specs = tuple(sorted(specs, key=lambda s: s.name.encode()))
        self.tensors = {spec.name: tensors[spec.name] for spec in self.specs}
        self.count = sum(spec.elements for spec in self.specs)
        starts = np.cumsum([0, *(spec.elements for spec in self.specs)])
        self._starts = {
            spec.name: int(start) for spec, start in zip(self.specs, starts, strict=False)
        }
        self.blocks = []
        for number, block in enumerate(cut(self.specs, most=BLOCK_ELEMENTS)):
            first = block.segments[0]
            start = self._starts[first.spec.name] + first.start
            self.blocks.append(FlatBlock(number, start, start + block.elements, block.segments))

    def require(self) -> None:
        """Raises InputError if the optimizers train other tensors, or the model has others, than
        when this was made."""
        now, trained = _named(self._model), self.optimizers.ids
        replaced = sorted(
            name
            for name in self._named.keys() | now.keys()
            if self._named.get(name) is not now.get(name)
        )
        if replaced:
            raise InputError(f"the model's parameters have changed: {_few(replaced)}", hint=_NEW)
        if trained != self._trained:
            self.optimizers.require(now)
            new = [name for name, p in now.items() if id(p) in trained - self._trained]
            gone = [name for name, p in now.items() if id(p) in self._trained - trained]
            what = [
                f"{word} {_few(names)}"
                for word, names in (("now also", new), ("no longer", gone))
                if names
            ]
            raise InputError(
                f"the optimizer's parameters have changed: {', '.join(what)}", hint=_NEW
            )

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of a module, also those that a checkpoint leaves out, in name order. A
        mapping has none."""
        model = self._model
        return dict(sorted(model.named_buffers())) if isinstance(model, torch.nn.Module) else {}

    def name_at(self, position: int) -> str:
        """The name of the parameter that a position of the flat array belongs to."""
        return next(
            s.name
            for s in self.specs
            if self._starts[s.name] <= position < self._starts[s.name] + s.elements
        )

    def first_non_finite(self, flat: Floats) -> str | None:
        """The name of the first parameter with a value that is not finite (`is_finite`), None
        without one."""
        # A block at a time: temporaries of the whole would cost more than the check.
        for block in self.blocks:
            finite = is_finite(block.of(flat))
            if not finite.all():
                return self.name_at(block.start + int(np.argmin(finite)))
        return None

    def views(self, flat: Floats) -> dict[str, Floats]:
        """The flat array as tensors, without copying."""
        return {
            s.name: flat[self._starts[s.name] :][: s.elements].reshape(s.shape) for s in self.specs
        }

    def by_name(self, flat: Floats) -> dict[str, torch.Tensor]:
        """The flat array as torch's tensors, without copying."""
        return {name: torch.from_numpy(view) for name, view in self.views(flat).items()}

    def state(self, flat: Floats) -> State:
        """The flat array as a state, for its root; no copy."""
        return State.of(self.views(flat))

    @torch.no_grad()
    def read(self) -> Floats:
        """The present values of all parameters, FP32 in host memory; zeros on a rank that does not
        lead."""
        if self.ranks and not self.ranks.leads:
            return np.zeros(self.count, np.float32)
        flat = np.empty(self.count, np.float32)
        for block in self.blocks:
            self.read_block(block, block.of(flat))
        return flat

    @torch.no_grad()
    def read_block(self, block: FlatBlock, out: Floats) -> None:
        """The present values of a block's parameters."""
        for part, segment in parts(block):
            out[part] = self.now(segment)

    @torch.no_grad()
    def now(self, segment: Segment) -> Floats:
        """The present values of a segment's parameters: the model's own memory where that is FP32
        on the host."""
        return self._piece(segment).to("cpu", torch.float32).numpy()

    @torch.no_grad()
    def give(self, segment: Segment, fill: Callable[[Floats], object]) -> None:
        """Gives a segment's parameters the values with which ``fill`` fills the FP32 array that it
        gets, cast to their dtype."""
        tensor = self.tensors[segment.spec.name]
        if tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous():
            fill(self._piece(segment).numpy())  # in place: no copy of a large model on the host
            torch.autograd.graph.increment_version(tensor)  # as an operation of torch's would
            return
        values = np.empty(segment.stop - segment.start, np.float32)
        fill(values)
        if tensor.is_contiguous():
            self._piece(segment).copy_(torch.from_numpy(values))
        elif len(values) == tensor.numel():
            tensor.copy_(torch.from_numpy(values).view(tensor.shape))
        else:
            places = torch.unravel_index(torch.arange(segment.start, segment.stop), tensor.shape)
            tensor[places] = torch.from_numpy(values).to(tensor.device, tensor.dtype)

    def _piece(self, segment: Segment) -> torch.Tensor:
        return self.tensors[segment.spec.name].detach().reshape(-1)[segment.start : segment.stop]

    @torch.no_grad()
    def write(self, flat: Floats) -> None:
        """Gives the model the values of ``flat``, cast to each parameter's dtype."""
        for name, view in self.views(flat).items():
            self.tensors[name].copy_(torch.from_numpy(view))

    def as_written(self, block: FlatBlock, values: Floats) -> Floats:
        """What `write` makes of ``values``, those of a block, as FP32."""
        dtypes = {self.tensors[segment.spec.name].dtype for segment in block.segments}
        if dtypes == {torch.float32}:
            return values
        start = values.copy()
        for part, segment in parts(block):
            piece = torch.from_numpy(start[part])
            piece.copy_(piece.to(self.tensors[segment.spec.name].dtype))
        return start

    def load(self, saved: object, flat: Floats, what: str) -> None:
        """Fills ``flat`` from tensors by name. Raises StateMismatch, with ``flat`` as it was, and
        NonFinite."""
        views = self.views(flat)
        if not isinstance(saved, Mapping) or not all(
            isinstance(t, torch.Tensor) for t in saved.values()
        ):
            raise StateMismatch(f"the {what} is not a mapping of names to tensors")
        if saved.keys() != views.keys():
            raise StateMismatch(
                f"the {what} has different parameters from the model: "
                f"{sorted(saved.keys() ^ views.keys())[:3]}"
            )
        for name, tensor in saved.items():
            if tuple(tensor.shape) != views[name].shape or tensor.dtype != torch.float32:
                raise StateMismatch(
                    f"parameter {name!r} of the {what} is {tensor.dtype} {list(tensor.shape)}"
                )
        for name, tensor in saved.items():
            torch.from_numpy(views[name]).copy_(tensor)
        if name := self.first_non_finite(flat):
            raise NonFinite(
                f"parameter {name!r} of the {what} is not finite",
                hint="Restore an earlier checkpoint.",
            )


def _named(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else dict(model)


def _few(names: list[str]) -> str:
    """Up to three of the names, for messages."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


# -- what no optimizer trains


class FrozenTensors:
    """The frozen parameters and the buffers of a model: all that its ``parameters`` do not train,
    without what shares memory with them.

    **Frozen** is a parameter that no optimizer trains, whether it requires gradients or not. A
    tensor of either kind must be the same on all trainers when they meet, and must stay as it was
    then.

    Raises UnsupportedTensor for what has no dense memory that can be read and written.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self.threads: int | None = None
        # By storage, the first and last byte of the tensors that are known.
        spans = defaultdict[Storage, list[tuple[int, int]]](list)
        for tensor in filter(torch.Tensor.numel, parameters.tensors.values()):
            storage, span = _span(tensor)
            spans[storage].append(span)

        def is_new(what: str, tensor: torch.Tensor) -> bool:
            require_dense(tensor, what)
            if not tensor.numel():
                return False
            storage, (first, last) = _span(tensor)
            known = any(first < stop and start < last for start, stop in spans[storage])
            spans[storage].append((first, last))
            return not known

        named = sorted(parameters.named.items())
        self._frozen = {name: p for name, p in named if is_new(f"parameter {name!r}", p)}
        buffers = parameters.buffers().items()
        self._buffer_names = [name for name, b in buffers if is_new(f"buffer {name!r}", b)]
        self.specs = [_spec(name, tensor) for name, tensor in self._tensors().items()]
        self._fingerprints: dict[str, object] = {}

    def __bool__(self) -> bool:
        return bool(self.specs)

    def digest(self) -> str:
        """SHA-256 of the SHA-256s of all tensors, 64 hexadecimal digits; from now on
        `require_unchanged` compares with what they are now. Raises StateMismatch as that does for
        buffers that are gone or of another shape."""
        return sha256(b"".join(self._note())).hexdigest()

    def require_unchanged(self) -> None:
        """Raises StateMismatch, with the names, if a tensor has changed since the trainers met."""
        if problem := self._problem():
            raise StateMismatch(problem, hint=_UNCHANGED)

    def meet(self, group: TrainerGroup) -> None:
        """Compares the tensors with those of the other trainers, who all call it. Raises
        StateMismatch, with the first name that differs, on all alike, and TrainerLost."""
        own = self._note()
        if not self or group.size == 1:
            return
        name, others = group.first_difference([name for name, _, _ in self.specs], b"".join(own))
        if others:
            raise StateMismatch(
                f"{name!r}, which no optimizer of PulseLoCo trains, is not trainer 0's on "
                f"trainers {others}",
                hint="Start from the same model on all trainers.",
            )

    def require_unchanged_on_all(self, group: TrainerGroup) -> int:
        """As `require_unchanged`, on all trainers alike. Returns the bytes of this trainer's
        message, none where nothing has changed. Raises TrainerLost too."""
        if not self:
            return 0
        problem = self._problem().encode()[:_MAX_PROBLEM_BYTES]
        for rank, words in enumerate(group.all_gather(problem, max_bytes=_MAX_PROBLEM_BYTES)):
            if words:
                raise StateMismatch(
                    f"trainer {rank}: {words.decode(errors='replace')}", hint=_UNCHANGED
                )
        return len(problem)

    def _note(self) -> list[bytes]:
        """The SHA-256 of each tensor, in the order of ``specs``; they must not change from now
        on."""
        tensors = self._tensors()
        if problem := self._replaced(tensors):
            raise StateMismatch(problem, hint="Create a new PulseLoCo on all trainers.")
        self._fingerprints = self._fingerprints_of(tensors)
        return list(ordered_map(digest_of, list(tensors.values()), self.threads))

    def _problem(self) -> str:
        """Words for what has changed since the trainers met, "" if nothing has."""
        tensors = self._tensors()
        if problem := self._replaced(tensors):
            return problem
        now = self._fingerprints_of(tensors)
        changed = [name for name in now if now[name] != self._fingerprints[name]]
        if not changed:
            return ""
        return f"{', '.join(map(repr, changed))} changed, and no optimizer of PulseLoCo trains it"

    def _replaced(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Words for the first buffer that is gone, or of another dtype or shape, "" without one."""
        for name, dtype, shape in self.specs:
            if name not in tensors:
                return f"buffer {name!r}, {dtype} {list(shape)}, is gone"
            _, now, size = _spec(name, tensors[name])
            if (now, size) != (dtype, shape):
                return f"buffer {name!r}, {dtype} {list(shape)}, is now {now} {list(size)}"
        return ""

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The tensors as they are now: a module may have replaced some of its buffers."""
        now = self._parameters.buffers()
        return {**self._frozen, **{name: now[name] for name in self._buffer_names if name in now}}

    def _fingerprints_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        found = ordered_map(fingerprint, list(tensors.values()), self.threads)
        return dict(zip(tensors, found, strict=True))


def _spec(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    return name, str(tensor.dtype), tuple(tensor.shape)


Storage = tuple[str, int]


def _span(tensor: torch.Tensor) -> tuple[Storage, tuple[int, int]]:
    """(device and storage, first and last byte) of a tensor that is not empty."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    length = 1 + sum(int(stride * (size - 1)) for stride, size in sizes)
    first = int(tensor.storage_offset()) * tensor.element_size()
    storage = str(tensor.device), tensor.untyped_storage().data_ptr()
    return storage, (first, first + length * tensor.element_size())
