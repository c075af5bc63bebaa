"""The page's data for a study: the parts of the JSON of ``pulse study`` that it needs, checked and shortened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .. import plan
from ..errors import InputError
from .run import thinned

FORMAT = "pulse.study.1"

_MAX_TENSORS = 30
_MAX_LAYERS = 40
_MAX_ROWS = 64
_MAX_EXPONENTS = 600
_MAX_DIMENSIONS = 8
_MAX_AGES = 16
_ROW = ("k", "pairs", "sparsity", "sparsity_min", "sparsity_max")
_ROW_OPTIONAL = ("untouched", "bytes", "bytes_per_changed", "bytes_per_changed_zstd", "entropy_bound", "times_bound")
_HISTORY_OPTIONAL = (
    "not_yet",
    "within_8",
    "entropy_bound",
    "entropy_bound_with_history",
    "bytes_per_changed_auto",
    "bytes_per_changed_history",
)
_SUMMARY_OPTIONAL = ("bytes_per_sync", "bandwidth_for_target", "bandwidth_full", "target", "step_seconds")


def study_data(study: Any) -> dict[str, Any]:
    """Raises InputError unless ``study`` is the JSON object that ``pulse study`` makes."""
    try:
        if study["format"] != FORMAT:
            raise ValueError(f"its format is {study['format']!r}, not {FORMAT!r}")
        return _data(study)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"not a study: {error!r}", hint="Give the output of `pulse study --json`.") from None


def _data(study: Mapping[str, Any]) -> dict[str, Any]:
    given = sorted(study["rows"][:_MAX_ROWS], key=lambda row: _number(row, "k"))
    rows = [_picked(row, _ROW, _ROW_OPTIONAL) for row in given]
    k = rows[0]["k"]
    layers = sorted(study["layers"], key=lambda layer: -_number(layer, "changed"))
    named = list(dict.fromkeys(str(layer["layer"]) for layer in layers))[:_MAX_LAYERS]
    tensors = sorted((t for t in study["tensors"] if t["k"] == k), key=lambda t: _number(t, "sparsity"))
    pairs = [pair for pair in study["pairs"] if pair["k"] == k]
    gradients = study["gradients"]
    summary = _picked(study["summary"], ("sparsity",), _SUMMARY_OPTIONAL) | {
        "full_bytes": _number(study, "dense_bytes")
    }
    measured = plan.from_study(study)
    return {
        "source": str(study["source"]),
        "dtype": str(study["dtype"]),
        "parameters": _number(study, "parameters"),
        "states": len(study["states"]),
        "lr": _optional(study, "lr"),
        "gradient_density": _optional(study, "gradient_density"),
        "rows": rows,
        "layers": [
            {"layer": str(layer["layer"]), **_picked(layer, ("k", "sparsity"), ())}
            for layer in layers
            if str(layer["layer"]) in named
        ],
        "tensors": [
            {
                **{name: str(tensor[name])[:300] for name in ("name", "layer", "dtype")},
                "shape": [int(n) for n in tensor["shape"][:_MAX_DIMENSIONS]],
                **_picked(tensor, ("k", "sparsity"), ()),
            }
            for tensor in tensors[:_MAX_TENSORS]
        ],
        "over_time": thinned([int(p["new"]) for p in pairs], [1 - _number(p, "sparsity") for p in pairs]),
        "gradients": thinned(list(range(len(gradients))), [_finite(g) for g in gradients]),
        "exponents": [
            _picked(e, ("exponent", "elements", "density"), ("threshold", "predicted_lr", "predicted_10lr"))
            for e in study["exponents"][:_MAX_EXPONENTS]
        ],
        "history": _history(study.get("history")),
        "summary": summary,
        "scenario": {
            "params": measured.params,
            "density": measured.density,
            "param_bytes": measured.param_bytes,
            "bytes_per_changed": dict(measured.bytes_per_changed),
            "step_seconds": summary["step_seconds"] or 50.0,
        },
    }


def _history(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """None for a study without it, and where nothing changed."""
    if given is None or not _number(given, "changed"):
        return None
    ages = [_picked(age, ("from", "share"), ("to",)) for age in given["ages"][:_MAX_AGES]]
    return {"ages": ages, **_picked(given, ("steps",), _HISTORY_OPTIONAL)}


def _picked(given: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, float | None]:
    return {name: _number(given, name) for name in required} | {name: _optional(given, name) for name in optional}


def _number(given: Mapping[str, Any], name: str) -> float:
    value = _finite(given[name])
    if value is None:
        raise ValueError(f"{name} is {given[name]!r}")
    return value


def _optional(given: Mapping[str, Any], name: str) -> float | None:
    return _finite(given.get(name))


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value if math.isfinite(value) else None
