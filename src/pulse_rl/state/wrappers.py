"""The parts of tensor names that come from a module's wrapper, not from the model: DDP, FSDP, torch.compile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InputError
from .tensors import check_tensor_name

_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_AROUND_ALL = "module"  # DistributedDataParallel's; inside a model it is a name like any other


def unwrapped(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """``tensors``, such as a ``state_dict``, under the names of the model without its wrappers.

    Removed are ``_orig_mod`` (torch.compile), ``_fsdp_wrapped_module`` and ``_checkpoint_wrapped_module`` wherever they
    are in a name, and ``module`` (DistributedDataParallel) in front of all names. The tensors are the same objects, in
    the same order; names without such parts stay. A trainer passes the result to `Publisher.publish`, a worker to
    `pulse_rl.integrations.torch.apply_`. Raises InputError where two names become one.
    """
    if not isinstance(tensors, Mapping):
        raise InputError(
            f"unwrapped() takes a mapping of names to tensors, not a {type(tensors).__name__}",
            hint="Pass model.state_dict().",
        )
    for name in tensors:
        check_tensor_name(name)
    names = _plain_names(tensors)
    result: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if names[name] in result:
            raise InputError(
                f"two tensors would be called {names[name]!r} without the wrappers' parts of their names",
                hint="Keep these names, or rename the tensors yourself.",
            )
        result[names[name]] = tensor
    return result


def is_wrapped(names: Iterable[str]) -> bool:
    """Whether `unwrapped` would change any of these names of one state."""
    return any(name != plain for name, plain in _plain_names(names).items())


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the parts that wrappers add."""
    paths = {name: name.split(".") for name in names}
    for name, path in paths.items():
        paths[name] = [*(part for part in path[:-1] if part not in _ANYWHERE), path[-1]]
    while paths and all(len(path) > 1 and path[0] == _AROUND_ALL for path in paths.values()):
        paths = {name: path[1:] for name, path in paths.items()}
    return {name: ".".join(path) for name, path in paths.items()}
