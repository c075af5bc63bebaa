"""The inner optimizers: who trains what, and which call ends an inner step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import InputError

_PROBES = 8
_NOT_IN_THE_MODEL = "If it holds FP32 masters, pass a mapping of names to the masters instead of the model."

Gradients = list[tuple[torch.Tensor, "weakref.ref[torch.Tensor]", int]]
"""Parameters, their gradients of some moment, and how often those had been written by then."""


class Optimizers:
    """One optimizer or several, in the order in which the training loop steps them.

    An inner step ends with the ``step()`` of the last one. Another one may skip a step there or take more than one.
    Raises InputError for an empty list, something else than optimizers, and one that is given twice.
    """

    def __init__(self, given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
        self._all = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
        if not self._all:
            raise InputError("no optimizer is given", hint="Give one, or a list of them.")
        for number, optimizer in enumerate(self._all):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InputError(f"optimizer {number} is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
            if any(optimizer is other for other in self._all[:number]):
                raise InputError(f"optimizer {number} ({type(optimizer).__name__}) is given twice")

    @property
    def ids(self) -> set[int]:
        """The ids of the tensors that are trained now."""
        return {id(p) for optimizer in self._all for _, p in _parameters(optimizer)}

    def label(self, number: int) -> str:
        """Words for messages."""
        one = len(self._all) == 1
        return "the optimizer" if one else f"optimizer {number} ({type(self._all[number]).__name__})"

    def require(self, named: dict[str, torch.Tensor]) -> None:
        """Raises InputError unless each tensor that is trained is in ``named`` and belongs to one optimizer."""
        names = {id(p): name for name, p in reversed(named.items())}
        owner: dict[int, int] = {}
        for number, optimizer in enumerate(self._all):
            for place, p in _parameters(optimizer):
                if id(p) not in names:
                    raise InputError(
                        f"{self.label(number)} trains tensors that are not parameters of the model: {place}, "
                        f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}",
                        hint=_NOT_IN_THE_MODEL,
                    )
                if owner.setdefault(id(p), number) != number:
                    both = f"{self.label(owner[id(p)])} and by {self.label(number)}"
                    raise InputError(
                        f"parameter {names[id(p)]!r} is trained by {both}", hint="Give each parameter one optimizer."
                    )

    def hook(self, after_step: Callable[[], None]) -> list[Any]:
        """Has ``after_step`` called at the end of each inner step. Returns handles with ``remove()``."""
        seen: dict[int, Gradients] = {}

        def end(*_: object) -> None:
            for number, optimizer in enumerate(self._all[:-1]):
                seen[number] = _gradients(optimizer)
            after_step()

        def watch(number: int) -> Callable[..., None]:
            def check(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                # A closure makes its gradients in the step itself. The first argument may be the optimizer.
                closure = kwargs.get("closure") or any(callable(a) for a in args)
                if not closure and _unchanged(seen.pop(number, [])):
                    raise InputError(
                        f"{self.label(number)} steps after {self.label(len(self._all) - 1)}, the last one of the list",
                        hint="List the optimizers in the order of their step() calls: the last one ends an inner step.",
                    )

            return check

        handles: list[Any] = [
            optimizer.register_step_pre_hook(watch(number)) for number, optimizer in enumerate(self._all[:-1])
        ]
        return [*handles, self._all[-1].register_step_post_hook(end)]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """All tensors of an optimizer, and words for where in it they are."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [])
        for i, p in enumerate(group["params"]):
            yield (repr(names[i]) if i < len(names) else f"number {i} of group {number}"), p


def _gradients(optimizer: torch.optim.Optimizer) -> Gradients:
    """Some of an optimizer's gradients as they are now. They are not kept alive."""
    found: Gradients = []
    for _, p in _parameters(optimizer):
        if p.grad is not None:
            found.append((p, weakref.ref(p.grad), p.grad._version))
        if len(found) == _PROBES:
            break
    return found


def _unchanged(gradients: Gradients) -> bool:
    """Whether nothing was computed since: there are gradients, the same ones, and none was written."""
    return bool(gradients) and all(
        p.grad is not None and p.grad is gradient() and p.grad._version == version for p, gradient, version in gradients
    )
