"""torch: scatter an update into a live model, and host states as torch tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..errors import StateMismatch
from ..state.tensors import DTYPES, State, UIntArray
from ..sync.update import TensorUpdate, Update

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TORCH = {
    name: getattr(torch, torch_name)
    for name, torch_name in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "U16": "uint16",
        "I16": "int16",
        "F16": "float16",
        "BF16": "bfloat16",
        "U32": "uint32",
        "I32": "int32",
        "F32": "float32",
        "U64": "uint64",
        "I64": "int64",
        "F64": "float64",
        "C64": "complex64",
    }.items()
    if hasattr(torch, torch_name)
}
assert _TORCH.keys() <= DTYPES.keys()


def apply_(model: torch.nn.Module | Mapping[str, torch.Tensor], update: Update) -> None:
    """Writes an update into a live model, or a mapping of names to its tensors, in place.

    Only the changed elements travel to the model's device and are written. Every name, dtype and shape is checked
    before the first write (StateMismatch). A tied tensor is written once; a model that holds a tied tensor under
    several storages, or under an alias only, gets all of its copies written.
    """
    tensors = model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else model
    plan = [(t, target) for t in update.tensors for target in _targets(t, tensors, update.aliases)]
    with torch.no_grad():
        for tensor, target in plan:
            _write(tensor, target.detach())


def to_torch(state: State, *, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """A host state as torch tensors under all of its names, aliases included.

    On the CPU the tensors may share the state's memory, unless that is read-only as in `Subscriber.state`.
    """
    stored = {}
    for spec in state.specs:
        ints = _from_numpy(state.read(spec.name), spec.dtype.width)
        stored[spec.name] = ints.view(_TORCH[spec.dtype.name]).reshape(spec.shape).to(device)
    return stored | {alias: stored[name] for alias, name in state.aliases.items()}


def _targets(update: TensorUpdate, tensors: Mapping[str, torch.Tensor], aliases: dict[str, str]) -> list[torch.Tensor]:
    spec = update.spec
    names = [spec.name, *(alias for alias, name in aliases.items() if name == spec.name)]
    targets: dict[tuple[str, int], torch.Tensor] = {}
    for name in names:
        if name in tensors:
            tensor = tensors[name]
            if tensor.dtype != _TORCH[spec.dtype.name] or tuple(tensor.shape) != spec.shape:
                raise StateMismatch(
                    f"the model's {name!r} is {tensor.dtype} {list(tensor.shape)}, "
                    f"the update's is {spec.dtype.name} {list(spec.shape)}"
                )
            targets.setdefault((str(tensor.device), tensor.data_ptr()), tensor)
    if not targets:
        raise StateMismatch(f"the model has no tensor {spec.name!r}")
    return list(targets.values())


def _write(update: TensorUpdate, target: torch.Tensor) -> None:
    width = update.spec.dtype.width
    values = _from_numpy(update.values, width).to(target.device)
    # Written as integers: float8 has no scatter kernel everywhere, and a float copy need not keep NaN payloads.
    flat = target.contiguous().view(-1).view(_INTS[width])
    if update.indices is None:
        flat.copy_(values)
    else:
        flat.index_copy_(0, torch.from_numpy(update.indices).to(target.device), values)
    if not target.is_contiguous():
        target.copy_(flat.view(target.dtype).view(target.shape))


def _from_numpy(bits: UIntArray, width: int) -> torch.Tensor:
    """The same bits in the integer type of that width; a copy where torch would warn of read-only memory."""
    ints = bits.view(np.dtype(f"i{width}")) if width > 1 else bits
    return torch.from_numpy(ints if ints.flags.writeable else ints.copy())
