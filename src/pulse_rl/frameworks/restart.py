"""torch: restarts at the exact weights of the newest version, with an optimizer state that is saved
more seldom.

A stream has every version, so a crash costs no step. What it does not have, the moments of the
optimizer and the FP32 weights behind a BF16 version, is four to six times as large, and is saved
every few hundred steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._util import extra

with extra("torch"):
    import torch

from .._util.files import write_atomically
from .._util.settings import checked_count, checked_path
from ..errors import FormatError, InputError, StateMismatch, UnsupportedTensor
from ..events import Metadata
from ..sync.subscriber import Subscriber
from .torch import _INTS, host_tensors

__all__ = ["restore_training", "save_training"]

Weights = torch.nn.Module | Mapping[str, torch.Tensor]


def save_training(
    file: str | os.PathLike[str], weights: Weights, *, step: int, **states: Any
) -> None:
    """Write to a file what a restart needs in addition to the stream.

    Call it every few hundred steps, after the version is published.

    Args:
        file: The file, which is replaced whole or not at all.
        weights: A module, or the mapping of names to tensors that is published. They are saved in
            their own dtypes.
        step: The step of the version with these weights.
        states: What has a ``state_dict()``, by name: ``optimizer=optimizer``, a scheduler.

    Raises:
        InputError: ``step`` or ``file`` makes no sense.
        UnsupportedTensor: A tensor is a DTensor.
        StoreFull: The disk is full.
        StoreError: The file cannot be written.
    """
    checked_count("step", step, 0)
    path = checked_path(file)
    saved = {
        "step": step,
        "weights": {name: tensor.detach() for name, tensor in _tensors(weights).items()},
        "states": {name: each.state_dict() for name, each in states.items()},
    }
    write_atomically(path, lambda opened: torch.save(saved, opened))


def restore_training(
    file: str | os.PathLike[str], subscriber: Subscriber, weights: Weights, **states: Any
) -> tuple[int, int | None] | None:
    """Go back to the weights of a stream's newest version, and to the states that were saved last.

    The weights are the version's bit for bit, in its dtypes. Where they are wider, FP32 behind
    BF16, an element that has had the version's bits since it was saved gets its saved number, any
    other the version's. If the file is newer than the stream, as after a time without a store, the
    weights are the file's. Everything is checked before the first write.

    Args:
        file: The file that `save_training` writes.
        subscriber: Follows the stream.
        weights: The module, or the mapping of names to tensors, that is written in place.
        states: What has a ``load_state_dict()``, by the names under which it was saved.

    Returns:
        (the ``step`` in the version's metadata, with which the training goes on; the step at which
        the states were saved, None where there is no ``file`` yet), or None where the stream has no
        version.

    Raises:
        StateMismatch: Names or shapes differ from the version's.
        InputError: The version has no ``step``, or the file not all of ``states``.
        FormatError: The file is damaged.
        UnsupportedTensor: A tensor is a DTensor.
        PulseError: Whatever `Subscriber.sync` raises.
    """
    subscriber.sync()
    if subscriber.version is None:
        return None
    step = step_of(subscriber.manifest.metadata)
    saved = _load(checked_path(file), set(states))
    tensors = _tensors(weights)
    kept: Mapping[str, torch.Tensor] = saved["weights"] if saved else {}
    version = dict(host_tensors(subscriber.state))
    aliases = subscriber.state.aliases
    # 1. What each tensor becomes, and whether it can.
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, tensor in tensors.items():
        before, stored = kept.get(name), version.get(aliases.get(name, name))
        for given in (before, stored):
            if given is not None and given.shape != tensor.shape:
                raise StateMismatch(
                    f"{name!r} is {list(tensor.shape)} here, and {list(given.shape)} there"
                )
        if stored is not None and not _holds(tensor.dtype, stored.dtype):
            raise StateMismatch(
                f"{name!r} is {tensor.dtype} here, which does not hold the {stored.dtype} of the "
                "version"
            )
        if stored is not None and (saved is None or step >= saved["step"]):
            pairs.append((tensor, moved_to(before, stored)))
        elif before is not None:
            pairs.append((tensor, before))
    known = {aliases.get(name, name) for name in tensors}
    if missing := sorted(version.keys() - known):
        raise StateMismatch(
            f"the weights have no tensor {missing[0]!r}",
            hint="Give the same mapping that is published.",
        )
    # 2. All of it, and the states.
    with torch.no_grad():
        for tensor, value in pairs:
            tensor.copy_(value)
    for name, each in states.items():
        if saved:
            each.load_state_dict(saved["states"][name])
    return (step, None) if saved is None else (max(step, saved["step"]), saved["step"])


def moved_to(saved: torch.Tensor | None, version: torch.Tensor) -> torch.Tensor:
    """``saved`` where its cast to the dtype of ``version`` has the same bits, ``version``
    elsewhere: the cast of it all is ``version``."""
    if saved is None or saved.dtype == version.dtype or not saved.is_floating_point():
        return version
    ints = _INTS[version.element_size()]
    host = saved.cpu()
    same = host.to(version.dtype).view(ints) == version.view(ints)
    return torch.where(same, host, version.to(host.dtype))


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether each number of ``dtype`` is one of ``wide``."""
    return wide == dtype or (
        wide.is_floating_point and dtype.is_floating_point and wide.itemsize > dtype.itemsize
    )


def step_of(metadata: Metadata) -> int:
    """The step of a version, by its metadata. Raises InputError."""
    step = metadata.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        raise InputError(
            "the newest version does not say its step", hint='Publish with metadata={"step": step}.'
        )
    return step


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """Raises UnsupportedTensor for what is not whole here."""
    if isinstance(weights, torch.nn.Module):
        named = weights.state_dict(keep_vars=True)
    else:
        named = dict(weights)
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "full_tensor"):
            raise UnsupportedTensor(
                f"{name!r} is a {type(tensor).__name__}, not a whole tensor",
                hint="Save and restore sharded weights with torch.distributed.checkpoint.",
            )
    return named


def _load(path: Path, names: set[str]) -> Any:
    """What is in the file; None where there is none. Raises InputError and FormatError."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found, _, _ = set(saved["states"]), saved["weights"], saved["step"]
    except FileNotFoundError:
        return None
    except Exception as error:
        # torch raises many kinds for a file that is none of its own, or is damaged.
        raise FormatError(
            f"{path} is not what save_training writes: {error}",
            hint="Delete it to restart without.",
        ) from None
    if names - found:
        raise InputError(
            f"{path} has no state of {', '.join(sorted(names - found))}: it has "
            f"{', '.join(sorted(found))}",
            hint="Save and restore the same names.",
        )
    return saved
