"""The three numbers at the top: sparsity, bytes per sync, bandwidth for a wanted utilisation."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any


def headline(run: Mapping[str, Any] | None, study: Mapping[str, Any] | None) -> str:
    """The numbers of the run, else of the study, as HTML that needs no script; empty where neither has them."""
    if run and run["summary"]:
        facts, between = run["summary"], "from one version to the next"
        work = "the run’s median"
    elif study:
        facts, k = study["summary"], study["rows"][0]["k"]
        between = "from one state to the next" if k == 1 else f"between states {k} apart"
        work = "assumed"
    else:
        return ""
    nbytes, full = facts["bytes_per_sync"], facts["full_bytes"]
    entries = [("Sparsity", percent(facts["sparsity"]), f"of the weights keep their bits {between}")]
    if nbytes is not None:
        entries.append(
            ("Bytes per sync", size(nbytes), f"instead of {size(full)}: {_times(full, nbytes)} times smaller")
        )
    if facts["bandwidth_for_target"] is not None:
        target, step = percent(facts["target"]), duration(facts["step_seconds"])
        full_rate = facts["bandwidth_full"]
        instead = "" if full_rate is None else f"instead of {rate(full_rate)} for full syncs, "
        note = f"{instead}with {step} of work between two syncs ({work})"
        entries.append((f"Bandwidth for {target} utilisation", rate(facts["bandwidth_for_target"]), note))
    cells = [
        f"<div><dt>{html.escape(name)}</dt><dd><strong>{html.escape(value)}</strong>"
        f"<small>{html.escape(note)}</small></dd></div>"
        for name, value, note in entries
    ]
    return f'<dl class="headline">{"".join(cells)}</dl>'


def percent(share: float) -> str:
    """With the digits that tell a share near 1 from it: 99.26%."""
    if share < 0.5:
        return f"{_digits(share * 100)}%"
    missing = (1 - share) * 100
    decimals = next((d for d in range(6) if missing >= 10 ** (1 - d)), 6) if missing > 0 else 0
    return f"{round(share * 100, decimals):.10g}%"


def size(nbytes: float) -> str:
    return f"{_scaled(nbytes)}B"


def rate(bits_per_second: float) -> str:
    return f"{_scaled(bits_per_second)}bit/s"


def duration(seconds: float) -> str:
    for least, unit, length in _DURATIONS:
        if seconds >= least:
            return f"{_digits(seconds / length)} {unit}"
    return f"{_digits(seconds / 1e-6)} µs"


def _scaled(value: float) -> str:
    prefix = next((p for p in _PREFIXES if value >= _PREFIXES[p] * 0.9995), "")
    return f"{_digits(value / _PREFIXES[prefix])} {prefix}"


_DURATIONS = ((172800, "days", 86400), (5400, "h", 3600), (90, "min", 60), (1, "s", 1), (1e-3, "ms", 1e-3))
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def _digits(value: float) -> str:
    """Three significant digits, never an exponent for what is readable without."""
    return f"{float(f'{value:.3g}'):.10g}"


def _times(full: float, nbytes: float) -> str:
    return _digits(full / nbytes) if nbytes else "infinitely many"
