"""Small states whose patches name a history all the same, as those of large ones do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pulse_rl.patch import build


@contextmanager
def named_in_small_patches() -> Iterator[None]:
    """Within it no patch is made a second time without its history."""
    small, build._SMALL = build._SMALL, -1
    try:
        yield
    finally:
        build._SMALL = small
