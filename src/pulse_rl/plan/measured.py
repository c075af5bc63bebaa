"""Inputs of a plan from a study's measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

_KEYS = {"auto": "bytes_per_changed", "zstd": "bytes_per_changed_zstd"}


@dataclass(frozen=True, slots=True)
class MeasuredInputs:
    """Fields of a `Scenario` that a study determines: ``params``, ``density``, ``param_bytes``, and
    ``bytes_per_changed`` by method, for the methods measured.
    """

    params: int
    density: float
    param_bytes: float
    bytes_per_changed: Mapping[str, float]


def from_study(study: Any) -> MeasuredInputs:
    """The inputs from a study (the JSON object of ``pulse study``): those of its row with the smallest k, and, if that
    is 1, what its patches with history take.

    Raises InputError if ``study`` is not a study.
    """
    try:
        row = min(study["rows"], key=lambda row: float(row["k"]))
        params = int(study["parameters"])
        found = {name: row.get(key) for name, key in _KEYS.items()}
        if row["k"] == 1:
            found["history"] = (study.get("history") or {}).get("bytes_per_changed_history")
        return MeasuredInputs(
            params=params,
            density=1 - float(row["sparsity"]),
            param_bytes=float(study["dense_bytes"]) / params,
            bytes_per_changed={name: float(value) for name, value in found.items() if value is not None},
        )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise InputError(f"not a study: {error!r}", hint="Give the output of `pulse study --json`.") from None
