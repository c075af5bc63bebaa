"""Listeners that do not keep their owner: an object that holds one of its own methods, through whatever else, would
live on after its last use until a garbage collection, and a state's memory with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec
from weakref import WeakMethod

P = ParamSpec("P")


def weak_callback(method: Callable[P, None]) -> Callable[P, None]:
    """Calls the bound ``method`` as long as its object lives, and then does nothing."""
    held = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        alive = held()
        if alive is not None:
            alive(*args, **kwargs)

    return call
