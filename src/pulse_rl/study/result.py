"""Builds the dict of format "pulse.study.1" (see `pulse_rl.study`) from the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan import bandwidth_for
from .layers import LAYERS
from .record import CODECS, Pair
from .tally import Tally
from .theory import exponent_rows

FORMAT = "pulse.study.1"
TARGET = 0.9
STEP_SECONDS = 50.0
"""The paper's: with it U = T / (T + 8 S / B) gives its Figure 1."""


def study_dict(
    tally: Tally,
    *,
    source: str,
    states: Sequence[str],
    lr: float | None = None,
    step_seconds: float = STEP_SECONDS,
    gradients: Sequence[float | None] = (),
) -> dict[str, Any]:
    """The study as a dict of plain values; values of k for which no pair was compared have no rows."""
    ks = [k for k in tally.ks if tally.statistics[k][0].pairs]
    rows = [_row(tally, k) for k in ks]
    dense_bytes = sum(s.nbytes for s in tally.specs)
    known = [g for g in gradients if g is not None]
    return {
        "format": FORMAT,
        "source": source,
        "dtype": tally.main_dtype.name,
        "dtypes": tally.dtypes(),
        "parameters": tally.elements,
        "dense_bytes": dense_bytes,
        "states": list(states),
        "rows": rows,
        "layers": _layer_rows(tally, ks),
        "tensors": _tensor_rows(tally, ks),
        "pairs": tally.pairs,
        "exponents": exponent_rows(tally.exponents, lr),
        "lr": lr,
        "gradient_density": sum(known) / len(known) if known else None,
        "gradients": list(gradients),
        "summary": _summary(rows, dense_bytes, step_seconds),
    }


def _row(tally: Tally, k: int) -> dict[str, Any]:
    whole, _, _ = tally.statistics[k]
    untouched = 1 - tally.touched[k] / whole.pairs / max(tally.elements, 1)
    row = {"k": k, "pairs": whole.pairs, **whole.row(0, tally.elements), "untouched": untouched}
    return row | _cost(tally, k)


def _cost(tally: Tally, k: int) -> dict[str, Any]:
    coded = [pair for pair in tally.coded if pair.k == k]
    changed = sum(tally.coded[pair].changed for pair in coded)
    if not changed:
        names = ("bytes", "bytes_per_changed", "bytes_per_changed_zstd", "entropy_bound", "times_bound")
        return {"coded_pairs": len(coded), **dict.fromkeys(names)}
    ours, zstd = (_total_bytes(tally, coded, codec) for codec in CODECS)
    bound = sum(tally.coded[pair].bound_bits for pair in coded) / 8
    return {
        "coded_pairs": len(coded),
        "bytes": ours / len(coded),
        "bytes_per_changed": ours / changed,
        "bytes_per_changed_zstd": zstd / changed,
        "entropy_bound": bound / changed,
        "times_bound": ours / bound if bound else None,
    }


def _total_bytes(tally: Tally, pairs: list[Pair], codec: str) -> int:
    return sum(tally.patch_bytes(pair, codec) for pair in pairs)


def _layer_rows(tally: Tally, ks: list[int]) -> list[dict[str, Any]]:
    elements = tally.layer_elements().tolist()
    return [
        {"layer": layer, "k": k, **tally.statistics[k][1].row(i, elements[i])}
        for k in ks
        for i, layer in enumerate(LAYERS)
        if layer in tally.layers
    ]


def _tensor_rows(tally: Tally, ks: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "layer": tally.layers[i],
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "k": k,
            **tally.statistics[k][2].row(i, spec.elements),
        }
        for k in ks
        for i, spec in enumerate(tally.specs)
    ]


def _summary(rows: list[dict[str, Any]], dense_bytes: int, step_seconds: float) -> dict[str, Any]:
    first = rows[0] if rows else None
    nbytes = None
    if first and first["coded_pairs"]:
        nbytes = (first["bytes_per_changed"] or 0.0) * first["changed"]
    return {
        "sparsity": first["sparsity"] if first else None,
        "bytes_per_sync": nbytes,
        "bandwidth_for_target": None if nbytes is None else bandwidth_for(nbytes, step_seconds, TARGET),
        "bandwidth_full": bandwidth_for(dense_bytes, step_seconds, TARGET),
        "target": TARGET,
        "step_seconds": step_seconds,
    }
