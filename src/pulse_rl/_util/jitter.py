"""Pauses that differ, so that workers which were started together do not ask together for ever."""

from __future__ import annotations

import random

_SHARE = 0.25


def jittered(seconds: float) -> float:
    """``seconds``, a quarter more or less."""
    return seconds * random.uniform(1 - _SHARE, 1 + _SHARE)
