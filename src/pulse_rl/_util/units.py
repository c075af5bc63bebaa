"""Reads numbers with units, as people write them: ``0.2Gbit``, ``50 Mbit/s``, ``10MB/s``, ``7B``, ``22.6M``."""

from __future__ import annotations

import math
import re

from ..errors import InputError

_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?"
_BANDWIDTH = re.compile(_NUMBER + r"\s*([kMGT]?)(bits?|b|B)(?:ps|/s)?", re.ASCII)
_COUNT = re.compile(_NUMBER + r"\s*([kKMBTG]?)", re.ASCII)
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_LONGEST = 40


def parse_bandwidth(text: str | float) -> float:
    """Bit/s from a number of them, or from text: a number, a decimal prefix (k, M, G, T), and ``bit`` (``bits``, ``b``)
    or ``B`` for bytes, with or without ``/s`` or ``ps``. Raises InputError."""
    hint = "Write it like 0.2Gbit, 50Mbit/s or 10MB/s."
    if isinstance(text, str):
        match = _matched(_BANDWIDTH, text)
        if not match:
            raise InputError(f"{text!r} is not a bandwidth", hint=hint)
        value = float(match[1] + (match[2] or "")) * _PREFIX[match[3]] * (8 if match[4] == "B" else 1)
    else:
        value = float(text)
    if not 0 < value < math.inf:
        raise InputError(f"{text!r} is not a bandwidth above 0", hint=hint)
    return value


def parse_count(text: str) -> int:
    """A whole number from ``7B``, ``0.5B``, ``22.6M``, ``300k`` or plain digits. Raises InputError."""
    match = _matched(_COUNT, text)
    value = float(match[1] + (match[2] or "")) * _PREFIX[match[3]] if match else math.nan
    if not 1 <= value < math.inf:
        raise InputError(f"{text!r} is not a number from 1 on", hint="Write it like 12, 22.6M or 7B.")
    return round(value)


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return pattern.fullmatch(text.strip()) if len(text) <= _LONGEST else None
