"""Copies of states: of host memory by several threads, of CUDA memory by the device, beside the
host's work."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, NamedTuple

from .._util.threads import ordered_map
from .cast import compute_dtype
from .memory import DeviceCopies, DeviceTensor, copied_on_device, pinned
from .tensors import DType, State, TensorSpec, stored_tensor

_PIECE_ELEMENTS = 1 << 22
_TORCH_CASTS = {"BF16": "bfloat16", "F16": "float16"}


class Snapshot(NamedTuple):
    """``state`` is in host memory of its own, and holds its values once ``copies`` were waited
    for."""

    state: State
    copies: DeviceCopies


def cuda_tensors(state: State) -> dict[str, DeviceTensor]:
    """Its tensors that are in the memory of CUDA devices, by the names under which it stores
    them."""
    return {spec.name: tensor for spec in state.specs if (tensor := _cuda_tensor(state, spec))}


def own_tensors(state: State) -> dict[str, DeviceTensor]:
    """Those of `cuda_tensors` that are copies which nobody else writes into."""
    return {name: tensor for name, tensor in cuda_tensors(state).items() if tensor.own}


def split(state: State, names: Collection[str]) -> tuple[State, State]:
    """The stored tensors ``names`` of a state, and all the others, each with their aliases."""
    return _part(state, {*names}), _part(state, {spec.name for spec in state.specs} - {*names})


def merge(one: State, other: State) -> State:
    """The tensors of both."""
    data = {
        spec.name: stored_tensor(state, spec.name) for state in (one, other) for spec in state.specs
    }
    return State(one.specs + other.specs, data, one.aliases | other.aliases)


def _part(state: State, names: set[str]) -> State:
    data = {name: stored_tensor(state, name) for name in names}
    aliases = {alias: name for alias, name in state.aliases.items() if name in names}
    return State(tuple(spec for spec in state.specs if spec.name in names), data, aliases)


def await_devices(state: State) -> None:
    """Returns once the CUDA tensors of ``state`` hold what the caller's current streams were given
    to write. Threads that read them afterwards have other current streams."""
    for device in {tensor.flat.device for tensor in cuda_tensors(state).values()}:
        torch: Any = sys.modules["torch"]
        torch.cuda.current_stream(device).synchronize()


def snapshot(
    state: State, into: Snapshot | None = None, *, threads: int | None = None, staged: bool = False
) -> Snapshot:
    """``state`` in host memory of its own: that of ``into``, which nobody needs any more, if it has
    the same tensors. What a device still copies into it comes first.

    New memory costs as much again as the copy: the system hands it out page by page. That of a
    state with CUDA tensors is page-locked, so that this returns before they are copied
    (`DeviceCopies`, which has ``staged``).
    """
    cuda = cuda_tensors(state)
    if into is None or into.state.specs != state.specs:
        into = Snapshot(
            _page_locked(state.specs) if cuda else State.empty(state.specs), DeviceCopies()
        )
    elif len(cuda) < len(state.specs):
        into.copies.wait()  # the host writes into it as well
    copied, copies = into.state.with_aliases(state.aliases), into.copies
    if cuda:
        copies.start(((tensor, copied.read(name)) for name, tensor in cuda.items()), staged=staged)
    pieces = [
        (spec.name, start, min(start + _PIECE_ELEMENTS, spec.elements))
        for spec in state.specs
        if spec.name not in cuda
        for start in range(0, spec.elements, _PIECE_ELEMENTS)
    ]

    def copy(piece: tuple[str, int, int]) -> None:
        copied.read(*piece)[:] = state.read(*piece)

    for _ in ordered_map(copy, pieces, threads):
        pass
    return Snapshot(copied, copies)


def copied_within_devices(state: State, dtype: DType | None) -> State | None:
    """``state`` with copies of its CUDA tensors on their devices (`DeviceTensor.own`), made by the
    current streams and cast to ``dtype`` if there is one; None where they do not fit. What is cast
    to FP8 or from FP64 is left as it is: devices differ in the one, and the other is rounded once
    by them, twice by `cast`."""
    torch: Any = sys.modules.get("torch")
    sources, specs = {}, {spec.name: spec for spec in state.specs}
    for name, tensor in cuda_tensors(state).items():
        given = specs[name].dtype
        target = given if dtype is None else compute_dtype(specs[name], dtype)
        if target == given:
            sources[name] = (tensor.flat, tensor.flat.dtype)
        elif given.name == "F32" and target.name in _TORCH_CASTS:
            sources[name] = (
                tensor.flat.view(torch.float32),
                getattr(torch, _TORCH_CASTS[target.name]),
            )
            specs[name] = TensorSpec(name, target, specs[name].shape)
    if not sources:
        return state
    copies = copied_on_device(list(sources.values()))
    if copies is None:
        return None
    data = {name: stored_tensor(state, name) for name in specs}
    data |= {
        name: DeviceTensor(c, specs[name].dtype.width, own=True)
        for name, c in zip(sources, copies, strict=True)
    }
    return State(tuple(specs.values()), data, state.aliases)


def _page_locked(specs: tuple[TensorSpec, ...]) -> State:
    arrays = pinned([s.nbytes for s in specs])
    return State(specs, {s.name: a.view(s.dtype.uint) for s, a in zip(specs, arrays, strict=True)})


def _cuda_tensor(state: State, spec: TensorSpec) -> DeviceTensor | None:
    tensor = stored_tensor(state, spec.name)
    return tensor if isinstance(tensor, DeviceTensor) and tensor.is_cuda else None
