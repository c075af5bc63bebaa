"""torch: scatter an update into a live model, and host states as torch tensors.

Changed elements of many tensors on a CUDA device are sent in groups: one transfer and, with Triton,
one kernel launch for all of a group.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from .._util import extra

with extra("torch"):
    import torch

from ..errors import InputError, StateMismatch, UnsupportedTensor
from ..follow.checkpoint import PEFT_HINT, adapter_names, is_wrapped
from ..patch.apply import TensorChanges
from ..sharding.layout import SliceSpec
from ..state.bits import LINE, UIntArray
from ..state.tensors import DTYPES, State, TensorSpec, is_sharded
from ..submit import page_locked
from ..sync.update import TensorUpdate, Update, changes_of

__all__ = ["apply_", "to_torch"]

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TORCH = {
    dtype.name: getattr(torch, dtype.library)
    for dtype in DTYPES.values()
    if hasattr(torch, dtype.library)
}
_SHARED_AT_ONCE = 1 << 22
#: What one program of the kernel writes.
PROGRAM_ELEMENTS = 1024
_GROUP_ELEMENTS = 1 << 22
_LAUNCHES: dict[torch.device, Launch] = {}
_DENSE = "Updates go into dense tensors; load a quantized model through its own loader."


def apply_(model: torch.nn.Module | Mapping[str, torch.Tensor], update: Update) -> None:
    """Write an update into a live model, in place.

    Only the changed elements travel to the model's device and are written. A tied tensor is written
    once; a model that holds a tied tensor under several storages, or under an alias only, gets all
    of its copies written. Of a DTensor (FSDP2, tensor parallelism) a rank writes what it has of it:
    each rank calls this with the same update, of a subscriber of its own. Ranks do not wait for
    each other.

    On a CUDA device changed elements are written by the stream that is current there; with Triton,
    up to four million of them, of all tensors of one width, by one transfer and one kernel launch.
    This returns before they are written, as torch's own operations do.

    Everything is checked before the first write. torch does not know memory that is mapped
    read-only from other memory: writing there ends the process.

    Args:
        model: A module, or a mapping of names to its tensors. The names must be the update's: those
            of a wrapped model (DDP, FSDP, torch.compile) are made so by `pulse_rl.unwrapped`, those
            of a model of transformers that fuses tensors in memory by
            `pulse_rl.frameworks.transformers.checkpoint_weights`.
        update: What `Subscriber.sync` has returned.

    Raises:
        InputError: It is no update, or does not fit its own tensors.
        StateMismatch: A tensor is missing, of another dtype or shape, or expanded, so that its
            elements share memory; or the update does not follow what this function wrote into the
            module before.
        UnsupportedTensor: A tensor has no dense memory of its own: sparse, a DTensor that is a sum
            still to be made, on the meta device, not initialized yet, freed.
    """
    if not isinstance(update, Update):
        raise InputError(
            f"{type(update).__name__} is not an Update",
            hint="Pass what subscriber.sync() has returned.",
        )
    tensors = model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else model
    if not isinstance(tensors, Mapping):
        raise InputError(
            f"{type(model).__name__} is neither a module nor a mapping of names to tensors"
        )
    # 1. Everything that can be wrong is, before anything is written.
    held = _required_version(model, update)
    for changed in update.tensors:
        _require_fitting(changed)
    plan = [(t, target) for t in update.tensors for target in _targets(t, tensors, update.aliases)]
    # 2. From here on the model is between two versions: after an interrupt only an update that
    # covers both goes on.
    _note_version(model, update, held, update.version)
    scattered = []
    for whole, (attached, box) in plan:
        # Not within no_grad(): an interrupt there would leave gradients off.
        target = attached.detach()
        tensor = whole if box is None else _share(whole, box)
        changes = changes_of(tensor)
        # Many small writes to a device are gathered, and sent at once.
        if changes is not None and _is_on_cuda(target) and _is_plain(target):
            scattered.append(Scatter(changes, target.view(-1).view(_INTS[tensor.spec.dtype.width])))
        else:
            _write(tensor, target)
    if scattered:
        scatter(scattered)
    # 3. The model holds the version; the next `sync` starts from there.
    _note_version(model, update, update.version, update.version)
    update.acknowledge()


class _Target(NamedTuple):
    """Memory to write to: a ``tensor``, or what this rank has of a DTensor, its elements in
    ``box``."""

    tensor: torch.Tensor
    box: SliceSpec | None


class _Held(NamedTuple):
    """What `apply_` wrote into a model: it holds version ``least``, and here and there what came up
    to ``most``.

    They differ after an interrupt only. ``source`` stands for the subscriber.
    """

    source: object
    least: int | None
    most: int


_HELD: WeakKeyDictionary[torch.nn.Module, _Held] = WeakKeyDictionary()


def _required_version(model: object, update: Update) -> int | None:
    """The version that a module holds, by what `apply_` knows. Raises StateMismatch where the
    update cannot follow."""
    held = _HELD.get(model) if isinstance(model, torch.nn.Module) else None
    source = update._receipt.source
    if update.full or held is None or source is None or held.source is not source:
        return update.previous
    least = held.least if held.least is not None else -1
    assert update.previous is not None
    if least < update.previous or update.version < held.most:
        raise StateMismatch(
            f"the model holds version {held.least}, the update leads from {update.previous} to "
            f"{update.version}",
            hint="Apply updates in order; after a missed one apply subscriber.full_update().",
        )
    return held.least


def _note_version(model: object, update: Update, least: int | None, most: int) -> None:
    if isinstance(model, torch.nn.Module):
        _HELD[model] = _Held(update._receipt.source, least, most)


def to_torch(state: State, *, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Make torch tensors of a host state.

    Args:
        state: The state, such as `Subscriber.state`.
        device: Where the tensors are. On the CPU they may share the state's memory, unless that is
            read-only as in `Subscriber.state`.

    Returns:
        The tensors under all of the state's names, aliases included.

    Raises:
        InputError: torch does not know the device.
        UnsupportedTensor: This version of torch lacks a dtype.
    """
    if not isinstance(state, State):
        raise InputError(f"{type(state).__name__} is not a State", hint="Pass subscriber.state.")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{device!r} is not a device of this torch: {str(error).splitlines()[0]}"
        ) from None
    stored = {name: tensor.to(place) for name, tensor in host_tensors(state)}
    return stored | {alias: stored[name] for alias, name in state.aliases.items()}


def host_tensors(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """The stored tensors of ``state`` one by one, as `to_torch` makes them on the CPU."""
    for spec in state.specs:
        dtype = dtype_of(spec)
        ints = _from_numpy(state.read(spec.name), spec.dtype.width)
        yield spec.name, ints.view(dtype).reshape(spec.shape)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """torch's dtype of a tensor. Raises UnsupportedTensor."""
    if spec.dtype.name not in _TORCH:
        raise UnsupportedTensor(
            f"this version of torch has no dtype for {spec.dtype.name} ({spec.name!r})"
        )
    dtype: torch.dtype = _TORCH[spec.dtype.name]
    return dtype


def _targets(
    update: TensorUpdate, tensors: Mapping[str, torch.Tensor], aliases: dict[str, str]
) -> list[_Target]:
    spec = update.spec
    names = [spec.name, *(alias for alias, name in aliases.items() if name == spec.name)]
    present = [name for name in names if name in tensors]
    if not present:
        raise StateMismatch(
            f"the model has no tensor {spec.name!r}", hint=_names_hint(spec.name, tensors)
        )
    targets: dict[tuple[str, int], _Target] = {}
    for name in present:
        tensor = tensors[name]
        _require_dense(name, tensor)
        if tensor.dtype != _TORCH.get(spec.dtype.name) or tuple(tensor.shape) != spec.shape:
            raise StateMismatch(
                f"the model's {name!r} is {tensor.dtype} {list(tensor.shape)}, "
                f"the update's is {spec.dtype.name} {list(spec.shape)}"
            )
        if (target := _of_this_rank(name, tensor)) is None:
            continue
        _require_memory(name, target.tensor)
        targets.setdefault((str(target.tensor.device), target.tensor.data_ptr()), target)
    return list(targets.values())


def _of_this_rank(name: str, tensor: torch.Tensor) -> _Target | None:
    """None where a DTensor is on other ranks. Raises UnsupportedTensor for placements that are no
    slices of it."""
    if not is_sharded(tensor):
        return _Target(tensor, None)
    from torch.distributed.tensor import DTensor

    from .shards import local_box

    assert isinstance(tensor, DTensor)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    return _Target(tensor.to_local(), local_box(name, tensor))


def _share(update: TensorUpdate, box: SliceSpec) -> TensorUpdate:
    """What the update writes of a box, as an update of the box."""
    spec = replace(update.spec, shape=box.local_shape)
    changes = changes_of(update)
    if changes is None:
        return TensorUpdate(
            spec, None, box.take(lambda start, stop: update.values[start:stop], 0, box.elements)
        )
    indices, values = [np.zeros(0, np.int64)], [np.zeros(0, f"u{spec.dtype.width}")]
    for part in changes.cut(_SHARED_AT_ONCE):
        inside, numbers = box.within(part.indices)
        indices.append(numbers)
        values.append(part.values[inside])
    return TensorUpdate(spec, np.concatenate(indices), np.concatenate(values))


def _names_hint(missing: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """What may hide ``missing``: parts of names that wrappers add, tensors that are fused in
    memory."""
    if adapter_names([missing]) or adapter_names(n for n in tensors if isinstance(n, str)):
        return PEFT_HINT
    if is_wrapped(name for name in tensors if isinstance(name, str)):
        return "The model is wrapped: call apply_(pulse_rl.unwrapped(model.state_dict()), update)."
    if is_wrapped([missing]):
        return (
            "The trainer's model is wrapped: let it publish pulse_rl.unwrapped(model.state_dict())."
        )
    if "transformers" in sys.modules:
        return (
            "A stream has a checkpoint's names, and transformers fuses some tensors in memory: "
            "call apply_(pulse_rl.frameworks.transformers.checkpoint_weights(model), update)."
        )
    return None


def _require_dense(name: str, tensor: object) -> None:
    """Raises UnsupportedTensor unless the tensor is dense."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensor(
            f"the model's {name!r} is a {type(tensor).__name__}, not a torch.Tensor", hint=_DENSE
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedTensor(
            f"the model's {name!r} is not initialized",
            hint="A lazy module gets its sizes in the first forward pass.",
        )
    if is_sharded(tensor):
        return
    dense = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
    foreign = hasattr(tensor, "full_tensor")  # a sharded tensor of another kind
    if foreign or tensor.is_meta or not dense:
        place = f"layout {tensor.layout}, device {tensor.device}"
        kind = f"{type(tensor).__name__}, {tensor.dtype}, {place}"
        raise UnsupportedTensor(f"the model's {name!r} has no dense memory ({kind})", hint=_DENSE)


def _require_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedTensor unless all elements are in memory, StateMismatch where two may be at
    one place of it."""
    if not tensor.numel():
        return
    last = 0
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((s, n) for s, n in sizes if n > 1):
        if stride <= last:
            raise StateMismatch(
                f"elements of the model's {name!r} share memory: shape {list(tensor.shape)}, "
                f"strides {tensor.stride()}",
                hint="Give the tensor memory of its own: clone() an expanded one.",
            )
        last += stride * (size - 1)
    try:
        storage = tensor.untyped_storage()
        end = (tensor.storage_offset() + last + 1) * tensor.element_size()
        held = storage.device.type != "meta" and storage.nbytes() >= end and storage.data_ptr() != 0
    except RuntimeError:  # a wrapper of other tensors, or a kind that is not known yet
        held = False
    if not held:
        raise UnsupportedTensor(
            f"the model's {name!r} is a {type(tensor).__name__} whose memory is not there",
            hint=_DENSE,
        )


def _require_fitting(update: TensorUpdate) -> None:
    """Raises InputError for what no subscriber has made."""
    changes, spec = changes_of(update), update.spec
    if changes is None:
        fits = update.values.size == spec.elements
    else:
        fits = changes.fits(spec.elements, spec.dtype.width)
    if not fits:
        raise InputError(
            f"the update of {spec.name!r} does not fit its {spec.elements} elements of "
            f"{spec.dtype.width} bytes",
            hint="Values are unsigned integers of the element's width, one for each index.",
        )


def _is_on_cuda(target: torch.Tensor) -> bool:
    return target.is_cuda


def _is_plain(target: torch.Tensor) -> bool:
    """Whether its memory holds its elements one after another, as they are."""
    return target.is_contiguous() and not target.is_conj() and not target.is_neg()


def _write(update: TensorUpdate, target: torch.Tensor) -> None:
    width = update.spec.dtype.width
    values = _from_numpy(update.values, width).to(target.device)
    # Written as integers: float8 has no scatter kernel everywhere, and a float copy need not keep
    # NaN payloads.
    flat = target.resolve_conj().resolve_neg().contiguous().view(-1).view(_INTS[width])
    if update.indices is None:
        flat.copy_(values)
    else:
        flat.index_copy_(0, torch.from_numpy(update.indices).to(target.device), values)
    if flat.data_ptr() != target.data_ptr():
        target.copy_(flat.view(target.dtype).view(target.shape))


def _from_numpy(bits: UIntArray, width: int) -> torch.Tensor:
    """The same bits in the integer type of that width; a copy where torch would warn of read-only
    memory."""
    ints = bits.view(np.dtype(f"i{width}")) if width > 1 else bits
    return torch.from_numpy(ints if ints.flags.writeable else ints.copy())


# -- changed elements of many tensors on a device


class Scatter(NamedTuple):
    """``changes`` of a live tensor whose elements are ``flat``, integers of their width [n], all
    within it."""

    changes: TensorChanges
    flat: torch.Tensor


class Sent(NamedTuple):
    """What is on the device of a group: ``positions`` (int32 or int64) and ``values`` one after
    another, for each of ``tensors`` those from its number in ``firsts`` to the next one's.
    ``programs``: int64 [n, 3], for each program of the kernel the address of a tensor, and the
    first and the last of what it writes there."""

    tensors: Sequence[torch.Tensor]
    firsts: Sequence[int]
    positions: torch.Tensor
    values: torch.Tensor
    programs: torch.Tensor


Launch = Callable[[Sent], None]


def write_group(group: Sequence[Scatter], launch: Launch) -> None:
    """Sends a group, of one device and one width, and launches what writes it."""
    flats = [one.flat for one in group]
    firsts = [0, *accumulate(len(one.changes) for one in group)]
    programs = _programs(flats, firsts)
    position = np.dtype(np.int32 if max(map(len, flats)) < 1 << 31 else np.int64)
    value = np.dtype(f"u{flats[0].element_size()}")
    sizes = [programs.nbytes, firsts[-1] * position.itemsize, firsts[-1] * value.itemsize]
    # Aligned alike, which Triton compiles for.
    ends = list(accumulate(size + -size % LINE for size in sizes))
    host = page_locked(ends[-1])
    host[: programs.nbytes].view(np.int64)[:] = programs.reshape(-1)
    indices, values = host[ends[0] : ends[1]].view(position), host[ends[1] :].view(value)
    for one, (first, stop) in zip(group, pairwise(firsts), strict=True):
        one.changes.write_into(indices[first:stop], values[first:stop])
    sent = flats[0].new_empty(len(host), dtype=torch.uint8)
    sent.copy_(torch.from_numpy(host), non_blocking=True)
    rows = sent[: programs.nbytes].view(torch.int64).view(-1, 3)
    places = sent[ends[0] : ends[1]].view(torch.from_numpy(indices).dtype)
    launch(Sent(flats, firsts, places, sent[ends[1] :].view(flats[0].dtype), rows))
    for flat in flats:
        torch.autograd.graph.increment_version(flat)


def by_indices(sent: Sent) -> None:
    """One launch for each tensor."""
    for flat, (start, stop) in zip(sent.tensors, pairwise(sent.firsts), strict=True):
        flat.index_copy_(0, sent.positions[start:stop].long(), sent.values[start:stop])


def _programs(flats: Sequence[torch.Tensor], firsts: Sequence[int]) -> npt.NDArray[np.int64]:
    parts = []
    for flat, (start, stop) in zip(flats, pairwise(firsts), strict=True):
        begins = np.arange(start, stop, PROGRAM_ELEMENTS, dtype=np.int64)
        ends = np.minimum(begins + PROGRAM_ELEMENTS, stop)
        parts.append(np.stack([np.full_like(begins, flat.data_ptr()), begins, ends], axis=1))
    return np.concatenate(parts)


def scatter(changed: Iterable[Scatter]) -> None:
    """Writes all of it, on the current streams of the tensors' devices. Returns when it is given to
    these, before they have done it."""
    kinds: dict[tuple[torch.device, int], list[Scatter]] = {}
    for one in changed:
        if len(one.changes):
            kinds.setdefault((one.flat.device, one.flat.element_size()), []).append(one)
    for (device, _), alike in kinds.items():
        launch = _launch_of(device)
        for group in _groups(alike):
            write_group(group, launch)


def _groups(changed: Iterable[Scatter]) -> Iterator[list[Scatter]]:
    group: list[Scatter] = []
    elements = 0
    for changes, flat in changed:
        for part in changes.cut(_GROUP_ELEMENTS):
            if group and elements + len(part) > _GROUP_ELEMENTS:
                yield group
                group, elements = [], 0
            group.append(Scatter(part, flat))
            elements += len(part)
    if group:
        yield group


def _launch_of(device: torch.device) -> Launch:
    """The kernel where it is there and does what it should, else one launch for each tensor."""
    if device.type != "cuda":
        return by_indices
    if device not in _LAUNCHES:
        try:
            _LAUNCHES[device] = _tried_out(device)
        except torch.cuda.OutOfMemoryError:  # of now
            return by_indices
    return _LAUNCHES[device]


def _tried_out(device: torch.device) -> Launch:
    try:
        from .scatter_kernel import by_kernel

        for width in (torch.uint8, torch.int16, torch.int32, torch.int64):
            _try_out(by_kernel, width, device)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        # No Triton, none for this device, no compiler, or a failure not known yet.
        warnings.warn(
            f"updates are written tensor by tensor on {device}: {type(error).__name__}: {error}",
            stacklevel=5,
        )
        return by_indices
    return by_kernel


def _try_out(launch: Launch, dtype: torch.dtype, device: torch.device) -> None:
    """Raises unless ``launch`` writes two tensors of ``dtype`` as it should."""
    size = 3 * PROGRAM_ELEMENTS
    tensors = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]
    expected = [torch.zeros(size, dtype=dtype, device="cpu") for _ in range(2)]
    group = []
    for k, step in enumerate((1, 7)):
        indices = np.arange(k, size, step, dtype=np.int64)
        values = (indices % 100 + 1).astype(f"<u{expected[k].element_size()}")
        expected[k][torch.from_numpy(indices)] = torch.from_numpy(indices % 100 + 1).to(dtype)
        group.append(Scatter(TensorChanges.at(indices, values), tensors[k]))
    write_group(group, launch)
    pairs = zip(tensors, expected, strict=True)
    if not all(torch.equal(found.cpu(), wanted) for found, wanted in pairs):
        raise AssertionError("the kernel wrote something else")
