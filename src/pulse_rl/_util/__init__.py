"""Helpers that all other packages share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around the import of a package of the extra ``name``: the error says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("pulse_rl"):
            error.add_note(f"Hint: Install it: pip install 'pulse-rl[{name}]'.")
        raise
