"""Checks of settings that callers give, and numbers with units.

Invalid settings raise `InputError` with their name. Numbers are read and written as people do:
``20ms``, 63 MB, 1.52 h, 99.26%. Prefixes are decimal, as networks count. Formatted numbers have
three significant digits.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError

MAX_NUMBER = (1 << 63) - 1
NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?"
_SECONDS = re.compile(NUMBER + r"\s*(ms|s|min|m|h|d|)", re.ASCII)
_LENGTHS = {"ms": 1e-3, "": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_TEXT = 40
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"))
_LONG = ((172800, "days", 86400), (5400, "h", 3600), (90, "min", 60))
# A value from this share of a unit on is written as 1 of it, not as 1000 of the next smaller one.
_ROUNDS_UP = 0.9995


def checked_number(
    name: str, value: Any, *, minimum: float = 0.0, maximum: float = math.inf
) -> float:
    """Return ``value``; raise InputError unless it is a number from ``minimum`` to ``maximum``.

    NaN and booleans are refused.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not minimum <= value <= maximum
    ):
        limits = f"from {minimum:g} to {maximum:g}"
        if maximum == math.inf:
            limits = f"of at least {minimum:g}"
        raise InputError(f"{name} must be a number {limits}, not {value!r}")
    return value


def checked_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return ``value``; raise InputError unless it is a whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"{name} must be a whole number of at least {minimum}, not {value!r}")
    return value


def checked_collection(name: str, value: Any, example: str) -> Collection[Any]:
    """Return ``value``; raise InputError unless it is a collection other than a string.

    The error shows ``example``.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        raise InputError(
            f"{name} must be a collection, not {value!r}", hint=f"Write it like {name}={example}."
        )
    return value


def checked_path(value: Any) -> Path:
    """Return the path ``value``; raise InputError if it is no path, or one that no disk can
    have."""
    try:
        path = Path(value)
    except TypeError:
        raise InputError(f"a path must be a string or a pathlib.Path, not {value!r}") from None
    if "\0" in str(path):
        raise InputError(f"no path has a zero character: {value!r}")
    try:
        # A name that no file system takes must fail here, not when the first version is written.
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(
                f"{str(path)[:200]!r}: {error.strerror}", hint="Check the path."
            ) from None
    return path


def parse_seconds(text: str) -> float:
    """Seconds from ``50``, ``50s``, ``5min`` or ``5m``, ``2h``, ``1d``. Raises InputError."""
    match = matched(_SECONDS, text)
    value = float(match[1] + (match[2] or "")) * _LENGTHS[match[3]] if match else math.nan
    if not value < math.inf:
        raise InputError(
            f"{text!r} is not a number of seconds", hint="Write it like 50, 50s, 20ms, 5min or 2h."
        )
    return value


def counted(number: int, noun: str) -> str:
    """1 object, 2 objects."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(nbytes: float) -> str:
    """63 MB."""
    return with_prefix(nbytes, "B")


def format_duration(seconds: float) -> str:
    """42 µs, 12.3 ms, 46 s, 1.5 min, 1.52 h, 2.5 days."""
    for least, unit, length in _LONG:
        if seconds >= least:
            return f"{format_number(seconds / length)} {unit}"
    return with_prefix(seconds, "s", _SMALL) if seconds else "0 s"


def format_percent(share: float) -> str:
    """3.35%. A share near 1 has enough digits to differ from it: 99.26%, 99.991%."""
    if share < 0.5:
        return f"{format_number(share * 100)}%"
    missing = (1 - share) * 100
    decimals = next((d for d in range(6) if missing >= 10 ** (1 - d)), 6) if missing > 0 else 0
    return f"{round(share * 100, decimals):.10g}%"


def format_number(value: float) -> str:
    """Three significant digits, without an exponent if that is readable."""
    return f"{float(f'{value:.3g}'):.10g}"


def with_prefix(value: float, unit: str, prefixes: tuple[tuple[float, str], ...] = _LARGE) -> str:
    """98.6 Mbit/s."""
    factor, prefix = next((p for p in prefixes if abs(value) >= p[0] * _ROUNDS_UP), prefixes[-1])
    return f"{format_number(value / factor)} {prefix}{unit}"


def matched(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The match of a short text without surrounding blanks."""
    return pattern.fullmatch(text.strip()) if len(text) <= _MAX_TEXT else None


def short_int(digits: str) -> int:
    """A whole number of JSON that others wrote, as `json.loads` asks for with ``parse_int``. Raises
    ValueError for one of more than 19 digits: no float holds one of 400."""
    if len(digits) > 19:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def checked_metadata(metadata: Mapping[str, object]) -> dict[str, str | int | float | bool]:
    """A copy of ``metadata`` with plain values; numpy scalars become Python's.

    Raises InputError for values that JSON cannot hold exactly.
    """
    if not isinstance(metadata, Mapping):
        raise InputError(f"metadata must be a mapping, not a {type(metadata).__name__}")
    return {
        _checked_text(key, f"a key of the metadata, {key!r},"): _checked_fact(key, metadata[key])
        for key in metadata
    }


def _checked_fact(key: str, given: object) -> str | int | float | bool:
    value = given.item() if isinstance(given, np.generic) else given
    if isinstance(value, str):
        return _checked_text(value, f"metadata {key!r}")
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= MAX_NUMBER):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise InputError(
        f"metadata {key!r} is {given!r}: only strings, finite numbers and booleans are allowed"
    )


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{what} is not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} is not valid Unicode") from None
    return text
