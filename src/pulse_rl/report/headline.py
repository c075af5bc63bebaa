"""The three numbers at the top: sparsity, bytes per sync, bandwidth for a target utilisation."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from .._util.settings import format_bandwidth, format_bytes, format_duration, format_number, format_percent


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
    entries = [("Sparsity", format_percent(facts["sparsity"]), f"of the weights keep their bits {between}")]
    if nbytes is not None:
        note = f"instead of {format_bytes(full)}: {_times(full, nbytes)} times smaller"
        entries.append(("Bytes per sync", format_bytes(nbytes), note))
    if facts["bandwidth_for_target"] is not None:
        target, step = format_percent(facts["target"]), format_duration(facts["step_seconds"])
        full_rate = facts["bandwidth_full"]
        instead = "" if full_rate is None else f"instead of {format_bandwidth(full_rate)} for full syncs, "
        note = f"{instead}with {step} of work between two syncs ({work})"
        entries.append((f"Bandwidth for {target} utilisation", format_bandwidth(facts["bandwidth_for_target"]), note))
    cells = [
        f"<div><dt>{html.escape(name)}</dt><dd><strong>{html.escape(value)}</strong>"
        f"<small>{html.escape(note)}</small></dd></div>"
        for name, value, note in entries
    ]
    return f'<dl class="headline">{"".join(cells)}</dl>'


def _times(full: float, nbytes: float) -> str:
    return format_number(full / nbytes) if nbytes else "infinitely many"
