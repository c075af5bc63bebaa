"""torch: scatter an update into a live model, and host states as torch tensors.

What goes to a CUDA device is put together in page-locked buffers, by threads, while the device
copies from those that are full. Changed elements of many tensors share a transfer and, with Triton,
a kernel launch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from .._util import extra
from .._util.threads import default_threads, ordered_map

with extra("torch"):
    import torch

from ..errors import InputError, StateMismatch, UnsupportedTensor
from ..follow.checkpoint import PEFT_HINT, adapter_names, is_wrapped
from ..patch.apply import TensorChanges
from ..sharding.layout import SliceSpec
from ..state.bits import LINE, UIntArray
from ..state.tensors import DTYPES, State, TensorSpec, is_sharded
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
_GROUP_ELEMENTS = 1 << 20
#: Bytes of whole tensors in a buffer; a group of changes has 6 MB in BF16, and 16 at most.
_BUFFER_BYTES = 8 << 20
#: More threads do not copy faster than memory can. Each has a buffer that it fills and one that the
#: device copies from: 128 MiB page-locked in all.
_FILLERS = 8
_LAUNCHES: dict[torch.device, Launch] = {}
_DENSE = "Updates go into dense tensors; load a quantized model through its own loader."


def apply_(model: torch.nn.Module | Mapping[str, torch.Tensor], update: Update) -> None:
    """Write an update into a live model, in place.

    Only the changed elements travel to the model's device and are written. A tied tensor is written
    once; a model that holds a tied tensor under several storages, or under an alias only, gets all
    of its copies written. Of a DTensor (FSDP2, tensor parallelism) a rank writes what it has of it:
    each rank calls this with the same update, of a subscriber of its own. Ranks do not wait for
    each other.

    A CUDA device is written to by the stream that is current there; with Triton, up to a million
    changed elements, of all tensors of one width, by one transfer and one kernel launch. This
    returns before they are written, as torch's own operations do: the host waits only for a
    page-locked buffer that is free again. Nothing refers to the update's memory by then.

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
    aliases: dict[str, list[str]] = {}
    for alias, name in update.aliases.items():
        aliases.setdefault(name, []).append(alias)
    plan = [
        (t, target)
        for t in update.tensors
        for target in _targets(t, tensors, aliases.get(t.spec.name, ()))
    ]
    # 2. From here on the model is between two versions: after an interrupt only an update that
    # covers both goes on.
    _note_version(model, update, held, update.version)
    sent: list[Whole] = []
    scattered: list[Scatter] = []
    for tensor, (attached, box) in plan:
        # Not within no_grad(): an interrupt there would leave gradients off.
        target = attached.detach()
        if not _is_on_cuda(target):
            _write(tensor if box is None else _share(tensor, box), target)
        elif _is_plain(target):
            # Many small writes to a device are gathered, and sent at once.
            _add(tensor, box, target.view(-1).view(_INTS[tensor.spec.dtype.width]), sent, scattered)
        else:
            _write_apart(tensor, box, target)
    send(sent)
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
    update: TensorUpdate, tensors: Mapping[str, torch.Tensor], aliases: Iterable[str]
) -> list[_Target]:
    spec = update.spec
    present = [name for name in (spec.name, *aliases) if name in tensors]
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
    return target.device.type == "cuda"


def _is_plain(target: torch.Tensor) -> bool:
    """Whether its memory holds its elements one after another, as they are."""
    return target.is_contiguous() and not target.is_conj() and not target.is_neg()


def _write(update: TensorUpdate, target: torch.Tensor) -> None:
    """Not for CUDA devices: the host waits for each transfer."""
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


def _write_apart(update: TensorUpdate, box: SliceSpec | None, target: torch.Tensor) -> None:
    """Writes to a device's tensor whose elements are strided or lazily changed, through a plain
    copy on the device."""
    plain = target.resolve_conj().resolve_neg().contiguous()
    sent: list[Whole] = []
    scattered: list[Scatter] = []
    _add(update, box, plain.view(-1).view(_INTS[update.spec.dtype.width]), sent, scattered)
    send(sent)
    scatter(scattered)
    target.copy_(plain, non_blocking=True)


def _add(
    update: TensorUpdate,
    box: SliceSpec | None,
    flat: torch.Tensor,
    sent: list[Whole],
    scattered: list[Scatter],
) -> None:
    """Adds what the update writes to ``flat``, all of the tensor or of ``box``, to its list."""
    if changes_of(update) is None:
        # A box is read piece by piece: in one it would take as much memory again.
        sent.append(Whole(update.values, box, flat))
        return
    changes = changes_of(update if box is None else _share(update, box))
    assert changes is not None
    scattered.append(Scatter(changes, flat))


def _from_numpy(bits: UIntArray, width: int) -> torch.Tensor:
    """The same bits in the integer type of that width; a copy where torch would warn of read-only
    memory."""
    ints = bits.view(np.dtype(f"i{width}")) if width > 1 else bits
    return torch.from_numpy(ints if ints.flags.writeable else ints.copy())


# -- what goes to a device: loads, each of which fits into a buffer


class Load(Protocol):
    """``nbytes`` for a device: the host fills a buffer with them, and the device copies them."""

    @property
    def nbytes(self) -> int: ...

    def fill(self, host: npt.NDArray[np.uint8]) -> None:
        """Any thread may call it."""

    def launch(self, host: torch.Tensor) -> None:
        """Gives the copies from ``host`` to the device's current stream."""


class _Buffer:
    """Page-locked memory of ``nbytes``, ordinary memory where none can be locked.

    torch keeps the memory of a page-locked tensor until the copies from it have ended, whoever
    drops the tensor. This must not be circumvented: by another tensor over the same memory, say.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:  # no device, or the system's limit of locked memory
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._copied: torch.cuda.Event | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """Waits until the device has copied what was there before."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory[:nbytes]

    def launched(self, device: torch.device) -> None:
        """The copies were given to the current stream of ``device``."""
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))


def _transfer(device: torch.device, loads: Sequence[Load]) -> None:
    """Fills buffers by threads and launches each when it is full. Returns before the device has
    copied the last ones.

    Only the caller's thread, whose current stream counts, deals with the device.
    """
    threads = min(default_threads(), _FILLERS, len(loads))
    # `ordered_map` asks for an item when all but the last `threads` ones were launched: with more
    # buffers than threads the one that is taken again has been launched.
    size = max(load.nbytes for load in loads)
    buffers = [_Buffer(size) for _ in range(min(2 * threads, len(loads)))]

    def taken() -> Iterator[tuple[Load, torch.Tensor]]:
        for number, load in enumerate(loads):
            yield load, buffers[number % len(buffers)].take(load.nbytes)

    def filled(one: tuple[Load, torch.Tensor]) -> tuple[Load, torch.Tensor]:
        one[0].fill(one[1].numpy())
        return one

    with closing(ordered_map(filled, taken(), threads)) as full:
        for number, (load, host) in enumerate(full):
            load.launch(host)
            buffers[number % len(buffers)].launched(device)


# -- whole tensors


class Whole(NamedTuple):
    """All elements of a live tensor ``flat``, integers of their width [n]: ``values``, or those of
    them in ``box``."""

    values: UIntArray
    box: SliceSpec | None
    flat: torch.Tensor

    def read(self, start: int, stop: int) -> UIntArray:
        """Elements [``start``, ``stop``) of ``flat``."""
        if self.box is None:
            return self.values[start:stop]
        return self.box.take(lambda first, last: self.values[first:last], start, stop)


class _Part(NamedTuple):
    """Elements [``start``, ``stop``) of ``whole``, at the byte ``at`` of a buffer."""

    whole: Whole
    start: int
    stop: int
    at: int

    @property
    def end(self) -> int:
        return self.at + (self.stop - self.start) * self.whole.flat.element_size()


class _Parts(list[_Part]):
    """A `Load`."""

    @property
    def nbytes(self) -> int:
        return self[-1].end

    def fill(self, host: npt.NDArray[np.uint8]) -> None:
        for part in self:
            values = part.whole.read(part.start, part.stop)
            host[part.at : part.end].view(values.dtype)[:] = values

    def launch(self, host: torch.Tensor) -> None:
        for part in self:
            flat = part.whole.flat
            flat[part.start : part.stop].copy_(
                host[part.at : part.end].view(flat.dtype), non_blocking=True
            )


def send(wholes: Iterable[Whole]) -> None:
    """Writes all of them, on the current streams of their devices. Returns when it is given to
    these, before they have done it."""
    devices: dict[torch.device, list[Whole]] = {}
    for whole in wholes:
        if len(whole.flat):
            devices.setdefault(whole.flat.device, []).append(whole)
    for device, alike in devices.items():
        _transfer(device, list(_loads(alike)))


def _loads(wholes: Iterable[Whole]) -> Iterator[_Parts]:
    """Small tensors share a load, a large one has many."""
    load, at = _Parts(), 0
    for whole in wholes:
        start, width = 0, whole.flat.element_size()
        while start < len(whole.flat):
            stop = min(len(whole.flat), start + (_BUFFER_BYTES - at) // width)
            load.append(_Part(whole, start, stop, at))
            at, start = load.nbytes + -load.nbytes % LINE, stop
            if at >= _BUFFER_BYTES:
                yield load
                load, at = _Parts(), 0
    if load:
        yield load


# -- changed elements of many tensors


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


class _Group:
    """A `Load`: ``changed`` of one device and one width, which ``launch`` writes."""

    def __init__(self, changed: Sequence[Scatter], launch: Launch) -> None:
        self._changed, self._launch = changed, launch
        self._flats = [one.flat for one in changed]
        self._firsts = [0, *accumulate(len(one.changes) for one in changed)]
        self._position = np.dtype(np.int32 if max(map(len, self._flats)) < 1 << 31 else np.int64)
        value = self._flats[0].element_size()
        self._programs = _programs(self._flats, self._firsts)
        sizes = [
            self._programs.nbytes,
            *(self._firsts[-1] * n for n in (self._position.itemsize, value)),
        ]
        # Aligned alike, which Triton compiles for.
        self._ends = list(accumulate(size + -size % LINE for size in sizes))

    @property
    def nbytes(self) -> int:
        return self._ends[-1]

    def fill(self, host: npt.NDArray[np.uint8]) -> None:
        rows, places, _ = self._ends
        host[: self._programs.nbytes].view(np.int64)[:] = self._programs.reshape(-1)
        value = np.dtype(f"u{self._flats[0].element_size()}")
        indices, values = host[rows:places].view(self._position), host[places:].view(value)
        for one, (first, stop) in zip(self._changed, pairwise(self._firsts), strict=True):
            one.changes.write_into(indices[first:stop], values[first:stop])

    def launch(self, host: torch.Tensor) -> None:
        rows, places, _ = self._ends
        sent = self._flats[0].new_empty(len(host), dtype=torch.uint8)
        sent.copy_(host, non_blocking=True)
        programs = sent[: self._programs.nbytes].view(torch.int64).view(-1, 3)
        positions = sent[rows:places].view(_INTS[self._position.itemsize])
        values = sent[places:].view(self._flats[0].dtype)
        self._launch(Sent(self._flats, self._firsts, positions, values, programs))
        for flat in self._flats:
            torch.autograd.graph.increment_version(flat)


def write_group(group: Sequence[Scatter], launch: Launch) -> None:
    """Sends a group, of one device and one width, and launches what writes it."""
    _transfer(group[0].flat.device, [_Group(group, launch)])


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
        _transfer(device, [_Group(group, launch) for group in _groups(alike)])


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
