"""The live parameters of one rank: where the elements of checkpoint tensors lie in them, traced
through the model's own loader; and their bits, gathered, scattered and rolled back.

A loader copies rectangles: a tensor-parallel slice, one part of a fused parameter, a transpose.
Each is a `Rectangle`, however many elements it has. To learn them, the loader is given empty
tensors of the checkpoint's names and shapes. Its copies into live parameters are noted as boxes and
not carried out: nothing is read or written, whatever the size of the model, and the engine may go
on generating.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import InputError, StateMismatch, UnsupportedTensor
from ..frameworks.torch import _INTS, dtype_of
from ..state.bits import UIntArray
from ..state.tensors import State

Indices = npt.NDArray[np.int64]
_OTHER_MODEL = (
    "Is the stream that of this model? Compare `pulse digest --tensors` of both checkpoints. The "
    "trainer publishes the whole model, frozen parts included, under the names of its checkpoint: "
    "checkpoint_weights(model) of transformers."
)
_QUANTIZE = (
    "Let the trainer publish what the engine has loaded: publish(state, quantize=…), "
    "docs/quantized.md."
)
_ALIASES = {"clone", "_to_copy", "contiguous"}


@dataclass(frozen=True, slots=True)
class Axis:
    """``size`` elements that lie ``source`` elements apart in the checkpoint tensor, ``target`` in
    the parameter."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The elements ``source + sum(c * axis.source)`` of a flattened checkpoint tensor go to the
    elements ``target + sum(c * axis.target)`` of the memory of ``parameter``, for all ``0 <= c <
    axis.size``.

    ``axes`` go from the widest step in the source to the narrowest. No two elements share a place.
    ``widened``: BF16 elements go to an FP32 parameter, whose memory counts in halves of an element:
    the high half has the bits of the source, the low half is 0. Made by `make`.
    """

    parameter: str
    source: int
    target: int
    axes: tuple[Axis, ...]
    widened: bool = False

    @classmethod
    def make(
        cls,
        parameter: str,
        sizes: Sequence[int],
        source: tuple[int, Sequence[int]],
        target: tuple[int, Sequence[int]],
        widened: bool = False,
    ) -> Rectangle:
        """The box of a copy between two views of ``sizes``, of which ``source`` and ``target`` are
        (offset, strides), in elements.

        Raises ValueError where elements of a view share a place.
        """
        if widened:
            target = 2 * target[0] + 1, [2 * stride for stride in target[1]]
        axes = [
            Axis(n, s, t) for n, s, t in zip(sizes, source[1], target[1], strict=True) if n != 1
        ]
        axes.sort(key=lambda axis: -axis.source)
        joined: list[Axis] = []
        for axis in axes:
            whole = (axis.size * axis.source, axis.size * axis.target)
            if joined and (joined[-1].source, joined[-1].target) == whole:
                joined[-1] = Axis(joined[-1].size * axis.size, axis.source, axis.target)
            else:
                joined.append(axis)
        for steps in ([(a.source, a.size) for a in joined], [(a.target, a.size) for a in joined]):
            reach = 0
            for step, size in sorted(steps):
                if step <= reach:
                    raise ValueError(f"elements of a view of {list(sizes)} share a place")
                reach += step * (size - 1)
        return cls(parameter, source[0], target[0], tuple(joined), widened)

    @property
    def low_half(self) -> Rectangle:
        """Of a widened box: the low halves of the same elements."""
        return replace(self, target=self.target - 1)

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
        """Which of ``indices``, ascending flat positions in the checkpoint tensor, lie in the box,
        and the positions in the parameter's memory to which those go."""
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

    def within(self, start: int, stop: int) -> Iterator[Rectangle]:
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

    def _part(self, low: int, high: int) -> Rectangle:
        first, *inner = self.axes
        if high - low > 1:
            inner.insert(0, Axis(high - low, first.source, first.target))
        source, target = self.source + low * first.source, self.target + low * first.target
        return replace(self, source=source, target=target, axes=tuple(inner))


def _reach(axes: Sequence[Axis]) -> int:
    return sum(axis.source * (axis.size - 1) for axis in axes)


@dataclass(frozen=True, slots=True)
class LoaderMap:
    """Where the elements of the checkpoint tensors go on this rank.

    ``boxes`` by the tensor's name; ``derived``: such that lead into parameters which the engine
    then derives others from (`derived`); ``padding``: the constants with which the loader fills
    elements, by parameter; ``unused``: tensors of which this rank holds nothing; ``ties``: pairs of
    tensors that the engine keeps in one place, so that they must be equal.
    """

    boxes: dict[str, tuple[Rectangle, ...]]
    derived: dict[str, tuple[Rectangle, ...]]
    padding: dict[str, frozenset[float]]
    unused: tuple[str, ...]
    ties: tuple[tuple[str, str], ...] = ()

    @property
    def filled(self) -> set[str]:
        """The parameters and buffers that the stream fills, at least in part."""
        found = chain.from_iterable((*self.boxes.values(), *self.derived.values()))
        return {box.parameter for box in found}


@dataclass(frozen=True, slots=True)
class Scattered:
    """``values``, unsigned integers of the element's width, for ``positions`` in the memory of
    ``parameter``; ``widened``: see `Rectangle`."""

    parameter: str
    positions: Indices
    values: UIntArray
    widened: bool = False


class WholeRectangle(NamedTuple):
    """All elements of ``box``, with the bits ``values`` of its checkpoint tensor, of which all are
    given."""

    box: Rectangle
    values: UIntArray


Change = Scattered | WholeRectangle


class LiveWeights:
    """The memory of a model's parameters and buffers, and of ``others``, by name, as flat integers
    of the element's width.

    Positions count from the start of the memory (torch: storage) that a tensor lies in, as those of
    a `Rectangle` do.
    """

    def __init__(
        self, model: torch.nn.Module, others: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        tensors = dict(others or {}) | dict(model.named_parameters()) | dict(model.named_buffers())
        self.flat = {name: as_flat(tensor) for name, tensor in tensors.items() if tensor.numel()}

    def view(self, box: Rectangle) -> torch.Tensor:
        """The live elements of ``box``, as integers, in the order of its axes."""
        return memory(self.flat, box).as_strided(box.sizes, box.target_strides, box.target)

    def take(self, change: Scattered) -> UIntArray:
        """The bits at the positions of ``change``."""
        flat = memory(self.flat, change)
        if flat.device.type == "cpu":  # four times as fast as by torch
            taken = flat.numpy()[change.positions]
        else:
            taken = flat[torch.from_numpy(change.positions).to(flat.device)].cpu().numpy()
        return taken.view(f"<u{taken.itemsize}")

    @torch.no_grad()
    def put(self, scatter: Scattered) -> None:
        flat = memory(self.flat, scatter)
        if flat.device.type == "cpu":
            flat.numpy().view(scatter.values.dtype)[scatter.positions] = scatter.values
            return
        positions = torch.from_numpy(scatter.positions).to(flat.device)
        flat.index_copy_(0, positions, as_ints(scatter.values).to(flat.device))

    def synchronize(self) -> None:
        """Returns when the device has done what was asked of it."""
        for kind in {flat.device.type for flat in self.flat.values()} - {"cpu"}:
            torch.get_device_module(kind).synchronize()


class Journal:
    """The old bits of what one update writes; `roll_back` restores them."""

    def __init__(self, live: LiveWeights) -> None:
        self._live = live
        self._taken: list[Scattered] = []
        self._copies: list[tuple[Rectangle, torch.Tensor]] = []
        self._whole: dict[str, torch.Tensor] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        """Writes ``changes``, each after its old bits were taken."""
        for change in changes:
            if isinstance(change, WholeRectangle):
                box, source = change.box, as_ints(change.values)
                self.write(box, source.as_strided(box.sizes, box.source_strides, box.source))
                continue
            self._taken.append(replace(change, values=self._live.take(change)))
            self._live.put(change)

    @torch.no_grad()
    def write(self, box: Rectangle, source: torch.Tensor) -> None:
        """Writes ``source``, integers of the element's width in the order of the box's axes, where
        it differs."""
        halves = [(box, source)]
        if box.widened:  # the engine may have loaded an FP32 checkpoint, with low halves of its own
            halves.append((box.low_half, torch.zeros_like(source)))
        for place, bits in halves:
            view = self._live.view(place)
            value = bits.to(view.device)
            if not torch.equal(view, value):
                self._copies.append((place, view.to("cpu", copy=True)))
                view.copy_(value)

    @torch.no_grad()
    def keep_all(self) -> None:
        """Copies all live parameters, to the host: a device has no room for them next to the keys
        of its requests."""
        self._whole = {name: flat.to("cpu", copy=True) for name, flat in self._live.flat.items()}

    @torch.no_grad()
    def roll_back(self) -> None:
        """Restores the bits, latest first."""
        for taken in reversed(self._taken):
            self._live.put(taken)
        for box, old in reversed(self._copies):
            self._live.view(box).copy_(old)
        for name, old in self._whole.items():
            self._live.flat[name].copy_(old)
        self._live.synchronize()


def located(
    loader_map: LoaderMap, name: str, indices: Indices | None, values: UIntArray
) -> Iterable[Change]:
    """Where the elements ``indices``, ascending, of the checkpoint tensor ``name`` go on this rank;
    None: all."""
    for box in loader_map.boxes.get(name, ()):
        if indices is None:
            yield WholeRectangle(box, values)
            continue
        chosen, positions = box.locate(indices)
        if len(positions):
            taken = np.ascontiguousarray(values[chosen])
            yield Scattered(box.parameter, positions, taken, box.widened)


def memory(flat: Mapping[str, torch.Tensor], place: Rectangle | Scattered) -> torch.Tensor:
    """The memory of ``flat`` in which the positions of ``place`` count."""
    whole = flat[place.parameter]
    return whole.view(torch.int16) if place.widened else whole


def as_flat(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory that ``tensor`` lies in, as integers of its elements' width."""
    width = tensor.element_size()
    return (
        tensor.detach()
        .as_strided((tensor.untyped_storage().nbytes() // width,), (1,), 0)
        .view(_INTS[width])
    )


def as_ints(values: UIntArray) -> torch.Tensor:
    """The same bits in torch's integer type of that width; a copy of read-only memory, of which
    torch would warn."""
    ints = values.view(f"<i{values.itemsize}") if values.itemsize > 1 else values
    return torch.from_numpy(ints if ints.flags.writeable else ints.copy())


def trace_loader(model: torch.nn.Module, state: State, derived: Collection[str] = ()) -> LoaderMap:
    """The map of ``state``'s names and shapes into the parameters and buffers of ``model``, by its
    ``load_weights``.

    Raises StateMismatch if the model does not take the tensors or needs others as well, and
    UnsupportedTensor for parameters that hold something else than elements of the checkpoint
    (packed, quantized, derived).
    """
    tracer = _Tracer(model, state)
    held = [(tensor, tensor.data) for tensor in tracer.tensors.values()]
    try:
        with torch.no_grad(), _in_this_thread(), tracer:
            model.load_weights(tracer.sources())  # type: ignore[operator]
    except InputError:
        raise
    except Exception as error:  # a loader raises whatever its author chose
        shape = list(state.spec(tracer.last).shape) if tracer.last else []
        where = f" at {tracer.last!r} {shape}" if tracer.last else ""
        rows = getattr(getattr(model, "config", None), "vocab_size", None)
        bare = f"{type(error).__name__} (the engine's vocab_size: {rows})"
        reason = " ".join(str(error).split())[:120] or bare
        raise StateMismatch(
            f"the engine's model does not take the stream's tensors{where}: {reason}; the stream "
            f"has {_families(state)}, the engine {_families(tracer.tensors)}",
            hint=_OTHER_MODEL,
        ) from error
    finally:
        for tensor, data in held:
            if tensor.data.data_ptr() != data.data_ptr():
                tensor.data = data
    return tracer.result(model, derived)


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """What a loader gives to a pool of threads is done at once: the tracer does not see what other
    threads copy."""
    submit, here = ThreadPoolExecutor.submit, threading.get_ident()

    def at_once(
        pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if threading.get_ident() != here:
            return submit(pool, work, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # the loader's, which asks the future for it
            future.set_exception(error)
        return future

    ThreadPoolExecutor.submit = at_once  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


@dataclass(slots=True)
class _Written:
    """What the loader wrote into one piece of memory."""

    boxes: dict[Rectangle, str] = field(default_factory=dict)
    padding: int = 0
    constants: set[float] = field(default_factory=set)
    odd: str = ""


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: torch.nn.Module, state: State) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state
        self.tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
        self.tensors |= dict(model.named_buffers())
        self.last = ""
        self._names: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            if (place := _place(tensor)) is not None:
                self._names.setdefault(place, name)
        self._written: dict[str, _Written] = {}
        self._sources: dict[int, str] = {}
        self._given: list[torch.Tensor] = []
        self._copied: set[str] = set()
        self._constant: dict[str, float] = {}
        self._altered: dict[str, str] = {}
        self._ties: dict[tuple[str, str], None] = {}

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors under all of their names, in memory that is reserved and never touched."""
        for name in self.state.names:
            spec = self.state.spec(name)
            tensor = torch.empty(spec.shape, dtype=dtype_of(spec))
            self._sources[tensor.untyped_storage().data_ptr()] = spec.name
            self._given.append(tensor)  # no other one gets its memory
            self.last = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = func._schema.name.removeprefix("aten::")
        # 1. An operation that writes (copy_, fill_, zero_ …), by its schema: noted, not carried
        # out, where it writes into the model or into a tensor that the loader was given. All views
        # (narrow, view, transpose …) come through here as well, and write nothing; their results
        # share the storage, by which tensors are recognized.
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                name = self._name(written)
                if name is not None:
                    self._note(name, written, operation, args)
                    return written
                if source := self._source(written):
                    # All of it becomes a constant, as a bias that only one of several ranks may
                    # add, or it is no part of the checkpoint any more. A copy that the loader made
                    # of it stands for the tensor itself here, so that it is not known which of the
                    # two is written.
                    whole = written.untyped_storage().nbytes() == written.nbytes
                    if operation in ("fill_", "zero_") and whole and source not in self._copied:
                        self._constant[source] = _constant(args)
                    else:
                        self._altered[source] = operation
                    return written
        # 2. Anything else runs, on memory that is reserved and never touched.
        result = func(*args, **kwargs)
        # 3. A copy in the same dtype (loaders call contiguous(), to() and clone()) stands for its
        # source, so that a later copy_ from it is still known to come from the checkpoint.
        source = self._source(args[0]) if operation in _ALIASES else None
        if source is not None and result.dtype == args[0].dtype:
            self._copied.add(source)
            return args[0].view(args[0].shape)
        return result

    def _name(self, tensor: object) -> str | None:
        place = _place(tensor)
        return None if place is None else self._names.get(place)

    def _source(self, tensor: object) -> str | None:
        place = _place(tensor)
        return None if place is None else self._sources.get(place)

    def _note(self, name: str, target: torch.Tensor, operation: str, args: Any) -> None:
        written = self._written.setdefault(name, _Written())
        # 1. Constants: the padding of a vocabulary, say, or a source that the loader has filled.
        if operation in ("fill_", "zero_"):
            written.padding += target.numel()
            written.constants.add(_constant(args))
            return
        source = self._source(args[1]) if operation == "copy_" else None
        if source in self._constant:
            written.padding += target.numel()
            written.constants.add(self._constant[source])
            return
        # 2. What is computed, not copied: `result` refuses the parameter.
        odd = ""
        if source in self._altered:
            odd = f"{self._altered[source]} changes {source!r} before it is copied"
        elif source is None:
            odd = f"{operation} of something else than a checkpoint tensor"
        if odd or source is None:
            written.odd = written.odd or odd
            return
        # 3. A copy: a strided box of the source goes to one of the parameter. From BF16 to FP32 it
        # is the high half of each element. Any other cast on the way is refused, since an update
        # writes bits.
        value = args[1].expand(target.shape)
        widened = (value.dtype, target.dtype) == (torch.bfloat16, torch.float32)
        if value.dtype != target.dtype and not widened:
            raise UnsupportedTensor(
                f"the stream's {source!r} is {_short(value.dtype)}, the engine's {name!r} "
                f"{_short(target.dtype)}",
                hint=_cast_hint(value.dtype, target.dtype),
            )
        taken = (int(value.storage_offset()), value.stride())
        put = (int(target.storage_offset()), target.stride())
        try:
            box = Rectangle.make(name, tuple(target.shape), taken, put, widened)
        except ValueError as error:
            written.odd = str(error)
            return
        first = written.boxes.setdefault(box, source)
        if first != source:  # a tied model, a stream with both tensors
            self._ties[source, first] = None

    def result(self, model: torch.nn.Module, derived: Collection[str]) -> LoaderMap:
        plain: dict[str, tuple[Rectangle, ...]] = {}
        into_derived: dict[str, tuple[Rectangle, ...]] = {}
        missing: dict[str, str] = {}
        for name, written in self._written.items():
            if written.odd:
                raise UnsupportedTensor(
                    f"the loader does not copy into the engine's {name!r} but computes it: "
                    f"{written.odd}",
                    hint="An update writes bits of the stream, and cannot repeat this. Start the "
                    "engine unquantized if it packs or quantizes this parameter.",
                )
        for name, parameter in model.named_parameters():
            stored = self._name(parameter)
            if stored is None or stored != name:
                continue
            written = self._written.get(name, _Written())
            filled = sum(box.elements for box in written.boxes) + written.padding
            if filled != parameter.numel():
                missing[name] = f"{name!r} ({filled} of {parameter.numel()} elements)"
        if missing:
            raise StateMismatch(
                f"the stream does not fill {len(missing)} of the engine's parameters, "
                f"{_families(missing)}: {next(iter(missing.values()))}",
                hint=_OTHER_MODEL,
            )
        for written in self._written.values():
            for box, source in written.boxes.items():
                boxes = into_derived if box.parameter in derived else plain
                boxes[source] = (*boxes.get(source, ()), box)
        padding = {name: frozenset(w.constants) for name, w in self._written.items() if w.padding}
        held = plain.keys() | into_derived.keys()
        unused = tuple(
            spec.name for spec in self.state.specs if spec.name not in held and spec.elements
        )
        return LoaderMap(plain, into_derived, padding, unused, tuple(self._ties))


def _families(names: Iterable[str]) -> str:
    """The first parts of ``names`` with their numbers, the most frequent ones first."""
    found = Counter(name.partition(".")[0] for name in names).most_common(4)
    return ", ".join(f"{count} {family}.*" for family, count in found)


def _cast_hint(source: torch.dtype, target: torch.dtype) -> str:
    """How a stream of ``source`` and an engine's parameter of ``target`` come together."""
    computes = {torch.float32, torch.bfloat16, torch.float16}
    if target not in computes or source not in computes:
        return _QUANTIZE
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[target]
    if target is torch.float32:
        return f"Publish this tensor as {name}, in which the engine keeps it."
    if source is torch.float32:
        return f"Publish what the engine computes in: publish(state, dtype={name!r})."
    return (
        f"Start the engine with --dtype {_short(source)}; or let the trainer publish its FP32 "
        f"masters with dtype={name!r}."
    )


def _constant(args: Sequence[Any]) -> float:
    """Of the arguments of ``fill_`` or ``zero_``."""
    return float(args[1]) if len(args) > 1 else 0.0


def _place(tensor: object) -> int | None:
    """Where the memory of ``tensor`` begins; None: it has none."""
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
