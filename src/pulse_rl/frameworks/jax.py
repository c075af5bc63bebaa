"""JAX: the weights of a pytree for a publisher, and updates of a stream written into one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._util import extra
from ..errors import InputError, StateMismatch, UnsupportedTensor
from ..sharding.layout import Assembled, SliceSpec
from ..state.bits import UIntArray
from ..state.tensors import State, TensorSpec, dtype_named, stored_tensor
from ..sync.update import TensorUpdate, Update

__all__ = ["apply", "weights"]

View = Callable[[Any], Any]
Target = str | tuple[str, View]
Names = Mapping[str, Target] | Callable[[str], Target | None]

# Kinds of dtypes that JAX does not take for integers: they are written as they are.
_SAME = ("b", "c")
_LEAST = 1 << 10


def weights(tree: Any, names: Mapping[str, Any] | Callable[[str], Any] | None = None) -> State:
    """Read the arrays of a pytree, for `Publisher.publish` and `pulse_rl.state_root`.

    On CPUs nothing is copied, and sharded arrays are not gathered: what is compared and stored is
    read slice by slice from the shards. What other devices hold is copied to the host. The arrays
    must not be donated before `publish` or `submit` has returned.

    Args:
        tree: Nested dicts, Linen's ``params``, or ``nnx.state(model, nnx.Param)`` of NNX.
        names: The names of the stream, a checkpoint's, by the paths of the arrays
            (``params.Dense_0.kernel``): a dictionary, or a function, whose None leaves an array
            out. None: the paths are the names. In place of a name, ``(name, view)`` also says how
            the checkpoint's tensor lies in the array: ``view`` gets a numpy array of its shape, and
            returns a view of it, such as ``lambda kernel: kernel.reshape(64, -1).T``.

    Raises:
        InputError: A name is missing, or given twice.
        UnsupportedTensor: It is no array of a known dtype, or other processes have a part of it.
    """
    with extra("jax"):
        import jax
    plain: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    specs: list[TensorSpec] = []
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for leaf in _named(tree, names)[0]:
        array = leaf.array
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise UnsupportedTensor(
                f"other processes hold a part of {leaf.name!r}",
                hint="Use ShardedPublisher, one in each process.",
            )
        if leaf.view is not None:
            spread[leaf.name] = _Rearranged(array, leaf.view)
        elif not isinstance(array, jax.Array) or len(array.sharding.device_set) == 1:
            plain[leaf.name] = np.asarray(array)
            continue
        elif id(array) in first:
            aliases[leaf.name] = first[id(array)]
            continue
        else:
            first[id(array)] = leaf.name
            shards = _shards(array)
            spread[leaf.name] = Assembled(
                leaf.spec.dtype, [(box, _Rearranged(shard).read) for box, shard in shards]
            )
        specs.append(leaf.spec)
    host = State.of(plain)
    data = {spec.name: stored_tensor(host, spec.name) for spec in host.specs} | spread
    return State((*host.specs, *specs), data, host.aliases | aliases)


def apply(
    tree: Any,
    update: Update,
    names: Mapping[str, Any] | Callable[[str], Any] | None = None,
    *,
    donate: bool = False,
) -> Any:
    """Write an update into a pytree, and return the new one.

    Of a sharded array each device gets the changed elements of its own shard, also where other
    processes hold the rest. Compiled once for each shape of a shard, device, and power of four in
    the number of changes. Everything is checked first.

    Args:
        tree: The pytree. It keeps its own arrays, unless they are donated.
        update: What `Subscriber.sync` has returned.
        names: As for `weights`.
        donate: Whether the new arrays take the memory of the old ones, which are deleted, where the
            backend can do so.

    Returns:
        A pytree like ``tree``: of what changed new arrays with the same shardings, otherwise the
        same arrays.

    Raises:
        StateMismatch: A tensor of the update is missing in the tree, or of another dtype or shape.
        InputError: As by `weights`, and for what is no update.
        UnsupportedTensor: As by `weights`, and for an array that is none of JAX.
    """
    with extra("jax"):
        import jax
    if not isinstance(update, Update):
        raise InputError(
            f"{type(update).__name__} is not an Update",
            hint="Pass what subscriber.sync() has returned.",
        )
    leaves, arrays, structure = _named(tree, names)
    # 1. Everything that can be wrong is, before anything is written.
    plan: list[tuple[_Leaf, TensorUpdate]] = []
    for tensor in update.tensors:
        comes = tensor.spec
        tied = {comes.name, *(a for a, name in update.aliases.items() if name == comes.name)}
        found = [leaf for leaf in leaves if leaf.name in tied]
        if not found:
            raise StateMismatch(
                f"the tree has no tensor {comes.name!r}",
                hint="Give names=: which path has which tensor.",
            )
        for leaf in found:
            held = leaf.spec
            if (held.dtype, held.shape) != (comes.dtype, comes.shape):
                raise StateMismatch(
                    f"the tree's {held.name!r} is {held.dtype.name} {list(held.shape)}, "
                    f"the update's is {comes.dtype.name} {list(comes.shape)}"
                )
            if not isinstance(leaf.array, jax.Array):
                raise UnsupportedTensor(
                    f"{held.name!r} is a {type(leaf.array).__name__}, not a jax.Array"
                )
            plan.append((leaf, tensor))
    # 2. New arrays; one that stands in several places of the tree stays one.
    made: dict[int, Any] = {}
    for leaf, tensor in plan:
        if id(leaf.array) not in made:
            made[id(leaf.array)] = _written(leaf, tensor, donate=donate)
        arrays[leaf.number] = made[id(leaf.array)]
    # 3. The caller holds the version; the next `sync` starts from there.
    update.acknowledge()
    return jax.tree_util.tree_unflatten(structure, arrays)


class _Leaf(NamedTuple):
    """An ``array``, number ``number`` of its tree, as the stream has it: ``spec``, its elements in
    the order of ``view``."""

    number: int
    array: Any
    spec: TensorSpec
    view: View | None

    @property
    def name(self) -> str:
        return self.spec.name


def _named(tree: Any, names: Names | None) -> tuple[list[_Leaf], list[Any], Any]:
    """The arrays of a tree that have a name; all of its arrays, and what makes a tree of them."""
    import jax

    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves: list[_Leaf] = []
    taken: set[str] = set()
    for number, (keys, array) in enumerate(paths):
        path = _path(keys)
        if names is None:
            target: Target | None = path
        elif callable(names):
            target = names(path)
        elif path in names:
            target = names[path]
        else:
            raise InputError(
                f"names has no {path!r}",
                hint="A function as names may leave arrays out, with None.",
            )
        if target is None:
            continue
        name, view = target if isinstance(target, tuple) else (target, None)
        if name in taken:
            raise InputError(f"two arrays are called {name!r}", hint="Look at names=.")
        taken.add(name)
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise UnsupportedTensor(
                f"{path!r} is a {type(array).__name__}, not an array", hint=_HINT
            )
        dtype = dtype_named(path, str(array.dtype))
        shape = tuple(array.shape) if view is None else _strides(tuple(array.shape), view, path)[0]
        leaves.append(_Leaf(number, array, TensorSpec(name, dtype, shape), view))
    return leaves, [array for _, array in paths], structure


_HINT = "Leave out what is no weight: nnx.state(model, nnx.Param), or names= with None for it."


def _path(keys: Any) -> str:
    """``layers.0.kernel``. An NNX variable's own part of it, ``value``, is left out."""
    import jax

    is_attribute = len(keys) > 1 and isinstance(keys[-1], jax.tree_util.GetAttrKey)
    if is_attribute and keys[-1].name == "value":
        keys = keys[:-1]
    return str(jax.tree_util.keystr(keys, simple=True, separator="."))


def _strides(
    shape: tuple[int, ...], view: View, path: str
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """(the shape of a view of a flat array of ``shape``, its first element, how many elements a
    step of each of its dimensions goes on). Raises InputError unless it is one, with each element
    once."""
    probe = np.empty(shape, np.uint8)  # never touched: the system gives no memory for it
    seen = view(probe)
    whole = isinstance(seen, np.ndarray) and seen.size == probe.size
    if not (whole and np.may_share_memory(seen, probe)):
        raise InputError(
            f"the view for {path!r} must return a view of all of its array",
            hint="reshape, transpose and [...] do; what computes or copies does not.",
        )
    return seen.shape, seen.ctypes.data - probe.ctypes.data, seen.strides


def local_part(name: str, array: Any) -> tuple[npt.NDArray[Any], SliceSpec]:
    """(what this process has of a jax.Array, which elements these are). Raises UnsupportedTensor
    where they are no product of ranges of the dimensions."""
    shards = _shards(array)
    runs = [sorted({run for box, _ in shards for run in box.of[dim]}) for dim in range(array.ndim)]
    if len(shards) != math.prod(max(1, len(each)) for each in runs):
        raise UnsupportedTensor(
            f"the shards of {name!r} that this process has are no grid of slices"
        )
    whole = SliceSpec(tuple(map(tuple, runs)), tuple(array.shape))
    if len(shards) == 1:
        return np.asarray(shards[0][1]), whole
    result = np.empty(whole.local_shape, array.dtype)
    for box, shard in shards:
        place = []
        for each, of, size in zip(runs, box.of, box.local_shape, strict=True):
            before = sum(stop - start for start, stop in each if of and start < of[0][0])
            place.append(slice(before, before + size))
        result[tuple(place)] = np.asarray(shard)
    return result, whole


def _shards(array: Any) -> list[tuple[SliceSpec, Any]]:
    """(its elements, one of its arrays) of each shard of a jax.Array that this process has,
    replicas once."""
    found = {
        _box(shard.index, array.shape): shard.data for shard in reversed(array.addressable_shards)
    }
    return list(found.items())


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> SliceSpec:
    ranges = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
    return SliceSpec(
        tuple(((start, stop),) if stop > start else () for start, stop in ranges), tuple(shape)
    )


class _Rearranged:
    """An array whose elements lie in another order in the checkpoint. A sharded one is assembled in
    host memory."""

    def __init__(self, array: Any, view: View = lambda array: array) -> None:
        self._array, self._view = array, view

    def read(self, start: int, stop: int) -> UIntArray:
        host = np.asarray(self._array)
        seen = self._view(host.view(f"<u{host.dtype.itemsize}"))
        if not seen.ndim or start == stop:
            flat: UIntArray = seen.reshape(-1)[start:stop]
            return flat
        row = seen.size // len(seen)
        first = start // row
        part: UIntArray = np.ascontiguousarray(seen[first : -(-stop // row)]).reshape(-1)
        return part[start - first * row : stop - first * row]


def _written(leaf: _Leaf, update: TensorUpdate, *, donate: bool) -> Any:
    """The leaf's array with the update in it."""
    import jax

    array, values = leaf.array, update.values
    if update.indices is None:
        whole = np.empty(array.shape, values.dtype)
        (whole if leaf.view is None else leaf.view(whole))[...] = values.reshape(leaf.spec.shape)
        host = whole.view(array.dtype)
        made = jax.make_array_from_callback(
            array.shape, array.sharding, lambda index: np.array(host[index])
        )
        if donate:
            array.delete()
        return made
    places = update.indices
    if leaf.view is not None:
        shape, offset, strides = _strides(tuple(array.shape), leaf.view, leaf.name)
        places = np.full(len(update.indices), offset, np.int64)
        for index, stride in zip(np.unravel_index(update.indices, shape), strides, strict=True):
            places += index * stride
    parts = []
    for shard in array.addressable_shards:
        inside, numbers = _box(shard.index, array.shape).within(places)
        parts.append(_scattered(shard.data, numbers, values[inside], donate=donate))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _scattered(
    shard: Any, numbers: npt.NDArray[np.int64], values: UIntArray, *, donate: bool
) -> Any:
    """One device's array with the bits ``values`` at the flat ``numbers``."""
    if not len(numbers):
        return shard
    # A flat number may need more than the 32 bits that JAX has by default: rows and columns do not.
    # Counts are rounded up, with rows that are not there, so that few programs are compiled.
    columns = shard.shape[-1] if shard.ndim else 1
    rows = shard.size // columns
    padded = max(_LEAST, 1 << (len(numbers) - 1).bit_length())
    padded <<= (padded.bit_length() - 1) % 2
    at = np.full((2, padded), rows, np.int32)
    at[0, : len(numbers)], at[1, : len(numbers)] = numbers // columns, numbers % columns
    new = np.zeros(padded, values.dtype)
    new[: len(numbers)] = values
    return _scatter(donate)(shard, at, new.view(shard.dtype) if shard.dtype.kind in _SAME else new)


@cache
def _scatter(donate: bool) -> Any:
    import jax

    def write(shard: Any, at: Any, values: Any) -> Any:
        # Bits are written, not numbers: a NaN keeps its payload.
        cast = jax.lax.bitcast_convert_type
        bits = shard if values.dtype == shard.dtype else cast(shard, values.dtype)
        rows = bits.reshape(-1, shard.shape[-1] if shard.ndim else 1)
        bits = rows.at[at[0], at[1]].set(values, mode="drop").reshape(shard.shape)
        return bits if bits.dtype == shard.dtype else cast(bits, shard.dtype)

    return jax.jit(write, donate_argnums=(0,) if donate else ())
