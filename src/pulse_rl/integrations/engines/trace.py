"""Learns from a model's own loader where each checkpoint element goes, by watching what it copies.

The loader is given empty tensors of the checkpoint's names and shapes. Its copies into live parameters are noted as
boxes and not carried out: nothing is read or written, whatever the size of the model, and the engine may go on
generating.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import InputError, StateMismatch, UnsupportedTensor
from ...state.tensors import State, TensorSpec
from ..torch import _TORCH
from .boxes import Box

_OTHER_MODEL = "Is the stream that of this model? Compare `pulse digest --tensors` of both checkpoints."
_CAST = "Let the trainer publish what the engine computes in: publish(state, dtype='BF16')."
_ALIASES = {"clone", "_to_copy", "contiguous"}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Where the elements of the checkpoint tensors go on this rank.

    ``boxes`` by the tensor's name; ``derived``: such that lead into parameters which the engine then derives others
    from (`derived`); ``padding``: elements by parameter that the loader fills with a constant; ``unused``: tensors of
    which this rank holds nothing.
    """

    boxes: dict[str, tuple[Box, ...]]
    derived: dict[str, tuple[Box, ...]]
    padding: dict[str, int]
    unused: tuple[str, ...]


def learn(model: torch.nn.Module, state: State, derived: Collection[str] = ()) -> TensorMap:
    """The map of ``state``'s names and shapes into the parameters and buffers of ``model``, by its ``load_weights``.

    Raises StateMismatch if the model does not take the tensors or needs others as well, and UnsupportedTensor for
    parameters that hold something else than elements of the checkpoint (packed, quantised, derived).
    """
    tracer = _Tracer(model, state)
    held = [(tensor, tensor.data) for tensor in tracer.tensors.values()]
    try:
        with torch.no_grad(), _in_this_thread(), tracer:
            model.load_weights(tracer.sources())  # type: ignore[operator]
    except InputError:
        raise
    except Exception as error:  # a loader raises whatever its author chose
        where = f" at {tracer.last!r}" if tracer.last else ""
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StateMismatch(
            f"the engine's model does not take the stream's tensors{where}: {reason}", hint=_OTHER_MODEL
        ) from error
    finally:
        for tensor, data in held:
            if tensor.data.data_ptr() != data.data_ptr():
                tensor.data = data
    return tracer.result(model, derived)


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """What a loader gives to a pool of threads is done at once: the tracer does not see what other threads copy."""
    submit, here = ThreadPoolExecutor.submit, threading.get_ident()

    def at_once(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
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

    boxes: dict[Box, str] = field(default_factory=dict)
    padding: int = 0
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
            if tensor.numel():
                self._names.setdefault(tensor.untyped_storage().data_ptr(), name)
        self._written: dict[str, _Written] = {}
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors under all of their names, in memory that is reserved and never touched."""
        for name in self.state.names:
            spec = self.state.spec(name)
            tensor = torch.empty(spec.shape, dtype=torch_dtype(spec))
            self._sources[tensor.untyped_storage().data_ptr()] = (spec.name, tensor)
            self.last = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = func._schema.name.removeprefix("aten::")
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                name = self._name(written)
                if name is not None:
                    self._note(name, written, operation, args)
                    return written
        result = func(*args, **kwargs)
        if operation in _ALIASES and self._source(args[0]) and result.dtype == args[0].dtype:
            return args[0].view(args[0].shape)
        return result

    def _name(self, tensor: object) -> str | None:
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            return None
        return self._names.get(tensor.untyped_storage().data_ptr())

    def _source(self, tensor: object) -> str | None:
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            return None
        found = self._sources.get(tensor.untyped_storage().data_ptr())
        return found[0] if found else None

    def _note(self, name: str, target: torch.Tensor, operation: str, args: Any) -> None:
        written = self._written.setdefault(name, _Written())
        if operation in ("fill_", "zero_"):
            written.padding += target.numel()
            return
        source = self._source(args[1]) if operation == "copy_" else None
        if source is None:
            written.odd = written.odd or f"{operation} of something else than a checkpoint tensor"
            return
        value = args[1].expand(target.shape)
        if value.dtype != target.dtype:
            raise UnsupportedTensor(
                f"the stream's {source!r} is {_short(value.dtype)}, the engine's {name!r} {_short(target.dtype)}",
                hint=_CAST,
            )
        try:
            box = Box.make(
                name,
                tuple(target.shape),
                (int(value.storage_offset()), value.stride()),
                (int(target.storage_offset()), target.stride()),
            )
        except ValueError as error:
            written.odd = str(error)
            return
        if written.boxes.setdefault(box, source) != source:
            written.odd = f"{source!r} and {written.boxes[box]!r} go to the same place"

    def result(self, model: torch.nn.Module, derived: Collection[str]) -> TensorMap:
        plain: dict[str, list[Box]] = {}
        into_derived: dict[str, list[Box]] = {}
        missing = []
        for name, written in self._written.items():
            if written.odd:
                raise UnsupportedTensor(
                    f"the loader does not copy into the engine's {name!r} but computes it: {written.odd}",
                    hint="Packed and quantised parameters cannot follow a stream yet; load the model unquantised.",
                )
        for name, parameter in model.named_parameters():
            stored = self._name(parameter)
            if stored is None or stored != name:
                continue
            written = self._written.get(name, _Written())
            filled = sum(box.elements for box in written.boxes) + written.padding
            if filled != parameter.numel():
                missing.append(f"{name!r} ({filled} of {parameter.numel()} elements)")
        if missing:
            raise StateMismatch(
                f"the stream does not fill {len(missing)} of the engine's parameters: {missing[0]}", hint=_OTHER_MODEL
            )
        for written in self._written.values():
            for box, source in written.boxes.items():
                (into_derived if box.parameter in derived else plain).setdefault(source, []).append(box)
        padding = {name: w.padding for name, w in self._written.items() if w.padding}
        held = plain.keys() | into_derived.keys()
        unused = tuple(spec.name for spec in self.state.specs if spec.name not in held and spec.elements)
        return TensorMap(_frozen(plain), _frozen(into_derived), padding, unused)


def _frozen(boxes: dict[str, list[Box]]) -> dict[str, tuple[Box, ...]]:
    return {name: tuple(found) for name, found in boxes.items()}


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """torch's dtype of the tensor; raises UnsupportedTensor."""
    if spec.dtype.name not in _TORCH:
        raise UnsupportedTensor(f"this version of torch has no dtype for {spec.dtype.name} ({spec.name!r})")
    dtype: torch.dtype = _TORCH[spec.dtype.name]
    return dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
