"""Units of plans, as people write and read them: ``0.2Gbit``, ``10MB/s``, ``7B``, ``0.86%``."""

from __future__ import annotations

import math
import re

from .._util.settings import NUMBER, matched, with_prefix
from ..errors import InputError

_BANDWIDTH = re.compile(NUMBER + r"\s*([kMGT]?)(bits?|b|B)(?:ps|/s)?", re.ASCII)
_COUNT = re.compile(NUMBER + r"\s*([kKMBTG]?)", re.ASCII)
_SHARE = re.compile(NUMBER + r"\s*(%?)", re.ASCII)
_FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_bandwidth(text: str | float) -> float:
    """Bit/s from ``text``: a number of them, or words: a number, a decimal prefix (k, M, G, T), and
    ``bit`` (``bits``, ``b``) or ``B`` for bytes, with or without ``/s`` or ``ps``. Raises
    InputError.
    """
    hint = "Write it like 0.2Gbit, 50Mbit/s or 10MB/s."
    if isinstance(text, str):
        match = matched(_BANDWIDTH, text)
        if not match:
            raise InputError(f"{text!r} is not a bandwidth", hint=hint)
        value = (
            float(match[1] + (match[2] or "")) * _FACTORS[match[3]] * (8 if match[4] == "B" else 1)
        )
    else:
        value = (
            float(text)
            if isinstance(text, int | float) and not isinstance(text, bool)
            else math.nan
        )
    if not 0 < value < math.inf:
        raise InputError(f"{text!r} is not a bandwidth above 0", hint=hint)
    return value


def parse_count(text: str) -> int:
    """A whole number from ``text`` such as ``7B``, ``0.5B``, ``22.6M``, ``300k`` or plain digits.
    Raises InputError."""
    match = matched(_COUNT, text)
    value = float(match[1] + (match[2] or "")) * _FACTORS[match[3]] if match else math.nan
    if not 1 <= value < math.inf:
        raise InputError(
            f"{text!r} is not a positive number", hint="Write it like 12, 22.6M or 7B."
        )
    return round(value)


def parse_share(text: str) -> float:
    """0.0086 from ``0.0086`` or ``0.86%``. Raises InputError."""
    match = matched(_SHARE, text)
    value = float(match[1] + (match[2] or "")) / (100 if match[3] else 1) if match else math.nan
    if not value < math.inf:
        raise InputError(f"{text!r} is not a share", hint="Write it like 0.0086 or 0.86%.")
    return value


def format_bandwidth(bits_per_second: float) -> str:
    """98.6 Mbit/s."""
    return with_prefix(bits_per_second, "bit/s")
