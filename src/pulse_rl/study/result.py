"""Builds the dict of format "pulse.study.1" (see `pulse_rl.study`) from the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan import bandwidth_for
from .layers import LAYERS
from .record import CODECS, WITH_HISTORY, Pair
from .remembered import HistoryTally, first_step
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
        "history": _history(tally, len(states) - 1) if tally.history else None,
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


def _history(tally: Tally, last: int) -> dict[str, Any] | None:
    history, first = tally.history, first_step(last)
    if history is None or last < 2:
        return None
    return {"first": first, **history.recurrence(first), **_coded_steps(tally, history)}


def _coded_steps(tally: Tally, history: HistoryTally) -> dict[str, Any]:
    """What the steps cost that were coded with history."""
    steps = sorted(history.entries)
    changed = sum(entry.changed for new in steps for entry in history.entries[new][WITH_HISTORY[0]])
    counted, bits = history.changed(), history.bits()
    found: dict[str, Any] = {"coded_steps": len(steps)}
    for name, pair in bits._asdict().items():
        for suffix, total in zip(("", "_with_history"), pair, strict=True):
            found[f"{name}_bits{suffix}"] = total / counted if counted else None
    for suffix, at in (("", 0), ("_with_history", 1)):
        found[f"entropy_bound{suffix}"] = sum(pair[at] for pair in bits) / 8 / counted if counted else None
    for codec in WITH_HISTORY:
        nbytes = sum(tally.step_bytes(new, codec) for new in steps)
        found[f"bytes_per_changed_{codec}"] = nbytes / changed if changed else None
    return found


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
