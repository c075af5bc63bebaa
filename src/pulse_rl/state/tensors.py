"""Names, dtypes, shapes, and the bits of tensors as flat little-endian unsigned integers.

Everything above this module sees a tensor as a `TensorSpec` and a flat unsigned array. Comparisons
are made on bits, so NaN payloads, -0.0 and Inf survive and every dtype works alike. This module
never imports torch.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from fnmatch import translate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, Union

import numpy as np
import numpy.typing as npt

from .._util.settings import checked_collection
from ..errors import InputError, StateMismatch, UnsupportedTensor
from .bits import UIntArray, contiguous

if TYPE_CHECKING:
    import torch


if sys.byteorder != "little":  # pragma: no cover
    raise ImportError(
        "pulse_rl needs a little-endian machine: roots and patches are defined on little-endian "
        "bytes"
    )

# Caps on what a stranger's file or manifest can make a reader allocate.
MAX_NAME_BYTES = 1024
MAX_DIMS = 16
MAX_TENSORS = 1 << 18
MAX_TENSOR_ELEMENTS = 1 << 48

_UINT: dict[int, np.dtype[Any]] = {w: np.dtype(f"<u{w}") for w in (1, 2, 4, 8)}


@dataclass(frozen=True, slots=True)
class DType:
    """An element type with its safetensors ``name`` and its ``width`` in bytes.

    ``exponent`` is (lowest bit, number of bits) of the exponent field; None if the dtype has none.
    ``id`` identifies the dtype in a patch header and never changes. ``library`` is the name that
    numpy, ml_dtypes and torch use.
    """

    id: int
    name: str
    width: int
    exponent: tuple[int, int] | None
    library: str

    @property
    def uint(self) -> np.dtype[Any]:
        """The unsigned numpy dtype of the same width."""
        return _UINT[self.width]


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType(1, "BOOL", 1, None, "bool"),
        DType(2, "U8", 1, None, "uint8"),
        DType(3, "I8", 1, None, "int8"),
        DType(4, "F8_E5M2", 1, (2, 5), "float8_e5m2"),
        DType(5, "F8_E4M3", 1, (3, 4), "float8_e4m3fn"),
        DType(6, "F8_E8M0", 1, None, "float8_e8m0fnu"),
        DType(7, "F8_E5M2FNUZ", 1, (2, 5), "float8_e5m2fnuz"),
        DType(8, "F8_E4M3FNUZ", 1, (3, 4), "float8_e4m3fnuz"),
        DType(9, "U16", 2, None, "uint16"),
        DType(10, "I16", 2, None, "int16"),
        DType(11, "F16", 2, (10, 5), "float16"),
        DType(12, "BF16", 2, (7, 8), "bfloat16"),
        DType(13, "U32", 4, None, "uint32"),
        DType(14, "I32", 4, None, "int32"),
        DType(15, "F32", 4, (23, 8), "float32"),
        DType(16, "U64", 8, None, "uint64"),
        DType(17, "I64", 8, None, "int64"),
        DType(18, "F64", 8, (52, 11), "float64"),
        DType(19, "C64", 8, None, "complex64"),
    )
}


_FROM_LIBRARY = {dtype.library: dtype for dtype in DTYPES.values()}


def dtype_of(name: str) -> DType:
    """The `DType` with the safetensors name ``name``; raises UnsupportedTensor."""
    if not isinstance(name, str) or name not in DTYPES:
        raise UnsupportedTensor(
            f"dtype {name!r} is not supported", hint=f"Supported: {', '.join(DTYPES)}."
        )
    return DTYPES[name]


def check_tensor_name(name: object) -> None:
    """Raise InputError unless ``name`` can name a tensor or an alias."""
    if not isinstance(name, str):
        raise InputError(f"a tensor name must be a string, not {name!r}")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        raise InputError(f"tensor name {name!r} is not valid Unicode") from None
    if not 0 < nbytes <= MAX_NAME_BYTES:
        raise InputError(f"a tensor name must have 1 to {MAX_NAME_BYTES} bytes, got {nbytes}")
    if name == "__metadata__":
        raise InputError("no tensor can be called __metadata__: safetensors reserves that name")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describe a tensor without its values.

    Args:
        name: The tensor's name, 1 to 1,024 bytes in UTF-8.
        dtype: The element type (`DType`).
        shape: The sizes of at most 16 dimensions; ``()`` for a scalar.
    Raises:
        InputError: A name, a size or the number of elements is out of range.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_tensor_name(self.name)
        if not isinstance(self.shape, tuple) or any(type(d) is not int for d in self.shape):
            raise InputError(
                f"tensor {self.name!r} has the shape {self.shape!r}, not a tuple of whole numbers"
            )
        if len(self.shape) > MAX_DIMS:
            raise InputError(
                f"tensor {self.name!r} has {len(self.shape)} dimensions, more than {MAX_DIMS}"
            )
        possible = all(0 <= d <= MAX_TENSOR_ELEMENTS for d in self.shape)
        if not possible or self.elements > MAX_TENSOR_ELEMENTS:
            raise InputError(f"tensor {self.name!r} has an impossible shape {self.shape}")

    @property
    def elements(self) -> int:
        """The number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.dtype.width


@dataclass(frozen=True, slots=True)
class Bits:
    """Pass a tensor as bits, for dtypes that numpy lacks: ``Bits(uint16_array, "BF16")``.

    Args:
        array: The bits: an array of unsigned integers of the element's width, in the tensor's
            shape.
        dtype: The safetensors name of the dtype, such as "BF16" or "F8_E4M3".
    """

    array: UIntArray
    dtype: str

    def __repr__(self) -> str:
        return f"<Bits of {self.dtype}, shape {tuple(self.array.shape)}>"


_INTS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A torch tensor outside of host memory; slices are copied on demand.

    ``flat`` is torch.uint8 [elements * width] on its device; ``width`` is the bytes of an element.
    """

    flat: Any
    width: int

    @property
    def is_cuda(self) -> bool:
        """Whether the tensor is in the memory of a CUDA or ROCm device."""
        return bool(self.flat.device.type == "cuda")

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Copy elements [``start``, ``stop``) to new host memory, as unsigned integers."""
        host: npt.NDArray[np.uint8] = (
            self.flat[start * self.width : stop * self.width].cpu().numpy()
        )
        return host.view(np.dtype(f"<u{self.width}"))

    def ints(self, start: int, stop: int) -> Any:
        """A view of elements [``start``, ``stop``) on the device, in torch's integer type of their
        width."""
        torch: Any = sys.modules["torch"]
        return self.flat[start * self.width : stop * self.width].view(
            getattr(torch, _INTS[self.width])
        )


class Readable(Protocol):
    """The elements of a tensor that is not in host memory in its dtype."""

    def read(self, start: int, stop: int) -> UIntArray:
        """Elements [``start``, ``stop``) of the flattened tensor, in new host memory."""


class State:
    """Hold the named tensors of one version, as bits.

    Make a state with `of` or `empty`. Host tensors are views of the caller's memory,
    not copies. Iteration yields all names, aliases included.

    Args:
        specs: The stored tensors. The attribute ``specs`` has them in the order of the UTF-8 bytes
            of their names.
        data: For each name the flat elements: an unsigned array [elements], or an object with
            ``read(start, stop)``.
        aliases: The other names of tied tensors, each with the name under which the tensor is
            stored. Aliases are not in ``specs``. Default: none.
    Raises:
        InputError: There are too many tensors, or an alias fits no tensor.
    """

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        data: Mapping[str, Any],  # flat UIntArray or Readable
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if len(specs) > MAX_TENSORS:
            raise InputError(f"a state of {len(specs)} tensors is more than {MAX_TENSORS}")
        self.specs = tuple(sorted(specs, key=lambda s: s.name.encode()))
        self.aliases = dict(aliases or {})
        self._data = data
        self._views: dict[int, tuple[object, UIntArray | None]] = {}
        self._spec = {s.name: s for s in self.specs}
        for alias, name in self.aliases.items():
            check_tensor_name(alias)
            if name not in self._spec or alias in self._spec:
                raise InputError(
                    f"alias {alias!r} of {name!r} does not fit the tensors of the state"
                )

    def __repr__(self) -> str:
        dtypes = ", ".join(sorted({spec.dtype.name for spec in self.specs}))
        return (
            f"<State of {len(self.specs)} tensors, {self.elements} elements of "
            f"{dtypes or 'no dtype'}>"
        )

    #: The stored names of the tensors that no cast to a compute dtype changes.
    uncast: frozenset[str] = frozenset()

    @classmethod
    def of(cls, source: StateSource, *, keep: Collection[str] = ()) -> State:
        """Return the state of ``source``, without a copy.

        Strided host tensors are copied, and those at an address that is not a multiple of their
        element's width. Names that share storage, shape and dtype are tied: the first name in a
        mapping stores the tensor, as in Hugging Face checkpoints, and the others become aliases.

        Args:
            source: A mapping of names to torch tensors, numpy arrays or `Bits` of any shape; the
                path of a checkpoint, which is read part by part; a `State`; or a torch.nn.Module. A
                module has the names and ties that ``save_pretrained`` would write, without the
                prefixes that DDP and torch.compile add. PEFT adapters are merged into copies.
            keep: Patterns of the names of tensors that ``publish(state, dtype=…)`` leaves as wide
                as they are, such as ``["*router*"]``. Default: what the transformers model keeps in
                FP32.
        Returns: The state.
        Raises:
            InputError: ``source`` is none of these, a name is invalid, or a file cannot be read.
            UnsupportedTensor: A tensor has a dtype or a layout without plain bits, or a module is
                sharded over ranks.
            CorruptCheckpoint: The checkpoint's files are damaged.
        """
        state = cls._taken(source)
        if patterns := checked_collection("keep", keep, '["*router*"]'):
            state, matches = copy(state), re.compile("|".join(map(translate, patterns))).match
            state.uncast |= {state.aliases.get(name, name) for name in state if matches(name)}
        return state

    @classmethod
    def _taken(cls, source: StateSource) -> State:
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(source, torch.nn.Module):
            from ..frameworks.weights import whole_weights

            source = whole_weights(source)
        if isinstance(source, State):
            return source
        if isinstance(source, str | os.PathLike):
            from ..follow.checkpoint import load

            return load(source)[0]
        if not isinstance(source, Mapping):
            raise InputError(
                f"{type(source).__name__} is not a state: pass a module, a mapping, a State or a "
                "checkpoint's path",
                hint="Pass model.state_dict()." if hasattr(source, "state_dict") else None,
            )
        specs: list[TensorSpec] = []
        data: dict[str, UIntArray | Readable] = {}
        aliases: dict[str, str] = {}
        seen: dict[object, str] = {}
        # Values stay referenced until the end. A mapping may create them on the fly; a freed
        # tensor's memory could become the next tensor's, and the two would look tied.
        held = []
        for name, value in source.items():
            held.append(value)
            dtype, shape, flat, storage = _ingest(name, value)
            key = (storage, dtype.name, shape)
            if storage is not None and key in seen:
                aliases[name] = seen[key]
                continue
            seen[key] = name
            specs.append(TensorSpec(name, dtype, shape))
            data[name] = flat
        state = cls(tuple(specs), data, aliases)
        state.uncast = frozenset(aliases.get(name, name) for name in getattr(source, "uncast", ()))
        return state

    @classmethod
    def empty(cls, specs: tuple[TensorSpec, ...], aliases: Mapping[str, str] | None = None) -> Self:
        """Allocate a state with uninitialized values.

        Args:
            specs: The tensors.
            aliases: The other names of tied tensors, each with its stored name. Default: none.
        Returns: The state, in new host memory.
        """
        # Tensors of one dtype are adjacent in memory, because small ones share a block of a patch.
        # A block can then be read without a copy.
        placed = sorted(specs, key=lambda s: (s.dtype.id, s.name.encode()))
        memory = contiguous([s.nbytes for s in placed])
        data = {s.name: m.view(s.dtype.uint) for s, m in zip(placed, memory, strict=True)}
        return cls(specs, data, aliases)

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(s.elements for s in self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(s.nbytes for s in self.specs)

    @property
    def names(self) -> list[str]:
        """All names in order, aliases included."""
        return sorted([*self._spec, *self.aliases])

    def __contains__(self, name: object) -> bool:
        return name in self._spec or name in self.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.specs) + len(self.aliases)

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a tensor.

        Args:
            name: The name of a tensor, or an alias.
        Raises:
            KeyError: The state has no such tensor.
        """
        return self._spec[self.aliases.get(name, name)]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> UIntArray:
        """Return elements of a flattened tensor as unsigned integers.

        Args:
            name: The name of a tensor, or an alias.
            start: The first element. Default: 0.
            stop: The element after the last one. Default: the number of elements.
        Returns: An array [stop - start] of unsigned integers of the element's width: a view of host
            memory, or a copy of device memory.
        Raises:
            KeyError: The state has no such tensor.
        """
        name = self.aliases.get(name, name)
        stop = self._spec[name].elements if stop is None else stop
        data = self._data[name]
        return data[start:stop] if isinstance(data, np.ndarray) else data.read(start, stop)

    def _is_view(self, name: str) -> bool:
        return isinstance(self._data.get(self.aliases.get(name, name)), np.ndarray)

    def copy(self, empty: Empty | None = None) -> State:
        """Copy the state into new host memory.

        Args:
            empty: Allocates the memory, as `State.empty` does. Default: `State.empty`.
        Returns: The copy, with the same names and aliases.
        """
        fresh = (empty or State.empty)(self.specs, self.aliases)
        for spec in self.specs:
            fresh.read(spec.name)[:] = self.read(spec.name)
        return fresh

    def with_aliases(self, aliases: Mapping[str, str]) -> State:
        """Return a state with the same memory and other aliases.

        Args:
            aliases: The other names of tied tensors, each with its stored name.
        Raises:
            InputError: An alias fits no tensor.
        """
        if type(self) is State and self.aliases == aliases:
            return self
        return State(self.specs, self._data, aliases)

    def stored_as(self, names: Collection[str]) -> State:
        """Return a state with the same memory that stores tied tensors under other names.

        Args:
            names: Names to store tensors under. A tied tensor of which exactly one name is among
                them is stored under it; all others stay as they are.
        """
        tied: dict[str, list[str]] = {}
        for alias, name in self.aliases.items():
            tied.setdefault(name, [name]).append(alias)
        stored = {}
        for name, group in tied.items():
            known = [n for n in group if n in names]
            stored[name] = known[0] if len(known) == 1 else name
        if all(name == chosen for name, chosen in stored.items()):
            return self
        return State(
            tuple(replace(spec, name=stored.get(spec.name, spec.name)) for spec in self.specs),
            {stored.get(name, name): data for name, data in self._data.items()},
            {n: stored[name] for name, group in tied.items() for n in group if n != stored[name]},
        )

    def readonly(self) -> State:
        """Return a state with the same memory, through which nobody can write."""
        views = {}
        for spec in self.specs:
            views[spec.name] = self.read(spec.name).view()
            views[spec.name].flags.writeable = False
        return State(self.specs, views, self.aliases)

    def require_specs(self, specs: tuple[TensorSpec, ...], what: str) -> None:
        """Check that this state has exactly the given tensors.

        Args:
            specs: The expected tensors in name order.
            what: Their owner, in words for the error message.
        Raises:
            StateMismatch: A tensor differs. The message names the first one.
        """
        if self.specs == specs:
            return
        theirs = {s.name: s for s in specs}
        for spec in self.specs:
            other = theirs.pop(spec.name, None)
            if other is None:
                raise StateMismatch(f"tensor {spec.name!r} is not in {what}")
            if other != spec:
                raise StateMismatch(
                    f"tensor {spec.name!r} is {spec.dtype.name} {list(spec.shape)}, "
                    f"but {other.dtype.name} {list(other.shape)} in {what}"
                )
        raise StateMismatch(f"tensor {next(iter(theirs))!r} of {what} is missing")


#: Allocates a state with uninitialized values, as `State.empty` does.
Empty = Callable[[tuple[TensorSpec, ...], Mapping[str, str] | None], State]


#: The sources of a state: a torch.nn.Module, a mapping of names to tensors, a checkpoint's path, or
#: a `State`. A module has the names and ties that ``save_pretrained`` would write.
StateSource = Union[State, Mapping[str, Any], str, os.PathLike[str], "torch.nn.Module"]


def stored_tensor(state: State, name: str) -> UIntArray | Readable:
    """The flat elements of the tensor ``name`` as the state stores them. Raises KeyError."""
    tensor: UIntArray | Readable = state._data[name]
    return tensor


def is_view(state: State, name: str) -> bool:
    """Whether `State.read` of this tensor is a view of host memory, which costs nothing."""
    return state._is_view(name)


def views_of(state: State) -> dict[int, tuple[object, UIntArray | None]]:
    """The state's cache of views over several tensors, by the identity of their block."""
    return state._views


def _ingest(
    name: str, value: Any
) -> tuple[DType, tuple[int, ...], UIntArray | DeviceTensor, object]:
    """(dtype, shape, flat data, storage identity or None) of one tensor.

    Two names with equal storage identity, dtype and shape are tied.
    """
    if type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "untyped_storage"):
        return _ingest_torch(name, value)
    if isinstance(value, Bits):
        dtype, array = dtype_of(value.dtype), np.asarray(value.array)
        if array.dtype.kind != "u" or array.dtype.itemsize != dtype.width:
            raise UnsupportedTensor(
                f"tensor {name!r}: {dtype.name} bits need uint{8 * dtype.width}, got {array.dtype}"
            )
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        dtype = dtype_named(name, array.dtype.name)
    else:
        raise UnsupportedTensor(
            f"tensor {name!r} is a {type(value).__name__}, not a torch tensor or a numpy array",
            hint="Leave out what is no tensor, such as a module's extra state.",
        )
    # The identity is that of the caller's memory, before any conversion: a converted copy has an
    # address of its own.
    owned = isinstance(value, np.ndarray | Bits) and array.size > 0
    storage = (array.__array_interface__["data"][0], array.strides) if owned else None
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return dtype, array.shape, _aligned(little.reshape(-1).view(dtype.uint)), storage


def _ingest_torch(
    name: str, value: Any
) -> tuple[DType, tuple[int, ...], UIntArray | DeviceTensor, object]:
    torch: Any = sys.modules["torch"]
    if not isinstance(value, torch.Tensor) or hasattr(value, "full_tensor"):
        raise UnsupportedTensor(
            f"tensor {name!r} is a {type(value).__name__}, not a plain torch.Tensor"
        )
    # 1. Refuse tensors without plain strided storage.
    if torch.nn.parameter.is_lazy(value):
        raise UnsupportedTensor(
            f"tensor {name!r} is not initialized",
            hint="Run a forward pass first: it gives a lazy module its sizes.",
        )
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise UnsupportedTensor(
            f"tensor {name!r} has no plain storage (layout {value.layout}, device {value.device})"
        )
    dtype = dtype_named(name, str(value.dtype).removeprefix("torch."))
    # 2. The identity of the storage, and the elements as bytes. Fake and wrapped tensors pass the
    # checks above and fail here.
    try:
        # Lazy conjugates and negatives share their address with the tensor, but not its values.
        bits_of = (value.is_conj(), value.is_neg())
        storage: object = None
        if value.numel():
            storage = str(value.device), value.data_ptr(), value.stride(), bits_of
        # FSDP frees the storage of unsharded parameters: reading one would be a segmentation fault.
        if value.device.type in ("cpu", "cuda") and value.untyped_storage().nbytes() < _end(value):
            raise UnsupportedTensor(f"tensor {name!r} has been freed: its memory is not there")
        flat = (
            value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        )
        host = flat.numpy() if flat.device.type == "cpu" else None
    # Fake, nested and wrapped tensors, and future kinds.
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UnsupportedTensor(
            f"tensor {name!r} is a {type(value).__name__} without plain storage: {error}"
        ) from None
    # 3. Host memory is viewed, device memory is copied when it is read.
    shape = tuple(value.shape)
    if host is None:
        return dtype, shape, DeviceTensor(flat, dtype.width), storage
    return dtype, shape, _aligned(host.view(dtype.uint)), storage


def is_sharded(tensor: object) -> bool:
    """Whether ``tensor`` is a DTensor.

    The module of DTensor takes half a second to import. A program that has a DTensor has imported
    it.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _end(tensor: Any) -> int:
    """The bytes of its storage that a torch tensor uses, up to its last element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0


def _aligned(flat: UIntArray) -> UIntArray:
    """``flat``, or a copy if it is strided or misaligned. The kernels read contiguous, aligned
    arrays only."""
    return np.require(flat, requirements=["C", "A"])


def dtype_named(name: str, library_name: str) -> DType:
    """The dtype that numpy, ml_dtypes, JAX or torch call ``library_name``.

    Raises UnsupportedTensor, which names the tensor ``name``.
    """
    if library_name not in _FROM_LIBRARY:
        raise UnsupportedTensor(f"tensor {name!r} has dtype {library_name}, which is not supported")
    return _FROM_LIBRARY[library_name]


class Segment(NamedTuple):
    """Elements [start, stop) of the flattened tensor ``spec``."""

    spec: TensorSpec
    start: int
    stop: int

    @property
    def place(self) -> tuple[str, int, int]:
        """The arguments of `State.read`."""
        return self.spec.name, self.start, self.stop

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.elements * self.spec.dtype.width

    @property
    def is_whole(self) -> bool:
        """Whether the segment is its whole tensor."""
        return self.elements == self.spec.elements


def cuda_tensors(state: State) -> dict[str, DeviceTensor]:
    """The tensors of ``state`` in the memory of CUDA devices, by their stored names."""
    stored = {spec.name: stored_tensor(state, spec.name) for spec in state.specs}
    return {n: t for n, t in stored.items() if isinstance(t, DeviceTensor) and t.is_cuda}


def await_devices(state: State) -> None:
    """Wait for the work on the caller's current CUDA streams, which may still write to ``state``.

    Threads that read the tensors later have other current streams.
    """
    for device in {tensor.flat.device for tensor in cuda_tensors(state).values()}:
        torch: Any = sys.modules["torch"]
        torch.cuda.current_stream(device).synchronize()
