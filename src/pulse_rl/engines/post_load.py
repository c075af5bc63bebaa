"""Modules whose weights an engine processes after it has loaded them: packed, shuffled, padded,
quantized, multiplied.

What such a module computes with need not be what its loader wrote, even where names and shapes are
the same. The engine's own processing is therefore run aside, on a copy of the module in the state
before its first processing, and every tensor that the module can reach afterwards is compared with
the live module's: parameters, buffers, attributes, what its methods and kernels hold. Where random
weights come out as they went in, the map of the loader is right as it is. All other modules are
`derived` again for each version.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import PulseError, UnsupportedTensor
from ..frameworks.torch import _INTS

#: Processes the copies that the given function returns for live modules.
Process = Callable[[Callable[[Any], Any]], None]
#: What engines call a quantization method's processing of a module.
HOOK = "process_weights_after_loading"
_REGISTERED = ("_parameters", "_buffers", "_modules")
# Random values that repeat with this period, a prime: a permutation by a multiple of it is no
# layout.
_TILE = 1_000_003
_MAX_OBJECTS = 200_000
_BITS = " bits"
_MISSING = object()


class _Parameter(NamedTuple):
    """Stands for a parameter or buffer of the model in a `Before`, so that its memory can be
    freed."""

    name: str


@dataclass(frozen=True, slots=True)
class Before:
    """A module, or an object that processes its weights, before the processing: its ``attributes``,
    the ``forms`` of its parameters as meta tensors, the names of those that are ``unset``, its
    ``buffers`` and the ``modules`` right under it."""

    attributes: dict[str, Any]
    forms: dict[str, torch.Tensor]
    unset: tuple[str, ...]
    buffers: dict[str, Any]
    modules: dict[str, nn.Module | None]


@dataclass(slots=True)
class Group:
    """``modules``: a module with those under it that are copied with it, by their first names in
    the model; ``owners``: other objects that process their weights and keep something of it;
    ``process`` does it."""

    name: str
    modules: dict[str, nn.Module]
    owners: Sequence[Any]
    process: Process

    @property
    def subjects(self) -> list[Any]:
        """All that the processing may change."""
        return [*self.modules.values(), *self.owners]


def group_of(
    names: dict[int, str],
    modules: Sequence[nn.Module],
    processing: Sequence[nn.Module],
    at_last: Callable[[Callable[[Any], Any]], None] | None = None,
) -> Group:
    """The group of ``modules``, the first of which gives it its name, in which the methods of those
    that are ``processing`` do it, and then ``at_last``. ``names``: of the model's modules, by
    id."""
    owners: list[Any] = []

    def own(value: Any) -> None:
        known = any(value is held for held in (*owners, *modules))
        processes = not isinstance(value, type) and callable(getattr(value, HOOK, None))
        if not known and processes and hasattr(value, "__dict__"):
            owners.append(value)
            for inner in list(vars(value).values()):
                own(inner)

    for module in modules:
        if any(module is held for held in processing):
            own(module.quant_method)
        for value in list(vars(module).values()):
            own(value)

    def process(copy_of: Callable[[Any], Any]) -> None:
        for module in processing:
            copied = copy_of(module)
            if copied.quant_method is not copy_of(module.quant_method):
                raise UnsupportedTensor(
                    f"the engine's {names[id(module)]!r} has got another method since it was loaded"
                )
            getattr(copied.quant_method, HOOK)(copied)
        if at_last is not None:
            at_last(copy_of)

    named = {names[id(module)]: module for module in modules}
    return Group(names[id(modules[0])], named, owners, process)


def with_method(module: nn.Module) -> list[nn.Module]:
    """``module`` and the method that processes its weights, if that is a module under it."""
    return [module, *(inner for inner in module.modules() if inner is module.quant_method)]


def remember(subjects: Sequence[Any], names: dict[int, str]) -> dict[int, Before]:
    """The state of modules and other objects before the first processing, by their ids. ``names``:
    of the model's parameters and buffers, by id. What is kept holds no parameter's memory."""

    def kept(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in names:
            return _Parameter(names[id(value)])
        return _copied(value)

    found = {}
    for subject in subjects:
        attributes = {
            key: kept(value) for key, value in vars(subject).items() if key not in _REGISTERED
        }
        is_module = isinstance(subject, nn.Module)
        parameters, buffers, modules = (
            getattr(subject, key) if is_module else {} for key in _REGISTERED
        )
        found[id(subject)] = Before(
            attributes,
            {key: as_meta(value) for key, value in parameters.items() if value is not None},
            tuple(key for key, value in parameters.items() if value is None),
            {key: kept(value) for key, value in buffers.items()},
            dict(modules),
        )
    return found


def tensor_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by the tensor's id."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {id(tensor): name for name, tensor in reversed(tensors)}


def module_names(model: nn.Module) -> dict[int, str]:
    """The first name of each module, by its id."""
    modules = list(model.named_modules(remove_duplicate=False))
    return {id(module): name for name, module in reversed(modules)}


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the class and with the attributes of ``tensor``."""
    return like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def like(model: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a parameter of the class and with the attributes of ``model``."""
    tensor.__class__ = model.__class__
    tensor.__dict__ = model.__dict__.copy()
    return tensor


class ProcessedLayer:
    """One `Group` of ``model`` as a layer of `derived`. ``before``: what `remember` found for its
    modules and owners, as far as it was there in time; ``context`` surrounds the processing.

    Raises UnsupportedTensor where the processing keeps something that depends on the weights and is
    no tensor."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        before: dict[int, Before],
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._group, self._context = group, context
        self._names = tensor_names(model)
        self._tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        self._module_names = {id(module): name for name, module in group.modules.items()}
        self._before = {
            id(s): before.get(id(s)) or remember([s], self._names)[id(s)] for s in group.subjects
        }
        self._swapped: list[tuple[nn.Module, dict[str, Any]]] = []
        self._paths: dict[str, str] = {}
        self.loaded = self._loaded_forms()
        self.live: dict[str, torch.Tensor] = {}
        #: Whether the module computes with its weights just as they are loaded.
        self.plain = self._probe()

    def derive(self, loaded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pairs = self._processed(
            {name: like(meta, loaded[name]) for name, meta in self.loaded.items()}
        )
        missing = self._paths.keys() - pairs.keys()
        if missing:
            raise self._unsupported(sorted(missing))
        return {key: pairs[path][1].detach() for path, key in self._paths.items()}

    def put_loaded(self) -> None:
        """Gives the live modules parameters of the loaded form where theirs have another one, for
        their loader to be watched. A plain module's have lost their loaders, if anything, and the
        map leads to the same places."""
        if self.plain and not self._unloadable():
            return
        for module in self._group.modules.values():
            live = dict(module._parameters)
            self._swapped.append((module, live))
            for key in live.keys() - self._before[id(module)].forms.keys():
                del module._parameters[key]
            for key, meta in self._before[id(module)].forms.items():
                held = live.get(key)
                if held is None or not _loads_as(held, meta):
                    put = like(meta, torch.empty(meta.shape, dtype=meta.dtype))
                    module._parameters[key] = put  # type: ignore[assignment]

    def put_live(self) -> None:
        """Gives the modules their live parameters back."""
        for module, live in reversed(self._swapped):
            module._parameters.clear()
            module._parameters.update(live)
        self._swapped.clear()

    # -- the parts

    def _probe(self) -> bool:
        """Learns from random weights which tensors depend on them; whether these are just the
        weights."""
        own = (t for m in self._group.modules.values() for t in m.parameters(recurse=False))
        devices = (tensor.device for tensor in (*own, *self._tensors.values()))
        device = next(devices, torch.device("cpu"))
        probe = {name: _random(meta, device) for name, meta in self.loaded.items()}
        given = {name: tensor.detach().clone() for name, tensor in probe.items()}
        plain, places = True, set()
        for path, (live, derived) in self._processed(probe).items():
            name = self._name_of(live)
            place = (live.data_ptr(), live.shape, live.stride(), live.dtype)
            if place in places or (name not in given and _same_bits(live, derived)):
                continue  # known already, or of no weight
            places.add(place)
            key = name or f"{self._group.name}{path}"
            plain = (
                plain
                and name in given
                and self._in_order(name, live)
                and _same_bits(given[name], derived)
            )
            self._paths[path], self.live[key] = key, live
        for name in self.loaded.keys() - self.live.keys():
            plain = plain and name in self._tensors  # else it was replaced by others
        return plain

    def _in_order(self, name: str, live: torch.Tensor) -> bool:
        """Whether what the loader writes into the loaded form has the same places in the live
        parameter."""
        if live.is_contiguous() and not live.storage_offset():
            return True
        return _loads_as(live, self.loaded[name])

    def _unloadable(self) -> bool:
        """Whether a parameter is not what its loader expects."""
        pairs = [
            (module._parameters.get(key), meta)
            for module in self._group.modules.values()
            for key, meta in self._before[id(module)].forms.items()
        ]
        return any(live is None or not _loads_as(live, meta) for live, meta in pairs)

    def _parameter_name(self, module: nn.Module, key: str) -> str:
        """The name under which the loader's map leads to a parameter of the loaded form."""
        live = module._parameters.get(key)
        if live is not None and id(live) in self._names:
            return self._names[id(live)]
        path = self._module_names[id(module)]
        return f"{path}.{key}" if path else key

    def _loaded_forms(self) -> dict[str, torch.Tensor]:
        forms = {}
        for module in self._group.modules.values():
            for key, meta in self._before[id(module)].forms.items():
                forms[self._parameter_name(module, key)] = meta
        for before in self._before.values():
            for value in before.attributes.values():
                if isinstance(value, _Parameter) and value.name in self._tensors:
                    forms.setdefault(value.name, as_meta(self._tensors[value.name]))
        return forms

    def _name_of(self, live: torch.Tensor) -> str | None:
        """The name of the model's parameter that ``live`` is, in the same layout."""
        if id(live) in self._names:
            return self._names[id(live)]
        for name, tensor in self._tensors.items():
            same_place = tensor.numel() and tensor.data_ptr() == live.data_ptr()
            if same_place and _same_layout(tensor, live):
                return name
        return None

    def _processed(
        self, loaded: dict[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The parameters of the live group and of a copy that has processed ``loaded``, and all
        tensors that the processing made or changed, by path."""
        subjects = self._group.subjects
        copies: dict[int, Any] = {id(subject): copy.copy(subject) for subject in subjects}
        begun = {id(subject): self._begin(subject, copies, loaded) for subject in subjects}
        try:
            with torch.no_grad(), self._context():
                self._group.process(lambda live: copies.get(id(live), live))
        except PulseError:
            raise
        # An engine's own: what it processes only once, or needs of its surroundings.
        except Exception as error:
            raise UnsupportedTensor(
                f"the engine's {self._group.name!r} cannot process its weights again: "
                f"{type(error).__name__}: {error}"
            ) from error
        walk = _Walk()
        for subject in subjects:
            name = self._module_names.get(id(subject))
            path = f".{type(subject).__name__}"
            if name is not None:
                path = name.removeprefix(self._group.name)
            walk.subject(subject, copies[id(subject)], begun[id(subject)], path)
        if walk.odd:
            raise self._unsupported(walk.odd)
        return walk.pairs

    def _begin(
        self, subject: Any, copies: dict[int, Any], loaded: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Gives the copy of ``subject`` the state before the processing, and returns that."""
        before = self._before[id(subject)]

        def fresh(value: Any) -> Any:
            if isinstance(value, _Parameter):
                if value.name in loaded:
                    return loaded[value.name]
                value = self._tensors[value.name]
            if isinstance(value, torch.Tensor):
                return like(value, value.detach().clone())
            return copies[id(value)] if id(value) in copies else _copied(value)

        now = {key: fresh(value) for key, value in before.attributes.items()}
        if isinstance(subject, nn.Module):
            forms = {key: loaded[self._parameter_name(subject, key)] for key in before.forms}
            now["_parameters"] = dict.fromkeys(before.unset) | forms
            now["_buffers"] = {key: fresh(value) for key, value in before.buffers.items()}
            now["_modules"] = {
                key: copies.get(id(value), value) for key, value in before.modules.items()
            }
        # Containers of its own, so that what the processing does to them shows.
        copies[id(subject)].__dict__ = {key: _copied(value) for key, value in now.items()}
        values = [*now.values(), *now.get("_buffers", {}).values()]
        now[_BITS] = {
            id(value): value.detach().clone()
            for value in values
            if isinstance(value, torch.Tensor)
            and not any(value is held for held in loaded.values())
        }
        return now

    def _unsupported(self, places: Sequence[str]) -> UnsupportedTensor:
        return UnsupportedTensor(
            f"the engine's {self._group.name!r} keeps what it derived from its weights in "
            f"{', '.join(places[:3])}",
            hint="Only tensors that a module reaches can follow a stream: see docs/vllm.md.",
        )


class _Walk:
    """Compares live objects with copies that were processed aside. ``pairs``: (live, copy) of the
    tensors that are not the same object, by path; ``odd``: what else differs."""

    def __init__(self) -> None:
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.odd: list[str] = []
        self._seen: set[tuple[int, int]] = set()
        self._bits: dict[int, torch.Tensor] = {}

    def subject(self, live: Any, made: Any, begun: dict[str, Any], path: str) -> None:
        """Compares what the processing has changed in ``made``, whose attributes were ``begun``."""
        self._seen.add((id(live), id(made)))
        self._bits = begun[_BITS]
        # Parameters are compared in any case: the update writes them. Of buffers, submodules and
        # plain attributes only what the processing has changed: the rest is shared or was copied.
        if isinstance(live, nn.Module):
            self._dict(live._parameters, made._parameters, path)
            for key in ("_buffers", "_modules"):
                self._changed(getattr(live, key), getattr(made, key), begun[key], path)
        own, now = (
            {k: v for k, v in vars(one).items() if k not in _REGISTERED} for one in (live, made)
        )
        self._changed(own, now, begun, path)

    def _changed(
        self, live: dict[str, Any], made: dict[str, Any], begun: dict[str, Any], path: str
    ) -> None:
        for key, value in made.items():
            was = begun.get(key, _MISSING)
            # The same object is unchanged, but a tensor may have been written in place.
            if isinstance(value, torch.Tensor) and value is was:
                old = self._bits.get(id(value))
                if old is None or _same_bits(old, value):
                    continue
            # A container that was made anew and holds the same objects is unchanged, too.
            elif value is was or (type(value) in (dict, list, set) and _same_parts(value, was)):
                continue
            if key not in live:
                self.odd.append(f"{path}.{key}")
                continue
            self.compare(live[key], value, f"{path}.{key}")

    def compare(self, live: Any, made: Any, path: str) -> None:
        # Objects refer to each other in circles: a pair that was met is done, or under way.
        if live is made or (id(live), id(made)) in self._seen:
            return
        self._seen.add((id(live), id(made)))
        if len(self._seen) > _MAX_OBJECTS:
            raise UnsupportedTensor(f"what the engine keeps at {path!r} is too much to compare")
        if isinstance(live, torch.Tensor) and isinstance(made, torch.Tensor):
            self.pairs[path] = (live, made)
        elif type(live) is not type(made):
            self.odd.append(path)
        elif isinstance(live, dict):
            self._dict(live, made, path)
        elif isinstance(live, (list, tuple)):
            if len(live) != len(made):
                self.odd.append(path)
            for number, (one, other) in enumerate(zip(live, made, strict=False)):
                self.compare(one, other, f"{path}[{number}]")
        # Kernels keep packed weights in what they call: the arguments of a partial, the object of a
        # bound method, the cells of a closure. A tensor that was missed there would stay at the old
        # version for ever, and nothing would tell.
        elif isinstance(live, functools.partial):
            self.compare(
                (live.func, live.args, live.keywords), (made.func, made.args, made.keywords), path
            )
        elif isinstance(live, types.MethodType):
            self.compare((live.__func__, live.__self__), (made.__func__, made.__self__), path)
        elif isinstance(live, types.FunctionType):
            if live.__code__ is not made.__code__:
                self.odd.append(path)
            cells = [
                [_cell(cell) for cell in function.__closure__ or ()] for function in (live, made)
            ]
            self.compare((*cells[:1], live.__defaults__), (*cells[1:], made.__defaults__), path)
        # Numbers, strings, enums, configs; then any object by its attributes.
        elif _equal(live, made):
            return
        elif hasattr(live, "__dict__") or hasattr(type(live), "__slots__"):
            self._dict(_attributes(live), _attributes(made), path)
        else:
            self.odd.append(path)

    def _dict(self, live: dict[Any, Any], made: dict[Any, Any], path: str) -> None:
        # An attribute that is None may as well be missing: methods set what they do not use to
        # None. ``training`` differs where the engine has called eval() on the live model only; no
        # weight depends on it.
        live, made = (
            {k: v for k, v in one.items() if v is not None and k != "training"}
            for one in (live, made)
        )
        self.odd += [f"{path}.{key}" for key in sorted(map(str, live.keys() ^ made.keys()))]
        for key in live.keys() & made.keys():
            label = path if key in _REGISTERED else f"{path}.{key}"
            self.compare(live[key], made[key], label)


def _copied(value: Any) -> Any:
    """A container of its own, with the same objects; anything else as it is."""
    return copy.copy(value) if type(value) in (dict, list, set) else value


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot) and slot not in ("__dict__", "__weakref__"):
                found[slot] = getattr(value, slot)
    return found


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _equal(one: Any, other: Any) -> bool:
    # Compared part by part: an equality of its own may pass over tensors.
    if isinstance(one, nn.Module):
        return False
    equality: Any = type(one).__eq__
    if hasattr(one, "__dict__") and equality is not object.__eq__:
        return False
    try:
        return bool(one == other)
    except Exception:  # whatever an object's own comparison raises: then its parts are compared
        return False


def _same_parts(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and one[key] is other[key] for key in one)
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(one, other, strict=True))


def _loads_as(live: torch.Tensor, meta: torch.Tensor) -> bool:
    """Whether a loader treats both the same."""
    if live.storage_offset():
        return False
    if live.untyped_storage().nbytes() != live.numel() * live.element_size():
        return False
    alike = _same_layout(live, meta) and isinstance(live, type(meta))
    return alike and vars(meta).keys() <= vars(live).keys()


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    ints = _INTS[one.element_size()]
    return torch.equal(one.detach().view(ints), other.detach().view(ints))


def _random(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Finite values that differ from place to place."""
    generator = torch.Generator().manual_seed(meta.numel())
    size = min(_TILE, max(1, meta.numel()))
    if meta.dtype.is_floating_point:
        tile = torch.randn(size, generator=generator)
    else:
        tile = torch.randint(0, 100, (size,), generator=generator)
    tile = tile.to(meta.dtype).to(device)
    flat = torch.empty(meta.numel(), dtype=meta.dtype, device=device)
    for start in range(0, flat.numel(), len(tile)):
        part = flat[start : start + len(tile)]
        part.copy_(tile[: len(part)])
    return like(meta, flat.view(meta.shape))
