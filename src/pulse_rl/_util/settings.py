"""Settings that callers give: what makes no sense is refused at once, by name, as `InputError`."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..errors import InputError


def checked_number(name: str, value: Any, *, least: float = 0.0, most: float = math.inf) -> float:
    """``value`` itself; raises InputError unless it is a number from ``least`` to ``most``, not NaN and no boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise InputError(f"{name} must be a number {limits}, not {value!r}")
    return value


def checked_count(name: str, value: Any) -> int:
    """``value`` itself; raises InputError unless it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def checked_collection(name: str, value: Any, example: str) -> Collection[Any]:
    """``value`` itself; raises InputError unless it is a collection, and no text. ``example`` is shown then."""
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        raise InputError(f"{name} must be a collection, not {value!r}", hint=f"Write it like {name}={example}.")
    return value


def checked_path(value: Any) -> Path:
    """The path ``value``; raises InputError for what is none."""
    try:
        path = Path(value)
    except TypeError:
        raise InputError(f"a path must be a string or a pathlib.Path, not {value!r}") from None
    if "\0" in str(path):
        raise InputError(f"no path has a zero character: {value!r}")
    return path
